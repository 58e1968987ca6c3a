"""Offloading: tensors go to host memory and come back as they were; what uses them does not notice."""

import copy
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asyncrl.actors.actor import Actor, ActorTelemetry
from asyncrl.actors.imagination import WorldBackend
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ActorSettings, LearnerSettings
from asyncrl.devices import offload
from asyncrl.devices.offload import OFFLOAD_AFTER, OffloadedTensors
from asyncrl.episode_layout import episode_arrays
from asyncrl.launch.build import learner_offload
from asyncrl.launch.environment import actor_offload
from asyncrl.observability import metrics_system as m
from asyncrl.records import Episode
from asyncrl.replay.buffer import Replay
from asyncrl.replay.inline_ports import InProcessActorPort
from asyncrl.weights.packing import WholeTensors
from asyncrl.weights.transports.in_process import build_in_process
from support.memory_learner import Run
from support.replay import next_batch
from support.tiny_actor import GROUP, actor_with

CPU = torch.device("cpu")


def nothing() -> list[Tensor]:
    return []


def offloaded_module(model: nn.Module, device: torch.device = CPU, **more: Any) -> OffloadedTensors:
    """Only the first layer's weight changes."""
    first = next(model.parameters())
    return OffloadedTensors(
        lambda: [*model.parameters(), *model.buffers()], lambda: [first], {device}, **more
    )


def trainer(seed: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], list[Tensor]]:
    def tensors() -> list[Tensor]:
        found = [*model.parameters()]
        found += [p.grad for p in model.parameters() if p.grad is not None]
        return found + [x for state in optimizer.state.values() for x in state.values()]

    return tensors


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
    model(x.to(next(model.parameters()).device)).square().sum().backward()
    optimizer.step()


def test_what_is_parked_takes_no_memory_and_comes_back_bit_for_bit() -> None:
    model, _ = trainer()
    before = copy.deepcopy(model.state_dict())
    identities = [id(p) for p in model.parameters()]
    told, weight = list[int](), next(model.parameters())
    offloaded = offloaded_module(model, on_offload=lambda: told.append(weight.untyped_storage().nbytes()))
    offloaded.offload()
    offloaded.offload()
    assert told == [0], "who knows addresses, once, when all have left"
    tensors = [*model.parameters(), *model.buffers()]
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    assert offloaded.bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    offloaded.restore()
    assert offloaded.bytes == 0
    assert [id(p) for p in model.parameters()] == identities
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_views_of_one_storage_are_moved_once_and_stay_views() -> None:
    whole = torch.arange(12.0)
    left, right = whole[:6].view(2, 3), whole[6:]
    offloaded = OffloadedTensors(nothing, lambda: [left, right, whole.detach()], {CPU})
    offloaded.offload()
    assert offloaded.bytes == 48
    offloaded.restore()
    right[0] = -1.0
    assert whole.tolist() == [0, 1, 2, 3, 4, 5, -1, 7, 8, 9, 10, 11]
    assert left.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_steps_of_adam_after_parking_equal_those_without_it() -> None:
    (plain, plain_optimizer), (model, optimizer) = trainer(), trainer()
    offloaded = OffloadedTensors(nothing, training_tensors(model, optimizer), {CPU})
    for number in range(4):
        step(plain, plain_optimizer, number)
        offloaded.offload()
        assert next(model.parameters()).untyped_storage().nbytes() == 0
        offloaded.restore()
        step(model, optimizer, number)
        if number:
            assert offloaded.seconds > 0
    for one, other in zip(plain.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        for key, value in plain_optimizer.state[one].items():
            assert torch.equal(optimizer.state[other][key], value), key


def test_a_frozen_tensor_is_copied_once_and_a_changing_one_each_time() -> None:
    frozen, begins, changing = (torch.ones(2) for _ in range(3))
    moving = [changing]
    offloaded = OffloadedTensors(lambda: [frozen, begins, changing], lambda: moving, {CPU})
    offloaded.offload()
    offloaded.restore()
    moving.append(begins)  # which was frozen until now
    for tensor in (frozen, begins, changing):
        tensor += 1  # against the agreement of the first, which shows that nobody looked again
    offloaded.offload()
    offloaded.restore()
    assert [tensor.tolist() for tensor in (frozen, begins, changing)] == [[1, 1], [2, 2], [2, 2]]


def test_a_gradient_that_was_let_go_is_not_kept() -> None:
    model, optimizer = trainer()
    step(model, optimizer, 0)
    offloaded = OffloadedTensors(nothing, training_tensors(model, optimizer), {CPU})
    offloaded.offload()
    whole = offloaded.bytes
    offloaded.restore()
    weight = next(model.parameters())
    weight.grad = None
    assert offloaded._copies == {}, "no reference to its memory"
    offloaded.offload()
    assert offloaded.bytes == whole - weight.numel() * 4
    offloaded.restore()


def test_tensors_elsewhere_stay() -> None:
    here, there = torch.ones(2), torch.ones(2, device="meta")
    offloaded = OffloadedTensors(nothing, lambda: [here, there], {CPU})
    offloaded.offload()
    assert offloaded.bytes == 8
    offloaded.restore()
    nowhere = OffloadedTensors(nothing, lambda: [here], {torch.device("cuda", 0)})
    assert nowhere._host_copies() == {}


def test_what_is_written_to_a_stand_in_comes_back() -> None:
    model, _ = trainer()
    offloaded = offloaded_module(model)
    first = next(model.parameters())
    assert offloaded.host_views({"w": first.detach()})["w"].data_ptr() == first.data_ptr(), (
        "not offloaded: itself"
    )
    offloaded.offload()
    stand_in = offloaded.host_views({"w": first.detach()})["w"]
    assert (stand_in.shape, stand_in.dtype) == (first.shape, first.dtype)
    stand_in.fill_(7.0)
    offloaded.restore()
    assert (first == 7.0).all()


def test_only_a_wait_that_lasts_is_used_for_offloading() -> None:
    clock = [100.0]
    offloaded = owner = offloaded_module(trainer()[0], clock=lambda: clock[0])
    assert owner.next_check_in == OFFLOAD_AFTER
    for _ in range(3):  # short waits, between which it works
        owner.offload_if_idle()
        clock[0] += 0.9 * OFFLOAD_AFTER
        owner.offload_if_idle()
        assert not offloaded.offloaded
        assert owner.next_check_in == pytest.approx(0.1 * OFFLOAD_AFTER)
        owner.restore()
    owner.offload_if_idle()
    clock[0] += OFFLOAD_AFTER + 0.01
    owner.offload_if_idle()
    assert offloaded.offloaded
    assert owner.next_check_in == float("inf")
    owner.restore()
    assert not offloaded.offloaded
    seconds, most = owner.pop_metrics()
    assert (seconds >= 0, most) == (True, (5 * 7 + 7 + 4 * 7 + 7 * 3 + 3) * 4 + 8)
    assert owner.pop_metrics() == (0.0, 0)


def test_returning_waits_for_the_other_role_to_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []

    class Crowded:
        def resize_(self, size: int) -> None:
            attempts.append(size)
            if len(attempts) < 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(offload, "_RETRY_INTERVAL", 0.001)
    crowded: Any = Crowded()
    copy = offload._HostCopy(storage=crowded, host=torch.zeros(4, dtype=torch.uint8), frozen=True)
    offload._allocate(copy)
    assert attempts == [4, 4, 4]
    attempts.clear()
    monkeypatch.setattr(offload, "MEMORY_TIMEOUT", -1.0)
    with pytest.raises(torch.OutOfMemoryError):
        offload._allocate(copy)


def offloading(actor: Actor) -> OffloadedTensors:
    """Give an actor what --actor.offload does."""
    config = TrainConfig(actor=ActorSettings(offload=True))
    actor.offload = actor_offload(config, actor.backend)
    actor.telemetry = ActorTelemetry(actor.backend, actor.offload)
    assert actor.offload.enabled
    return actor.offload


def idle_until_offloaded(actor: Actor, offloaded: OffloadedTensors) -> None:
    until = time.monotonic() + 10
    while not offloaded.offloaded:
        assert not actor.step(0.05)
        assert time.monotonic() < until


def imagine_one_group(actor: Actor, replay: Replay) -> None:
    assert isinstance(actor.port, InProcessActorPort)
    while not replay.state.limiter.ready:
        actor.step(0.0)
        actor.port.deliver()


def two_versions(models: WorldBackend, folder: Path, *, offload: bool) -> list[Episode]:
    """A group of version 0 and, after a wait for credit, one of version 1, whose weights are others."""
    original = {name: tensor.clone() for name, tensor in models.policy.trainable_tensors().items()}
    actor, replay, learner = actor_with(models, folder, slots=GROUP)
    publisher, actor.receiver = build_in_process()
    publisher.publish(WholeTensors(original), 0)
    imagine_one_group(actor, replay)
    (first,) = next_batch(learner, groups=1, version=0, timeout=0.0)
    offloaded = offloading(actor) if offload else None
    if offloaded is not None:
        idle_until_offloaded(actor, offloaded)
        assert offloaded.bytes > 1_000_000
    publisher.publish(WholeTensors({name: 1.5 * tensor for name, tensor in original.items()}), 1)
    assert not actor.step(0.0)
    assert actor.version == 1
    if offloaded is not None:
        assert offloaded.offloaded, "new weights reached the copy in host memory"
    learner.report_version(1)
    imagine_one_group(actor, replay)
    (second,) = next_batch(learner, groups=1, version=1, timeout=0.0)
    assert offloaded is None or not offloaded.offloaded
    replay.close()
    for name, tensor in models.policy.trainable_tensors().items():
        tensor.copy_(original[name])
    return [*first, *second]


def test_an_actor_that_was_parked_imagines_what_it_would_have_imagined(imagination, tmp_path) -> None:
    plain = two_versions(imagination, tmp_path / "plain", offload=False)
    found = two_versions(imagination, tmp_path / "offload", offload=True)
    assert [episode.policy_versions.tolist() for episode in plain] == [[0], [0], [1], [1]]
    for one, other in zip(plain, found, strict=True):
        for name, array in episode_arrays(one).items():
            np.testing.assert_array_equal(array, episode_arrays(other)[name], name)


@pytest.mark.parametrize("offload", [False, True])
def test_a_learner_parks_while_it_waits_and_learns_the_same(offload: bool, tmp_path, monkeypatch) -> None:
    plain, run = Run(tmp_path / "plain"), Run(tmp_path / "run", seconds_to_fill=3.0)
    plain.learner.run()
    config = TrainConfig(learner=LearnerSettings(offload=offload))
    run.learner.offload = learner_offload(config, run.learner.update)
    run.learner.offload._clock = run.clock
    here: list[int] = []
    choose = run.replay.choose

    def watched(**wish: Any) -> Any:
        here.append(sum(p.untyped_storage().nbytes() for p in run.policy.parameters()))
        return choose(**wish)

    monkeypatch.setattr(run.replay, "choose", watched)
    run.learner.run()
    for one, other in zip(run.policy.parameters(), plain.policy.parameters(), strict=True):
        assert torch.equal(one, other)
    weights = sum(p.numel() * 4 for p in run.policy.parameters())
    row = run.log.rows[3]
    if offload:
        assert run.replay.timeouts[:2] == [OFFLOAD_AFTER, 1.0]
        assert here[:3] == [weights, 0, 0], "not at once"
        assert row[m.LEARNER_OFFLOADED] >= 4 * weights, "gradient and moments too"
        assert row[m.LEARNER_OFFLOAD] > 0
    else:
        assert set(here) == {weights}
        assert m.LEARNER_OFFLOADED not in row


def test_a_learner_that_is_stopped_while_it_is_parked_saves_its_weights(tmp_path: Path) -> None:
    looks = iter([False] * 7 + [True])
    run = Run(tmp_path, seconds_to_fill=50.0, stop=lambda: next(looks))
    config = TrainConfig(learner=LearnerSettings(offload=True))
    run.learner.offload = learner_offload(config, run.learner.update)
    run.learner.offload._clock = run.clock
    before = {name: p.detach().clone() for name, p in run.policy.named_parameters()}
    run.learner.run()
    assert run.learner.version == 0
    assert run.events[-2:] == ["save 0", "stop"]
    for name, parameter in run.policy.named_parameters():
        assert torch.equal(parameter, before[name]), name


GRANULARITY = 2 * 2**20
"""Bytes by which torch's allocator may round: it does not split off less than 1 MiB of a large block, so a
tensor can hold more than was asked for, and after it came back another such rest, or none."""


def requested() -> int:
    """Bytes of the GPU that tensors asked for; `memory_allocated` adds what the allocator rounds up."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.gpu
def test_on_a_gpu_memory_falls_by_what_was_parked_and_comes_back() -> None:
    device = torch.device("cuda", 0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 1024, device=device)).sum().backward()
    optimizer.step()
    before = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    torch.cuda.synchronize()
    gc.collect()  # What other tests left in cycles would be counted when it goes.
    torch.cuda.empty_cache()
    asked, allocated, reserved = requested(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    offloaded = OffloadedTensors(nothing, training_tensors(model, optimizer), {device})
    for _ in range(2):
        offloaded.offload()
        weights = 8 * (1024 * 1024 + 1024) * 4
        assert offloaded.bytes == 4 * weights, (
            "weights, gradient and two moments; steps are counted on the host"
        )
        assert asked - requested() == offloaded.bytes
        assert 0 <= allocated - torch.cuda.memory_allocated() - offloaded.bytes <= GRANULARITY
        freed = reserved - torch.cuda.memory_reserved()
        assert freed > 0.9 * offloaded.bytes, "other processes can have it"
        assert all(copy.host.is_pinned() for copy in offloaded._copies.values())
        offloaded.restore()
        assert requested() == asked
        assert abs(torch.cuda.memory_allocated() - allocated) <= GRANULARITY
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), before[name]), name

"""A sharded policy computes what a whole one does, and its ranks exchange what they must."""

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.devices.offload import NO_OFFLOAD, OffloadedTensors
from asyncrl.errors import ReplayError, RunError
from asyncrl.learner.fsdp import UNITS, ReshardAfter, shard, spread, summed_gradient
from asyncrl.learner.optimizer import clip
from asyncrl.learner.ranks import DistributedRanks, local_tensors
from asyncrl.policies.acceleration import enable_gradient_checkpointing
from asyncrl.policies.interface import SamplingParams
from asyncrl.policies.lora import add_lora, merged_tensors
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from asyncrl.replay.interface import BatchDescription
from asyncrl.storage.assets import latest
from support.memory_learner import Run
from support.ranks import run_ranks
from support.tiny_models import small_policy

ROWS = 4
TASKS = ["lift the red block", "stack the blue block on the green block"] * (ROWS // 2)
SAMPLING = SamplingParams(temperature=1.0)
CPU = torch.device("cpu")
TWO_GROUPS = BatchDescription(request="r", numbers=(0, 1))


def policy_of() -> OpenVLAOFTPolicy:
    return small_policy(value_head="chunk")


def loss_of(policy: OpenVLAOFTPolicy, rows: slice) -> Tensor:
    """Policy gradient and value loss of some of the rows, as their part of the sum over all."""
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (ROWS, 64, 64, 3), dtype=np.uint8)
    tokens = torch.from_numpy(rng.integers(0, 256, (ROWS, 8, 7)))
    advantages = torch.from_numpy(rng.normal(size=(ROWS, 1, 1)).astype(np.float32))
    result = policy.evaluate(policy.preprocess(frames[rows], TASKS[rows]), {"tokens": tokens[rows]}, SAMPLING)
    assert result.value is not None
    gain = (advantages[rows] * result.logprob).sum() + 0.01 * result.entropy.sum()
    return (result.value.sum() - gain) / ROWS


def gradients(policy: OpenVLAOFTPolicy) -> dict[str, Tensor]:
    found = policy.trainable_parameters()
    assert all(p.grad is not None for p in found.values())
    return {name: p.grad for name, p in found.items() if p.grad is not None}


def assert_same_gradients() -> None:
    group = DistributedRanks(20.0)
    alone = policy_of()
    for row in range(ROWS):
        loss_of(alone, slice(row, row + 1)).backward()
    expected = gradients(alone)
    policy = shard(policy_of(), CPU, "fp32")
    with torch.no_grad():  # Leaves nothing gathered behind.
        before = policy.evaluate(*_inputs(policy), SAMPLING).logprob
    torch.testing.assert_close(before, alone.evaluate(*_inputs(alone), SAMPLING).logprob, atol=1e-5, rtol=0)
    rows = ROWS // group.size
    for row in range(rows):  # Micro-batches of one row.
        begin = group.rank * rows + row
        (group.size * loss_of(policy, slice(begin, begin + 1))).backward()
    actual = group.gather_full(gradients(policy))
    assert set(actual) == (set(expected) if group.rank == 0 else set())
    for name, gradient in actual.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], atol=1e-6 * scale, rtol=0)


def _inputs(policy: OpenVLAOFTPolicy) -> tuple:
    frames = np.full((2, 64, 64, 3), 7, np.uint8)
    return policy.preprocess(frames, TASKS[:2]), {"tokens": torch.full((2, 8, 7), 3)}


def bf16_on_one_rank() -> dict[str, float]:
    policy = shard(policy_of(), CPU, "bf16")
    whole = policy_of()
    group = DistributedRanks(20.0)
    seen: dict[str, torch.dtype] = {}
    policy.llm.layers[0].mlp.register_forward_hook(lambda _m, i, o: seen.update(layer=o.dtype))
    policy.lm_head.register_forward_hook(lambda _m, i, o: seen.update(input=i[0].dtype, logits=o.dtype))
    result = policy.evaluate(*_inputs(policy), SAMPLING)
    assert seen == {"layer": torch.bfloat16, "input": torch.bfloat16, "logits": torch.float32}
    assert result.logprob.dtype is torch.float32
    assert all(p.dtype is torch.float32 for p in policy.trainable_parameters().values())
    loss_of(policy, slice(None)).backward()
    assert all(g.dtype is torch.float32 for g in gradients(policy).values())
    optimizer = torch.optim.AdamW(policy.parameter_groups(1e-3, 1e-3))
    optimizer.step()
    assert set(group.gather_full(policy.acting_tensors())) == set(whole.acting_tensors())
    expected = whole.evaluate(*_inputs(whole), SAMPLING).logprob
    return {"gap": float((result.logprob - expected).abs().mean())}


@pytest.mark.timeout(60)
def test_bf16_passes_keep_float32_weights_gradients_and_logits() -> None:
    (answer,) = run_ranks(bf16_on_one_rank, ranks=1)
    assert 0 < answer["gap"] < 0.1


def with_adapters() -> OpenVLAOFTPolicy:
    policy = policy_of()
    add_lora(policy, 2, 0.0)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return policy.eval()


def adapters_and_patched_forwards() -> None:
    alone = with_adapters()
    loss_of(alone, slice(None)).backward()
    policy = with_adapters()
    enable_gradient_checkpointing(policy)
    shard(policy, CPU, "fp32")
    group = DistributedRanks(20.0)
    assert {p.requires_grad for p in policy.parameters() if isinstance(p, DTensor)} == {True}
    assert {p.requires_grad for p in policy.parameters() if not isinstance(p, DTensor)} == {False}
    for _ in range(2):  # Gradients are added up.
        (group.size * loss_of(policy, slice(group.rank * 2, group.rank * 2 + 2)) / 2).backward()
    actual = group.gather_full(gradients(policy))
    for name, gradient in actual.items():
        expected = gradients(alone)[name]
        torch.testing.assert_close(gradient, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    assert_merged(alone, policy, group)


def assert_merged(alone: OpenVLAOFTPolicy, policy: OpenVLAOFTPolicy, group: DistributedRanks) -> None:
    expected = dict(merged_tensors(alone))
    for name, tensor in merged_tensors(policy):
        for full in group.gather_full({name: tensor}).values():
            torch.testing.assert_close(full, expected[name], atol=1e-6, rtol=0)


def same_gradients_also_with_adapters() -> None:
    assert_same_gradients()
    adapters_and_patched_forwards()


@pytest.mark.timeout(90)
def test_two_ranks_have_the_gradient_of_one_also_with_adapters_and_activation_checkpointing() -> None:
    run_ranks(same_gradients_also_with_adapters)


class Collectives(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def collectives(policy: OpenVLAOFTPolicy, ranks: float, passes: list[slice]) -> list[int]:
    """Add up the gradients of the passes for one step; how often parts were gathered and sums exchanged.

    Sums in a row of ranks, and between rows.
    """
    with Collectives() as seen, summed_gradient(policy) as pass_is_last:
        for number, rows in enumerate(passes):
            loss = ranks * loss_of(policy, rows)
            if number == len(passes) - 1:
                pass_is_last()
            loss.backward()
    kinds = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")
    return [seen.calls[f"c10d::{kind}"] for kind in kinds]


def fails_between_two_passes(policy: OpenVLAOFTPolicy, rows: slice) -> None:
    with suppress(ZeroDivisionError), summed_gradient(policy):
        loss_of(policy, rows).backward()
        raise ZeroDivisionError


def adapters_are_gathered_once_in_a_step() -> list[list[int]]:
    group, counts = DistributedRanks(20.0), list[list[int]]()
    one_by_one = [slice(2 * group.rank + row, 2 * group.rank + row + 1) for row in range(2)]
    alone, adapted = with_adapters(), shard(with_adapters(), CPU, "fp32")
    loss_of(alone, slice(None)).backward()
    for _ in range(2):  # A second step begins as the first one did.
        adapted.zero_grad()
        counts.append(collectives(adapted, group.size, one_by_one))
        for name, gradient in group.gather_full(gradients(adapted)).items():
            expected = gradients(alone)[name]
            torch.testing.assert_close(gradient, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    fails_between_two_passes(adapted, one_by_one[0])
    assert all(isinstance(p, DTensor) for p in adapted.trainable_parameters().values()), "nothing stays whole"
    whole = shard(policy_of(), CPU, "fp32")
    return [
        *counts,
        collectives(whole, group.size, one_by_one[:1]),
        collectives(whole, group.size, one_by_one),
    ]


@pytest.mark.timeout(90)
def test_adapters_are_gathered_and_summed_once_in_a_step_of_several_passes() -> None:
    for first, second, one_pass, two_passes in run_ranks(adapters_are_gathered_once_in_a_step):
        assert first == second == [1, 1, 0]
        assert two_passes == [2 * number for number in one_pass], "all weights: in each pass"
        assert min(one_pass[:2]) > 1


def assert_gradients(policy: OpenVLAOFTPolicy, group: DistributedRanks) -> None:
    """Every weight has the gradient that one rank finds for all rows."""
    alone = policy_of()
    loss_of(alone, slice(None)).backward()
    expected = gradients(alone)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in group.gather_full(gradients(policy)).items():
        # What attention adds to all keys alike has no gradient but rounding.
        scale = max(float(expected[name].abs().max()), 1e-3 * largest)
        torch.testing.assert_close(gradient, expected[name], atol=1e-5 * scale, rtol=0)


def weights_stay_for_a_step() -> list[list[int]]:
    group, counts = DistributedRanks(20.0), list[list[int]]()
    one_by_one = [slice(2 * group.rank + row, 2 * group.rank + row + 1) for row in range(2)]
    policy = shard(policy_of(), CPU, "fp32", reshard_after="step")
    for passes in (one_by_one, one_by_one, [slice(2 * group.rank, 2 * group.rank + 2)]):
        policy.zero_grad()
        counts.append(collectives(policy, group.size, passes))
        assert_gradients(policy, group)
    fails_between_two_passes(policy, one_by_one[0])
    assert all(isinstance(p, DTensor) for p in policy.trainable_parameters().values()), "nothing stays whole"
    with Collectives() as seen, torch.no_grad():
        policy.evaluate(*_inputs(policy), SAMPLING)
    assert all(isinstance(p, DTensor) for p in policy.trainable_parameters().values())
    return [*counts, [seen.calls["c10d::_allgather_base_"]]]


@pytest.mark.timeout(90)
def test_weights_can_stay_gathered_for_a_step_and_no_longer() -> None:
    for first, second, one_pass, (without_gradient,) in run_ranks(weights_stay_for_a_step):
        assert first == second
        units, sums, _ = one_pass
        assert first == [units, 2 * sums, 0], "gathered once, whatever the passes"
        assert without_gradient == units


def rows_of_ranks_exchange_once_in_a_step() -> list[list[int]]:
    group, counts = DistributedRanks(20.0), list[list[int]]()
    policy = shard(policy_of(), CPU, "fp32", copies=2)
    part = slice(group.rank, group.rank + 1)
    for passes in ([part], [part] * 3, [part] * 3):
        policy.zero_grad()
        # Each pass is a share of the whole.
        counts.append(collectives(policy, group.size / len(passes), passes))
        assert_gradients(policy, group)
    return counts


class Skips(nn.Module):
    """Three small layers that share a unit, each of which may be left out, and a large one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.small = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.large = nn.Linear(4, 40)
        self.skipped: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.small):
            x = x if index in self.skipped else torch.tanh(layer(x))
        return self.large(x).square().mean()


def layers_are_skipped(reshard_after: ReshardAfter) -> list[tuple[str, ...]]:
    """Compares gradients of two passes, pair after pair; returns the layers without one."""
    alone, net = Skips(), Skips()
    parts = [torch.randn(5, 4) for _ in range(2)]
    spread(net, [*net.small, net.large], CPU, "fp32", reshard_after=reshard_after)
    assert len(getattr(net, UNITS).modules) == 3  # The small ones, the large one, the root.
    without = []
    for skipped in ((), (1,), (0,), (2,), (), (0, 1, 2)):
        net.skipped = alone.skipped = skipped
        for some in (net, alone):
            some.zero_grad()
            with summed_gradient(some) as pass_is_last:
                some(parts[0]).backward()
                pass_is_last()
                some(parts[1]).backward()
        found = dict(net.named_parameters())
        for name, parameter in alone.named_parameters():
            own: Any = found[name].grad
            assert (own is None) == (parameter.grad is None), name
            if own is not None:
                torch.testing.assert_close(own.full_tensor(), parameter.grad, atol=1e-7, rtol=1e-6)
        without.append(tuple(name for name, p in alone.named_parameters() if p.grad is None))
    return without


@pytest.mark.parametrize("reshard_after", ["pass", "step"])
def test_passes_may_skip_layers_that_share_a_unit(reshard_after: ReshardAfter) -> None:
    (found, again) = run_ranks(layers_are_skipped, reshard_after)
    assert found == again
    assert [len(names) for names in found] == [0, 2, 2, 2, 0, 6]


def norm_of_gradients(copies: int) -> float:
    """As the optimizer clips it, of a gradient that the ranks hold twice."""
    policy = shard(policy_of(), CPU, "fp32", copies=copies)
    rows = ROWS // torch.distributed.get_world_size()
    begin = torch.distributed.get_rank() * rows
    (torch.distributed.get_world_size() * loss_of(policy, slice(begin, begin + rows))).backward()
    held = list(gradients(policy).values())
    wanted = [torch.nn.Parameter(gradient.detach().clone()) for gradient in held]
    for parameter, gradient in zip(wanted, held, strict=True):
        parameter.grad = gradient.detach().clone()
    largest = 0.01
    expected: Any = torch.nn.utils.clip_grad_norm_(wanted, largest)
    norm = float(clip(held, largest))
    assert norm > 10 * largest
    assert norm == pytest.approx(float(expected.full_tensor()), rel=1e-5)
    for gradient, parameter in zip(held, wanted, strict=True):
        assert parameter.grad is not None
        found, expected = local_tensors([gradient, parameter.grad])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    small = clip(held, 2 * largest)
    assert float(small) == pytest.approx(largest, rel=1e-3), "nothing is scaled up"
    assert float(clip(held, 1.0)) == pytest.approx(float(small), rel=1e-6)
    return norm


def two_copies() -> tuple[list[list[int]], float, float]:
    return rows_of_ranks_exchange_once_in_a_step(), norm_of_gradients(copies=1), norm_of_gradients(copies=2)


@pytest.mark.slow
def test_hosts_that_have_a_copy_each_add_them_up_behind_the_last_pass_of_a_step() -> None:
    for (one_pass, three, again), alone, twice in run_ranks(two_copies, ranks=4, deadline=110.0):
        gathered, sums, between = one_pass
        assert between == sums > 1
        assert three == again == [3 * gathered, 3 * sums, between]
        assert twice == pytest.approx(alone, rel=1e-5)


def peer_dies(group: DistributedRanks) -> str:
    if group.rank == 0:
        return ""  # Leaves: its process ends.
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        group.share_batch(None)
    assert time.monotonic() - began < 15
    return str(caught.value)


def exchange_until_a_peer_dies() -> tuple[tuple[int, ...], float, float, int, str]:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1

    group = DistributedRanks(20.0)
    rank = float(group.rank)
    sum_, max_ = float(group.sum(torch.tensor(rank + 1))), float(group.max(torch.tensor(-rank)))
    batch = BatchDescription(request="r", numbers=(7, 3, 12))
    time.sleep(0.0 if group.rank else 0.3)
    part = group.share_batch(batch if group.rank == 0 else None, look)
    assert part is not None
    assert part.request == "r"
    assert group.share_batch(None) is None
    return part.numbers, sum_, max_, looks, peer_dies(group)


@pytest.mark.timeout(60)
def test_ranks_share_whole_groups_and_one_whose_peer_is_gone_says_what_it_waited_for() -> None:
    (first, *sums), (second, *others) = run_ranks(exchange_until_a_peer_dies)
    assert (first, second) == ((7, 12), (3,))
    assert sums[:2] == others[:2] == [3.0, 0.0]
    assert others[2] >= 3, "a rank that waits looks after its children"
    assert "learner rank 1 of 2 to share a batch" in others[3]


def a_wait_longer_than_the_deadline() -> bool:
    group = DistributedRanks(1.0)
    if group.rank == 0:
        for _ in range(3):
            time.sleep(0.5)
            group.send_heartbeat()
    return group.share_batch(TWO_GROUPS if group.rank == 0 else None) is not None


@pytest.mark.timeout(60)
def test_ranks_wait_as_long_as_rank_0_says_that_it_waits() -> None:
    assert run_ranks(a_wait_longer_than_the_deadline) == [True, True]


def ends_and_saves(folder: str) -> tuple[str, list[str]]:
    """A learner on two ranks whose replay fails at version 2, on rank 0."""
    ranks = DistributedRanks(20.0)
    run = Run(Path(folder), updates=9, every=1000, ranks=ranks)
    if ranks.rank == 0:
        write = run.log.write

        def at_version_2(step: int, values: Any) -> None:
            write(step, values)
            if step == 2:
                run.replay.fails = ReplayError("no start state is left")

        run.log.write = at_version_2  # type: ignore[method-assign]
    try:
        run.learner.run()
    except ReplayError as error:
        return str(error), run.events
    return "", run.events


@pytest.mark.timeout(60)
def test_when_rank_0_fails_in_its_wait_all_ranks_save_and_it_alone_raises(tmp_path: Path) -> None:
    (said, _), (others, events) = run_ranks(ends_and_saves, str(tmp_path))
    assert said == "no start state is left"
    assert others == ""
    assert "save 2" in events, "a save is made by all ranks together"
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.name == "update_000002"


def two_steps_of_adam(*, offloaded: bool) -> tuple[dict[str, Tensor], int]:
    """Parameters of this rank after two steps, and the most bytes offloaded while it waited between them."""
    group, policy, most = DistributedRanks(20.0), shard(policy_of(), CPU, "fp32"), 0
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)

    def tensors() -> list[Tensor]:
        moments = [x for state in optimizer.state.values() for x in state.values()]
        return [*policy.parameters(), *(p.grad for p in policy.parameters() if p.grad is not None), *moments]

    offload = OffloadedTensors(policy.buffers, tensors, {CPU}) if offloaded else NO_OFFLOAD
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        (2 * loss_of(policy, slice(2 * group.rank, 2 * group.rank + 2))).backward()
        optimizer.step()
        if group.rank == 0 and offloaded:
            time.sleep(0.5)  # The other one waits for the word that follows, and offloads.
            offload.offload_if_idle()
            time.sleep(0.25)
            offload.offload_if_idle()
        group.share_batch(TWO_GROUPS if group.rank == 0 else None, offload.offload_if_idle)
        offload.restore()
        most = max(most, offload.pop_metrics()[1])
    return {n: p.to_local().clone() for n, p in policy.named_parameters()}, most  # type: ignore[attr-defined]


def parked_shards_learn_the_same() -> None:
    plain, nothing = two_steps_of_adam(offloaded=False)
    found, most = two_steps_of_adam(offloaded=True)
    assert nothing == 0
    assert most > 3 * sum(tensor.nbytes for tensor in plain.values()), "weights, gradient, both moments"
    for name, tensor in plain.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.timeout(90)
def test_shards_that_are_parked_while_a_rank_waits_learn_the_same() -> None:
    run_ranks(parked_shards_learn_the_same)

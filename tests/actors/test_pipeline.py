"""Stages of an actor's batch: memory, order of launches, groups given up; the same bits at a fixed shape."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.actors import imagination
from asyncrl.actors.actor import ActorTelemetry
from asyncrl.actors.backend import EpisodePlan, Slots, Stage, split_slots
from asyncrl.actors.imagination import WorldBackend, wait_for
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ActorSettings, ImaginationSettings
from asyncrl.devices import tensors as device_tensors
from asyncrl.devices.offload import NO_OFFLOAD
from asyncrl.devices.tensors import DeviceEvent
from asyncrl.episode_layout import episode_arrays
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.environment import Environment, build_imagination, build_world_model
from asyncrl.launch.named_models import build_policy
from asyncrl.observability import metrics_system as m
from asyncrl.policies.interface import SamplingParams
from asyncrl.records import Episode
from asyncrl.replay.interface import GroupGrant
from support.failing_models import Poisoned, RowModels, RowState, episodes_of, inline_run
from support.replay import next_batch
from support.tiny_actor import TASKS

CPU = torch.device("cpu")


def rows(*numbers: int) -> RowState:
    return RowState(
        torch.tensor(numbers), torch.zeros(len(numbers), dtype=torch.long), torch.zeros(len(numbers))
    )


# ---- what a stage remembers ----------------------------------------------------------------------


def test_slots_are_cut_into_parts_that_differ_by_one_at_most() -> None:
    assert split_slots(4, 1) == [range(4)]
    assert split_slots(4, 2) == [range(2), range(2, 4)]
    assert split_slots(3, 2) == [range(1), range(1, 3)]
    with pytest.raises(ConfigError, match=r"actor.slots is 1.*each of --actor.pipeline-stages needs one"):
        ActorSettings(slots=1, pipeline_stages=2)


# ---- the order of launches -----------------------------------------------------------------------


class Slow(DeviceEvent):
    """Moments that pass only when somebody waits for them, as those of a device that is behind."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.reached = False

    @property
    def passed(self) -> bool:
        return self.reached


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens: launches with the number of their rows, and waits for them."""
    seen: list[str] = []
    draw = RowModels.imagine

    def launch(self: RowModels, state: RowState, *rest: Any) -> Any:
        seen.append(f"launch {len(state)}")
        return draw(self, state, *rest)

    def wait(moments: list[Any], deadline: float) -> float:
        seen.append("collect")
        for moment in moments:
            assert not moment.passed, "collected twice"
            moment.reached = True
        return 0.0

    monkeypatch.setattr(RowModels, "imagine", launch)
    monkeypatch.setattr(imagination, "DeviceEvent", Slow)
    monkeypatch.setattr(imagination, "wait_for", wait)
    return seen


def test_one_stage_is_launched_and_collected_in_turns(order: list[str], tmp_path: Path) -> None:
    run = inline_run(tmp_path, Poisoned(), per_update=2)
    for _ in range(2):
        run.actor.step(0.0)
    assert order == ["launch 4", "collect"] * 2
    run.replay.close()


def test_the_next_half_is_launched_before_the_one_before_is_collected(order: list[str], tmp_path) -> None:
    run = inline_run(tmp_path, Poisoned(), per_update=2, slots=3, stages=2)
    for _ in range(5):
        run.actor.step(0.0)
    assert order == [
        "launch 1",
        "launch 2",
        "collect",
        "launch 1",
        "collect",
        "launch 2",
        "collect",
        "launch 1",
        "collect",
    ]
    run.replay.close()


def test_a_half_without_episodes_keeps_nobody_waiting(order: list[str], tmp_path: Path) -> None:
    """One group of two, two halves of two: the second half stays empty."""
    run = inline_run(tmp_path, Poisoned(), per_update=1, slots=4, stages=2)
    while run.actor.step(0.0):
        pass
    assert order == ["launch 2", "collect"] * 3
    assert not run.actor.step(0.0)
    assert len(next_batch(run.learner, groups=1, version=0, timeout=0.0)) == 1
    run.replay.close()


def test_a_decision_carries_the_version_it_was_launched_with(monkeypatch, tmp_path) -> None:
    run = inline_run(tmp_path, Poisoned(), per_update=1, slots=2, stages=2)
    run.actor.step(0.0)  # launches member 0 with version 0
    monkeypatch.setattr(run.actor.receiver, "swap_into", lambda tensors: 1)
    pushed: list[Episode] = []
    monkeypatch.setattr(run.actor.port, "push", pushed.append)
    while len(pushed) < 2:
        run.actor.step(0.0)
    versions = {episode.member: episode.policy_versions.tolist() for episode in pushed}
    assert versions == {0: [0, 1, 1], 1: [1, 1, 1]}
    run.replay.close()


# ---- the same episodes, also with poison ---------------------------------------------------------


@pytest.mark.parametrize(("slots", "stages"), [(2, 2), (3, 2), (5, 2)])
def test_stages_change_no_bit_of_any_episode(slots: int, stages: int, tmp_path: Path) -> None:
    plain = inline_run(tmp_path / "plain", Poisoned())
    halved = inline_run(tmp_path / "halved", Poisoned(), slots=slots, stages=stages)
    expected, found = episodes_of(plain, 4), episodes_of(halved, 4)
    assert expected.keys() == found.keys()
    for key, episode in expected.items():
        for name, array in episode_arrays(found[key]).items():
            np.testing.assert_array_equal(array, episode_arrays(episode)[name], name)
    plain.replay.close()
    halved.replay.close()


# ---- waiting and measuring -----------------------------------------------------------------------


def test_a_device_that_does_not_finish_ends_the_wait_at_its_deadline() -> None:
    never, soon = Slow(CPU), Slow(CPU)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"within 0.05 s \(--hang-timeout\)"):
        wait_for([never], 0.05)
    assert 0.05 <= time.monotonic() - began < 5
    timer = threading.Timer(0.02, lambda: setattr(soon, "reached", True))
    timer.start()
    assert 0.01 < wait_for([soon], 60.0) < 5
    timer.join()
    assert wait_for([DeviceEvent(CPU)], 60.0) == 0.0


def test_the_seconds_of_each_model_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = [0.0]
    monkeypatch.setattr(device_tensors.time, "perf_counter", lambda: clock[0])

    def slowed(original: Any, seconds: float) -> Any:
        def slow(self: RowModels, *args: Any, **more: Any) -> Any:
            clock[0] += seconds
            return original(self, *args, **more)

        return slow

    for name, seconds in (("start", 1.0), ("act", 2.0), ("imagine", 4.0), ("score", 8.0)):
        monkeypatch.setattr(RowModels, name, slowed(getattr(RowModels, name), seconds))
    run = inline_run(tmp_path, Poisoned())
    for _ in range(2):
        run.actor.step(0.0)
    seconds = run.actor.backend.pop_device_seconds()
    assert seconds == {m.ACTOR_WORLD: 1 + 2 * 4.0, m.ACTOR_POLICY: 4.0, m.ACTOR_REWARD: 16.0}
    assert run.actor.backend.pop_device_seconds() == {}
    run.replay.close()


def test_a_report_tells_shares_of_the_time_and_reaches_the_learners_row(monkeypatch, tmp_path) -> None:
    run = inline_run(tmp_path, Poisoned())
    telemetry = ActorTelemetry(run.actor.backend, NO_OFFLOAD)
    assert telemetry.report_if_due() is None, "too soon"
    monkeypatch.setattr(
        run.actor.backend, "pop_device_seconds", lambda: {m.ACTOR_WORLD: 4.0, m.ACTOR_POLICY: 1.0}
    )
    telemetry.add(m.ACTOR_HOST, 8.0)
    telemetry.add(m.ACTOR_HOST, -2.0)
    telemetry.add(m.ACTORS_WAITING, 2.5)
    telemetry._since -= 10.0
    found = telemetry.report_if_due()
    assert found is not None
    assert found.pop(m.ACTOR_MEMORY) > 1e6
    assert found.pop(m.ACTOR_DECISIONS) == 0
    shares = {m.ACTORS_WAITING: 0.25, m.ACTOR_WORLD: 0.4, m.ACTOR_POLICY: 0.1, m.ACTOR_HOST: 0.1}
    assert found == pytest.approx(shares, rel=0.01), "on the CPU the models' time is not the host's"
    run.actor.port.report(found)
    status = run.replay.status()
    assert {metric: status[metric] for metric in shares} == pytest.approx(shares, rel=0.01)
    run.replay.close()


SLOTS = 5
Imagined = list[dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def environment() -> Environment:
    return build_world_model(TrainConfig(), CPU)


def models(environment: Environment, *, fixed_shape: bool) -> WorldBackend[Any]:
    config = TrainConfig(
        actor=ActorSettings(slots=SLOTS), imagination=ImaginationSettings(fixed_shape=fixed_shape)
    )
    return build_imagination(config, build_policy(config, CPU), environment)


def imagine(models: WorldBackend[Any], environment: Environment, wanted: list[tuple[int, int]]) -> Imagined:
    """Two decisions of the last of the given (group, member) pairs, the others in the slots before it."""
    stage, slots = Stage[Any](indices=range(SLOTS)), Slots(SLOTS, run_seed=0)
    for number, member in wanted:
        grant = GroupGrant(number=number, min_version=0, keep_video=True)
        slots.pending.append(EpisodePlan(grant=grant, member=member, start=environment.starts[number]))
    models.begin(slots, stage, slots.fill(0, range(SLOTS)))
    for _ in range(2):
        models.launch(slots, stage, slots.live, 0)
        assert models.collect(slots, stage, 60.0)[0] == []
    return slots.episode(len(wanted) - 1).decisions


def same(one: Imagined, other: Imagined) -> bool:
    return all(
        np.array_equal(array, theirs[name])
        for mine, theirs in zip(one, other, strict=True)
        for name, array in mine.items()
    )


def test_at_a_fixed_shape_no_bit_of_an_episode_depends_on_how_many_are_beside_it(environment) -> None:
    found = {}
    for fixed_shape in (False, True):
        imagination = models(environment, fixed_shape=fixed_shape)
        alone = imagine(imagination, environment, [(1, 1)])
        among = imagine(imagination, environment, [(0, 0), (2, 1), (1, 0), (1, 1)])
        found[fixed_shape] = same(alone, among)
    assert found == {False: False, True: True}, "else this test cannot tell that filling up is needed"


def test_at_a_fixed_shape_no_bit_of_a_decision_depends_on_the_length_of_its_neighbours_instructions(
    imagination: WorldBackend[Any],
) -> None:
    policy: Any = imagination.policy
    short, long = "lift it", TASKS[0]
    frames = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    sampling = SamplingParams(temperature=1.0)

    def decided(*tasks: str) -> list[torch.Tensor]:
        """Tokens and log-probs of the first row."""
        acted = policy.act(policy.preprocess(frames, tasks), sampling, [3, 4])
        return [acted.sample["tokens"][0], acted.logprob[0]]

    before = policy.tokenizer.shortest, policy.tokenizer.always_masked
    policy.fix_prompts([long, short])
    try:
        for task in (short, long):
            beside_short, beside_long = decided(task, short), decided(task, long)
            assert all(map(torch.equal, beside_short, beside_long)), task
    finally:
        policy.tokenizer.shortest, policy.tokenizer.always_masked = before

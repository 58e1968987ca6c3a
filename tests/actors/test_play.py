"""An actor in a simulator: what it records, and what a lost worker or a group that is given up changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.actors.actor import Actor
from asyncrl.actors.backend import Slots, Stage, build_episode
from asyncrl.actors.play import MOST_RESTARTS, SimulatorBackend
from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ActorSettings, ReplaySettings
from asyncrl.episode_layout import ArraySpec, episode_arrays
from asyncrl.errors import ReplayError, RunError
from asyncrl.launch.roles import open_run_replay
from asyncrl.launch.simulated import TrainingStarts
from asyncrl.observability import metrics_system as m
from asyncrl.policies.interface import ActResult, SamplingParams
from asyncrl.records import ActionSpec, Episode, episode_seed, noise_seed, sampling_seed
from asyncrl.replay.admission import problem_with
from asyncrl.replay.inline_ports import InProcessLearnerPort
from asyncrl.replay.interface import GroupGrant
from asyncrl.simulators.interface import SimStart, SimulatorSource, SimulatorSpec, random_start
from asyncrl.simulators.pool import SimulatorPool, SlotAnswer
from asyncrl.weights.packing import WholeTensors
from asyncrl.weights.transports.in_process import build_in_process
from support.replay import next_batch
from support.simulated import COUNTING, TASKS

SPEC = SimulatorSource(name=COUNTING).build().spec
SAMPLING = SamplingParams(temperature=1.0)


class Chooser:
    """Draws its actions from the seeds it is given, and keeps all that it was shown."""

    def __init__(self, chunk: int = 8, sick: Callable[[int], bool] = lambda seed: False) -> None:
        self.action_spec = ActionSpec(chunk=chunk)
        self.sample_arrays = {"drawn": ArraySpec(dtype="int64", shape=("N", "C"))}
        self.device, self.sick = torch.device("cpu"), sick
        self.shown: list[tuple[np.ndarray, list[str], np.ndarray | None]] = []

    def preprocess(self, frames: np.ndarray, tasks: list[str], proprio: np.ndarray | None = None) -> Any:
        self.shown.append((frames, tasks, proprio))
        return torch.zeros(len(tasks))

    def act(self, inputs: Tensor, sampling: SamplingParams, seeds: list[int]) -> ActResult:
        chunk = self.action_spec.chunk
        drawn = np.stack([np.random.default_rng(seed).integers(0, 256, (chunk, 7)) for seed in seeds])
        actions = torch.from_numpy(drawn / 256).float()
        for row, seed in enumerate(seeds):
            if self.sick(seed):
                actions[row] = float("nan")
        logprob = -actions.nan_to_num().abs()
        return ActResult(
            actions=actions,
            sample={"drawn": torch.from_numpy(drawn[:, :, 0])},
            logprob=logprob,
            value=actions[:, 0, :1].nan_to_num(),
            entropy=logprob,
        )

    def acting_tensors(self) -> dict[str, Tensor]:
        return {"weight": torch.zeros(1)}


@contextmanager
def playing(
    chunk: int = 8,
    *,
    workers: int = 0,
    places: int = 2,
    max_decisions: int = 100,
    accident: str = "",
    lockstep: bool = False,
    **more: Any,
) -> Iterator[tuple[SimulatorBackend, Slots, Stage[Any]]]:
    settings = (*((f'accident="{accident}"',) if accident else ()), f"lockstep={str(lockstep).lower()}")
    source = SimulatorSource(name=COUNTING, places=places, settings=settings)
    with SimulatorPool(source, workers, timeout=30.0) as pool:
        policy: Any = more.pop("policy", None) or Chooser(chunk)
        shown: dict[str, Any] = {"cameras": 2, "shows_state": True}
        play = SimulatorBackend(policy, pool, SAMPLING, max_decisions=max_decisions, **shown, **more)
        yield play, Slots(pool.slots, run_seed=0), Stage[Any](indices=range(pool.slots))


def queue(slots: Slots, seeds: list[int], *, size: int = 1, keep_video: bool = False, first: int = 0) -> None:
    for number, seed in enumerate(seeds, start=first):
        grant = GroupGrant(number=number, min_version=0, keep_video=keep_video)
        slots.add_group(grant, random_start(SPEC, seed), size)


def finish(
    play: SimulatorBackend,
    slots: Slots,
    stage: Stage[Any],
    *,
    version: Callable[[int], int] = lambda turn: 3,
    turns: int = 200,
) -> dict[tuple[int, int], Episode]:
    """Play until no slot has an episode; episodes by group and member."""
    found = {}
    for turn in range(turns):
        begun = slots.fill(1000, stage.indices, play.is_cheapest)
        if begun:
            assert play.begin(slots, stage, begun) == []
        if not slots.live:
            return found
        assert play.launch(slots, stage, slots.live, version(turn)) == []
        assert play.collect(slots, stage, 60.0)[0] == []
        for index in slots.live:
            episode = slots.episode(index)
            if episode.decisions and (ending := play.episode_end(episode)) is not None:
                made = build_episode(
                    slots.clear(index), ending, group_size=8, actor="a", world_version=play.world_version,
                    sampling=SamplingParams(temperature=1.0),
                )  # fmt: skip
                found[episode.plan.grant.number, made.member] = made
    raise AssertionError("the episodes do not end")


# ---- the record ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 5, 8])
@pytest.mark.parametrize(
    ("seed", "steps", "end"),
    [
        (7, 7, "success"),
        (16, 16, "success"),
        (11, 11, "success"),
        (550, 10, "terminated"),
        (500, 24, "truncated"),
    ],
)
def test_the_record_says_how_many_steps_were_taken_and_how_it_ended(chunk, seed, steps, end) -> None:
    with playing(chunk) as parts:
        queue(parts[1], [seed])
        made = finish(*parts)[0, 0]
        policy: Any = parts[0].policy
    decisions = -(-steps // chunk)
    assert problem_with(made) is None
    assert (made.end_reason, made.steps, len(made.frames)) == (end, steps, decisions)
    assert (made.start_state, made.task, made.world_version) == (f"counting/seed-{seed}", TASKS[seed % 2], -1)
    won = [0.0] * (decisions * chunk)
    won[steps - 1] = float(end == "success")
    assert made.rewards.reshape(-1).tolist() == won
    assert made.success_scores.reshape(-1).tolist() == won
    seen = [n * chunk for n in range(decisions)]
    assert made.states is not None
    assert made.more_frames is not None
    assert made.final_state is not None
    assert made.final_more_frames is not None
    assert made.frames[:, 0, 0, 0].tolist() == made.more_frames[:, 0, 0, 0, 0].tolist() == seen
    assert made.states.tolist() == [[seed % 7, steps_then] for steps_then in seen]
    assert (made.final_frame[0, 0, 0], made.final_more_frames[0, 0, 0, 0]) == (steps, steps)
    assert made.final_state.tolist() == [seed % 7, steps]
    assert made.seed == episode_seed(0, 0, 0)
    assert made.noise_seeds.tolist() == [noise_seed(made.seed, n) for n in range(decisions)]
    for n, noise in enumerate(made.noise_seeds.tolist()):
        drawn = np.random.default_rng(sampling_seed(noise)).integers(0, 256, (chunk, 7))
        assert made.sample["drawn"][n].tolist() == drawn[:, 0].tolist()
        np.testing.assert_array_equal(made.actions[n], (drawn / 256).astype(np.float32))
        frames, tasks, proprio = policy.shown[n]
        assert (frames.shape[:2], tasks) == ((1, 2), [made.task])
        np.testing.assert_array_equal(proprio, made.states[n : n + 1])


@pytest.mark.parametrize("keep_video", [False, True])
def test_every_frame_is_kept_where_the_grant_asks_for_it(keep_video: bool) -> None:
    with playing() as parts:
        queue(parts[1], [11], keep_video=keep_video)
        made = finish(*parts)[0, 0]
    assert made.video[:, 0, 0, 0].tolist() == (list(range(1, 12)) if keep_video else [])
    assert problem_with(made) is None


def test_an_episode_is_cut_by_the_settings_before_its_simulator_does_it() -> None:
    with playing(max_decisions=2) as parts:
        queue(parts[1], [500])
        made = finish(*parts)[0, 0]
    assert (made.end_reason, made.steps, problem_with(made)) == ("truncated", 16, None)


def test_a_policy_of_one_picture_is_shown_one() -> None:
    with playing() as (play, slots, stage):
        play.cameras, play.shows_state = 1, False
        queue(slots, [11])
        made = finish(play, slots, stage)[0, 0]
        policy: Any = play.policy
    assert {frames.shape for frames, _, _ in policy.shown} == {(1, 2, 2, 3)}
    assert {proprio for _, _, proprio in policy.shown} == {None}
    assert (made.more_frames, made.states, problem_with(made)) == (None, None, None)


# ---- whoever plays beside it ---------------------------------------------------------------------

SEEDS = [7, 550, 500, 16, 3, 541, 99, 12]


def episodes_of(*, workers: int, places: int, **more: Any) -> dict[tuple[int, int], Episode]:
    with playing(workers=workers, places=places, **more) as parts:
        queue(parts[1], SEEDS, size=2)
        return finish(*parts)


def assert_equal(one: Episode, other: Episode, *but: str) -> None:
    assert (one.steps, one.end_reason, one.task) == (other.steps, other.end_reason, other.task)
    for name, array in episode_arrays(one).items():
        if name not in but:
            np.testing.assert_array_equal(array, episode_arrays(other)[name], name)


def test_no_episode_depends_on_workers_slots_or_who_answers_first() -> None:
    alone = episodes_of(workers=0, places=1)
    assert len(alone) == 16
    for workers, places, together, lockstep in (
        (2, 2, False, False),
        (0, 5, True, False),
        (2, 3, False, True),
        (0, 5, True, True),
    ):
        found = episodes_of(workers=workers, places=places, together=together, lockstep=lockstep)
        assert found.keys() == alone.keys()
        for key, made in found.items():
            assert_equal(made, alone[key])


@pytest.mark.parametrize("how", ["kill", pytest.param("raise", marks=pytest.mark.slow)])
def test_an_episode_whose_worker_is_lost_begins_again_and_says_which_weights_made_it(tmp_path, how) -> None:
    with playing(workers=1, places=2, accident=f"{how}@{tmp_path / 'happened'}") as (play, slots, stage):
        queue(slots, [500, 7])
        before = finish(play, slots, stage, version=lambda turn: turn)
        counts = dict(play.counts)
    assert (tmp_path / "happened").exists()
    assert counts[m.ACTOR_RESTARTED] == 2, "both were played by the worker that was lost"
    assert_equal(before[0, 0], episodes_alone(500), "policy_versions")
    made = before[0, 0].policy_versions.tolist()
    assert made == sorted(made)
    assert made[0] > 0, "the decision that version 0 made was lost, and nothing of it is left"
    assert counts[m.ACTOR_DECISIONS] >= sum(len(e.frames) for e in before.values())


def episodes_alone(seed: int) -> Episode:
    with playing(places=1) as parts:
        queue(parts[1], [seed])
        return finish(*parts)[0, 0]


class Scripted:
    """A pool of one slot that answers what it is told."""

    def __init__(self, *answers: SlotAnswer) -> None:
        self.answers, self.asked = list(answers), list[str]()
        self.spec: SimulatorSpec = SPEC
        self.slots, self.closed = 1, False

    def reset(self, slot: int, start: SimStart, expert: Any = None) -> None:
        self.asked.append(f"reset {start.seed}")

    def step(self, slot: int, actions: Any, **how: Any) -> None:
        self.asked.append(f"step {len(actions)}")

    def leave(self, slot: int) -> None:
        self.asked.append("leave")

    def ready(self, patience: float) -> list[SlotAnswer]:
        return [self.answers.pop(0)] if self.answers else []

    def loaded_task(self, slot: int) -> int:
        return -1

    def close(self) -> None:
        self.closed = True


def shows(steps: int = 0, **changes: Any) -> SlotAnswer:
    told: dict[str, Any] = {
        "slot": 0,
        "task": TASKS[0],
        "frames": np.zeros((1, 2, 2, 2, 3), np.uint8),
        "states": np.zeros((1, 2), np.float32),
        "actions": np.zeros((steps, 7), np.float32),
        "rewards": np.zeros(steps, np.float32),
        "success": np.zeros(steps, np.bool_),
    }
    return SlotAnswer(**(told | changes))


def scripted(
    *answers: SlotAnswer, seeds: tuple[int, ...] = (500,)
) -> tuple[SimulatorBackend, Slots, Stage[Any], Scripted]:
    pool, policy = Scripted(*answers), Chooser()
    play = SimulatorBackend(policy, pool, SAMPLING, max_decisions=9, cameras=2, shows_state=True)  # type: ignore[arg-type]
    slots, stage = Slots(1, run_seed=0), Stage[Any](indices=range(1))
    queue(slots, list(seeds))
    play.begin(slots, stage, slots.fill(0, stage.indices))
    return play, slots, stage, pool


def test_what_was_asked_is_never_asked_again() -> None:
    play, slots, stage, pool = scripted(shows(), shows(8))
    play.launch(slots, stage, [0], 0)
    play.collect(slots, stage, 10.0)
    assert pool.asked == ["reset 500", "step 8"]
    assert len(slots.episode(0).decisions) == 1
    play.launch(slots, stage, [0], 0)
    with pytest.raises(RunError, match=r"slot 0 within 0.01 s \(--hang-timeout\)"):
        play.collect(slots, stage, 0.01)
    assert pool.asked == ["reset 500", "step 8", "step 8"]


def test_a_start_that_costs_one_worker_after_the_other_is_given_up() -> None:
    lost = SlotAnswer(slot=0, lost="worker 0 died.")
    play, slots, stage, pool = scripted(*[lost] * (MOST_RESTARTS + 1))
    failed = []
    for _ in range(MOST_RESTARTS + 1):
        failed += play.launch(slots, stage, [0], 0)
    assert [(one.index, one.cause) for one in failed] == [(0, "world")]
    assert "lost 3 times: worker 0 died." in failed[0].reason
    assert pool.asked == ["reset 500"] * (MOST_RESTARTS + 1)
    assert play.counts[m.ACTOR_RESTARTED] == MOST_RESTARTS


def test_the_answer_to_an_episode_that_is_gone_reaches_no_other() -> None:
    play, slots, stage, pool = scripted(
        shows(), shows(8, rewards=np.ones(8, np.float32)), shows(), seeds=(500, 7)
    )
    play.launch(slots, stage, [0], 0)
    assert pool.asked == ["reset 500", "step 8"]
    slots.remove_group(0)
    play.begin(slots, stage, slots.fill(0, stage.indices))
    assert pool.asked == ["reset 500", "step 8"], "the slot is not free before it has answered"
    play.launch(slots, stage, [0], 0)
    assert pool.asked[2:] == ["leave", "reset 7"]
    play.launch(slots, stage, [0], 0)
    assert pool.asked[4:] == ["step 8"]
    assert slots.episode(0).decisions == []


@pytest.mark.parametrize(("last", "most"), [(shows(8, truncated=True), 9), (shows(8), 1)])
def test_an_episode_whose_last_answer_comes_while_others_are_decided_is_handed_over(last, most) -> None:
    play, slots, stage, pool = scripted(shows(), last)
    play.max_decisions = most
    play.launch(slots, stage, [0], 0)
    assert play.launch(slots, stage, [0], 0) == []
    assert pool.asked == ["reset 500", "step 8"], "nothing is decided behind its end"
    assert stage.in_flight == [0], "so that the stage is collected"
    assert play.collect(slots, stage, 0.0) == ([], 0.0)
    assert play.episode_end(slots.episode(0)) is not None


def test_simulators_that_step_together_do_not_wait_for_a_decision_that_failed() -> None:
    play, slots, stage, pool = scripted(shows())
    play.policy = Chooser(sick=lambda seed: True)  # type: ignore[assignment]
    (failed,) = play.launch(slots, stage, [0], 0)
    assert (failed.index, failed.cause) == (0, "policy")
    assert pool.asked == ["reset 500", "leave"]
    assert stage.in_flight == []


def test_an_episode_that_is_cut_leaves_its_place_to_those_that_step_together() -> None:
    play, slots, stage, pool = scripted(shows(), shows(8))
    play.max_decisions = 1
    play.launch(slots, stage, [0], 0)
    play.collect(slots, stage, 1.0)
    assert play.episode_end(slots.clear(0)) is not None
    play.release(slots, stage)
    assert pool.asked == ["reset 500", "step 8", "leave"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (shows(8, rewards=np.full(8, np.nan, np.float32)), "the simulator's rewards are not finite"),
        (shows(8, states=np.full((1, 2), np.inf, np.float32)), "the simulator's state is not finite"),
        (shows(3), "stopped after 3 of 8 steps without an end"),
    ],
)
def test_what_a_simulator_must_not_answer_ends_the_group_by_name(answer: SlotAnswer, reason: str) -> None:
    play, slots, stage, _ = scripted(shows(), answer)
    assert play.launch(slots, stage, [0], 0) == []
    (failed,), _ = play.collect(slots, stage, 10.0)
    assert (failed.index, failed.cause) == (0, "world")
    assert reason in failed.reason


# ---- in an actor ---------------------------------------------------------------------------------

GROUP = 4


def run_of(
    folder: Path, play: SimulatorBackend, *, groups: int, slots: int, stages: int = 1, filtered: bool = False
) -> Any:
    config = TrainConfig(
        algorithm=AlgorithmSettings(group_size=GROUP, groups_per_update=groups),
        replay=ReplaySettings(max_lag=0, keep_video_every=2),
    )
    replay = open_run_replay(folder, config)
    publisher, receiver = build_in_process()
    publisher.publish(WholeTensors(play.policy.acting_tensors()), 0)
    settings = ActorSettings(slots=slots, pipeline_stages=2 if stages == 2 else 1, max_decisions=100)
    run = SimpleNamespace(replay=replay)
    run.learner = InProcessLearnerPort(replay, imagine=lambda: run.actor.step(0.0))
    run.actor = Actor(
        "inline", play, TrainingStarts(SPEC, 0, "random"), run.learner.actor_port(), receiver, settings,
        group_size=GROUP, run_seed=0,
    )  # fmt: skip
    return run


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("together", [False, True])
def test_the_members_of_a_group_begin_at_one_start_and_sample_each_for_itself(
    tmp_path: Path, stages: int, together: bool
) -> None:
    with playing(places=6, together=together) as (play, _, _):
        run = run_of(tmp_path, play, groups=5, slots=6, stages=stages)
        batch = next_batch(run.learner, groups=5, version=0, timeout=60.0)
        run.replay.close()
    starts = TrainingStarts(SPEC, 0, "random")
    assert len(batch) == 5
    for group in batch:
        number = int(group[0].group_id)
        assert {e.start_state for e in group} == {starts[number].name}
        assert len({e.sample["drawn"].tobytes() for e in group}) == GROUP
        assert {problem_with(e) for e in group} == {None}
        assert {(e.steps, e.end_reason) for e in group} == {(group[0].steps, group[0].end_reason)}
        assert {bool(len(e.video)) for e in group} == {number % 2 == 0}


def test_a_policy_that_is_not_finite_ends_that_group_only_and_is_counted(tmp_path: Path) -> None:
    sick = sampling_seed(noise_seed(episode_seed(0, 1, 2), 0))
    with playing(places=6, policy=Chooser(sick=lambda seed: seed == sick)) as (play, _, _):
        run = run_of(tmp_path, play, groups=3, slots=6)
        batch = next_batch(run.learner, groups=3, version=0, timeout=60.0)
        assert run.replay.status()[m.POISONED_POLICY] == 1
        run.replay.close()
    assert sorted(int(group[0].group_id) for group in batch) == [0, 2, 3]


def test_a_run_whose_every_episode_fails_ends_although_there_are_always_other_starts(tmp_path: Path) -> None:
    with playing(places=6, policy=Chooser(sick=lambda seed: True)) as (play, _, _):
        run = run_of(tmp_path, play, groups=3, slots=6)
        with pytest.raises(ReplayError, match="16 groups in a row failed, each from another start"):
            next_batch(run.learner, groups=3, version=0, timeout=60.0)
        run.replay.close()

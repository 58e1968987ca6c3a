"""The actor: seeds, slots, and imagination that does not depend on its neighbours. Tiny real models."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.actors import actor as actor_module
from asyncrl.actors.actor import Actor
from asyncrl.actors.backend import EpisodeInProgress, EpisodePlan, Slots, Stage, build_episode
from asyncrl.actors.imagination import WorldBackend
from asyncrl.config.sections import ActorSettings, SuccessFrames
from asyncrl.episode_layout import episode_arrays
from asyncrl.errors import SampleTimeout
from asyncrl.learner.batches import valid_steps
from asyncrl.observability import metrics_system as s
from asyncrl.policies.interface import SamplingParams
from asyncrl.records import Episode, episode_seed, noise_seed, sampling_seed
from asyncrl.replay.admission import problem_with
from asyncrl.replay.inline_ports import InProcessActorPort, InProcessLearnerPort
from asyncrl.replay.interface import GroupGrant
from asyncrl.weights.interface import ChannelClosed
from support.replay import next_batch
from support.tiny_actor import GROUP, TASKS, actor_with, start


def grant(number: int, *, min_version: int = 0, keep_video: bool = False) -> GroupGrant:
    return GroupGrant(number=number, min_version=min_version, keep_video=keep_video)


# ---- seeds ---------------------------------------------------------------------------------------


def test_no_two_decisions_of_a_run_share_a_seed() -> None:
    episodes = [episode_seed(run, group, i) for run in (0, 1) for group in range(20) for i in range(8)]
    noises = [noise_seed(seed, n) for seed in episodes for n in range(6)]
    everything = [*episodes, *noises, *map(sampling_seed, noises)]
    assert len(set(everything)) == 2 * 20 * 8 * (1 + 6 + 6)
    assert all(0 <= seed < 2**62 for seed in everything)


# ---- slots ---------------------------------------------------------------------------------------


def fill(slots: Slots, version: int) -> list[int]:
    return slots.fill(version, range(len(slots.episodes)))


def members(slots: Slots) -> list[tuple[int, int] | None]:
    return [(e.plan.grant.number, e.plan.member) if e else None for e in slots.episodes]


def test_slots_are_filled_in_the_order_of_the_grants() -> None:
    slots = Slots(3, run_seed=0)
    assert slots.wanted(0) == 3
    slots.add_group(grant(4), start(4), 2)
    assert slots.wanted(0) == 1
    slots.add_group(grant(5), start(5), 2)
    assert slots.wanted(0) == 0
    assert fill(slots, 0) == [0, 1, 2]
    assert members(slots) == [(4, 0), (4, 1), (5, 0)]
    assert slots.episode(1).seed == episode_seed(0, 4, 1)


def test_a_group_that_is_removed_leaves_its_slots_and_the_queue_and_no_other_group_does() -> None:
    slots = Slots(3, run_seed=0)
    for number in (4, 5, 6):
        slots.add_group(grant(number), start(number), 2)
    fill(slots, 0)
    slots.remove_group(5)
    assert members(slots) == [(4, 0), (4, 1), None]
    fill(slots, 0)
    slots.remove_group(4)
    assert members(slots) == [None, None, (6, 0)]
    assert [(m.grant.number, m.member) for m in slots.pending] == [(6, 1)]


# ---- the record ----------------------------------------------------------------------------------


def episode_with(scores: list[list[float]], *, keep_video: bool = False) -> EpisodeInProgress:
    """An episode whose decision n saw a frame of value 8 n, and whose step i drew one of value i + 1."""
    episode = EpisodeInProgress(
        plan=EpisodePlan(grant=grant(3, keep_video=keep_video), member=1, start=start(3)),
        seed=9,
        task=start(3).task,
        frame=start(3).frame,
    )
    for n, row in enumerate(scores):
        episode.add(
            {
                "frames": np.full((2, 2, 3), 8 * n, np.uint8),
                "tokens": np.full((8, 7), n, np.int32),
                "logprobs": np.full((8, 7), -1.0 - n, np.float32),
                "actions": np.full((8, 7), 0.1 * n, np.float32),
                "success_scores": np.array(row, np.float32),
                "policy_versions": np.array(10 + n),
                "noise_seeds": np.array(episode.next_noise_seed()),
                "video": np.stack([np.full((2, 2, 3), 8 * n + i + 1, np.uint8) for i in range(8)]),
            }
        )
    return episode


def finish(
    episode: EpisodeInProgress, max_decisions: int = 3, success_frames: SuccessFrames = 1
) -> Episode | None:
    rule = ActorSettings(max_decisions=max_decisions, success_threshold=0.9, success_frames=success_frames)
    nothing: Any = None
    world: Any = SimpleNamespace(version=0)
    ending = WorldBackend(nothing, world, nothing, nothing, rule=rule).episode_end(episode)
    if ending is None:
        return None
    return build_episode(
        episode,
        ending,
        group_size=GROUP,
        actor="actor-0",
        world_version=5,
        sampling=SamplingParams(temperature=1.3, top_k=20),
    )


LOW, HIGH = [0.1] * 8, [0.2, 0.3, 0.9, 0.5, 0.95, 0.1, 0.1, 0.1]


def test_an_episode_that_begins_on_the_way_has_the_decisions_that_are_left() -> None:
    one, two = episode_with([LOW]), episode_with([LOW, LOW])
    for episode in (one, two):
        on_the_way = replace(episode.plan.start, elapsed=1)
        episode.plan = replace(episode.plan, start=on_the_way)
    assert finish(one) is None
    ended = finish(two)
    assert ended is not None
    assert (ended.end_reason, len(ended.actions)) == ("truncated", 2)


BLINK = [0.1, 0.9, 0.1, 0.1, 0.1, 0.1, 0.95, 0.95]
"""One frame scores alone; the last two of the decision do."""


@pytest.mark.parametrize(
    ("scores", "rule", "rewarded"),
    [
        ([LOW, HIGH], 1, (1, 2)),
        ([LOW, HIGH], 2, None),  # It scores twice, and not in a row.
        ([LOW, HIGH], "last", None),
        ([BLINK], 1, (0, 1)),
        ([BLINK], 2, (0, 7)),
        ([BLINK], "last", (0, 7)),
        ([BLINK], 3, None),
        ([BLINK, [0.9, *LOW[1:]]], 3, (1, 0)),  # A row of frames goes on in the next decision.
        ([LOW, BLINK], 2, (1, 7)),
    ],
)
def test_the_rule_says_which_step_is_the_success(scores, rule, rewarded) -> None:
    ended = finish(episode_with(scores), success_frames=rule)
    if rewarded is None:
        assert ended is None
        ended = finish(episode_with(scores), max_decisions=len(scores), success_frames=rule)
        assert ended is not None
        assert (ended.end_reason, ended.rewards.sum(), ended.steps) == ("truncated", 0, ended.rewards.size)
        return
    assert ended is not None
    assert (ended.end_reason, ended.rewards.sum(), ended.rewards[rewarded]) == ("success", 1, 1)
    step = 8 * rewarded[0] + rewarded[1]
    assert ended.steps == step + 1
    assert valid_steps(ended).sum() == step + 1  # What learning counts ends there.
    assert problem_with(ended) is None


def test_an_episode_carries_all_it_was_made_of() -> None:
    ended = finish(episode_with([LOW, HIGH], keep_video=True))
    assert ended is not None
    assert (ended.group_id, ended.member, ended.group_size) == ("00000003", 1, GROUP)
    assert (ended.task, ended.start_state, ended.actor) == (TASKS[1], "start-3", "actor-0")
    assert (ended.world_version, ended.temperature, ended.top_k, ended.seed) == (5, 1.3, 20, 9)
    assert ended.policy_versions.tolist() == [10, 11]
    assert ended.noise_seeds.tolist() == [noise_seed(9, 0), noise_seed(9, 1)]
    assert ended.frames[:, 0, 0, 0].tolist() == [0, 8]
    assert ended.final_frame[0, 0, 0] == 16
    assert ended.video[:, 0, 0, 0].tolist() == list(range(1, 17))
    assert problem_with(ended) is None
    without_video = finish(episode_with([HIGH]))
    assert without_video is not None
    assert without_video.video.shape == (0, 2, 2, 3)


def test_a_finished_episode_keeps_no_other_frames_alive() -> None:
    """What a round draws is one array over all slots: too much to hold until a receipt comes."""
    ended = finish(episode_with([LOW, HIGH]))
    assert ended is not None
    for name, array in episode_arrays(ended).items():
        assert array.base is None or array.base.nbytes == array.nbytes, name


# ---- imagination ---------------------------------------------------------------------------------


def imagine(models: WorldBackend, wanted: list[tuple[int, int]]) -> list[dict[str, np.ndarray]]:
    """One decision of the given (group, member) pairs, in this order of slots."""
    stage = Stage(indices=range(len(wanted)))
    slots = Slots(len(wanted), run_seed=0)
    slots.pending.extend(EpisodePlan(grant=grant(g), member=i, start=start(g)) for g, i in wanted)
    models.begin(slots, stage, fill(slots, 0))
    models.launch(slots, stage, slots.live, 7)
    models.collect(slots, stage, 60.0)
    return [slots.episode(index).decisions[0] for index in range(len(wanted))]


def test_siblings_share_their_start_and_nothing_else(imagination: WorldBackend) -> None:
    one, other = imagine(imagination, [(1, 0), (1, 1)])
    np.testing.assert_array_equal(one["frames"], other["frames"])
    assert (one["tokens"] != other["tokens"]).any()
    assert (one["video"] != other["video"]).any()


# ---- the loop ------------------------------------------------------------------------------------


def deliver(actor: Actor) -> None:
    assert isinstance(actor.port, InProcessActorPort)
    actor.port.deliver()


def test_a_round_hands_over_a_complete_group(imagination: WorldBackend, tmp_path: Path) -> None:
    actor, replay, learner = actor_with(imagination, tmp_path, slots=GROUP)
    assert actor.step(wait=0.0)
    deliver(actor)
    assert (list(replay.state.limiter.ready), actor.slots.live) == ([0], [])
    ((first, second),) = next_batch(learner, groups=1, version=0, timeout=0.0)
    assert (first.member, second.member) == (0, 1)
    assert first.start_state == second.start_state == actor.starts[0].name
    for episode in (first, second):
        assert problem_with(episode) is None
        assert episode.policy_versions.tolist() == [0]
        assert (episode.world_version, episode.video.shape) == (5, (8, 64, 64, 3))
    replay.close()


def test_without_credit_a_round_imagines_nothing(imagination: WorldBackend, tmp_path: Path) -> None:
    actor, replay, learner = actor_with(imagination, tmp_path, slots=GROUP)
    assert actor.step(wait=0.0)
    deliver(actor)
    assert not actor.step(wait=0.0)
    assert (replay.state.limiter.credit, list(replay.state.limiter.ready), actor.slots.live) == (0, [0], [])
    next_batch(learner, groups=1, version=0, timeout=0.0)
    learner.report_version(1)  # Credit for the next group, which asks for version 1.
    assert actor.step(wait=0.0), "there is something to imagine, but not yet"
    assert (len(actor.slots.pending), actor.slots.live) == (GROUP, [])
    replay.close()


def test_in_one_process_an_actor_that_lacks_a_version_ends_in_a_timeout_until_it_comes(
    imagination: WorldBackend, tmp_path: Path
) -> None:
    actor, replay, _ = actor_with(imagination, tmp_path, slots=GROUP)
    receiver, actor.receiver = actor.receiver, Unreached()
    learner = InProcessLearnerPort(replay, imagine=lambda: actor.step(0.0))
    actor.port = learner.actor_port()
    with pytest.raises(SampleTimeout, match="0 groups ready, 1 in flight with 0 episodes"):
        next_batch(learner, groups=1, version=0, timeout=0.05)
    actor.receiver = receiver
    assert len(next_batch(learner, groups=1, version=0, timeout=60.0)) == 1
    replay.close()


class Unreached:
    """A receiver that no version has reached."""

    def swap_into(self, tensors: object) -> int:
        return -1

    def wait_newer(self, version: int, wait: float) -> None:
        """Nothing comes."""


def test_a_learner_that_left_before_its_first_version_ends_the_actor(imagination, tmp_path) -> None:
    class Closed:
        def wait_for_first(self, deadline: float) -> int:
            raise ChannelClosed("over")

    actor, replay, _ = actor_with(imagination, tmp_path, slots=GROUP)
    actor.receiver = Closed()
    actor.run()
    assert (actor.version, replay.state.limiter.next_number) == (-1, 0)
    replay.close()


def test_a_run_that_is_over_ends_the_actor(imagination: WorldBackend, tmp_path: Path) -> None:
    actor, replay, learner = actor_with(imagination, tmp_path, slots=GROUP)
    learner.stop()
    actor.run()
    assert (actor.version, replay.state.limiter.next_number) == (0, 0)
    replay.close()


def test_an_actor_reports_how_full_its_slots_are_and_how_many_steps_are_of_use(
    imagination: WorldBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "FIRST_REPORT", 0.0)
    actor, _, _ = actor_with(imagination, tmp_path, slots=4, decisions=2)
    assert actor.step(wait=0.0)
    assert (report := actor.telemetry.report_if_due()) is not None
    assert report[s.LIVE_SLOTS] == GROUP / 4, "there is credit for one group only"
    assert report[s.USEFUL_STEPS] == 1.0

"""Successes that are imagined again: weights are what a slow repetition finds, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.actors.imagination import EndRule, Imagination
from asyncrl.actors.slots import PendingEpisode, Slots
from asyncrl.episode_layout import episode_arrays, problem_with
from asyncrl.observability import metrics_system as s
from asyncrl.records import Episode
from asyncrl.replay.interface import GroupGrant
from asyncrl.seeds import episode_seed, noise_seed, repetition_seed, sampling_seed
from support.episodes import make_episode
from support.failing_models import (
    Poisoned,
    RowModels,
    RowState,
    counts,
    episodes_of,
    inline_run,
    named,
    start,
)

THRESHOLD = 0.23
"""Reached by about half of the episodes."""
GROUPS = 12


class OtherWorld(RowModels):
    """Draws other frames than `RowModels` from the same noise."""

    def imagine(
        self, state: RowState, actions: Tensor, noise_seeds: Sequence[int]
    ) -> tuple[Tensor, RowState]:
        return super().imagine(state, actions, [seed + 1 for seed in noise_seeds])


def imagined(folder: Path, *, repeats: bool = True, **actor: Any) -> dict[tuple[str, int], Episode]:
    """Episodes of `GROUPS` groups, by group and member."""
    run = inline_run(
        folder, Poisoned(), per_update=GROUPS, starts=8, threshold=THRESHOLD, repeats=repeats, **actor
    )
    found = episodes_of(run, GROUPS)
    assert run.actor.slots.live == []
    run.replay.close()
    return found


def succeeds_again(world: RowModels, episode: Episode) -> bool:
    """Slow and obvious: one row, the recorded actions, one decision after the other."""
    state = world.start([start(int(episode.frames[0, 0, 0, 0]))])
    for n, actions in enumerate(episode.actions):
        seed = noise_seed(repetition_seed(episode.seed), n)
        frames, state = world.imagine(state, torch.from_numpy(actions)[None], [seed])
        if (world.score(frames, [episode.task]) >= THRESHOLD).any():
            return True
    return False


def without_weight(episode: Episode) -> dict[str, Any]:
    return {"end": episode.end_reason, "seed": episode.seed} | episode_arrays(episode)


# ---- seeds and slots -----------------------------------------------------------------------------


def test_a_repetition_shares_no_seed_with_any_episode_of_the_run() -> None:
    originals = [episode_seed(0, group, member) for group in range(20) for member in range(8)]
    again = [repetition_seed(seed) for seed in originals]
    noises = [noise_seed(seed, n) for seed in (*originals, *again) for n in range(6)]
    everything = [*originals, *again, *noises, *map(sampling_seed, noises)]
    assert len(set(everything)) == len(everything) == 20 * 8 * 2 * (1 + 6 + 6)
    assert again == [repetition_seed(seed) for seed in originals]
    assert all(0 <= seed < 2**62 for seed in again)


def test_a_repetition_waits_behind_its_siblings_and_before_later_groups() -> None:
    slots = Slots(1, run_seed=0)
    for number in (3, 4):
        grant = GroupGrant(number=number, min_version=0, keep_video=False)
        slots.add_group(grant, start(number), 2)
    slots.fill(0, range(1))
    ended = slots.clear(0)
    slots.add_repetition(ended.pending, replace(make_episode(3, 0), seed=ended.seed))
    order = [(one.grant.number, one.member, one.repeats is not None) for one in slots.pending]
    assert order == [(3, 1, False), (3, 0, True), (4, 0, False), (4, 1, False)]
    slots.fill(0, range(1))
    slots.clear(0)
    slots.fill(0, range(1))
    again = slots.episode(0)
    assert again.seed == repetition_seed(episode_seed(0, 3, 0))
    assert again.next_noise_seed() == noise_seed(again.seed, 0)
    assert again.pending.repeats is not None
    np.testing.assert_array_equal(again.next_repeated_actions(), again.pending.repeats.actions[0])
    assert slots.wanted(0) == 0


def test_repetitions_go_with_their_group() -> None:
    slots = Slots(2, run_seed=0)
    grant = GroupGrant(number=3, min_version=0, keep_video=False)
    for member in (0, 1):
        pending = PendingEpisode(grant=grant, member=member, start=start(3))
        slots.add_repetition(pending, replace(make_episode(3, member), seed=member))
    slots.fill(0, range(1))
    assert (len(slots.live), len(slots.pending)) == (1, 1)
    slots.remove_group(3)
    assert (slots.live, list(slots.pending)) == ([], [])


# ---- the actor -----------------------------------------------------------------------------------


@pytest.mark.parametrize("other_world", [False, True])
@pytest.mark.parametrize(("slots", "stages"), [(4, 1), (4, 2), (3, 1), (1, 1)])
def test_every_success_weighs_what_imagining_it_again_says(
    tmp_path: Path, slots: int, stages: int, other_world: bool
) -> None:
    world = (OtherWorld if other_world else RowModels)(Poisoned())
    second = world if other_world else None
    found = imagined(tmp_path / "guarded", slots=slots, stages=stages, second=second)
    plain = imagined(tmp_path / "plain", repeats=False, slots=slots)
    assert found.keys() == plain.keys()
    for key, episode in found.items():
        assert problem_with(episode) is None
        assert episode.world_versions is not None
        expected = float(succeeds_again(world, episode)) if episode.success else 1.0
        assert episode.weight == expected, key
        ours, theirs = without_weight(episode), without_weight(plain[key])
        assert ours.pop("world_versions").tolist() == [0] * len(episode.actions)
        for name, value in theirs.items():
            np.testing.assert_array_equal(ours[name], value, f"{name} of {key}: it is the original")
        assert (plain[key].weight, plain[key].world_versions) == (1.0, None)
    outcomes = {(episode.success, episode.weight) for episode in found.values()}
    assert outcomes == {(False, 1.0), (True, 1.0), (True, 0.0)}, "else this shows nothing"


def test_the_second_world_draws_the_repetitions_and_nothing_else(tmp_path: Path) -> None:
    one = imagined(tmp_path / "one", second=OtherWorld(Poisoned()))
    other = imagined(tmp_path / "other")
    assert any(one[key].weight != other[key].weight for key in one), "else it was not asked"


def test_a_repetition_that_fails_gives_its_group_up(tmp_path: Path) -> None:
    broken = OtherWorld(Poisoned({0: "world", 1: "imagine raises"}))
    run = inline_run(
        tmp_path, Poisoned(), per_update=6, starts=4, threshold=THRESHOLD, repeats=True, second=broken
    )
    found = episodes_of(run, 6)
    tried = {episode.start_state for episode in found.values() if episode.success}
    assert tried == {"start-2", "start-3"}, "a success from elsewhere cannot be imagined again"
    closed = run.replay.state.limiter.closed
    given_up = {named(run, number) for number in closed if closed[number].status == "dropped_poisoned"}
    assert given_up == {"start-0", "start-1"}
    poisoned = counts(run)
    assert poisoned["world"] > 0
    assert poisoned["raised"] > 0
    run.replay.close()


def test_repetitions_are_decisions_of_the_actor_but_no_useful_steps(tmp_path: Path) -> None:
    totals = {}
    for repeats in (False, True):
        run = inline_run(
            tmp_path / str(repeats), Poisoned(), per_update=GROUPS, threshold=THRESHOLD, repeats=repeats
        )
        telemetry = run.actor.telemetry
        telemetry._every = float("inf")  # No report in between, which would begin to count anew.
        episodes = episodes_of(run, GROUPS).values()
        totals[repeats] = run.actor.acting.counts[s.ACTOR_DECISIONS], telemetry._useful, telemetry._imagined
        steps = sum(episode.steps for episode in episodes)
        assert telemetry._useful == steps, "what is learned from, whatever was imagined besides"
        run.replay.close()
    (decisions, useful, drawn), (more, same, drawn_too) = totals[False], totals[True]
    assert more > decisions
    assert useful == same
    assert (drawn, drawn_too) == (8 * decisions, 8 * more)


def test_a_repetition_ends_with_its_success_or_as_many_decisions_as_its_original_had() -> None:
    nothing: Any = None
    models = Imagination(nothing, nothing, nothing, nothing, rule=EndRule(max_decisions=5, threshold=0.5))
    slots = Slots(1, run_seed=0)
    grant = GroupGrant(number=3, min_version=0, keep_video=False)
    pending = PendingEpisode(grant=grant, member=0, start=start(3))
    slots.add_repetition(pending, replace(make_episode(3, 0, versions=(0, 0)), seed=0))
    slots.fill(0, range(1))
    episode = slots.episode(0)

    def decided(score: float) -> str | None:
        video = np.zeros((8, 4, 4, 3), np.uint8)
        episode.add({"success_scores": np.full(8, score, np.float32), "video": video})
        ending = models.ending(episode)
        return None if ending is None else ending.reason

    assert [decided(0.1), decided(0.4)] == [None, "truncated"]
    episode.decisions.clear()
    assert decided(0.6) == "success"

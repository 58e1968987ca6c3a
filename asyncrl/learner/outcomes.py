"""What rank 0 says about a batch, of which each learner rank holds a part: how its episodes ended.

Letters used in this file:
    E  episodes of a group     D  decisions of all of them     F  numbers of an episode, see `EPISODE`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.observability import metrics_guard as g
from asyncrl.observability import metrics_system as r
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import LAG_RANGES, Metric
from asyncrl.records import Episode, Int64

EPISODE: Final = ("total_reward", "steps", "success", "ended", "weight")
"""What is said of an episode; `ended`: it could not go on, by success or otherwise."""


@dataclass(frozen=True, kw_only=True)
class GroupOutcome:
    """How the episodes of one group ended, and which versions made their decisions."""

    episodes: NDArray[np.float64]
    """``[E, F]`` float64, columns as in `EPISODE`."""
    policy_versions: Int64
    """``[D]`` int64."""
    world_versions: Int64
    """``[D]`` int64; ``[0]`` where it is not said which world drew each decision."""

    def column(self, name: str) -> NDArray[np.float64]:
        """Return ``[E]`` one of `EPISODE`."""
        return self.episodes[:, EPISODE.index(name)]


def outcome_of(group: Sequence[Episode]) -> GroupOutcome:
    """Sum a group up; the order of its episodes stays."""
    rows = [(e.total_reward, e.steps, e.success, e.end_reason != "truncated", e.weight) for e in group]
    worlds = [e.world_versions for e in group if e.world_versions is not None]
    return GroupOutcome(
        episodes=np.array(rows, np.float64),
        policy_versions=np.concatenate([e.policy_versions for e in group]),
        world_versions=np.concatenate(worlds) if worlds else np.empty(0, np.int64),
    )


def batch_metrics(
    outcomes: Sequence[GroupOutcome], version: int, *, weighted: bool = False
) -> dict[Metric, float]:
    """Describe the groups of an update: episodes, and lags over decisions.

    Args:
        outcomes: Of the update's groups; without any, as on other ranks than 0, nothing is said.
        version: Learner's policy version, from which the lag counts.
        weighted: Whether successes were imagined again, so that episodes may count less than others.
    """
    if not outcomes:
        return {}
    scores, lengths, success, ended, weight = (
        np.concatenate([outcome.column(name) for outcome in outcomes]) for name in EPISODE
    )
    mean_return = float(scores.mean())
    lag = version - np.concatenate([outcome.policy_versions for outcome in outcomes])
    return {
        m.SUCCESS_ONCE: float(success.mean()),
        m.RETURN: mean_return,
        m.REWARDS: mean_return,
        m.REWARD_STD: float(scores.std()),
        m.REWARD: float((scores / lengths).mean()),
        m.STEP_REWARD: float(scores.sum() / lengths.sum()),
        m.TERMINATION_RATE: float(ended.mean()),
        m.EPISODE_LEN: float(lengths.mean()),
        r.SIGNAL_GROUPS: float(np.mean([_has_signal(outcome) for outcome in outcomes])),
        r.LAG_MEAN: float(lag.mean()),
        r.LAG_MAX: float(lag.max()),
        **{
            metric: float(lags.holds(lag).mean())
            for metric, lags in zip(r.LAG_HISTOGRAM, LAG_RANGES, strict=True)
        },
        **_world_lag(np.concatenate([outcome.world_versions for outcome in outcomes])),
        **(_agreement(success, weight) if weighted else {}),
    }


def _has_signal(outcome: GroupOutcome) -> bool:
    """Tell whether the episodes that count differ in return."""
    return len(set(outcome.column("total_reward")[outcome.column("weight") != 0].tolist())) > 1


def _agreement(success: NDArray[np.float64], weight: NDArray[np.float64]) -> dict[Metric, float]:
    """Say how much episodes count, and of the successes how many were none when imagined again."""
    found = {g.WEIGHT_MEAN: float(weight.mean())}
    if success.any():
        found[g.DISAGREE] = float(1 - weight[success != 0].mean())
    return found


def _world_lag(versions_D: Int64) -> dict[Metric, float]:
    """Say how far the decisions' worlds are behind the newest; nothing where there is one world."""
    if not versions_D.size:
        return {}
    lag = versions_D.max() - versions_D
    return {r.WORLD_LAG_MEAN: float(lag.mean()), r.WORLD_LAG_MAX: float(lag.max())}


def pack(outcomes: Sequence[GroupOutcome]) -> tuple[Int64, NDArray[np.float64]]:
    """Write outcomes as two arrays that `unpack` reads.

    Returns:
        ``[n]`` int64: how many groups there are, then of each its E, its D, how many versions of worlds it
        has, and these versions. ``[sum of E * F]`` float64: the episodes of all groups.
    """
    numbers = [np.array([len(outcomes)])]
    for outcome in outcomes:
        sizes = (len(outcome.episodes), len(outcome.policy_versions), len(outcome.world_versions))
        numbers += [np.array(sizes), outcome.policy_versions, outcome.world_versions]
    episodes = [outcome.episodes.reshape(-1) for outcome in outcomes]
    return np.concatenate(numbers).astype(np.int64), np.concatenate([np.empty(0), *episodes])


def unpack(numbers: Int64, episodes: NDArray[np.float64]) -> list[GroupOutcome]:
    """Read what `pack` wrote."""
    outcomes, at, row, rows = list[GroupOutcome](), 1, 0, episodes.reshape(-1, len(EPISODE))
    for _ in range(int(numbers[0])):
        count, decisions, worlds = numbers[at : at + 3].tolist()
        versions_end = at + 3 + decisions
        outcomes.append(
            GroupOutcome(
                episodes=rows[row : row + count],
                policy_versions=numbers[at + 3 : versions_end],
                world_versions=numbers[versions_end : versions_end + worlds],
            )
        )
        at, row = versions_end + worlds, row + count
    return outcomes

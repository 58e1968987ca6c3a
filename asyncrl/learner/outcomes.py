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

from asyncrl.observability import metrics_system as r
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import LAG_RANGES, Metric
from asyncrl.records import Episode, Int64

EPISODE: Final = ("total_reward", "steps", "success", "ended")
"""What is said of an episode; `ended`: it could not go on, by success or otherwise."""


@dataclass(frozen=True, kw_only=True)
class GroupOutcome:
    """How the episodes of one group ended, and which versions made their decisions."""

    episodes: NDArray[np.float64]
    """``[E, F]`` float64, columns as in `EPISODE`."""
    policy_versions: Int64
    """``[D]`` int64."""

    def column(self, name: str) -> NDArray[np.float64]:
        """Return ``[E]`` one of `EPISODE`."""
        return self.episodes[:, EPISODE.index(name)]


def outcome_of(group: Sequence[Episode]) -> GroupOutcome:
    """Sum a group up; the order of its episodes stays."""
    rows = [(e.total_reward, e.steps, e.success, e.end_reason != "truncated") for e in group]
    return GroupOutcome(
        episodes=np.array(rows, np.float64),
        policy_versions=np.concatenate([e.policy_versions for e in group]),
    )


def batch_metrics(outcomes: Sequence[GroupOutcome], version: int) -> dict[Metric, float]:
    """Describe the groups of an update: episodes, and lags over decisions."""
    if not outcomes:
        return {}
    scores, lengths, success, ended = (
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
    }


def _has_signal(outcome: GroupOutcome) -> bool:
    """Return True if the episodes differ in return."""
    return len(set(outcome.column("total_reward").tolist())) > 1


def pack(outcomes: Sequence[GroupOutcome]) -> tuple[Int64, NDArray[np.float64]]:
    """Write outcomes as two arrays that `unpack` reads.

    Returns:
        ``[n]`` int64: the number of groups, then of each its E, its D and its policy versions.
        ``[sum of E * F]`` float64: the episodes of all groups.
    """
    numbers = [np.array([len(outcomes)])]
    for outcome in outcomes:
        sizes = (len(outcome.episodes), len(outcome.policy_versions))
        numbers += [np.array(sizes), outcome.policy_versions]
    episodes = [outcome.episodes.reshape(-1) for outcome in outcomes]
    return np.concatenate(numbers).astype(np.int64), np.concatenate([np.empty(0), *episodes])


def unpack(numbers: Int64, episodes: NDArray[np.float64]) -> list[GroupOutcome]:
    """Read what `pack` wrote."""
    outcomes, at, row, rows = list[GroupOutcome](), 1, 0, episodes.reshape(-1, len(EPISODE))
    for _ in range(int(numbers[0])):
        count, decisions = numbers[at : at + 2].tolist()
        end = at + 2 + decisions
        outcomes.append(
            GroupOutcome(
                episodes=rows[row : row + count],
                policy_versions=numbers[at + 2 : end],
            )
        )
        at, row = end, row + count
    return outcomes

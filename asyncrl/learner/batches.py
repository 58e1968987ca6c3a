"""Flattens groups of episodes (numpy) into one batch of decisions for the update (torch), and sums them up.

Dimension letters used in this file:
    D  decisions of all episodes     C  steps per decision     A  numbers per step
    B  episodes                      N  decisions of one       H, W  image size in pixels
    V  cameras beside the first      Q  numbers of state       K  cameras, V + 1
    E  episodes of a group           F  numbers of an episode, see `EPISODE`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.episode_layout import decision_layout
from asyncrl.errors import ReplayError
from asyncrl.observability import metrics_system as r
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import LAG_RANGES, Metric
from asyncrl.records import Episode, Float32, Int64, Uint8


def valid_steps(episode: Episode) -> NDArray[np.bool_]:
    """Mark the steps until the episode's end (`Episode.steps`): the others' rewards would be noise.

    RLinf keeps the whole decision in which an episode succeeds (its mask counts finished decisions, not
    steps); a comparison with its numbers has to allow for at most C - 1 steps per successful episode.

    Returns:
        ``[N, C]`` bool.
    """
    return (np.arange(episode.rewards.size) < episode.steps).reshape(episode.rewards.shape)


def token_mask(steps_NC: NDArray[np.bool_], dim: int) -> NDArray[np.bool_]:
    """Give each of the numbers of a step the step's validity.

    Args:
        steps_NC: ``[N, C]`` bool.
        dim: ``A``.

    Returns:
        ``[N, C, A]`` bool.

    Example:
        >>> token_mask(np.array([[True, False]]), 7).sum(axis=-1)
        array([[7, 0]])
    """
    return np.repeat(steps_NC[..., None], dim, axis=-1)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one update learns from. Decisions of an episode are adjacent, episodes of a group too."""

    frames: Uint8
    """``[D, H, W, 3]`` observation of each decision."""
    tasks: tuple[str, ...]
    """``D`` instructions."""
    sample: dict[str, Tensor]
    """`Episode.sample`: name -> ``[D, ...]``, integers as int64."""
    logprob_behaviour: Tensor
    """``[D, C, A]`` float32, nats."""
    mask: Tensor
    """``[D, C, A]`` bool, True until the episode's end, that step included."""
    rewards: Tensor
    """``[D, C]`` float32, per step; 0 where the step does not count."""
    lag: Tensor
    """``[D]`` int64, learner's version minus the version that sampled the decision."""
    episode: Tensor
    """``[D]`` int64, index of the decision's episode, ascending."""
    decision_index: Tensor
    """``[D]`` int64, number of the decision within its episode."""
    returns: Tensor
    """``[B]`` float32, sum of rewards of each episode."""
    lengths: Tensor
    """``[B]`` int64, steps until the end."""
    terminated: Tensor
    """``[B]`` bool, True: it could not go on, by success or otherwise. False: time ran out (`truncated`), so
    it could have gone on from its final frame."""
    final_frames: Uint8
    """``[B, H, W, 3]`` what was seen after the last step, before any reset."""
    more_frames: Uint8 | None = None
    """``[D, V, H, W, 3]`` what the other cameras saw with `frames`; None: there is one camera."""
    states: Float32 | None = None
    """``[D, Q]`` the robot's state with `frames`; None: the policy does not see it."""
    final_more_frames: Uint8 | None = None
    """``[B, V, H, W, 3]`` with `final_frames`."""
    final_states: Float32 | None = None
    """``[B, Q]`` with `final_frames`."""
    group_size: int
    temperature: float
    """What the tokens were sampled with, and are evaluated with."""
    top_k: int


def build_batch(groups: Sequence[Sequence[Episode]], *, version: int) -> Batch:
    """Flatten groups into decisions, with masks and lags.

    Raises:
        ReplayError: A group is incomplete, a decision is newer than the learner, or the episodes differ in
            what one batch must share (group size, sampling, image size).
    """
    groups = [_complete(group) for group in groups]
    episodes = [episode for group in groups for episode in group]
    _check_shared(episodes, version)
    steps = [valid_steps(episode) for episode in episodes]
    decisions = np.array([len(episode.frames) for episode in episodes])
    episode_D = torch.from_numpy(np.repeat(np.arange(len(episodes)), decisions))
    valid = np.concatenate(steps)
    return Batch(
        frames=np.concatenate([episode.frames for episode in episodes]),
        tasks=tuple(e.task for e in episodes for _ in range(len(e.frames))),
        sample={name: _joined([e.sample[name] for e in episodes]) for name in episodes[0].sample},
        logprob_behaviour=torch.from_numpy(np.concatenate([e.logprobs for e in episodes])),
        mask=torch.from_numpy(token_mask(valid, episodes[0].logprobs.shape[2])),
        rewards=torch.from_numpy(np.concatenate([e.rewards for e in episodes]) * valid),
        lag=version - torch.from_numpy(np.concatenate([e.policy_versions for e in episodes])),
        episode=episode_D,
        decision_index=torch.from_numpy(np.concatenate([np.arange(n) for n in decisions])),
        returns=torch.tensor([episode.total_reward for episode in episodes]),
        lengths=torch.tensor([episode.steps for episode in episodes]),
        terminated=torch.tensor([episode.end_reason != "truncated" for episode in episodes]),
        final_frames=np.stack([episode.final_frame for episode in episodes]),
        more_frames=_optional(np.concatenate, [episode.more_frames for episode in episodes]),
        states=_optional(np.concatenate, [episode.states for episode in episodes]),
        final_more_frames=_optional(np.stack, [episode.final_more_frames for episode in episodes]),
        final_states=_optional(np.stack, [episode.final_state for episode in episodes]),
        group_size=episodes[0].group_size,
        temperature=episodes[0].temperature,
        top_k=episodes[0].top_k,
    )


def _optional(
    join: Callable[[list[NDArray[Any]]], NDArray[Any]], arrays: Sequence[NDArray[Any] | None]
) -> NDArray[Any] | None:
    """Join arrays that all episodes of a batch have, or none (`_check_shared`)."""
    there = [array for array in arrays if array is not None]
    return join(there) if there else None


def _joined(arrays: Sequence[NDArray[Any]]) -> Tensor:
    """``[D, ...]`` one array of the sample of all episodes; integers as int64."""
    joined = np.concatenate(arrays)
    return torch.from_numpy(joined if joined.dtype.kind == "f" else joined.astype(np.int64))


def _complete(group: Sequence[Episode]) -> list[Episode]:
    """Sort a group by sibling number; refuse it when one is absent, double or from elsewhere."""
    members = sorted(group, key=lambda episode: episode.member)
    size = members[0].group_size if members else 0
    same_group = len({(episode.group_id, episode.group_size) for episode in members}) == 1
    if not same_group or [episode.member for episode in members] != list(range(size)):
        seen = [(episode.group_id, episode.member) for episode in members]
        raise ReplayError(
            f"A group of {size} episodes reached the learner as {seen} (group, member). Advantages need each "
            "sibling exactly once. Check the run folder with `asyncrl replay verify`."
        )
    return members


def _check_shared(episodes: Sequence[Episode], version: int) -> None:
    """Refuse episodes that cannot be in one batch or that come from the learner's future."""
    if not episodes:
        raise ReplayError(
            "A batch without groups reached the learner. Set --algorithm.groups-per-update to 1 or more."
        )
    shared = {
        "group size (--algorithm.group-size)": {episode.group_size for episode in episodes},
        "temperature (--algorithm.temperature)": {episode.temperature for episode in episodes},
        "top-k (--algorithm.top-k)": {episode.top_k for episode in episodes},
        "image size": {episode.frames.shape[1:] for episode in episodes},
        "the policy's sample, cameras or states": {
            tuple(decision_layout(episode).items()) for episode in episodes
        },
    }
    for name, values in shared.items():
        if len(values) > 1:
            raise ReplayError(
                f"One batch holds episodes that differ in {name}: {sorted(values)}. Actors with other "
                "settings fill this replay: start them with the learner's config.json."
            )
    newest = max(int(episode.policy_versions.max()) for episode in episodes)
    if newest > version:
        raise ReplayError(
            f"A decision was sampled by policy version {newest}, but the learner is only at {version}. The "
            "replay holds episodes of a later state of this run: move its replay folder away before --resume."
        )


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

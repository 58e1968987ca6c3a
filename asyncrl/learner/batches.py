"""Flattens groups of episodes (numpy) into one batch of decisions (torch), with its statistics.

D decisions of all B episodes, N of one, C steps per decision, A numbers per step, H, W image size in pixels,
V cameras after the first, Q numbers of state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.errors import ReplayError
from asyncrl.observability import metrics_system as r
from asyncrl.observability import metrics_training as m
from asyncrl.observability.metrics import LAG_RANGES, Metric
from asyncrl.records import Episode, Float32, SamplingParams, Uint8
from asyncrl.replay.groups import has_no_signal


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Decisions of one update; those of an episode are adjacent, episodes of a group too."""

    frames: Uint8  # [D, H, W, 3]
    tasks: tuple[str, ...]  # D instructions
    sample: dict[str, Tensor]  # Name -> [D, ...], integers as int64
    behaviour_logprob: Tensor  # [D, C, A] float32, nats
    mask: Tensor  # [D, C, A] bool, True until the episode's end, that step included
    rewards: Tensor  # [D, C] float32; 0 where the step does not count
    lag: Tensor  # [D] int64, learner's version minus the version that sampled the decision
    episode: Tensor  # [D] int64, index of the decision's episode, ascending
    decision_index: Tensor  # [D] int64, number of the decision within its episode
    returns: Tensor  # [B] float32
    lengths: Tensor  # [B] int64, steps until the end
    terminated: Tensor  # [B] bool; False: time ran out (truncated)
    final_frames: Uint8  # [B, H, W, 3] after the last step
    more_frames: Uint8 | None = None  # [D, V, H, W, 3] of the other cameras; None with one camera
    states: Float32 | None = None  # [D, Q] the robot's state; None if the policy does not see it
    final_more_frames: Uint8 | None = None  # [B, V, H, W, 3]
    final_states: Float32 | None = None  # [B, Q]
    group_size: int
    sampling: SamplingParams


def build_batch(groups: Sequence[Sequence[Episode]], *, version: int) -> Batch:
    """Flatten groups; raises ReplayError if one is incomplete, or a decision is newer than `version`."""
    episodes = [episode for group in groups for episode in _sorted_members(group)]
    _check_versions(episodes, version)
    decisions = np.array([len(episode.frames) for episode in episodes])
    valid = np.concatenate([valid_steps(episode) for episode in episodes])

    def joined(arrays: list[NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays))

    def optional(join: Callable[[list[NDArray[Any]]], NDArray[Any]], name: str) -> NDArray[Any] | None:
        arrays = [getattr(episode, name) for episode in episodes]
        return None if arrays[0] is None else join(arrays)  # All have it, or none.

    sample = {name: np.concatenate([e.sample[name] for e in episodes]) for name in episodes[0].sample}
    return Batch(
        frames=np.concatenate([episode.frames for episode in episodes]),
        tasks=tuple(e.task for e in episodes for _ in range(len(e.frames))),
        sample={
            name: torch.from_numpy(array if array.dtype.kind == "f" else array.astype(np.int64))
            for name, array in sample.items()
        },
        behaviour_logprob=joined([e.logprobs for e in episodes]),
        mask=torch.from_numpy(np.repeat(valid[..., None], episodes[0].logprobs.shape[2], axis=-1)),
        rewards=torch.from_numpy(np.concatenate([e.rewards for e in episodes]) * valid),
        lag=version - joined([e.policy_versions for e in episodes]),
        episode=torch.from_numpy(np.repeat(np.arange(len(episodes)), decisions)),
        decision_index=joined([np.arange(n) for n in decisions]),
        returns=torch.tensor([episode.total_reward for episode in episodes]),
        lengths=torch.tensor([episode.steps for episode in episodes]),
        terminated=torch.tensor([episode.end_reason != "truncated" for episode in episodes]),
        final_frames=np.stack([episode.final_frame for episode in episodes]),
        more_frames=optional(np.concatenate, "more_frames"),
        states=optional(np.concatenate, "states"),
        final_more_frames=optional(np.stack, "final_more_frames"),
        final_states=optional(np.stack, "final_state"),
        group_size=episodes[0].group_size,
        sampling=SamplingParams(temperature=episodes[0].temperature, top_k=episodes[0].top_k),
    )


def valid_steps(episode: Episode) -> NDArray[np.bool_]:
    """Mark the steps until the episode's end (`Episode.steps`), ``[N, C]`` bool; later rewards are noise."""
    return (np.arange(episode.rewards.size) < episode.steps).reshape(episode.rewards.shape)


def _sorted_members(group: Sequence[Episode]) -> list[Episode]:
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


def _check_versions(episodes: Sequence[Episode], version: int) -> None:
    newest = max(int(episode.policy_versions.max()) for episode in episodes)
    if newest > version:
        raise ReplayError(
            f"A decision was sampled by policy version {newest}, but the learner is only at {version}. The "
            "replay holds episodes of a later state of this run: move its replay folder away before --resume."
        )


class GroupOutcome(NamedTuple):
    """Outcomes of the episodes of one group; plain numbers, which ranks exchange as JSON."""

    returns: list[float]
    lengths: list[int]
    successes: list[bool]
    terminated: list[bool]
    policy_versions: list[int]  # Of each decision
    signal: bool  # True if the returns differ


def group_outcome(group: Sequence[Episode]) -> GroupOutcome:
    """Summarise a group."""
    return GroupOutcome(
        [episode.total_reward for episode in group],
        [episode.steps for episode in group],
        [episode.success for episode in group],
        [episode.end_reason != "truncated" for episode in group],
        np.concatenate([episode.policy_versions for episode in group]).tolist(),
        not has_no_signal(group),
    )


def batch_metrics(outcomes: Sequence[GroupOutcome], version: int) -> dict[Metric, float]:
    """Compute the metrics of an update's groups; empty without groups."""
    if not outcomes:
        return {}
    returns, lengths, successes, terminated = (
        np.array([x for outcome in outcomes for x in getattr(outcome, column)], np.float64)
        for column in GroupOutcome._fields[:4]
    )
    lag = version - np.array([v for outcome in outcomes for v in outcome.policy_versions], np.int64)
    return {
        m.SUCCESS_ONCE: float(successes.mean()),
        m.RETURN: float(returns.mean()),
        m.REWARDS: float(returns.mean()),
        m.REWARD_STD: float(returns.std()),
        m.REWARD: float((returns / lengths).mean()),
        m.STEP_REWARD: float(returns.sum() / lengths.sum()),
        m.TERMINATION_RATE: float(terminated.mean()),
        m.EPISODE_LEN: float(lengths.mean()),
        r.SIGNAL_GROUPS: float(np.mean([outcome.signal for outcome in outcomes])),
        r.LAG_MEAN: float(lag.mean()),
        r.LAG_MAX: float(lag.max()),
        **{
            metric: float(((lag >= lags.low) & (lag <= lags.high)).mean())
            for metric, lags in zip(r.LAG_HISTOGRAM, LAG_RANGES, strict=True)
        },
    }

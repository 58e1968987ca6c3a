"""Groups of episodes in, one batch of decisions for the update out. numpy in, torch out; no config.

Dimension letters used in this file:
    D  decisions of all episodes     C  steps per decision (8)     A  action dimensions (7)
    B  episodes                      G  episodes per group         H, W  image size in pixels
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl import metrics as m
from asyncrl.errors import ReplayError
from asyncrl.learner.advantages import group_relative_advantages
from asyncrl.learner.masks import token_mask, valid_steps
from asyncrl.metrics import Metric
from asyncrl.records import Episode, Uint8


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one update learns from. Decisions of an episode are adjacent, episodes of a group too."""

    frames: Uint8
    """``[D, H, W, 3]`` observation of each decision."""
    tasks: tuple[str, ...]
    """``D`` instructions."""
    tokens: Tensor
    """``[D, 8, 7]`` int64, action bins, 0..255."""
    logprob_behaviour: Tensor
    """``[D, 8, 7]`` float32, nats."""
    mask: Tensor
    """``[D, 8, 7]`` bool, True up to and including the first successful step."""
    advantages: Tensor
    """``[D]`` float32, the advantage of the decision's episode."""
    lag: Tensor
    """``[D]`` int64, learner's version minus the version that sampled the decision."""
    episode: Tensor
    """``[D]`` int64, index of the decision's episode."""
    returns: Tensor
    """``[B]`` float32, sum of rewards of each episode."""
    lengths: Tensor
    """``[B]`` int64, steps until success or truncation."""
    successes: Tensor
    """``[B]`` bool."""
    group_size: int
    temperature: float
    """What the tokens were sampled with, and are evaluated with."""
    top_k: int

    @property
    def valid_tokens(self) -> int:
        """Number of tokens that count: the denominator of the loss."""
        return int(self.mask.sum())

    @property
    def with_signal(self) -> Tensor:
        """``[K]`` int64, ascending: decisions that can have a gradient (a valid token, an advantage)."""
        return torch.nonzero(self.mask.flatten(1).any(dim=1) & (self.advantages != 0)).flatten()


def build_batch(groups: Sequence[Sequence[Episode]], *, version: int, normalize_by_std: bool) -> Batch:
    """Flatten groups into decisions, with masks, advantages and lags.

    Args:
        groups: Complete groups; the order of members does not matter.
        version: Learner's policy version, from which the lag counts.
        normalize_by_std: See `group_relative_advantages`.

    Raises:
        ReplayError: A group is incomplete, a decision is newer than the learner, or the episodes differ in
            what one batch must share (group size, sampling, image size).
    """
    groups = [_complete(group) for group in groups]
    episodes = [episode for group in groups for episode in group]
    _check_shared(episodes, version)
    steps = [valid_steps(episode.rewards) for episode in episodes]
    decisions = np.array([len(episode.frames) for episode in episodes])
    returns_B = torch.tensor([float(episode.rewards.sum()) for episode in episodes])
    group_size = episodes[0].group_size
    advantages_B = group_relative_advantages(returns_B, group_size, normalize_by_std=normalize_by_std)
    episode_D = torch.from_numpy(np.repeat(np.arange(len(episodes)), decisions))
    return Batch(
        frames=np.concatenate([episode.frames for episode in episodes]),
        tasks=tuple(e.task for e in episodes for _ in range(len(e.frames))),
        tokens=torch.from_numpy(np.concatenate([e.tokens for e in episodes]).astype(np.int64)),
        logprob_behaviour=torch.from_numpy(np.concatenate([e.logprobs for e in episodes])),
        mask=torch.from_numpy(token_mask(np.concatenate(steps))),
        advantages=advantages_B[episode_D],
        lag=version - torch.from_numpy(np.concatenate([e.policy_versions for e in episodes])),
        episode=episode_D,
        returns=returns_B,
        lengths=torch.tensor([int(step.sum()) for step in steps]),
        successes=torch.tensor([episode.success for episode in episodes]),
        group_size=group_size,
        temperature=episodes[0].temperature,
        top_k=episodes[0].top_k,
    )


def batch_metrics(batch: Batch) -> dict[Metric, float]:
    """Describe a batch: episodes, advantages over valid tokens, lags over decisions."""
    tokens_D = batch.mask.flatten(1).sum(dim=1)
    advantages_K, lag = batch.advantages[tokens_D > 0], batch.lag.double()
    returns_NG = batch.returns.unflatten(0, (-1, batch.group_size))
    mean_return = float(batch.returns.mean())
    return {
        m.SUCCESS_ONCE: float(batch.successes.float().mean()),
        m.RETURN: mean_return,
        m.REWARDS: mean_return,
        m.REWARD: float((batch.returns / batch.lengths).mean()),
        m.EPISODE_LEN: float(batch.lengths.double().mean()),
        m.ADVANTAGES_MEAN: float((batch.advantages * tokens_D).sum() / tokens_D.sum()),
        m.ADVANTAGES_MAX: float(advantages_K.max()),
        m.ADVANTAGES_MIN: float(advantages_K.min()),
        m.SIGNAL_GROUPS: float((returns_NG.amax(dim=1) > returns_NG.amin(dim=1)).float().mean()),
        m.LAG_MEAN: float(lag.mean()),
        m.LAG_MAX: float(lag.max()),
    }


def _complete(group: Sequence[Episode]) -> list[Episode]:
    """Sort a group by member; refuse it when a member is absent, double or from elsewhere."""
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

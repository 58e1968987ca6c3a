"""Cut stored episodes into the samples of a data set for imitation learning, one per step or per decision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.records import Episode

Rate = Literal["step", "decision"]
STEPS_PER_SECOND: Final = 20
"""A step is 0.05 s of the environment's time."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """One episode at a steady rate, up to its end."""

    images: NDArray[np.uint8]
    """``[T, H, W, 3]`` what was seen before each action."""
    actions: NDArray[np.float32]
    """``[T, A]`` at the rate of decisions: only the first action of each."""
    chunks: NDArray[np.float32]
    """``[T, C * A]`` all actions of each decision, step by step; empty at the rate of steps."""
    rewards: NDArray[np.float32]
    """``[T]`` at the rate of decisions: the sum over the steps of each."""
    dones: NDArray[np.bool_]
    """``[T]`` True at the last sample only."""
    successes: NDArray[np.bool_]
    """``[T]`` True at the last sample of an episode that ended in success."""


def samples_of(episode: Episode, rate: Rate) -> Samples | None:
    """Cut an episode into samples; None at the rate of steps when its video was not kept.

    At the rate of steps observation t is the last frame before action t: the first observation of the
    episode, then the video frame that action t - 1 made. What came after the end is left out.
    """
    return _per_decision(episode) if rate == "decision" else _per_step(episode)


def _per_step(episode: Episode) -> Samples | None:
    if not len(episode.video):
        return None
    length = episode.steps
    return Samples(
        images=np.concatenate([episode.frames[:1], episode.video[: length - 1]]),
        actions=episode.actions.reshape(-1, episode.actions.shape[-1])[:length],
        chunks=np.empty((length, 0), np.float32),
        rewards=episode.rewards.reshape(-1)[:length],
        **_ends(episode, length),
    )


def _per_decision(episode: Episode) -> Samples:
    length = math.ceil(episode.steps / episode.rewards.shape[1])
    return Samples(
        images=episode.frames[:length],
        actions=episode.actions[:length, 0],
        chunks=episode.actions[:length].reshape(length, -1),
        rewards=episode.rewards[:length].sum(axis=1, dtype=np.float32),
        **_ends(episode, length),
    )


def _ends(episode: Episode, length: int) -> dict[str, NDArray[np.bool_]]:
    """`dones` and `successes`."""
    dones = np.arange(length) == length - 1
    return {"dones": dones, "successes": dones & episode.success}

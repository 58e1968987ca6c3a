"""Cut stored episodes into the samples of a data set for imitation learning, one per step or per decision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.records import Episode

Rate = Literal["step", "decision"]
STEPS_PER_SECOND: Final = 20  # A step is 0.05 s of the environment's time


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
    states: NDArray[np.float32]
    """``[T, Q]`` of the robot, seen with the image; ``[T, 0]``: not known. A replay has them of decisions: at
    the rate of steps only where a decision is one step."""
    more_images: NDArray[np.uint8]
    """``[T, V, H, W, 3]`` what the other cameras saw; ``V`` is 0 where `states` would not be known either."""
    dones: NDArray[np.bool_]
    """``[T]`` True at the last sample only."""
    successes: NDArray[np.bool_]
    """``[T]`` True at the last sample of an episode that ended in success."""


def camera_name(number: int) -> str:
    """Return the name of another camera, from 0, which a replay does not know."""
    return f"camera_{number + 1}"


def samples_of(episode: Episode, rate: Rate) -> Samples | None:
    """Cut an episode into samples; None at the rate of steps when its video was not kept.

    At the rate of steps observation t is the last frame before action t: the first observation of the
    episode, then the video frame that action t - 1 made. What came after the end is left out.
    """
    length = episode.steps
    if rate == "decision":
        length = math.ceil(episode.steps / episode.rewards.shape[1])
        found: dict[str, Any] = {
            "images": episode.frames[:length],
            "actions": episode.actions[:length, 0],
            "chunks": episode.actions[:length].reshape(length, -1),
            "rewards": episode.rewards[:length].sum(axis=1, dtype=np.float32),
        }
    elif len(episode.video):
        found = {
            "images": np.concatenate([episode.frames[:1], episode.video[: length - 1]]),
            "actions": episode.actions.reshape(-1, episode.actions.shape[-1])[:length],
            "chunks": np.empty((length, 0), np.float32),
            "rewards": episode.rewards.reshape(-1)[:length],
        }
    else:
        return None
    known = rate == "decision" or episode.actions.shape[1] == 1
    states, pictures = episode.states, episode.more_frames
    no_picture = np.empty((length, 0, *episode.frames.shape[1:]), np.uint8)
    dones = np.arange(length) == length - 1
    return Samples(
        **found,
        states=np.empty((length, 0), np.float32) if states is None or not known else states[:length],
        more_images=no_picture if pictures is None or not known else pictures[:length],
        dones=dones,
        successes=dones & episode.success,
    )

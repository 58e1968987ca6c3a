"""Cut stored episodes into samples for imitation learning, one per step or decision; write robomimic's file.

docs/replay_inspection.md has the format. There are no simulator states and no next_obs: robomimic can train
from it, but not replay it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from asyncrl.records import Episode
from asyncrl.replay_tools.episodes import StoredEpisode
from asyncrl.storage.atomic import replacing

Rate = Literal["step", "decision"]
GYM: Final = 2  # robomimic's EnvType.GYM_TYPE; the environment itself cannot be made from the file

STEPS_PER_SECOND: Final = 20  # A step is 0.05 s of the environment's time


@dataclass(frozen=True, kw_only=True)
class Samples:
    """One episode, a sample per step or decision."""

    images: NDArray[np.uint8]  # ``[T, H, W, 3]`` what was seen before each action
    actions: NDArray[np.float32]  # ``[T, A]`` at the rate of decisions: only the first action of each
    chunks: NDArray[np.float32]  # ``[T, C * A]`` all of each decision, by step; empty at the rate of steps
    rewards: NDArray[np.float32]  # ``[T]`` at the rate of decisions: the sum over the steps of each
    states: NDArray[np.float32]
    """``[T, Q]`` of the robot, seen with the image; ``[T, 0]``: unknown, as at the rate of steps unless a
    decision is one step: a replay has one state per decision."""
    more_images: NDArray[np.uint8]
    """``[T, V, H, W, 3]`` of the other cameras; ``V`` is 0 wherever `states` are unknown."""
    dones: NDArray[np.bool_]  # ``[T]`` True at the last sample only
    successes: NDArray[np.bool_]  # ``[T]`` True at the last sample of an episode that ended in success


def camera_name(number: int) -> str:
    """Name an extra camera by number (from 0): replays store no camera names."""
    return f"camera_{number + 1}"


def samples_of(episode: Episode, rate: Rate) -> Samples | None:
    """Cut an episode into samples; None at the rate of steps when its video was not kept.

    At the rate of steps, observation t is the last frame before action t: the first observation of the
    episode, then the video frame that action t - 1 made. Steps after the end are omitted.
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


def write_robomimic(out: Path, episodes: Iterable[tuple[StoredEpisode, Samples]], rate: Rate) -> int:
    """Write the episodes, one demonstration each; return the number of their samples."""
    total, names = 0, {True: list[bytes](), False: list[bytes]()}
    with replacing(out) as part, h5py.File(part, "w", locking=False) as file:
        data = file.create_group("data")
        for number, (row, samples) in enumerate(episodes):
            _put_episode(data.create_group(f"demo_{number}"), row, samples)
            total += len(samples.actions)
            names[row.episode.success].append(f"demo_{number}".encode())
        data.attrs["total"] = total
        made = {"sample": rate, "steps_per_second": STEPS_PER_SECOND}
        about = {"env_name": "asyncrl", "type": GYM, "env_kwargs": made}
        data.attrs["env_args"] = json.dumps(about)
        mask = file.create_group("mask")
        for success, name in ((True, "success"), (False, "failure")):
            mask.create_dataset(name, data=np.array(names[success], "S"))
    return total


def _put_episode(group: h5py.Group, row: StoredEpisode, samples: Samples) -> None:
    episode = row.episode
    group.attrs["num_samples"] = len(samples.actions)
    for name in ("episode_id", "task", "success", "world_version"):
        group.attrs[name] = getattr(episode, name)
    group.attrs["group_number"] = row.number
    group.attrs["policy_version"] = episode.oldest_version
    group.create_dataset("obs/agentview_image", data=samples.images)
    for camera in range(samples.more_images.shape[1]):
        group.create_dataset(f"obs/{camera_name(camera)}_image", data=samples.more_images[:, camera])
    if samples.states.shape[1]:
        group.create_dataset("obs/robot_state", data=samples.states)
    group.create_dataset("actions", data=samples.actions)
    if samples.chunks.size:
        group.create_dataset("actions_chunk", data=samples.chunks)
    group.create_dataset("rewards", data=samples.rewards)
    group.create_dataset("dones", data=samples.dones.astype(np.int64))

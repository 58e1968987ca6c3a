"""Write samples as an HDF5 file in the layout of robomimic.

    /data               attributes: total (samples of all episodes), env_args (JSON)
    /data/demo_0        attributes: num_samples, and about the episode: episode_id, task, success,
                        group_number, policy_version (of its oldest decision), world_version
        obs/agentview_image   uint8    [T, H, W, 3]
        obs/camera_1_image    uint8    [T, H, W, 3]  the first camera beside it, and so on
        obs/robot_state       float32  [T, Q]  both where they are known of every sample
        actions               float32  [T, A]
        actions_chunk         float32  [T, C * A]  only with one sample per decision
        rewards               float32  [T]
        dones                 int64    [T]      1 at the last sample
    /mask/success       names of the successful episodes; /mask/failure of the others

There are no simulator states and no next_obs: robomimic can train from it, but not replay it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import h5py
import numpy as np

from asyncrl.replay_tools.episodes import StoredEpisode
from asyncrl.replay_tools.samples import STEPS_PER_SECOND, Rate, Samples, camera_name
from asyncrl.storage.atomic import replacing

GYM = 2
"""The number of robomimic's EnvType.GYM_TYPE; the environment itself cannot be made from the file."""


def write_robomimic(out: Path, episodes: Iterable[tuple[StoredEpisode, Samples]], rate: Rate) -> int:
    """Write the episodes, one demonstration each.

    Returns:
        Samples of all episodes.
    """
    total, names = 0, {True: list[bytes](), False: list[bytes]()}
    with replacing(out) as part, h5py.File(part, "w") as file:
        data = file.create_group("data")
        for number, (row, samples) in enumerate(episodes):
            _put_episode(data.create_group(f"demo_{number}"), row, samples)
            total += len(samples.actions)
            names[row.episode.success].append(f"demo_{number}".encode())
        data.attrs["total"] = total
        data.attrs["env_args"] = json.dumps(_env_args(rate))
        mask = file.create_group("mask")
        for success, name in ((True, "success"), (False, "failure")):
            mask.create_dataset(name, data=np.array(names[success], "S"))
    return total


def _put_episode(group: h5py.Group, row: StoredEpisode, samples: Samples) -> None:
    episode = row.episode
    group.attrs["num_samples"] = len(samples.actions)
    group.attrs["episode_id"] = episode.episode_id
    group.attrs["task"] = episode.task
    group.attrs["success"] = episode.success
    group.attrs["group_number"] = row.number
    group.attrs["policy_version"] = episode.oldest_version
    group.attrs["world_version"] = episode.world_version
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


def _env_args(rate: Rate) -> dict[str, object]:
    return {
        "env_name": "asyncrl",
        "type": GYM,
        "env_kwargs": {"sample": rate, "steps_per_second": STEPS_PER_SECOND},
    }

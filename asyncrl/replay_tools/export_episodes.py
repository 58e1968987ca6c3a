"""Run `asyncrl replay export`; write the layout of robomimic, described in docs/replay_inspection.md.

There are no simulator states and no next_obs: robomimic can train from it, but not replay it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import h5py
import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.replay_tools.episodes import LIGHT, EpisodeSelection, StoredEpisode
from asyncrl.replay_tools.lerobot_writer import write_lerobot
from asyncrl.replay_tools.samples import STEPS_PER_SECOND, Rate, Samples, camera_name, samples_of
from asyncrl.storage.atomic import replacing, unfinished

GYM = 2  # The number of robomimic's EnvType.GYM_TYPE; the environment itself cannot be made from the file


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


KEEP = "--replay.keep-video-every 1 in training keeps that of every group; --rate decision needs none"
NEEDED = (*LIGHT, "frames", "actions", "video", "more_frames", "states")


@dataclass(frozen=True, kw_only=True)
class Export(EpisodeSelection):
    """Write episodes as a robomimic HDF5 file or a LeRobot v3 folder.

    One sample per step needs the video of an episode, which training keeps of every 16th group
    (--replay.keep-video-every; 1: of all). One per decision needs none.
    """

    format: Literal["robomimic", "lerobot"]
    """The layout; lerobot needs the extra `lerobot`."""
    out: Path
    """A new file ending in .h5 or .hdf5 for robomimic, a new folder for lerobot."""
    rate: Rate = "step"
    """One sample per step, from episodes whose video was kept; or one per decision, from every episode, with
    all cameras and the robot's state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out.exists():
            raise ConfigError(f"--out {self.out} exists already. Remove it, or choose another name.")
        if (part := unfinished(self.out)).exists():
            raise ConfigError(f"{part} is left from an export that was interrupted. Remove it first.")
        if not self.out.parent.is_dir():
            raise ConfigError(f"--out {self.out} is not in an existing folder. Make {self.out.parent} first.")
        if self.format == "robomimic" and self.out.suffix.lower() not in (".h5", ".hdf5"):
            raise ConfigError(f"--out {self.out} must end in .h5 or .hdf5 for robomimic.")

    def run(self) -> int:
        """Write the data set and print its contents, and what was left out."""
        write = write_robomimic if self.format == "robomimic" else write_lerobot
        # Nothing is created for nothing: the first episode is looked for before the output is opened.
        if not any(True for _ in self._samples(Counter())):
            video, remedy = (" and whose video was kept", f" {KEEP}") if self.rate == "step" else ("", "")
            raise ConfigError(f"{self.path} holds no episode that fits{video}. Widen the flags.{remedy}")
        counts = Counter[str]()
        samples = write(self.out, self._samples(counts), self.rate)
        print(f"{self.out}: {counts['taken']} episodes, {samples} samples, one per {self.rate}")
        if left_out := counts["left out"]:
            print(f"left out: {left_out} episodes, whose video was not kept. {KEEP}")
        return 0

    def _samples(self, counts: Counter[str]) -> Iterator[tuple[StoredEpisode, Samples]]:
        for row in self.rows(NEEDED):
            samples = samples_of(row.episode, self.rate)
            if samples is None:
                counts["left out"] += 1
                continue
            counts["taken"] += 1
            yield row, samples

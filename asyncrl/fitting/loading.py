"""Read what `--data` names into `Recordings`, whatever its kind; pictures are never all in memory.

a folder with part-*.h5, or one such file    recordings of our own
a folder with meta/info.json                 a LeRobot v3 data set
an HDF5 file with data/demo_*, or a folder of such files    robomimic
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from asyncrl.errors import AssetError, ConfigError
from asyncrl.fitting.datasets.interface import DataSet
from asyncrl.fitting.datasets.lerobot import LeRobotFolder, is_lerobot
from asyncrl.fitting.datasets.robomimic import RobomimicFile, is_robomimic
from asyncrl.fitting.datasets.settings import DataSetSettings
from asyncrl.fitting.frame_file import FrameFile
from asyncrl.fitting.recordings import (
    Looks,
    RecordingFile,
    Recordings,
    is_recording,
    read_part,
    recording_files,
    unpack_frames,
)
from asyncrl.records import POSE_DIM

_log = logging.getLogger(__name__)
AS_STORED: Final = DataSetSettings()
_SUFFIXES: Final = (".h5", ".hdf5")


class Source(Protocol):
    """Episodes of one file or data set."""

    @property
    def path(self) -> Path:
        """Return where they are."""
        ...

    @property
    def looks(self) -> Looks:
        """Return what they look like."""
        ...

    @property
    def frames(self) -> int:
        """Count their frames."""
        ...

    def read(self, into: FrameFile, row: int) -> RecordingFile:
        """Write their pictures of the first camera from a row on, and return the rest."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Own:
    path: Path
    part: RecordingFile

    @property
    def looks(self) -> Looks:
        return self.part.looks

    @property
    def frames(self) -> int:
        return self.part.shape[0]

    def read(self, into: FrameFile, row: int) -> RecordingFile:
        unpack_frames(self.path, into, row)
        return self.part


@dataclass(frozen=True, kw_only=True)
class _Foreign:
    data_set: DataSet

    @property
    def path(self) -> Path:
        return self.data_set.path

    @property
    def looks(self) -> Looks:
        return self.data_set.looks

    @property
    def frames(self) -> int:
        return self.data_set.frames

    def read(self, into: FrameFile, row: int) -> RecordingFile:
        """Read it as a stream: one episode is in memory."""
        looks, lengths, at = self.looks, list[int](), 0
        actions, success, tasks, seeds = [], [], list[str](), list[int]()
        name = f"read {self.path.name}"
        bar = tqdm(self.data_set.episodes(), desc=name, unit="episode", delay=2, mininterval=2, leave=False)
        for episode in bar:
            if at + len(episode.frames) > self.frames:
                break
            into.write(row + at, episode.frames)
            lengths.append(len(episode.frames))
            at += len(episode.frames)
            actions.append(episode.actions)
            success.append(episode.success)
            tasks.append(episode.task)
            seeds.append(episode.seed)
        if at != self.frames:
            raise ConfigError(
                f"{self.path} has other episodes than it says. Download or write the data set again."
            )
        for note in self.data_set.notes:
            _log.warning("%s: %s", self.path, note)
        return RecordingFile(
            simulator=looks.simulator,
            cameras=looks.cameras,
            shape=(self.frames, looks.height, looks.width, 3),
            actions=np.concatenate(actions),
            success=np.concatenate(success),
            offsets=np.cumsum([0, *lengths]).astype(np.int64),
            tasks=tasks,
            seeds=np.array(seeds, np.int64),
            task_ids=np.full(len(tasks), -1, np.int64),
            poses=np.zeros((0, POSE_DIM), np.float32),
            rate=looks.rate,
        )


def open_data_sets(path: Path, settings: DataSetSettings = AS_STORED) -> list[DataSet]:
    """Open what another program recorded; none: there is no such thing at this path.

    Raises:
        ConfigError: It is one, and cannot be read as the settings say.
    """
    if path.is_dir():
        if is_lerobot(path):
            return [LeRobotFolder(path, settings)]
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES and is_robomimic(file))
        return [RobomimicFile(file, settings) for file in files]
    return [RobomimicFile(path, settings)] if path.is_file() and is_robomimic(path) else []


def open_sources(path: Path, settings: DataSetSettings = AS_STORED) -> list[Source]:
    """Open a path of `--data`, of any kind."""
    if path.is_file() and is_recording(path):
        return [_Own(path=path, part=read_part(path))]
    if not path.is_dir() or not any(path.glob("part-*.h5")):
        if found := open_data_sets(path, settings):
            return [_Foreign(data_set=data_set) for data_set in found]
        if path.is_file():
            raise ConfigError(
                f"{path} is neither a recording (HDF5 with the attribute format), nor robomimic's HDF5 "
                "(data/demo_0). Give one, a folder with part-*.h5, or a LeRobot v3 folder (meta/info.json)."
            )
    return [_Own(path=file, part=read_part(file)) for file in recording_files(path)]


def check_alike(sources: Sequence[Source | DataSet]) -> None:
    """Refuse what cannot be used together.

    Raises:
        ConfigError: Two differ in simulator, cameras, size of picture, width of action or rate.
    """
    first = sources[0]
    for source in sources:
        if not source.looks.fits(first.looks):
            raise ConfigError(
                f"{source.path} has {source.looks}, but {first.path} has {first.looks}. What is used "
                "together must look alike: give --data of one kind."
            )


def load_recordings(paths: Iterable[Path], settings: DataSetSettings = AS_STORED) -> Recordings:
    """Read everything that is named. The pictures are unpacked into a temporary file.

    Raises:
        AssetError: Nothing is there, or there is no room for the pictures.
        ConfigError: A file is damaged or of no kind that is read, or they are of different simulators,
            cameras, sizes of picture, widths of action or rates; or there are settings for none.
    """
    sources = [source for path in paths for source in open_sources(path, settings)]
    if not sources:
        raise AssetError("no recordings were given. Name a folder or file: --data PATH.")
    if settings != AS_STORED and all(isinstance(source, _Own) for source in sources):
        raise ConfigError(
            f"--dataset settings are about data sets of LeRobot and robomimic, but {sources[0].path} is a "
            "recording of our own, which is read as it is. Leave them out, or record it anew."
        )
    check_alike(sources)
    looks = sources[0].looks
    starts = np.cumsum([0, *(source.frames for source in sources)])
    frames = FrameFile((int(starts[-1]), looks.height, looks.width, 3))
    bar = tqdm(sources, desc="unpack", unit="file", delay=2, leave=False)
    parts = [source.read(frames, int(start)) for source, start in zip(bar, starts, strict=False)]
    return Recordings(
        frames=frames,
        actions=np.concatenate([part.actions for part in parts]),
        success=np.concatenate([part.success for part in parts]),
        offsets=np.concatenate(
            [[0], *(part.offsets[1:] + start for part, start in zip(parts, starts[:-1], strict=True))]
        ).astype(np.int64),
        tasks=[task for part in parts for task in part.tasks],
        seeds=np.concatenate([part.seeds for part in parts]),
        task_ids=np.concatenate([part.task_ids for part in parts]),
        simulator=looks.simulator,
        poses=_joined_poses([source.path for source in sources], parts),
    )


def _joined_poses(paths: Sequence[Path], parts: Sequence[RecordingFile]) -> NDArray[np.float32]:
    """Join the poses of files; where some say none, all are read as without, since most models need none."""
    without = [path for path, part in zip(paths, parts, strict=True) if len(part.poses) < part.shape[0]]
    if without:
        if len(without) < len(parts):
            _log.warning("Poses are not read: %s has none, unlike other files that were given.", without[0])
        return np.zeros((0, POSE_DIM), np.float32)
    return np.concatenate([part.poses for part in parts])

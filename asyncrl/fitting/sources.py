"""Read the data sets of `--data`, of any layout, into `Recordings`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np

from asyncrl.errors import AssetError, ConfigError, first_line
from asyncrl.fitting import recording_files as recordings
from asyncrl.fitting.data_sets import AS_STORED, DataSet
from asyncrl.fitting.lerobot import LeRobotFolder, is_lerobot
from asyncrl.fitting.recording_files import RATE, UNREADABLE, FrameFile, RecordingFile, Recordings, hdf5_files
from asyncrl.fitting.robomimic import RobomimicFile, holds_libero
from asyncrl.fitting.settings import DataSetSettings
from asyncrl.observability.terminal import progress
from asyncrl.storage.untrusted import open_hdf5

_log = logging.getLogger(__name__)


Kind = Literal["recording", "robomimic", "libero", "lerobot"]


def list_sources(path: Path) -> list[tuple[Path, Kind]]:
    """List the LeRobot folder or all HDF5 files at a path, with their kinds; unknown kinds are refused."""
    if is_lerobot(path):
        return [(path, "lerobot")]
    return [(file, _kind_of(file)) for file in hdf5_files(path)]


def _kind_of(path: Path) -> Kind:
    try:
        with open_hdf5(path) as file:
            found = str(file.attrs.get("format", ""))
            if found.startswith("asyncrl-recordings-"):
                return "recording"
            if "data" in file:
                return "libero" if holds_libero(file) else "robomimic"
        problem = f"is neither a recording (format {found!r}), nor robomimic's HDF5 (data/demo_0)"
    except UNREADABLE as error:
        problem = f"cannot be read ({first_line(error)})" if path.exists() else "does not exist"
    raise ConfigError(
        f"{path} {problem}. --data takes recordings, robomimic's files, folders of either, and LeRobot v3 "
        "folders (meta/info.json)."
    )


def open_data_sets(path: Path, settings: DataSetSettings = AS_STORED) -> Sequence[RecordingFile | DataSet]:
    """Open all data sets at a path."""
    if is_lerobot(path):
        return [LeRobotFolder(path, settings)]
    return [
        recordings.read_part(file) if kind == "recording" else RobomimicFile(file, settings)
        for file, kind in list_sources(path)
    ]


def check_alike(sources: Sequence[RecordingFile | DataSet]) -> None:
    """Refuse sources that differ in simulator, cameras, size of picture, width of action or rate."""
    first = sources[0]
    for source in sources:
        if not source.looks.fits(first.looks):
            raise ConfigError(
                f"{source.path} has {source.looks}, but {first.path} has {first.looks}. What is used "
                "together must look alike: give --data of one kind."
            )


def load_recordings(paths: Iterable[Path], settings: DataSetSettings = AS_STORED) -> Recordings:
    """Read folders and files of any kind. The pictures are unpacked into a temporary file."""
    sources = [source for path in paths for source in open_data_sets(path, settings)]
    if not sources:
        raise AssetError("no recordings were given. Name a folder or file: --data PATH.")
    if settings != AS_STORED and all(isinstance(source, RecordingFile) for source in sources):
        raise ConfigError(
            f"--dataset settings are about data sets of LeRobot and robomimic, but {sources[0].path} is a "
            "recording of our own, which is read as it is. Leave them out, or record it again."
        )
    check_alike(sources)
    looks = sources[0].looks
    starts = np.cumsum([0, *(source.frames for source in sources)])
    frames = FrameFile((int(starts[-1]), looks.height, looks.width, 3))
    bar = progress(sources, desc="unpack", unit="file", delay=2, leave=False, disable=len(sources) == 1)
    parts = [source.read(frames, int(start)) for source, start in zip(bar, starts, strict=False)]
    ends = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=False)]
    without = [source.path for source, part in zip(sources, parts, strict=True) if not len(part.poses)]
    if without and len(without) < len(parts):
        _log.warning("Poses are not read: %s has none, unlike other files that were given.", without[0])
    return Recordings(
        frames=frames,
        actions=np.concatenate([part.actions for part in parts]),
        success=np.concatenate([part.success for part in parts]),
        offsets=np.concatenate([[0], *ends]).astype(np.int64),
        tasks=[task for part in parts for task in part.tasks],
        seeds=np.concatenate([part.seeds for part in parts]),
        task_ids=np.concatenate([part.task_ids for part in parts]),
        simulator=looks.simulator,
        poses=np.concatenate([part.poses[: 0 if without else None] for part in parts]),
    )


def import_data_sets(data_sets: Sequence[DataSet], folder: Path) -> int:
    """Write recordings of compatible data sets to a new folder, or nothing; return how many episodes."""
    check_alike(data_sets)
    written = parts = 0
    try:
        for data_set in data_sets:
            looks = data_set.looks
            about: dict[str, object] = {"imported": data_set.path.name}
            if looks.rate:
                about[RATE] = looks.rate
            bar = progress(data_set.episodes(), desc=f"import {data_set.path.name}", unit="episode", delay=2)
            stream = iter(bar)
            for first in stream:
                count = recordings.episodes_per_part(first.frames.nbytes + first.more_frames.nbytes)
                part, file = chain([first], islice(stream, count - 1)), folder / f"part-{parts:05d}.h5"
                written += recordings.write_part(file, part, looks.simulator, looks.cameras, about)
                parts += 1
    except BaseException:
        for part in folder.glob("part-*.h5"):  # The folder was new: half of an import is none.
            part.unlink()
        raise
    return written

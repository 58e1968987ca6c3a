"""Read everything that `--data` names, whatever its layout, into `Recordings`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from asyncrl.errors import AssetError, ConfigError
from asyncrl.fitting import recording_files as recordings
from asyncrl.fitting.data_sets import AS_STORED, DataSet
from asyncrl.fitting.lerobot import LeRobotFolder, is_lerobot
from asyncrl.fitting.recording_files import RATE, FrameFile, RecordingFile, Recordings
from asyncrl.fitting.robomimic import RobomimicFile, is_robomimic
from asyncrl.fitting.settings import DataSetSettings

_log = logging.getLogger(__name__)


def open_data_sets(path: Path, settings: DataSetSettings = AS_STORED) -> list[DataSet]:
    """Open the data sets of other programs at a path; none if there are none."""
    if path.is_dir():
        if is_lerobot(path):
            return [LeRobotFolder(path, settings)]
        files = (file for file in sorted(path.iterdir()) if file.suffix in (".h5", ".hdf5"))
        return [RobomimicFile(file, settings) for file in files if is_robomimic(file)]
    return [RobomimicFile(path, settings)] if path.is_file() and is_robomimic(path) else []


def _open_sources(path: Path, settings: DataSetSettings) -> Sequence[RecordingFile | DataSet]:
    if path.is_file() and recordings.is_recording(path):
        return [recordings.read_part(path)]
    if not path.is_dir() or not any(path.glob("part-*.h5")):
        if found := open_data_sets(path, settings):
            return found
        if path.is_file():
            raise ConfigError(
                f"{path} is neither a recording (HDF5 with the attribute format), nor robomimic's HDF5 "
                "(data/demo_0). Give one, a folder with part-*.h5, or a LeRobot v3 folder (meta/info.json)."
            )
    return [recordings.read_part(file) for file in recordings.recording_files(path)]


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
    """Read folders and files of any kind. The pictures are unpacked into a temporary file.

    Raises:
        AssetError: Nothing is there, or there is no room for the pictures.
        ConfigError: A file is damaged or of an unknown kind, sources differ, or settings apply to none.
    """
    sources = [source for path in paths for source in _open_sources(path, settings)]
    if not sources:
        raise AssetError("no recordings were given. Name a folder or file: --data PATH.")
    if settings != AS_STORED and all(isinstance(source, RecordingFile) for source in sources):
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
    """Write recordings of data sets that look alike to a new folder, or nothing; return how many episodes."""
    check_alike(data_sets)
    written = parts = 0
    try:
        for data_set in data_sets:
            looks = data_set.looks
            about: dict[str, object] = {"imported": data_set.path.name}
            if looks.rate:
                about[RATE] = looks.rate
            bar = tqdm(data_set.episodes(), desc=f"import {data_set.path.name}", unit="episode", delay=2)
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

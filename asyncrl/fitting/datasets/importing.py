"""Write recordings of data sets that other programs made, one episode at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Final

from tqdm import tqdm

from asyncrl.fitting.datasets.interface import DataSet
from asyncrl.fitting.recordings import RATE, write_part
from asyncrl.records import dummy_action
from asyncrl.simulators.interface import SimulatorSpec
from asyncrl.simulators.rollout import SimulatedEpisode

_log = logging.getLogger(__name__)
EPISODES_PER_PART: Final = 32
"""At most."""
PART_BYTES: Final = 256 * 2**20
"""Pictures of a file, before compression, unless its first episode has more."""


def import_data_sets(data_sets: Sequence[DataSet], folder: Path) -> int:
    """Write recordings of data sets that look alike, or nothing; return how many episodes.

    Args:
        folder: New; see `collect.must_be_new`.

    Raises:
        ConfigError: A data set is damaged.
    """
    written = parts = 0
    try:
        for data_set in data_sets:
            about: dict[str, object] = {"imported": data_set.path.name}
            if data_set.looks.rate:
                about[RATE] = data_set.looks.rate
            spec = _spec_of(data_set)
            bar = tqdm(data_set.episodes(), desc=f"import {data_set.path.name}", unit="episode", delay=2)
            for part in _in_parts(bar):
                written += write_part(folder / f"part-{parts:05d}.h5", part, spec, about)
                parts += 1
            for note in data_set.notes:
                _log.warning("%s: %s", data_set.path, note)
    except BaseException:
        for part in folder.glob("part-*.h5"):  # The folder was new: half of an import is none.
            part.unlink()
        raise
    return written


def _spec_of(data_set: DataSet) -> SimulatorSpec:
    looks = data_set.looks
    return SimulatorSpec(
        name=looks.simulator,
        tasks=(),
        trials=0,
        max_steps=0,
        image_size=looks.height,
        cameras=looks.cameras,
        idle=tuple(dummy_action(looks.action_dim).tolist()),
    )


def _in_parts(
    episodes: Iterator[SimulatedEpisode] | tqdm[SimulatedEpisode],
) -> Iterator[Iterator[SimulatedEpisode]]:
    """Divide a stream into files of at most `EPISODES_PER_PART`, fewer of long episodes."""
    stream = iter(episodes)
    for first in stream:
        nbytes = first.frames.nbytes + first.more_frames.nbytes
        count = max(1, min(EPISODES_PER_PART, PART_BYTES // max(1, nbytes)))
        yield chain([first], islice(stream, count - 1))

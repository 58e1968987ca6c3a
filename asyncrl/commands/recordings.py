"""`asyncrl recordings list|stats|import`: look into recordings, and make recordings of other data sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from asyncrl.config.bounds import Bounded
from asyncrl.config.help import subcommands
from asyncrl.errors import ConfigError
from asyncrl.fitting.recording_files import RecordingFile, must_be_new, read_part
from asyncrl.fitting.settings import DataSetSettings
from asyncrl.replay_tools.episodes import table

Folders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER...")]


def _own_parts(given: tuple[Path, ...]) -> list[RecordingFile]:
    from asyncrl.fitting.sources import list_sources

    files = [source for path in given for source in list_sources(path)]
    if others := [path for path, kind in files if kind != "recording"]:
        raise ConfigError(
            f"{others[0]} is a data set of another program. Make recordings of it first: asyncrl recordings "
            f"import {others[0]} --out FOLDER."
        )
    return [read_part(file) for file, _ in files]


@dataclass(frozen=True, kw_only=True)
class ListFiles(Bounded):
    """List the files of recordings."""

    data: Folders
    """Recording folders, or files."""

    def run(self) -> int:
        """Print a row per file."""
        titles = ("file", "simulator", "cameras", "picture", "episodes", "frames", "solved")
        rows: list[tuple[str, ...]] = [titles]
        for part in _own_parts(self.data):
            looks, counts = part.looks, (len(part.tasks), part.frames, int(part.solved().sum()))
            shown = (looks.simulator, ",".join(looks.cameras), f"{looks.height}x{looks.width}")
            rows.append((str(part.path), *shown, *map(str, counts)))
        print(table(rows))
        return 0


@dataclass(frozen=True, kw_only=True)
class TaskStats(Bounded):
    """Count episodes and successes by task, and measure the actions."""

    data: Folders
    """Recording folders, or files."""

    def run(self) -> int:
        """Print a row per task, then one per number of an action."""
        parts = _own_parts(self.data)
        tasks = np.array([task for part in parts for task in part.tasks])
        solved = np.concatenate([part.solved() for part in parts])
        lengths = np.concatenate([np.diff(part.offsets) - 1 for part in parts])
        rows = [("task", "episodes", "solved", "mean steps", "longest")]
        for task in sorted(set(tasks.tolist())):
            own = tasks == task
            share, mean = solved[own].mean(), lengths[own].mean()
            rows.append((task, str(own.sum()), f"{share:.0%}", f"{mean:.1f}", str(lengths[own].max())))
        print(table(rows))
        if len({part.actions.shape[1] for part in parts}) > 1:
            raise ConfigError(
                "The actions of these recordings differ in width. Look at one folder at a time."
            )
        actions = np.concatenate([np.delete(part.actions, part.offsets[:-1], axis=0) for part in parts])
        shown: list[tuple[str, ...]] = [("action", "min", "q01", "mean", "q99", "max")]
        for number, values in enumerate(actions.T.astype(np.float64) if len(actions) else []):
            low, high = np.quantile(values, [0.01, 0.99])
            cells = (values.min(), low, values.mean(), high, values.max())
            shown.append((str(number), *(f"{cell:.4f}" for cell in cells)))
        print(f"\n{table(shown)}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Import(Bounded):
    """Write recordings of a LeRobot v3 folder, of robomimic's files, or of LIBERO's demonstrations (HDF5)."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE...")]
    """LeRobot v3 folders; robomimic's HDF5 files; or NAME_demo.hdf5 files of one of LIBERO's suites. Or
    folders of such files."""
    out: Path
    """Folder for the recordings; must not hold any yet."""
    simulator: str = ""
    """Of LIBERO: the suite; empty: the one that has these tasks, else the folder's name."""
    wrist: bool = True
    """Of LIBERO: whether the camera at the wrist is kept, as `asyncrl collect` does there."""
    dataset: DataSetSettings = field(default_factory=DataSetSettings)
    """How LeRobot and robomimic are read."""

    def run(self) -> int:
        """Import, and say how many."""
        from asyncrl.fitting.robomimic import LIBERO_CAMERAS, open_libero
        from asyncrl.fitting.sources import import_data_sets, list_sources, open_data_sets

        must_be_new(self.out)
        sources = [source for given in self.files for source in list_sources(given)]
        if own := [path for path, kind in sources if kind == "recording"]:
            raise ConfigError(f"{own[0]} is a recording already: give it to --data as it is.")
        libero = [path for path, kind in sources if kind == "libero"]
        data_sets: list[Any] = [
            one for path, kind in sources if kind != "libero" for one in open_data_sets(path, self.dataset)
        ]
        if libero:
            data_sets += open_libero(libero, self.simulator, list(LIBERO_CAMERAS)[: 2 if self.wrist else 1])
        written = import_data_sets(data_sets, self.out)
        print(f"{written} episodes in {self.out}. Next: asyncrl fit policy --data {self.out} --out POLICY")
        return 0


ARGUMENTS: Any = subcommands({"list": ListFiles, "stats": TaskStats, "import": Import})


def main(arguments: list[str]) -> int:
    """Run one of them."""
    wanted: Any = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl recordings")
    return wanted.run()

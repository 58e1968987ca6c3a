"""`asyncrl recordings list|stats|import|export`: look into recordings, and read and write those of others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from asyncrl.config.bounds import Bounded
from asyncrl.errors import ConfigError
from asyncrl.fitting.recordings import read_part, recording_files
from asyncrl.replay_tools.text import table

Folder = tyro.conf.Positional[Path]


@dataclass(frozen=True, kw_only=True)
class ListFiles(Bounded):
    """List the files of recordings."""

    data: tyro.conf.Positional[tuple[Path, ...]]
    """Recording folders."""

    def run(self) -> int:
        """Print a row per file."""
        rows = [("file", "simulator", "cameras", "picture", "episodes", "frames", "solved")]
        for path in (path for folder in self.data for path in recording_files(folder)):
            part = read_part(path)
            rows.append(
                (
                    str(path),
                    part.simulator,
                    ",".join(part.cameras),
                    f"{part.shape[1]}x{part.shape[2]}",
                    str(len(part.tasks)),
                    str(part.shape[0]),
                    str(int(part.solved().sum())),
                )
            )
        print(table(rows))
        return 0


@dataclass(frozen=True, kw_only=True)
class Stats(Bounded):
    """Count episodes and successes by task, and measure the actions."""

    data: tyro.conf.Positional[tuple[Path, ...]]
    """Recording folders."""

    def run(self) -> int:
        """Print a row per task, then one per number of an action."""
        parts = [read_part(path) for folder in self.data for path in recording_files(folder)]
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
    """Write recordings of demonstrations that LIBERO published (HDF5)."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """NAME_demo.hdf5 files of one suite, or folders of them."""
    out: Path
    """Folder for the recordings; must not hold any yet."""
    simulator: str = ""
    """Suite that they are of; empty: the one that has these tasks, else the folder's name."""
    wrist: bool = True
    """Whether the camera at the wrist is kept, as `asyncrl collect` does in LIBERO."""

    def run(self) -> int:
        """Import, and say how many."""
        from asyncrl.fitting.collect import must_be_new
        from asyncrl.fitting.libero_demonstrations import CAMERAS, import_demonstrations

        paths: list[Path] = []
        for given in self.files:
            found = sorted(given.glob("*.hdf5")) if given.is_dir() else [given]
            if not found or not all(path.is_file() for path in found):
                raise ConfigError(f"{given} is no file, nor a folder of .hdf5 files. Check the path.")
            paths += found
        if not paths:
            raise ConfigError("No file was given. Give NAME_demo.hdf5 files, or folders of them.")
        must_be_new(self.out)
        cameras = CAMERAS if self.wrist else CAMERAS[:1]
        written = import_demonstrations(paths, self.out, simulator=self.simulator, cameras=cameras)
        print(f"{written} episodes in {self.out}. Next: asyncrl fit policy --data {self.out} --out POLICY")
        return 0


@dataclass(frozen=True, kw_only=True)
class Export(Bounded):
    """Write recordings in the layout of another project."""

    data: Folder
    """Recording folder."""
    out: Folder
    """Folder to write; must not hold any trajectories yet."""
    layout: Literal["rlinf"] = "rlinf"
    """rlinf: first frames (traj*.npy) and key frames (traj*_kir.npy) that a world model begins with."""
    keyframes: bool = True
    """Whether key frames are written too."""

    def run(self) -> int:
        """Export, and say how many."""
        from asyncrl.fitting.recordings import load_recordings
        from asyncrl.fitting.rlinf_trajectories import write_trajectories

        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"OUT {self.out} is a file, where a folder is expected. Choose another name.")
        recordings = load_recordings([self.data])
        starts, keyframes = write_trajectories(recordings, self.out, with_keyframes=self.keyframes)
        print(f"{starts} starts and {keyframes} key frames in {self.out}")
        return 0


_named = tyro.conf.subcommand
COMMANDS: Any = (
    Annotated[ListFiles, _named(name="list")]
    | Annotated[Stats, _named(name="stats")]
    | Annotated[Import, _named(name="import")]
    | Annotated[Export, _named(name="export")]
)


def main(arguments: list[str]) -> int:
    """Run one of them."""
    wanted: Any = tyro.cli(COMMANDS, args=arguments, prog="asyncrl recordings")
    return wanted.run()

"""Run `asyncrl replay export`: write stored episodes as a data set for imitation learning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from asyncrl.errors import ConfigError
from asyncrl.records import EPISODE_ARRAYS
from asyncrl.replay_tools.episodes import LIGHT, StoredEpisode
from asyncrl.replay_tools.lerobot import write_lerobot
from asyncrl.replay_tools.robomimic import write_robomimic
from asyncrl.replay_tools.samples import Rate, Samples, samples_of
from asyncrl.replay_tools.selection import EpisodeSelection
from asyncrl.storage.atomic import unfinished

NEEDED = (*LIGHT, "frames", "actions", "video")
assert set(NEEDED) <= set(EPISODE_ARRAYS)


@dataclass(frozen=True, kw_only=True)
class Export(EpisodeSelection):
    """Write episodes as a robomimic HDF5 file or a LeRobot v3 folder."""

    format: Literal["robomimic", "lerobot"]
    """The layout; lerobot needs the extra `lerobot`."""
    out: Path
    """A new file ending in .h5 or .hdf5 for robomimic, a new folder for lerobot."""
    rate: Rate = "step"
    """One sample per step, from episodes whose video was kept; or one per decision, from every episode."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out.exists():
            raise ConfigError(f"--out {self.out} exists already. Remove it, or choose another name.")
        if (part := unfinished(self.out)).exists():
            raise ConfigError(f"{part} is left from an export that was interrupted. Remove it first.")
        if not self.out.parent.is_dir():
            raise ConfigError(f"--out {self.out} is not in an existing folder. Make {self.out.parent} first.")
        if self.format == "robomimic" and self.out.suffix not in (".h5", ".hdf5"):
            raise ConfigError(f"--out {self.out} must end in .h5 or .hdf5 for robomimic.")
        if self.format == "lerobot" and self.rate == "decision":
            raise ConfigError(
                "--rate decision is 2.5 samples per second, but LeRobot wants a whole number. "
                "Use --rate step, or --format robomimic."
            )

    def run(self) -> int:
        """Write the data set and say what is in it, and what was left out."""
        write = write_robomimic if self.format == "robomimic" else write_lerobot
        source = _Source(command=self)
        # Nothing is created for nothing: the first episode is looked for before the output is opened.
        if not any(True for _ in _Source(command=self)):
            raise ConfigError(self._nothing())
        samples = write(self.out, source, self.rate)
        print(
            f"{self.out}: {source.taken} episodes, {samples} samples, one per {self.rate}"
            + (f"; {source.left_out} episodes left out: their video was not kept" if source.left_out else "")
        )
        return 0

    def _nothing(self) -> str:
        why = f"{self.path} holds no episode that fits"
        if self.rate == "step":
            return (
                f"{why} and whose video was kept. Train with --replay.keep-video-every 1, widen the flags"
                + (", or use --rate decision." if self.format == "robomimic" else ".")
            )
        return f"{why}. Widen the flags."


@dataclass(kw_only=True)
class _Source:
    """The chosen episodes as samples, read one group at a time, with a count of both kinds."""

    command: Export
    taken: int = field(default=0, init=False)
    left_out: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[tuple[StoredEpisode, Samples]]:
        for row in self.command.rows(NEEDED):
            samples = samples_of(row.episode, self.command.rate)
            if samples is None:
                self.left_out += 1
            else:
                self.taken += 1
                yield row, samples

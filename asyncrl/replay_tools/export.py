"""`asyncrl replay export`: stored episodes in, a data set for imitation learning out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.records import CHUNK, EPISODE_ARRAYS, Episode
from asyncrl.replay_tools.episodes import LIGHT, StoredEpisode
from asyncrl.replay_tools.selection import EpisodeSelection

Rate = Literal["step", "decision"]
STEPS_PER_SECOND: Final = 20
"""A step is 0.05 s of the environment's time."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """One episode at a steady rate, ending at its first success or where it was truncated."""

    images: NDArray[np.uint8]
    """``[T, H, W, 3]`` what was seen before each action."""
    actions: NDArray[np.float32]
    """``[T, 7]`` at the rate of decisions: only the first action of each."""
    chunks: NDArray[np.float32]
    """``[T, 8 * 7]`` all actions of each decision, step by step; empty at the rate of steps."""
    rewards: NDArray[np.float32]
    """``[T]`` at the rate of decisions: the sum over the steps of each."""
    dones: NDArray[np.bool_]
    """``[T]`` True at the last sample only."""


def samples_of(episode: Episode, rate: Rate) -> Samples | None:
    """Cut an episode into samples; None at the rate of steps when its video was not kept.

    At the rate of steps observation t is the last frame before action t: the first observation of the
    episode, then the video frame that action t - 1 made. What came after the first success is left out.
    """
    return _per_decision(episode) if rate == "decision" else _per_step(episode)


def _per_step(episode: Episode) -> Samples | None:
    if not len(episode.video):
        return None
    first = episode.first_success_step
    length = first + 1 if first >= 0 else episode.rewards.size
    return Samples(
        images=np.concatenate([episode.frames[:1], episode.video[: length - 1]]),
        actions=episode.actions.reshape(-1, episode.actions.shape[-1])[:length],
        chunks=np.empty((length, 0), np.float32),
        rewards=episode.rewards.reshape(-1)[:length],
        dones=np.arange(length) == length - 1,
    )


def _per_decision(episode: Episode) -> Samples:
    first = episode.first_success_step
    length = first // CHUNK + 1 if first >= 0 else len(episode.frames)
    return Samples(
        images=episode.frames[:length],
        actions=episode.actions[:length, 0],
        chunks=episode.actions[:length].reshape(length, -1),
        rewards=episode.rewards[:length].sum(axis=1, dtype=np.float32),
        dones=np.arange(length) == length - 1,
    )


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
        unfinished = self.out.with_name(self.out.name + ".tmp")
        if unfinished.exists():
            raise ConfigError(f"{unfinished} is left from an export that was interrupted. Remove it first.")
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
        if self.format == "robomimic":
            from asyncrl.replay_tools.robomimic import write_robomimic as write
        else:
            from asyncrl.replay_tools.lerobot import write_lerobot as write

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

"""Choose by flags which episodes a command is about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from asyncrl.config.bounds import Bounded
from asyncrl.errors import ConfigError
from asyncrl.replay_tools.episodes import LIGHT, Outcome, StoredEpisode, read_rows, replay_folder


@dataclass(frozen=True, kw_only=True)
class ReplayCommand(Bounded):
    """A command about a whole replay."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run's folder, or its replay folder; the run may be going on."""

    @property
    def folder(self) -> Path:
        """Return the replay folder.

        Raises:
            ConfigError: There is none.
        """
        return replay_folder(self.path)


@dataclass(frozen=True, kw_only=True)
class EpisodeSelection(ReplayCommand):
    """A command about some episodes. Flags of one kind widen the choice, flags of several kinds narrow it."""

    task: str = ""
    """Only tasks that contain this text."""
    success: bool = False
    """Only successful episodes."""
    no_success: bool = False
    """Only failed episodes."""
    used: bool = False
    """Only episodes whose group was given to the learner."""
    unused: bool = False
    """Only episodes whose group waits, or was dropped."""
    filtered: bool = False
    """Only episodes whose group was filtered: all its returns are equal."""
    min_lag: int | None = None
    """Only used episodes whose oldest decision was at least this many updates old."""
    max_lag: int | None = None
    """Only used episodes whose oldest decision was at most this many updates old."""
    version: int | None = None
    """Only episodes with a decision by this policy version."""
    world_version: int | None = None
    """Only episodes of this world model; -1: of a simulator."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_lag is not None and self.max_lag is not None and self.min_lag > self.max_lag:
            raise ConfigError(
                f"--min-lag {self.min_lag} is above --max-lag {self.max_lag}, so no episode fits. Swap them."
            )

    def rows(self, names: Sequence[str] = LIGHT, more: Sequence[str] = ()) -> Iterator[StoredEpisode]:
        """Read the chosen episodes, with the arrays `names`, and those of `more` that they have."""
        return self.choose(read_rows(self.folder, names, more))

    def choose(self, rows: Iterable[StoredEpisode]) -> Iterator[StoredEpisode]:
        """Leave out what the flags exclude."""
        successes = {True, False} if self.success == self.no_success else {self.success}
        outcomes = self._outcomes()
        for row in rows:
            episode = row.episode
            if (
                self.task in episode.task
                and episode.success in successes
                and row.outcome in outcomes
                and self._lag_fits(row.lag)
                and self.version in (None, *episode.policy_versions.tolist())
                and self.world_version in (None, episode.world_version)
            ):
                yield row

    def _outcomes(self) -> set[Outcome]:
        wanted: set[Outcome] = {"used"} if self.used else set()
        wanted |= {"unused", "dropped"} if self.unused else set()
        wanted |= {"filtered"} if self.filtered else set()
        return wanted or {"used", "unused", "dropped", "filtered"}

    def _lag_fits(self, lag: int | None) -> bool:
        if self.min_lag is None and self.max_lag is None:
            return True
        low = lag if self.min_lag is None else self.min_lag
        high = lag if self.max_lag is None else self.max_lag
        return lag is not None and low is not None and high is not None and low <= lag <= high

"""Read and choose the episodes of a run's replay folder, for `asyncrl replay`; align text in columns.

A live run deletes groups that it no longer needs: a file that vanishes between listing and reading is left
out, a damaged one is reported on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import tyro

from asyncrl.config.bounds import Bounded
from asyncrl.errors import ConfigError, ReplayError
from asyncrl.facts import plain_task
from asyncrl.observability.terminal import progress
from asyncrl.records import Episode
from asyncrl.replay.events import Dropped, Event, Filtered, Granted, Ready, Used, read_entries, read_events
from asyncrl.replay.group_file import read_group, read_group_file
from asyncrl.replay.store import PATTERN, file_name, read_meta

BAR: Final = 32  # characters of the longest bar
NOTHING: Final = "-"  # a number that does not exist, such as the lag of an episode that was never used
Item = TypeVar("Item")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns: text to the left, numbers to the right."""
    columns = list[list[str]]()
    for cells in zip(*rows, strict=True):
        width = max(map(len, cells))
        numbers = [cell.strip("%").replace(".", "", 1) for cell in cells[1:] if cell != NOTHING]
        numeric = all(text.replace("-", "", 1).isdigit() for text in numbers)
        columns.append([cell.rjust(width) if numeric else cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def bar(value: float, most: float) -> str:
    """Return ``#`` in proportion to `value`; a value above zero shows at least one."""
    return "#" * max(1, round(BAR * value / most)) if value > 0 else ""


def watched(items: Sequence[Item] | Iterable[Item], what: str) -> Iterator[Item]:
    """Yield the items; after 2 s, a progress bar appears on stderr, and it goes away at the end."""
    return iter(progress(items, desc=what, delay=2, leave=False))


Outcome = Literal["used", "filtered", "dropped", "unused"]
_OUTCOMES: Final[dict[type, Outcome]] = {Used: "used", Filtered: "filtered", Dropped: "dropped"}


@dataclass(kw_only=True)
class GroupOutcomes:
    """The last event of every group in the ledger."""

    granted: set[int] = field(default_factory=set)
    closed: dict[int, Used | Filtered | Dropped] = field(default_factory=dict)  # By group
    again: set[int] = field(default_factory=set)
    """Groups that wait to be used again, because a resume lost the update that had used them."""

    def of(self, number: int) -> Outcome:
        """Return the outcome of a group, `unused` if it waits or is not in the ledger."""
        return _OUTCOMES.get(type(self.closed.get(number)), "unused")

    def used_at(self, number: int) -> int | None:
        """Return the learner's version when a group was used; None if it was not."""
        event = self.closed.get(number)
        return event.version if isinstance(event, Used) else None

    def needless(self) -> set[int]:
        """Return the groups that were used or filtered: a run deletes their files."""
        return {number for number in self.closed if self.of(number) != "dropped"}

    def apply(self, event: Event) -> None:
        """Follow one event of the ledger."""
        match event:
            case Granted(grant=number):
                self.granted.add(number)
                self._forget(number)
            case Ready(ready=number):
                self._forget(number)
                self.again.add(number)
            case Used(used=numbers):
                for number in numbers:
                    self._forget(number)
                    self.closed[number] = event
            case Filtered(filtered=number) | Dropped(dropped=number):
                self._forget(number)
                self.closed[number] = event

    def _forget(self, number: int) -> None:
        self.closed.pop(number, None)
        self.again.discard(number)


def read_outcomes(folder: Path, warn: Callable[[str], None]) -> GroupOutcomes:
    """Read a replay folder's ledger."""
    outcomes = GroupOutcomes()
    for event in read_events(read_entries(folder / "ledger.log", warn), warn):
        outcomes.apply(event)
    return outcomes


LIGHT: Final = ("rewards", "policy_versions")  # The arrays that the tables need; images are left on disk


@dataclass(frozen=True, kw_only=True)
class StoredEpisode:
    """One stored episode and the outcome of its group. Only the arrays that were asked for are filled."""

    number: int  # of the group
    path: Path
    episode: Episode
    used_at: int | None  # learner's version; None if unused
    outcome: Outcome = "unused"

    @property
    def newest_version(self) -> int:
        """Return the version of the newest decision."""
        return int(self.episode.policy_versions.max())

    @property
    def lag(self) -> int | None:
        """Return the lag of the oldest decision when the group was used, in updates; None if unused."""
        return None if self.used_at is None else self.used_at - self.episode.oldest_version


def versions_of(episode: Episode) -> str:
    """Return the policy versions of the decisions, as text: ``3`` or ``3..4``."""
    oldest, newest = episode.oldest_version, int(episode.policy_versions.max())
    return str(oldest) if oldest == newest else f"{oldest}..{newest}"


def replay_folder(path: Path) -> Path:
    """Find the replay folder of a run."""
    for folder in (path, path / "replay"):
        if (folder / "replay.json").is_file():
            read_meta(folder)
            return folder
    raise ConfigError(
        f"{path} holds no replay: neither it nor its folder 'replay' has a replay.json. "
        "Give a run's folder, for example runs/2025-01-31_12-00-00."
    )


def read_rows(folder: Path, names: Sequence[str] = LIGHT) -> Iterator[StoredEpisode]:
    """Yield the episodes of readable files by group and member, with the arrays `names`, at least `LIGHT`."""
    outcomes = read_outcomes(folder, warn)
    for path in watched(sorted(folder.glob(PATTERN)), "reading groups"):
        found = sound(path, lambda path: (read_group_file(path).number, read_group(path, names)))
        number, episodes = found or (0, [])
        about = {"used_at": outcomes.used_at(number), "outcome": outcomes.of(number)}
        for episode in episodes:
            yield StoredEpisode(number=number, path=path, episode=episode, **about)


def sound(path: Path, read: Callable[[Path], Item]) -> Item | None:
    """Read from a group's file; None if it is gone, or damaged, which is reported."""
    try:
        return read(path)
    except (ReplayError, FileNotFoundError) as error:
        if path.exists():
            warn(f"warning: {error}")
        return None


def reread(row: StoredEpisode) -> Episode:
    """Read an episode's other arrays."""
    for episode in read_group(row.path):
        if episode.episode_id == row.episode.episode_id:
            return episode
    raise ReplayError(
        f"{row.path} holds another group by now: a resume wrote it again. Run the command again."
    )


def find_row(folder: Path, beginning: str) -> StoredEpisode:
    """Find the one episode whose id begins with `beginning`, with all its arrays; no other group is read."""
    files = watched(sorted(folder.glob(PATTERN)), "looking for the episode")
    ids = {
        one: path for path in files if (group := sound(path, read_group_file)) for one in group.episode_ids
    }
    found = [one for one in ids if one.startswith(beginning)]
    if len(found) != 1:
        several = ", ".join(found[:5])
        raise ConfigError(
            f"no stored episode's id begins with {beginning!r}. `asyncrl replay list` shows them."
            if not found
            else f"{len(found)} episodes' ids begin with {beginning!r}: {several} ... Give more digits."
        )
    path, outcomes = ids[found[0]], read_outcomes(folder, warn)
    episode = next(one for one in read_group(path) if one.episode_id == found[0])
    number = read_group_file(path).number
    about = {"used_at": outcomes.used_at(number), "outcome": outcomes.of(number)}
    return StoredEpisode(number=number, path=path, episode=episode, **about)


def newest_of_each_outcome(folder: Path) -> list[str]:
    """Return the ids of the newest success and the newest failure, if they exist."""
    newest: dict[bool, str] = {}
    for path in sorted(folder.glob(PATTERN), reverse=True):
        for episode in sound(path, lambda path: read_group(path, LIGHT)) or ():
            newest.setdefault(episode.success, episode.episode_id)
        if len(newest) == 2:
            break
    return [newest[outcome] for outcome in sorted(newest, reverse=True)]


def find_group(folder: Path, number: int) -> list[Episode]:
    """Read the episodes of one group, with all their arrays, in the order of the members."""
    path = folder / file_name(number)
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no file of group {number}: it was never complete, or the run did not need it any "
            "more. `asyncrl replay list` shows which groups there are."
        )
    return read_group(path)


def warn(line: str) -> None:
    """Report the omitted groups on stderr."""
    print(line, file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class ReplayCommand(Bounded):
    """A command about a whole replay."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run's folder, or its replay folder; the run may be going on."""

    @property
    def folder(self) -> Path:
        """Return the replay folder."""
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
    version: int | None = None
    """Only episodes with a decision by this policy version."""
    world_version: int | None = None
    """Only episodes of this world model; -1: of a simulator."""

    def rows(self, names: Sequence[str] = LIGHT) -> Iterator[StoredEpisode]:
        """Read the chosen episodes with the arrays `names`, as far as they have them."""
        successes = {True, False} if self.success == self.no_success else {self.success}
        groups = {"used": self.used, "unused": self.unused, "dropped": self.unused, "filtered": self.filtered}
        outcomes = [name for name, wanted in groups.items() if wanted] or list(groups)
        for row in read_rows(self.folder, names):
            episode = row.episode
            if (
                plain_task(self.task) in plain_task(episode.task)
                and episode.success in successes
                and row.outcome in outcomes
                and self.version in (None, *episode.policy_versions.tolist())
                and self.world_version in (None, episode.world_version)
            ):
                yield row

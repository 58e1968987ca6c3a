"""A run's replay folder in, its episodes out, for `asyncrl replay`. Reads only; works on a live run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import ConfigError, ReplayError
from asyncrl.records import EPISODE_ARRAYS, Episode, problem_with
from asyncrl.replay.layout import read_group
from asyncrl.replay.ledger import read_entries
from asyncrl.replay.schema import read_shard
from asyncrl.replay.store import PATTERN, read_meta


@dataclass(frozen=True, kw_only=True)
class Row:
    """One episode as `list` and `stats` see it; its images were not read."""

    number: int
    episode: Episode
    used_at: int | None
    """Learner's version when the group was used."""
    filtered: bool = False
    """Whether the group was replaced because all its episodes had the same return."""

    @property
    def steps(self) -> int:
        """Steps until success or truncation."""
        first = self.episode.first_success_step
        return first + 1 if first >= 0 else self.episode.rewards.size

    @property
    def newest_version(self) -> int:
        """Version of the newest decision."""
        return int(self.episode.policy_versions.max())

    @property
    def lag(self) -> int | None:
        """Lag of the oldest decision when the group was used."""
        return None if self.used_at is None else self.used_at - self.episode.oldest_version


def replay_folder(path: Path) -> Path:
    """Find the replay folder of a run.

    Raises:
        ConfigError: There is none.
    """
    for folder in (path, path / "replay"):
        if (folder / "replay.json").is_file():
            read_meta(folder)
            return folder
    raise ConfigError(
        f"{path} holds no replay: neither it nor its folder 'replay' has a replay.json. "
        "Give a run's folder, for example runs/2025-01-31_12-00-00."
    )


def read_rows(folder: Path) -> Iterator[Row]:
    """Yield every episode of the readable files; a damaged file is reported and left out."""
    used, filtered = read_fates(folder)
    for path in sorted(folder.glob(PATTERN)):
        try:
            number = read_shard(path).number
            episodes = read_group(path, ("rewards", "policy_versions"))
        except ReplayError as error:
            if path.exists():
                _warn(f"warning: {error}")
            continue
        for episode in episodes:
            yield Row(number=number, episode=episode, used_at=used.get(number), filtered=number in filtered)


def read_fates(folder: Path) -> tuple[dict[int, int], set[int]]:
    """Read from the ledger at which version of the learner each group was used, and which were filtered."""
    used: dict[int, int] = {}
    filtered: set[int] = set()
    for entry in read_entries(folder / "ledger.log", _warn):
        match entry:
            case {"used": list(numbers), "version": int(version)}:
                used |= dict.fromkeys(numbers, version)
            case {"filtered": int(number)}:
                filtered.add(number)
            case {"ready": int(number), "uses": [*_, int(version)]}:
                used[number] = version
            case {"ready": int(number)} | {"dropped": int(number)}:  # A resume undid what is above.
                used.pop(number, None)
                filtered.discard(number)
    return used, filtered


def find_episode(folder: Path, beginning: str) -> Episode:
    """Find the one episode whose id begins with `beginning`.

    Raises:
        ConfigError: There is none, or several.
    """
    found: list[tuple[Path, str]] = []
    for path in sorted(folder.glob(PATTERN)):
        try:
            found += [(path, x) for x in read_shard(path).episode_ids if x.startswith(beginning)]
        except ReplayError as error:
            _warn(f"warning: {error}")
    if len(found) != 1:
        several = ", ".join(x for _, x in found[:5])
        raise ConfigError(
            f"no stored episode's id begins with {beginning!r}. `asyncrl replay list` shows them."
            if not found
            else f"{len(found)} episodes' ids begin with {beginning!r}: {several} ... Give more digits."
        )
    path, episode_id = found[0]
    return next(episode for episode in read_group(path) if episode.episode_id == episode_id)


def problem_with_file(path: Path, group_size: int) -> str | None:
    """Say what is wrong with a group's file, or None when it is sound."""
    try:
        number, episodes = read_shard(path).number, read_group(path, tuple(EPISODE_ARRAYS))
    except ReplayError as error:
        return str(error)
    if path.name != f"group-{number:08d}.h5":
        return f"it says that it is group {number}"
    if [episode.member for episode in episodes] != list(range(group_size)):
        return f"its members are {[episode.member for episode in episodes]}, expected 0 to {group_size - 1}"
    if len({(episode.group_id, episode.task) for episode in episodes}) != 1:
        return "its members belong to different groups or tasks"
    for episode in episodes:
        problem = problem_with(episode)
        if problem:
            return f"episode {episode.episode_id}: {problem}"
    return None


def _warn(line: str) -> None:
    print(line, file=sys.stderr)

"""`asyncrl replay verify`: every file and the ledger in, one line per problem out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import ReplayError
from asyncrl.records import SCHEMA_VERSION
from asyncrl.replay.files.format import FORMAT_VERSION, Shard, read_shard
from asyncrl.replay.store import PATTERN, read_meta
from asyncrl.replay_tools.episodes import Fates, problem_with_file, read_fates
from asyncrl.replay_tools.selection import OfReplay
from asyncrl.replay_tools.text import watched


@dataclass(frozen=True, kw_only=True)
class Verify(OfReplay):
    """Check checksums, schema, completeness of groups, and the ledger against the files."""

    def run(self) -> int:
        """Print one line per problem, then a summary; 1 when there was a problem."""
        folder = self.folder
        problems, shards = check_files(folder)
        # The ledger is read after the files: a live run notes a grant before it writes the group's file.
        fates = read_fates(folder, problems.append)
        problems += check_ledger(fates, shards)
        for problem in problems:
            print(f"PROBLEM {problem}")
        away = len(list((folder / "quarantine").glob("*")))
        deleted = len((fates.used.keys() | fates.filtered.keys()) - shards.keys())
        print(
            f"{len(shards)} groups are readable, {len(problems)} problems, {away} files in quarantine since "
            f"earlier; {deleted} groups that were used or filtered have no readable file"
        )
        return 1 if problems else 0


def check_files(folder: Path) -> tuple[list[str], dict[int, Shard]]:
    """Read every file completely; return what is wrong, and the sound files by group number."""
    problems, shards, seen = list(_check_meta(folder)), dict[int, Shard](), dict[str, str]()
    group_size = read_meta(folder).get("group_size")
    group_size = group_size if isinstance(group_size, int) else 0  # What is wrong with it was said above.
    for path in watched(sorted(folder.glob(PATTERN)), "verifying groups"):
        problem = problem_with_file(path, group_size)
        try:
            shard = None if problem else read_shard(path)
        except (ReplayError, FileNotFoundError) as error:
            shard, problem = None, str(error)
        if shard is None:
            if path.exists():  # A live run deletes groups that it does not need any more.
                problems.append(f"{path.name}: {problem}")
            continue
        shards[shard.number] = shard
        for episode_id in shard.episode_ids:
            if episode_id in seen:
                problems.append(f"{path.name}: episode {episode_id} is in {seen[episode_id]} too")
            seen[episode_id] = path.name
    return problems, shards


def check_ledger(fates: Fates, shards: dict[int, Shard]) -> Iterator[str]:
    """Compare what the ledger says with the sound files."""
    for number, shard in sorted(shards.items()):
        if number not in fates.granted:
            yield f"{shard.path.name}: the ledger never granted group {number}"
        if fates.dropped.get(number) == "dropped_resume" and shard.path.exists():  # Perhaps it just did.
            yield f"{shard.path.name}: the ledger says that a resume deleted it"
        used_at = fates.used.get(number)
        if used_at is not None and used_at < shard.newest_version:
            yield (
                f"{shard.path.name}: used at version {used_at}, but it holds a decision of version "
                f"{shard.newest_version}"
            )
        for name, value in fates.filtered.get(number, {}).items():
            if shard.attributes[name] != value:
                yield f"{shard.path.name}: {name} is {shard.attributes[name]}, the ledger says {value}"
    for number in sorted(fates.again - shards.keys()):
        yield f"group-{number:08d}.h5: the ledger says that it waits to be used again, but it cannot be read"
    for number in sorted((fates.used.keys() | fates.filtered.keys()) - fates.granted):
        if number not in shards:
            yield f"ledger.log: group {number} was used or filtered, but never granted"


def _check_meta(folder: Path) -> Iterator[str]:
    meta = read_meta(folder)
    expected = {"format_version": FORMAT_VERSION, "schema_version": SCHEMA_VERSION}
    for name, value in expected.items():
        if meta.get(name) != value:
            yield f"replay.json: {name} is {meta.get(name)}, this asyncrl reads {value}"
    if not isinstance(meta.get("group_size"), int) or meta["group_size"] < 1:
        yield f"replay.json: group_size is {meta.get('group_size')}, expected a positive whole number"

"""Run `asyncrl replay verify`: check every file and the ledger, and print one line per problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from asyncrl.episode_layout import SCHEMA_VERSION, problem_with
from asyncrl.errors import ReplayError
from asyncrl.records import Episode
from asyncrl.replay.events import Dropped, Filtered, GroupSized, Used, read_entries, read_events
from asyncrl.replay.group_file import FORMAT_VERSION, GroupFile, read_group, read_group_file
from asyncrl.replay.store import LEDGER, PATTERN, file_name, read_meta
from asyncrl.replay_tools.episodes import GroupOutcomes, ReplayCommand, read_outcomes, watched
from asyncrl.storage.untrusted import shortened


@dataclass(frozen=True, kw_only=True)
class Verify(ReplayCommand):
    """Check checksums, schema, completeness of groups, and the ledger against the files."""

    def run(self) -> int:
        """Print one line per problem, then a summary; 1 when there was a problem."""
        folder = self.folder
        problems, group_files = check_files(folder)
        # The ledger is read after the files: a live run notes a grant before it writes the group's file.
        outcomes = read_outcomes(folder, problems.append)
        problems += check_ledger(outcomes, group_files)
        for problem in problems:
            print(f"PROBLEM {problem}")
        away, aside = (len(list((folder / name).glob("*"))) for name in ("quarantine", "set_aside"))
        deleted = len(outcomes.needless() - group_files.keys())
        print(
            f"{len(group_files)} groups are readable, {len(problems)} problems, "
            f"{away} files in quarantine since "
            f"earlier, {aside} set aside; {deleted} groups that were used or filtered have no readable file"
        )
        return 1 if problems else 0


def check_files(folder: Path) -> tuple[list[str], dict[int, GroupFile]]:
    """Read every file completely; return what is wrong, and the sound files by group number."""
    problems, group_files, seen = list(_check_meta(folder)), dict[int, GroupFile](), dict[str, str]()
    sizes = group_sizes(folder)
    for path in watched(sorted(folder.glob(PATTERN)), "verifying groups"):
        try:
            group_file = read_group_file(path)
            problem = problem_with_group(group_file, read_group(path), sizes)
        except (ReplayError, FileNotFoundError) as error:
            group_file, problem = None, str(error)
        if group_file is None or problem:
            if path.exists():  # A live run deletes groups that it does not need any more.
                problems.append(f"{path.name}: {problem}")
            continue
        group_files[group_file.number] = group_file
        for episode_id in group_file.episode_ids:
            if episode_id in seen:
                problems.append(f"{path.name}: episode {episode_id} is in {seen[episode_id]} too")
            seen[episode_id] = path.name
    return problems, group_files


def problem_with_group(group_file: GroupFile, episodes: Sequence[Episode], sizes: Set[int]) -> str | None:
    """Return the problem of a readable group, or None if it is sound; a group has one of `sizes`."""
    if group_file.path.name != file_name(group_file.number):
        return f"it says that it is group {group_file.number}"
    members = [episode.member for episode in episodes]
    if len(members) not in sizes or members != list(range(len(members))):
        expected = " or ".join(f"0 to {size - 1}" for size in sorted(sizes))
        return f"its members are {members}, expected {expected}"
    if len({(episode.group_id, episode.task) for episode in episodes}) != 1:
        return "its members belong to different groups or tasks"
    for episode in episodes:
        problem = problem_with(episode)
        if problem:
            return f"episode {episode.episode_id}: {problem}"
    return None


def group_sizes(folder: Path) -> set[int]:
    """Return the sizes that groups of a run may have: it began with one, and a resume may change it."""
    sizes = {read_meta(folder).get("group_size")}
    events = read_events(read_entries(folder / LEDGER, lambda line: None))  # Damage is said elsewhere.
    sizes |= {event.group_size for event in events if isinstance(event, GroupSized)}
    return {size for size in sizes if isinstance(size, int) and _is_group_size(size)}


def check_ledger(outcomes: GroupOutcomes, group_files: dict[int, GroupFile]) -> Iterator[str]:
    """Compare the ledger with the sound files."""
    for number, group_file in sorted(group_files.items()):
        name, event = group_file.path.name, outcomes.closed.get(number)
        dropped = event.status if isinstance(event, Dropped) else ""
        if number not in outcomes.granted and dropped != "dropped_unrecorded":
            yield f"{name}: the ledger never granted group {number}"
        if dropped == "dropped_resume" and group_file.path.exists():  # Perhaps it just did.
            yield f"{name}: the ledger says that a resume deleted it"
        if isinstance(event, Used) and event.version < (newest := group_file.newest_version):
            yield f"{name}: used at version {event.version}, but it holds a decision of version {newest}"
        for key in ("newest_version", "successes") if isinstance(event, Filtered) else ():
            if (found := group_file.attributes[key]) != (said := getattr(event, key)):
                yield f"{name}: {key} is {found}, the ledger says {said}"
    for number in sorted(outcomes.again - group_files.keys()):
        yield f"{file_name(number)}: the ledger says that it waits to be used again, but it cannot be read"
    for number in sorted(outcomes.needless() - outcomes.granted - group_files.keys()):
        yield f"ledger.log: group {number} was used or filtered, but never granted"


def _check_meta(folder: Path) -> Iterator[str]:
    meta = read_meta(folder)
    expected = {"format_version": FORMAT_VERSION, "schema_version": SCHEMA_VERSION}
    for name, value in expected.items():
        if meta.get(name) != value:
            yield f"replay.json: {name} is {meta.get(name)}, this asyncrl reads {value}"
    if not _is_group_size(meta.get("group_size")):
        said = shortened(meta.get("group_size"))
        yield f"replay.json: group_size is {said}, expected a positive whole number"


def _is_group_size(value: object) -> bool:
    return type(value) is int and value >= 1

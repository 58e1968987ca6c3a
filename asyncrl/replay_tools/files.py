"""Run `asyncrl replay verify`, `prune` and `export`: check, delete and export the groups of a replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from asyncrl.config.bounds import AtLeast
from asyncrl.errors import ConfigError, ReplayError
from asyncrl.records import Episode
from asyncrl.replay.admission import problem_with
from asyncrl.replay.events import Dropped, Used
from asyncrl.replay.group_file import GroupFile, read_group, read_group_file
from asyncrl.replay.store import PATTERN, file_name
from asyncrl.replay_tools import episodes as stored
from asyncrl.replay_tools.episodes import GroupOutcomes, ReplayCommand, read_outcomes, sound, warn, watched
from asyncrl.replay_tools.lerobot_writer import write_lerobot
from asyncrl.replay_tools.samples import Rate, Samples, samples_of, write_robomimic
from asyncrl.storage import run_owner
from asyncrl.storage.assets import kept
from asyncrl.storage.atomic import flush, unfinished
from asyncrl.storage.untrusted import take_lock


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
            f"{len(group_files)} groups are readable, {len(problems)} problems, {away} files in quarantine "
            f"since earlier, {aside} set aside; {deleted} groups that were used or filtered have no readable "
            "file"
        )
        return 1 if problems else 0


def check_files(folder: Path) -> tuple[list[str], dict[int, GroupFile]]:
    """Read every file completely; return the problems, and the sound files by group number."""
    problems, group_files, seen = list[str](), dict[int, GroupFile](), dict[str, str]()
    for path in watched(sorted(folder.glob(PATTERN)), "verifying groups"):
        try:
            group_file = read_group_file(path)
            problem = problem_with_group(group_file, read_group(path))
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


def problem_with_group(group_file: GroupFile, episodes: Sequence[Episode]) -> str | None:
    """Return the problem of a readable group, or None if it is sound."""
    if group_file.path.name != file_name(group_file.number):
        return f"its header names group {group_file.number}"
    members, size = [episode.member for episode in episodes], group_file.group_size
    if members != list(range(size)):
        return f"its members are {members}, expected 0 to {size - 1}"
    if len({(episode.group_id, episode.task) for episode in episodes}) != 1:
        return "its members belong to different groups or tasks"
    problems = (f"episode {x.episode_id}: {problem}" for x in episodes if (problem := problem_with(x)))
    return next(problems, None)


def check_ledger(outcomes: GroupOutcomes, group_files: dict[int, GroupFile]) -> Iterator[str]:
    """Compare the ledger with the sound files."""
    for number, group_file in sorted(group_files.items()):
        name, event = group_file.path.name, outcomes.closed.get(number)
        if number not in outcomes.granted:
            yield f"{name}: the ledger never granted group {number}"
        if isinstance(event, Dropped) and event.status == "dropped_resume" and group_file.path.exists():
            yield f"{name}: a resume deleted it, by the ledger"  # Perhaps it just did, above.
        if isinstance(event, Used) and event.version < (newest := group_file.newest_version):
            yield f"{name}: used at version {event.version}, but it holds a decision of version {newest}"
    for number in sorted(outcomes.again - group_files.keys()):
        yield f"{file_name(number)}: by the ledger it waits to be used again, but it cannot be read"
    for number in sorted(outcomes.needless() - outcomes.granted - group_files.keys()):
        yield f"ledger.log: group {number} was used or filtered, but never granted"


@dataclass(frozen=True, kw_only=True)
class Prune(ReplayCommand):
    """Delete groups that were used, filtered or dropped. Refuses on a live run, unless --dry-run."""

    keep_gigabytes: Annotated[float, AtLeast(0, "it is a size.", "Use 0 for as little as possible.")]
    """Delete the oldest of them until the replay is at most this large, in 1e9 bytes."""
    dry_run: bool = False
    """Only list what would be deleted."""

    def run(self) -> int:
        """Delete, lowest number first, and print the bytes freed."""
        folder = self.folder
        with nullcontext() if self.dry_run else locked(folder):
            paths = watched(sorted(folder.glob(PATTERN)), "reading groups")
            group_files = [x for path in paths if (x := sound(path, read_group_file)) is not None]
            outcomes, resume = read_outcomes(folder, warn), max(kept(folder.parent), default=None)
            closed = [x for x in group_files if expendable(x, outcomes, resume)]
            chosen, excess = list[GroupFile](), sum(x.size for x in group_files) - self.keep_gigabytes * 1e9
            for group_file in closed:
                if excess > 0:
                    chosen.append(group_file)
                    excess -= group_file.size
            if chosen and not self.dry_run:
                for group_file in watched(chosen, "deleting"):
                    group_file.path.unlink(missing_ok=True)
                flush(folder)
        for group_file in chosen:
            outcome = outcomes.of(group_file.number)
            print(f"{group_file.path.name}  {group_file.size / 1e6:8.2f} MB  {outcome}")
        freed, total = sum(s.size for s in chosen), sum(s.size for s in group_files)
        verb = "would free" if self.dry_run else "freed"
        print(
            f"{verb} {freed / 1e6:.2f} MB of {total / 1e6:.2f} MB: "
            f"{len(chosen)} of {len(group_files)} groups; "
            f"{len(group_files) - len(closed)} are still needed, or a resume may need them"
        )
        return 0


def expendable(group_file: GroupFile, outcomes: GroupOutcomes, resume: int | None) -> bool:
    """True if a group is closed and no resume (at version `resume`, if any) would use it again."""
    if outcomes.of(group_file.number) == "unused":
        return False
    used_at = outcomes.used_at(group_file.number)
    return used_at is None or resume is None or used_at < resume


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the locks of run and replay, so that no run begins."""
    of_run = (folder.parent / "config.json").exists()
    try:
        with (
            run_owner.kept_unowned(folder.parent, f"changing {folder}") if of_run else nullcontext(),
            (folder / "lock").open("a") as file,
        ):
            if not take_lock(folder / "lock", file.fileno()):
                raise ReplayError(
                    f"{folder} is written by a live run (which prunes by itself, --replay.max-gigabytes). "
                    "Wait until it ended, or use --dry-run."
                )
            yield
    except PermissionError as error:
        raise ReplayError(
            f"{folder} cannot be changed: {error}. Run it as the owner of the folder."
        ) from None


KEEP = "--replay.keep-video-every 1 in training keeps that of every group; --rate decision needs none"
NEEDED = (*stored.LIGHT, "frames", "actions", "video", "more_frames", "states")


@dataclass(frozen=True, kw_only=True)
class Export(stored.EpisodeSelection):
    """Write episodes as a robomimic HDF5 file or a LeRobot v3 folder.

    One sample per step needs the video of an episode, which training keeps of every 16th group
    (--replay.keep-video-every; 1: of all). One per decision needs none.
    """

    format: Literal["robomimic", "lerobot"]
    """The layout; lerobot needs the extra `lerobot`."""
    out: Path
    """A new file ending in .h5 or .hdf5 for robomimic, a new folder for lerobot."""
    rate: Rate = "step"
    """One sample per step, from episodes whose video was kept; or one per decision, from every episode, with
    all cameras and the robot's state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out.exists():
            raise ConfigError(f"--out {self.out} exists already. Remove it, or choose another name.")
        if (part := unfinished(self.out)).exists():
            raise ConfigError(f"{part} is left from an export that was interrupted. Remove it first.")
        if not self.out.parent.is_dir():
            raise ConfigError(f"--out {self.out} is not in an existing folder. Make {self.out.parent} first.")
        if self.format == "robomimic" and self.out.suffix.lower() not in (".h5", ".hdf5"):
            raise ConfigError(f"--out {self.out} must end in .h5 or .hdf5 for robomimic.")

    def run(self) -> int:
        """Write the data set and print its contents and the omitted episodes."""
        write = write_robomimic if self.format == "robomimic" else write_lerobot
        # Nothing is created for nothing: the first episode is looked for before the output is opened.
        if not any(True for _ in self._samples(Counter())):
            video, remedy = (" and whose video was kept", f" {KEEP}") if self.rate == "step" else ("", "")
            raise ConfigError(f"{self.path} holds no episode that fits{video}. Widen the flags.{remedy}")
        counts = Counter[str]()
        samples = write(self.out, self._samples(counts), self.rate)
        print(f"{self.out}: {counts['taken']} episodes, {samples} samples, one per {self.rate}")
        if left_out := counts["left out"]:
            print(f"left out: {left_out} episodes, whose video was not kept. {KEEP}")
        return 0

    def _samples(self, counts: Counter[str]) -> Iterator[tuple[stored.StoredEpisode, Samples]]:
        for row in self.rows(NEEDED):
            samples = samples_of(row.episode, self.rate)
            if samples is None:
                counts["left out"] += 1
                continue
            counts["taken"] += 1
            yield row, samples

"""`asyncrl replay`: a run's sealed groups in, tables and pictures out. Reads only; works on a live run."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from asyncrl.errors import ConfigError, ReplayError
from asyncrl.records import EPISODE_SCALARS
from asyncrl.replay.reading import Row, find_episode, problem_with_file, read_rows, replay_folder
from asyncrl.replay.store import PATTERN, read_meta

STEP_MS = 50
"""One step of the environment, in milliseconds of the GIF."""
SORTS = Literal["group", "task", "success", "steps", "version"]


def run_inspection(args: list[str]) -> int:
    """Run `asyncrl replay ARGS`; return 0, 1 when `verify` found damage, 2 for input that cannot work."""
    import tyro

    subcommand = tyro.conf.subcommand
    wish = tyro.cli(
        Annotated[List, subcommand(name="list")]
        | Annotated[Show, subcommand(name="show")]
        | Annotated[Verify, subcommand(name="verify")]
        | Annotated[Video, subcommand(name="video")]
        | Annotated[Stats, subcommand(name="stats")],  # pyright: ignore[reportArgumentType]
        args=args,
        prog="asyncrl replay",
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalRequiredArgs),
    )
    try:
        return wish.run()
    except (ConfigError, ReplayError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


@dataclass(frozen=True, kw_only=True)
class List:
    """List the stored episodes."""

    path: Path
    """A run's folder, or its replay folder."""
    task: str = ""
    """Only tasks that contain this text."""
    success: bool = False
    """Only successful episodes."""
    failure: bool = False
    """Only failed episodes."""
    sort: SORTS = "group"
    """Order of the rows."""

    def run(self) -> int:
        """Print the table."""
        wanted = {True, False} if self.success == self.failure else {self.success}
        rows = [
            row
            for row in read_rows(replay_folder(self.path))
            if self.task in row.episode.task and row.episode.success in wanted
        ]
        keys: dict[str, Any] = {
            "group": lambda row: row.number,
            "task": lambda row: row.episode.task,
            "success": lambda row: not row.episode.success,
            "steps": lambda row: row.steps,
            "version": lambda row: row.episode.oldest_version,
        }
        rows.sort(key=lambda row: (keys[self.sort](row), row.number, row.episode.member))
        titles = ("episode", "group", "member", "task", "success", "steps", "versions", "lag", "world")
        print(table([titles, *(_cells(row) for row in rows)]))
        print(f"{len(rows)} episodes")
        return 0


@dataclass(frozen=True, kw_only=True)
class Show:
    """Show one episode, decision by decision."""

    path: Path
    """A run's folder, or its replay folder."""
    episode: str
    """Its id, or the beginning of it."""

    def run(self) -> int:
        """Print its scalars, then one row per decision."""
        found = find_episode(replay_folder(self.path), self.episode)
        print(table([(name, str(getattr(found, name))) for name in EPISODE_SCALARS]))
        print(f"images: {list(found.frames.shape)}, video frames kept: {len(found.video)}\n")
        titles = ("decision", "version", "noise seed", "reward", "score", "mean logprob", "value")
        rows = [
            (
                str(n),
                str(found.policy_versions[n]),
                str(found.noise_seeds[n]),
                f"{found.rewards[n].sum():g}",
                f"{found.success_scores[n].max():.3f}",
                f"{found.logprobs[n].mean():.4f}",
                f"{found.values[n]:.4g}",
            )
            for n in range(len(found.frames))
        ]
        print(table([titles, *rows]))
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check every file: checksums, completeness, consistency. Exit code 1 on damage."""

    path: Path
    """A run's folder, or its replay folder."""

    def run(self) -> int:
        """Print one line per damaged file, then a summary."""
        folder = replay_folder(self.path)
        paths, damaged = sorted(folder.glob(PATTERN)), 0
        group_size = int(read_meta(folder)["group_size"])
        for path in paths:
            problem = problem_with_file(path, group_size)
            if problem and path.exists():  # A live run deletes used groups.
                damaged += 1
                print(f"DAMAGED {path.name}: {problem}")
        away = len(list((folder / "quarantine").glob("*")))
        print(f"{len(paths)} groups checked, {damaged} damaged, {away} in quarantine since earlier")
        return 1 if damaged else 0


@dataclass(frozen=True, kw_only=True)
class Video:
    """Write an episode as an animated GIF."""

    path: Path
    """A run's folder, or its replay folder."""
    episode: str
    """Its id, or the beginning of it."""
    out: Path
    """File to write, ending in .gif."""

    def run(self) -> int:
        """Write it from every frame if they were kept, else from the frames the decisions were taken on."""
        from PIL import Image

        if self.out.suffix.lower() != ".gif" or not self.out.parent.is_dir():
            raise ConfigError(
                f"{self.out} cannot be written: give a name ending in .gif in an existing folder."
            )
        found = find_episode(replay_folder(self.path), self.episode)
        whole = len(found.video) > 0
        frames = [*found.video] if whole else [*found.frames, found.final_frame]
        images = [Image.fromarray(frame) for frame in frames]
        duration = STEP_MS if whole else STEP_MS * found.rewards.shape[1]
        images[0].save(self.out, save_all=True, append_images=images[1:], duration=duration, loop=0)
        source = (
            "every imagined frame" if whole else "one frame per decision and the last one (no video kept)"
        )
        print(f"{self.out}: {len(frames)} frames of episode {found.episode_id}: {source}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Sum up: success by task, decisions by policy version."""

    path: Path
    """A run's folder, or its replay folder."""

    def run(self) -> int:
        """Print both tables."""
        by_task: dict[str, list[Row]] = defaultdict(list)
        versions: Counter[int] = Counter()
        groups: dict[int, bool] = {}
        for row in read_rows(replay_folder(self.path)):
            by_task[row.episode.task].append(row)
            versions.update(row.episode.policy_versions.tolist())
            groups[row.number] = row.filtered
        lines = [("task", "episodes", "success", "mean steps")]
        for task, rows in sorted(by_task.items()):
            success = sum(row.episode.success for row in rows) / len(rows)
            steps = sum(row.steps for row in rows) / len(rows)
            lines.append((task, str(len(rows)), f"{success:.1%}", f"{steps:.1f}"))
        print(table(lines))
        print()
        most = max(versions.values(), default=1)
        bars = [(str(v), str(n), "#" * max(1, 40 * n // most)) for v, n in sorted(versions.items())]
        print(table([("version", "decisions", ""), *bars]))
        if any(groups.values()):
            print(f"\n{sum(groups.values())} of {len(groups)} groups filtered: all returns were equal")
        return 0


def table(rows: list[tuple[str, ...]]) -> str:
    """Align columns: text to the left, numbers to the right; the first row may hold titles."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    numeric = [all(_is_number(row[i]) for row in rows[1:]) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def _is_number(text: str) -> bool:
    return text in ("-", "filtered") or text.strip("%").replace(".", "", 1).replace("-", "", 1).isdigit()


def _cells(row: Row) -> tuple[str, ...]:
    episode, oldest, newest = row.episode, row.episode.oldest_version, row.newest_version
    return (
        episode.episode_id[:12],
        str(row.number),
        str(episode.member),
        episode.task,
        "yes" if episode.success else "no",
        str(row.steps),
        str(oldest) if oldest == newest else f"{oldest}..{newest}",
        "filtered" if row.filtered else "-" if row.lag is None else str(row.lag),
        str(episode.world_version),
    )

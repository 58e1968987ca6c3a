"""What a run keeps of its rounds: `pace.jsonl`, and a folder for the episodes and the world of each.

    RUN/pace.jsonl                 a line per round, written last: what has no line did not happen
    RUN/true/round_000006/         true episodes of policy version 6, as recordings
    RUN/worlds/version_000001/     a world that the run went on with: a folder that --world takes

Folders are complete or absent. A run that goes on from an earlier checkpoint forgets what came later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncrl.storage import json_lines
from asyncrl.storage.regular_files import remove

NAME: Final = "pace.jsonl"
WORLDS: Final = "worlds"
TRUE: Final = "true"
_WORLD: Final = re.compile(r"version_(\d{6,})")
_ROUND: Final = re.compile(r"round_(\d{6,})")


@dataclass(frozen=True, kw_only=True)
class Round:
    """What came of one round."""

    version: int
    """Policy version that made the true episodes."""
    time: float
    """When it was over, in seconds since 1970."""
    world: int
    """Version of the world that the run goes on with."""
    published: bool
    """Whether that is a new version."""
    accepted: bool
    """Whether it is the refitted one; else only its key frames are new."""
    keyframes: int
    """That it came with."""
    source: str
    """Simulator, or folder of recordings."""
    episodes: int
    """True episodes of this round."""
    successes: int
    success: float
    """Share of them, in [0, 1]; `low` and `high` are the ends of its 95 % Wilson interval."""
    low: float
    high: float
    audited: int
    """Of them, those that were imagined again by both worlds from the same start with the same actions."""
    solved: int
    """Of the audited ones, true successes."""
    judged: int
    """Those that the world before the round makes a success."""
    wrong: int
    """Those that it judges unlike the truth."""
    false: int
    """Those that it makes a success and that are none."""
    wrong_after: int
    """As `wrong`, of the refitted world, whether it was accepted or not."""
    false_after: int
    """As `false`, of the refitted world."""
    collect_seconds: float
    """That the true episodes took, and..."""
    fit_seconds: float
    """...that refits and audits took."""

    @property
    def truth(self) -> str:
        """Say how often the policy truly succeeded."""
        interval = f"[{self.low:.1%}, {self.high:.1%}]"
        return f"true success {self.success:.1%} {interval} of {self.episodes} (version {self.version})"

    @property
    def verdicts(self) -> str:
        """Say how many verdicts were wrong before the refit and after it."""
        before, after = (f"{n / self.audited:.1%}" for n in (self.wrong, self.wrong_after))
        return f"wrong verdicts {before} -> {after} of {self.audited}"

    @property
    def outcome(self) -> str:
        """Say with which world the run goes on."""
        after = f"world {self.world} accepted" if self.accepted else f"world {self.world} stays"
        if self.published and not self.accepted:
            after = f"refit refused, world {self.world} has new key frames"
        if self.keyframes:
            after += f" ({self.keyframes} key frames)"
        return after

    def __str__(self) -> str:
        return f"{self.truth}; {self.verdicts}: {self.outcome}"


def append(run_dir: Path, row: Round) -> None:
    """Add a line; raises OSError when it cannot be written."""
    json_lines.append(run_dir / NAME, row)


def read(run_dir: Path) -> list[Round]:
    """Return all rounds that can be read, oldest first."""
    return json_lines.read(run_dir / NAME, Round)


def newest(run_dir: Path) -> Round | None:
    """Return the last round that a run made; None: none, or its file cannot be read."""
    try:
        made = read(run_dir)
    except OSError:
        return None
    return made[-1] if made else None


def world_folder(run_dir: Path, version: int) -> Path:
    """Return where a world's version is."""
    return run_dir / WORLDS / f"version_{version:06d}"


def round_folder(run_dir: Path, version: int) -> Path:
    """Return where the true episodes of a policy version are."""
    return run_dir / TRUE / f"round_{version:06d}"


def newest_world(run_dir: Path) -> int | None:
    """Return the version of the world that the last round left; None: that of the run's beginning."""
    published = [row.world for row in read(run_dir) if row.published]
    return published[-1] if published else None


def world_at(run_dir: Path, version: int) -> Path | None:
    """Return the folder of the world in which a policy version was trained; None: that of the beginning."""
    published = [row.world for row in read(run_dir) if row.published and row.version < version]
    return world_folder(run_dir, published[-1]) if published else None


def cut_after(run_dir: Path, version: int) -> None:
    """Forget the rounds of later policy versions, and what a round that was interrupted left."""
    json_lines.keep(run_dir / NAME, Round, lambda row: row.version <= version)
    put_away_unfinished(run_dir)


def put_away_unfinished(run_dir: Path) -> None:
    """Delete the episodes and worlds that belong to no round in the file, while nobody makes one."""
    rows = read(run_dir)
    worlds, played = {row.world for row in rows if row.published}, {row.version for row in rows}
    for folder, pattern, known in ((WORLDS, _WORLD, worlds), (TRUE, _ROUND, played)):
        for path in sorted((run_dir / folder).glob("*")):
            match = pattern.fullmatch(path.name)
            if match is None or int(match[1]) not in known:
                remove(path)

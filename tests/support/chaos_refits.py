"""A run with --pace.every that is being hit: its flags, and what its stored episodes say of their worlds."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from asyncrl import cli
from asyncrl.pace import rounds
from asyncrl.replay.files.format import read_group_file
from asyncrl.replay.store import PATTERN
from asyncrl.replay_tools.episodes import find_group, replay_folder
from support.pace_runs import PACE, write_models_and_base
from support.tiny_models import GROUP_SIZE

MAX_WORLD_LAG: Final = 1
SETTINGS: Final = PACE | {
    "actor.max-decisions": 4,
    "actor.pipeline-stages": 2,
    "actor.threads": 1,
    "actor.success-threshold": 0.999,
    "replay.max-world-lag": MAX_WORLD_LAG,
    "replay.keep-video-every": 1,
}
"""Small rounds; long episodes in two stages of slots, all frames of which are stored."""


def refit_flags(folder: Path) -> list[str]:
    """Write models of random weights and old recordings; the flags of a run with them."""
    flags = write_models_and_base(folder)
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    given |= {f"--{name}": str(value) for name, value in SETTINGS.items()}
    return [*itertools.chain.from_iterable(given.items()), "--imagination.fixed-shape"]


@dataclass(kw_only=True)
class WorldReport:
    """What stored episodes say of the worlds that drew them."""

    worlds: int = 0
    """Accepted by rounds."""
    drawn: dict[int, set[int]]
    """Stored group -> the worlds that drew its decisions."""
    wrong: list[str]
    """Stored episodes whose worlds cannot be what they say."""
    too_old: list[tuple[int, int]]
    """Batches with a decision beyond the bound: its world, and the newest that a batch had until then."""

    @property
    def mixed(self) -> int:
        """Count the groups that several worlds drew."""
        return sum(len(worlds) > 1 for worlds in self.drawn.values())


def look_at_worlds(run: Path, notes: Path) -> WorldReport:
    """Check what is stored in a run that is over, against what its rounds say.

    A world exists from the line of its round on; a group's file is written after its last decision was drawn.
    """
    born = {row.world: row.time for row in rounds.read(run) if row.published}
    found = WorldReport(worlds=len(born), drawn={}, wrong=[], too_old=[])
    for path in sorted(replay_folder(run).glob(PATTERN)):
        about = read_group_file(path)
        written = about.mtime_ns / 1e9
        for episode in find_group(path.parent, about.number):
            worlds = episode.world_versions
            if worlds is None or (np.diff(worlds) < 0).any():
                found.wrong.append(f"{path.name}: {worlds}")
                continue
            found.drawn.setdefault(int(episode.group_id), set()).update(worlds.tolist())
            unborn = [world for world in worlds.tolist() if world and born.get(world, np.inf) > written]
            found.wrong += [f"{path.name}: {worlds}, at {written} there was no {unborn}"] if unborn else []
    newest = 0
    for note in map(json.loads, notes.read_text().splitlines()):
        if "batch" in note:
            oldest, newest = note["worlds"][0], max(newest, note["worlds"][1])
            found.too_old += [(oldest, newest)] if newest - oldest > MAX_WORLD_LAG else []
    return found


def sample(drawn: dict[int, set[int]], count: int) -> list[int]:
    """Choose groups: first those that several worlds drew, then of every world some."""
    mixed = sorted(drawn, key=lambda number: -len(drawn[number]))[: count // 2]
    last_of = {max(worlds): number for number, worlds in sorted(drawn.items())}
    return list(dict.fromkeys([*mixed, *last_of.values(), *drawn]))[:count]


def unlike_again(run: Path, numbers: list[int]) -> list[str]:
    """Imagine groups again from actions, seeds and worlds that are stored; what is not equal bit for bit."""
    threads, found = torch.get_num_threads(), list[str]()
    torch.set_num_threads(1)
    try:
        for number in numbers:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                code = cli.run("replay", ["imagine", str(run), str(number), "--device", "cpu"])
            if code or f"{GROUP_SIZE} members: {GROUP_SIZE} equal" not in said.getvalue():
                found.append(said.getvalue())
    finally:
        torch.set_num_threads(threads)
    return found

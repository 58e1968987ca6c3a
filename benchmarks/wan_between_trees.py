"""Does the Wan world draw the same frames as in another checkout of this repository, and as fast?

    git worktree add --detach ../before e48a4de
    python benchmarks/wan_between_trees.py --other ../before

Both trees load the world and the start states that this one ships, each in a process of its own with one
thread. First either draws the same decisions in both memories, and the frames are compared bit by bit. Then
they take turns, A B B A: in each round both draw the same decisions, and the ratio of the round is this
tree's frames per second to the other's. All of this is done anew with fresh processes, because one process
differs from the next by where its memory lies. A pair of processes counts with the median of its rounds; the
result is the mean over pairs with two standard errors of it. Seconds are those of the processor
that a process was given, which others on the machine disturb less than the clock on the wall.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
import tyro
from measuring import heading, table
from numpy.typing import NDArray

ROOT: Final = Path(__file__).parents[1]
WORLD: Final = ROOT / "asyncrl/assets/tabletop/world"
STARTS: Final = ROOT / "asyncrl/assets/tabletop/start_states.h5"
DRAWER: Final = "--draw"
"""First argument of a process that draws."""
Memory = Literal["latents", "frames"]
MEMORIES: Final[tuple[Memory, ...]] = ("latents", "frames")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare the Wan world with that of another checkout."""

    other: Path
    """Folder of the other checkout."""
    rows: int = 4
    """Slots imagined together."""
    decisions: int = 3
    """Of an episode, one after the other."""
    pairs: int = 8
    """Pairs of processes, one after the other; at least 2."""
    rounds: int = 4
    """Pairs of readings of a pair of processes, for each memory."""
    json: str = ""
    """Also write the numbers here."""


# ---- the process of one tree; only what both trees have may be used ------------------------------------


def draw(rows: int, decisions: int) -> None:
    """Answer lines from standard input, 'MEMORY FILE', with a line of two numbers.

    The first line says where the code is. Draws an episode of `rows` slots, writes its frames
    ``[decisions, rows, 8, H, W, 3]`` uint8 to the file (if it is not '-'), and says how many seconds of the
    processor and of the clock the decisions took.
    """
    import asyncrl
    from asyncrl.config.run import TrainConfig
    from asyncrl.worlds.start_states import load_start_states
    from asyncrl.worlds.wan.world import WanWorld

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    usual = TrainConfig().imagination  # Its class is in another module of an older tree.
    worlds = {name: WanWorld.load(WORLD, cpu, replace(usual, context=name)) for name in MEMORIES}
    states = load_start_states(STARTS)[:rows]
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (decisions, rows, 8, 7)).astype(np.float32)
    print(Path(asyncrl.__file__).parents[1], flush=True)
    for line in sys.stdin:
        memory, file = line.split()
        world: Any = worlds[memory]
        told = {"decisions": decisions} if "decisions" in inspect.signature(world.start).parameters else {}
        state, drawn = world.start(states, **told), []
        used, began = time.process_time(), time.perf_counter()
        for number in range(decisions):
            seeds = [number * rows + row for row in range(rows)]
            frames, state = world.imagine(state, actions[number], seeds)
            drawn.append(frames.numpy())
        seconds = [time.process_time() - used, time.perf_counter() - began]
        if file != "-":
            np.save(file, np.stack(drawn))
        print(json.dumps(seconds), flush=True)


# ---- both -----------------------------------------------------------------------------------------------


class Tree:
    """A process that draws with the code of one checkout."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Start it.

        Raises:
            SystemExit: There is no such code in the folder, or it is not what the process runs.
        """
        folder = folder.resolve()
        if not (folder / "asyncrl/worlds/wan/world.py").is_file():
            sys.exit(f"{folder} is no checkout that has asyncrl/worlds/wan/world.py.")
        self.commit = _commit(folder)
        arguments = [DRAWER, str(settings.rows), str(settings.decisions)]
        paths = filter(None, [str(folder), os.environ.get("PYTHONPATH")])
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )

        if (ran := self._answer()) != str(folder):
            sys.exit(f"The process that was to run the code in {folder} runs that in {ran}.")

    def draw(self, memory: Memory, file: str = "-") -> NDArray[np.float64]:
        """Draw an episode: ``[2]`` seconds of the processor and of the clock. See `draw`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{memory} {file}\n")
        self._process.stdin.flush()
        return np.array(json.loads(self._answer()))

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            sys.exit("A process that draws has ended; what it said is above.")
        return line.rstrip("\n")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Of this tree's frames per second to the other's."""

    mean: float
    spread: float
    """Two standard errors of the mean."""

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        """Summarise pairs of processes."""
        values = np.array(ratios)
        return cls(mean=float(values.mean()), spread=float(2 * values.std(ddof=1) / len(values) ** 0.5))


def different_frames(here: Tree, there: Tree, memory: Memory) -> tuple[int, int]:
    """Let both draw the same; returns in how many frames a number differs, and of how many."""
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in ("here.npy", "there.npy")]
        for tree, file in zip((here, there), files, strict=True):
            tree.draw(memory, file)
        ours, theirs = (np.load(file) for file in files)
    return int((ours != theirs).any(axis=(-3, -2, -1)).sum()), ours[..., 0, 0, 0].size


def readings(here: Tree, there: Tree, memory: Memory, rounds: int) -> NDArray[np.float64]:
    """Take turns: ``[rounds, 2, 2]`` seconds, of this tree and the other, of the processor and the clock."""
    found = []
    for number in range(rounds):
        order = (here, there) if number % 2 == 0 else (there, here)
        seconds = {tree: tree.draw(memory) for tree in order}
        found.append([seconds[here], seconds[there]])
    return np.array(found)


def _commit(folder: Path) -> str:
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty=+"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"


def main() -> None:
    """Compare, take turns, print."""
    settings = tyro.cli(Settings, description=__doc__)
    print(heading(torch.device("cpu")))
    different = dict.fromkeys(MEMORIES, 0)
    count, seconds = 0, dict[Memory, list[NDArray[np.float64]]]((name, []) for name in MEMORIES)
    for pair in range(settings.pairs):
        here, there = Tree(ROOT, settings), Tree(settings.other, settings)
        for memory in MEMORIES:
            unequal, count = different_frames(here, there, memory)
            different[memory] += unequal
            seconds[memory].append(np.median(readings(here, there, memory, settings.rounds), axis=0))
        here.close()
        there.close()
        last = {memory: seconds[memory][-1][:, 0] for memory in MEMORIES}
        ratios = ", ".join(f"{memory} {other / ours:.3f}" for memory, (ours, other) in last.items())
        print(f"pair {pair + 1} of {settings.pairs}: {here.commit} to {there.commit}: {ratios}", flush=True)
    lines, written = [], dict[str, Any]()
    for memory in MEMORIES:
        taken_P22 = np.array(seconds[memory])
        speeds = settings.rows * settings.decisions * 8 / taken_P22.mean(axis=0)
        unequal = f"{different[memory]} of {count * settings.pairs}"
        for clock, name in enumerate(("processor", "wall")):
            ratio = Ratio.of(list(taken_P22[:, 1, clock] / taken_P22[:, 0, clock]))
            speed = [f"{value:.1f}" for value in speeds[:, clock]]
            lines.append([memory, unequal, name, *speed, f"{ratio.mean:.3f} +- {ratio.spread:.3f}"])
            written[f"{memory}, {name}"] = vars(ratio) | {"different": different[memory]}
    print("\n" + table(["memory", "frames that differ", "seconds", "frames/s", "other", "ratio"], lines))
    if settings.json:
        Path(settings.json).write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == [DRAWER]:
        draw(*map(int, sys.argv[2:]))
    else:
        main()

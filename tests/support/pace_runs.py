"""Small runs with --pace.every: their models, their flags, and what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from asyncrl import cli
from asyncrl.observability import process_status
from asyncrl.pace import rounds
from asyncrl.replay_tools.episodes import read_rows, replay_folder
from asyncrl.simulators.tabletop.scene import TASKS
from support.recorded import recorded_spec, write_recorded
from support.tiny_models import write_models
from support.whole_runs import TRAIN, environment, left_over, reach

PACE = {
    "pace.every": 2,
    "pace.episodes": 8,
    "pace.held-out": 0.5,
    "pace.fresh": 0.5,
    "pace.world-steps": 2,
    "pace.reward-steps": 4,
    "pace.batch": 8,
    "pace.workers": 0,
    "actor.success-threshold": 0.5,
    "actor.max-decisions": 2,
}


def write_models_and_base(folder: Path) -> list[str]:
    """Write models of random weights, and old recordings that show what solved looks like; their flags.

    The policy of random weights never solves anything.
    """
    old = recorded_spec(64, simulator="tabletop", tasks=tuple(TASKS), trials=0)
    write_recorded(folder / "base", old, (17,) * 8)
    return [*write_models(folder), "--pace.base", str(folder / "base")]


def flags(models: tuple[Path, list[str]], **changes: Any) -> list[str]:
    said = PACE | changes
    return [*models[1], *(text for name, value in said.items() for text in (f"--{name}", str(value)))]


def train(*arguments: object) -> None:
    assert cli.run("train", [str(argument) for argument in arguments]) == 0


def worlds_of(run: Path) -> dict[int, list[int]]:
    """Group -> the worlds that drew its decisions."""
    found: dict[int, list[int]] = {}
    for row in read_rows(replay_folder(run), more=["world_versions"]):
        assert row.episode.world_versions is not None
        found.setdefault(row.number, []).extend(row.episode.world_versions.tolist())
    return found


class Running:
    """A run that goes on until it is ended, in processes of its own."""

    def __init__(self, tmp_path: Path, settings: list[str]) -> None:
        self.folder, self.tmp_path = tmp_path / "run", tmp_path
        self.process = subprocess.Popen(
            [*TRAIN, *settings, "--run-dir", str(self.folder), "--updates", "100000"],
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Running:
        reach(self.folder, 1, self.process, 60)
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()

    def pids(self, role: str) -> list[int]:
        return [one.pid for one in process_status.read(self.folder) if one.role == role and one.alive]

    def doing(self, role: str, what: str) -> bool:
        """Whether what a thread of a role says that it does ends like this."""
        living = [one for one in process_status.read(self.folder) if one.role == role and one.alive]
        return any(activity.what.endswith(what) for one in living for activity in one.activities)

    def until(self, true: Any, what: str) -> None:
        deadline = time.monotonic() + 90
        while not true():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, what
            time.sleep(0.1)

    def replaced(self, role: str) -> None:
        (pid,) = self.pids(role)
        os.kill(pid, signal.SIGKILL)
        self.until(lambda: self.pids(role) not in ([], [pid]), f"{role} came back")

    def end(self) -> str:
        os.killpg(self.process.pid, signal.SIGINT)
        said, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, errors
        assert left_over(self.tmp_path) == []
        made = {row.version for row in rounds.read(self.folder)}
        played = {int(path.name.removeprefix("round_")) for path in self.folder.glob("true/*")}
        assert played <= made, "a round that was not finished is put away"
        assert not (self.folder / "checkpoints" / "refitting").exists()
        return said

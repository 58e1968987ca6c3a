"""A run that actors join over loopback tcp, with the keys that another host would get."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from asyncrl.messaging.keys import create_keys
from support.whole_runs import ACTOR, PATIENCE, TRAIN, Program, free_port, rows


class Site:
    """A run on loopback tcp with keys and without actors of its own."""

    def __init__(self, tmp_path: Path, flags: list[str]) -> None:
        self.tmp_path, self.run, self.keys = tmp_path, tmp_path / "run", tmp_path / "far-keys"
        own = tmp_path / "keys"
        create_keys(own, ["learner", "far"])
        self.keys.mkdir(mode=0o700)
        for file in ("server.public", "far.secret"):  # All that another host gets.
            shutil.copy2(own / file, self.keys / file)
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        listen = [
            "--replay.listen",
            self.endpoint,
            "--replay.keys",
            str(own),
            "--replay.heartbeat-timeout",
            "8",
        ]
        alone = ["--placement", "learner=0", "--updates", "100000", "--run-dir", str(self.run)]
        self.programs = [Program(tmp_path, "train", [*TRAIN, *flags, *alone, *listen])]
        self.train = self.programs[0]

    def actor(self, name: str, *more: str) -> Program:
        command = [*ACTOR, "--join", self.endpoint, "--keys", str(self.keys), "--name", name, *more]
        self.programs.append(Program(self.tmp_path, name, [*command, "--device", "cpu", "--threads", "1"]))
        return self.programs[-1]

    def updates(self) -> int:
        return len(rows(self.run)) if (self.run / "metrics.jsonl").exists() else 0

    def progress(self, updates: int) -> None:
        deadline, goal = time.monotonic() + PATIENCE, self.updates() + updates
        while self.updates() < goal:
            assert self.train.process.poll() is None, self.train.said()
            assert time.monotonic() < deadline, "\n".join(each.said() for each in self.programs)
            time.sleep(0.05)

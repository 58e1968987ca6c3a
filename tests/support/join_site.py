"""A run that actors join."""

import shutil
import sys
from pathlib import Path
from typing import Self

from asyncrl.messaging.keys import create_keys
from support.whole_runs import ACTOR, PATIENCE, Program, free_port, reach, rows

QUICK = Path(__file__).with_name("quick_silence.py")


class Site:
    """A run on loopback tcp with keys, and programs of actors that join it by the key `far`."""

    def __init__(self, tmp_path: Path, flags: list[str], *own_actors: str) -> None:
        self.tmp_path, self.run, self.keys = tmp_path, tmp_path / "run", tmp_path / "far-keys"
        own, self.endpoint = tmp_path / "keys", f"tcp://127.0.0.1:{free_port()}"
        create_keys(own, ["learner", "far", *own_actors])
        self.keys.mkdir(mode=0o700)
        for file in ("server.public", "far.secret"):  # All that another host gets.
            shutil.copy2(own / file, self.keys / file)
        listen = ["--replay.listen", self.endpoint, "--replay.keys", str(own), "--run-dir", str(self.run)]
        self.train = Program(tmp_path, "train", [sys.executable, str(QUICK), *flags, *listen])
        self.programs = [self.train]

    def actor(self, name: str) -> Program:
        command = [*ACTOR, "--join", self.endpoint, "--keys", str(self.keys), "--name", name]
        self.programs.append(Program(self.tmp_path, name, [*command, "--device", "cpu", "--threads", "1"]))
        return self.programs[-1]

    def progress(self, updates: int) -> None:
        """Wait for so many more updates."""
        made = len(rows(self.run)) if (self.run / "metrics.jsonl").exists() else 0
        reach(self.run, made + updates, self.train.process, PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self.programs:
            program.process.kill()

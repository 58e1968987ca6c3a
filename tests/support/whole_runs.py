"""Whole runs as a user starts them: commands, environment, and what is left of them."""

import json
import os
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Self

import pytest

from asyncrl import cli
from support import ROOT
from support.chaos_run import marked

TRAIN = [sys.executable, "-m", "asyncrl", "train"]
ACTOR = [sys.executable, "-m", "asyncrl", "actor"]
PATIENCE = 200.0
"""Seconds a program of a test has to say or do something."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def environment(tmp_path: Path) -> dict[str, str]:
    """A short TMPDIR of its own (unix sockets), so that leftovers are seen; no torchrun variables."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    base = next(path for path in tmp_path.parents if not path.name.startswith("popen-"))
    temporary = base / f"t{zlib.crc32(str(tmp_path).encode()):x}"
    temporary.mkdir(exist_ok=True)
    if not (tmp_path / "tmp").exists():
        (tmp_path / "tmp").symlink_to(temporary)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TMPDIR": str(temporary), "MARK": str(tmp_path)}
    return kept | more


def left_over(tmp_path: Path, patience: float = 5.0) -> list[str]:
    """Processes that were started with this test's environment and still run after `patience` seconds."""
    until = time.monotonic() + patience
    while (found := marked(f"MARK={tmp_path}")) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def exit_code(arguments: list[str], command: str = "train") -> int:
    try:
        return cli.run(command, arguments)
    except SystemExit as end:  # How tyro refuses a flag.
        return int(end.code or 0)


def refused(capsys: pytest.CaptureFixture[str], command: str, arguments: list[str]) -> str:
    """What a call says that ends with code 2, without line breaks and frames."""
    assert exit_code(arguments, command) == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


def reach(run: Path, updates: int, process: subprocess.Popen[Any], deadline: float) -> None:
    """Wait until the run has logged `updates` updates."""
    until = time.monotonic() + deadline
    path = run / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < updates:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, f"{path} has not {updates} rows after {deadline} s"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Program:
    """A process in a session of its own, whose output goes to a file; a context kills it at its end."""

    def __init__(
        self,
        tmp_path: Path,
        name: str,
        command: list[str],
        cwd: Path | None = None,
        more: dict[str, str] | None = None,
    ) -> None:
        """Start it; `more` is added to its environment."""
        self.output = tmp_path / f"{name}.txt"
        settings = environment(tmp_path) | (more or {})
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                command, env=settings, stdout=file, stderr=subprocess.STDOUT, cwd=cwd, start_new_session=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def said(self) -> str:
        return self.output.read_text()

    def until(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while text not in self.said():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, f"{text!r} was never said: {self.said()}"
            time.sleep(0.05)

    def ends(self, code: int = 0) -> str:
        assert self.process.wait(PATIENCE) == code, self.said()
        return self.said()


def on_two_ranks(folder: Path, program: list[str], arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program by torchrun, its temporary files in `folder`."""
    return subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "2", *program, *arguments],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=180,
    )

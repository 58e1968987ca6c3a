"""What strangers, a second run and another user of the host can do to a run that is alive: nothing.

    python benchmarks/strangers.py --seconds 40

Three runs with random tiny models on the CPU, one after the other: one as `asyncrl train` starts it, one with
--replay.listen, one with --replay.keys too. Where the system allows it all of it happens in a network
namespace of its own. While a run trains,

    a stranger     finds every TCP port that processes of the run listen on; to each it sends text, bytes, the
                   begin of a greeting and one message without an end, and opens 300 silent connections;
                   it speaks as the learner and as an actor, without a key and with one that nobody admits
    a second run   asks for the same folder (--resume), the same address and the same keys, and begins in
                   a copy of the folder
    another user   (where this process may become one) reads and connects to whatever it finds

A row says how many updates the run made meanwhile, which group files were lost (gone, and the ledger does not
say why), and how the run ended. Exit code 1 when a file was lost, or a run ended by itself or stood still.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
import zmq

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from asyncrl.messaging.curve_keys import create_keys, load_client_keys  # noqa: E402
from asyncrl.messaging.wire import encode  # noqa: E402
from asyncrl.replay.ledger import read_entries  # noqa: E402
from asyncrl.replay.store import PATTERN  # noqa: E402
from support.tiny_models import write_models  # noqa: E402

NOBODY = 65534
SILENT = 300
TRAIN = [sys.executable, "-m", "asyncrl", "train"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Trouble runs that are alive."""

    seconds: float = 40.0
    """How long each run is troubled."""
    seed: int = 0
    inside: bool = False
    """Already in a namespace of its own; set by the script itself."""


@dataclass(kw_only=True)
class Outcome:
    """What became of a run."""

    name: str
    updates: int
    acts: int
    refused: int
    """Second runs that ended with exit code 2, as they should."""
    let_in: int
    """Second runs that did not."""
    lost: list[str]
    ended: str


class Run:
    """A run that is being troubled."""

    def __init__(self, folder: Path, models: list[str], more: list[str]) -> None:
        """Start it and wait for its second update."""
        self.folder, self.run, self.models, self.more = folder, folder / "run", models, more
        self.output = folder / "output"
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        (folder / "tmp").mkdir()
        self.environment = kept | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder / "tmp"),
        }
        command = [*TRAIN, *models, *more, "--run-dir", str(self.run), "--updates", "1000000"]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--checkpoint-every", "5"],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until = time.monotonic() + 120
        while self.updates < 2:
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(self.output.read_text())
            time.sleep(0.2)

    @property
    def updates(self) -> int:
        """How many it has made."""
        file = self.run / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.is_file() else 0

    def ports(self) -> list[int]:
        """TCP ports that processes of the run listen on."""
        processes = subprocess.run(
            ["pgrep", "-s", str(self.process.pid)], capture_output=True, text=True
        ).stdout.split()
        sockets = set[str]()
        for pid in processes:
            with contextlib.suppress(OSError):
                for entry in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        sockets.add(str(entry.readlink()))
        found = set[int]()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                    found.add(int(words[1].rpartition(":")[2], 16))
        return sorted(found)

    def files(self) -> set[str]:
        """Group files that are sealed."""
        return {str(path.relative_to(self.run)) for path in (self.run / "replay").glob(PATTERN)}

    def second(self, *arguments: str) -> int:
        """Try to begin another run; its exit code."""
        try:
            done = subprocess.run(
                [*TRAIN, *arguments], env=self.environment, capture_output=True, text=True, timeout=60
            )
        except subprocess.TimeoutExpired:
            return -1
        return done.returncode

    def end(self) -> str:
        """Stop it as a user does."""
        if self.process.poll() is not None:
            return f"by itself, {self.process.returncode}"
        self.process.send_signal(signal.SIGINT)
        try:
            return f"as asked, {self.process.wait(60)}"
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return "not within 60 s"


def stranger(run: Run, chance: random.Random) -> Iterator[str]:
    """One act after the other, for ever."""
    silent: list[socket.socket] = []
    while True:
        for port in run.ports():
            for line in (
                b"hello\n",
                chance.randbytes(200),
                b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL".ljust(64, b"\0"),
            ):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as link:
                    link.sendall(line)
                    yield "bytes"
            with contextlib.suppress(OSError):
                while len(silent) < SILENT:
                    silent.append(socket.create_connection(("127.0.0.1", port), 1))
            yield "silence"
            yield from spoken(f"tcp://127.0.0.1:{port}", run.folder)
            while silent:
                silent.pop().close()
        yield "nothing to reach"
        time.sleep(0.2)


def spoken(endpoint: str, folder: Path) -> Iterator[str]:
    """Speak the protocol to an endpoint, without a key and with one that nobody admits."""
    create_keys(folder / "foreign", ["learner"])
    for keys in (None, load_client_keys(folder / "foreign", "learner")):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        if keys is not None:
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        dealer.connect(endpoint)
        about: dict[str, Any] = {"session": "x", "version": 0, "secret": "0" * 64, "attempt": 1}
        messages = [
            encode("hello", role="learner", name="learner", **about),
            encode("stop"),
            encode("hello", role="actor", name="actor-0", **about),
            encode("sample", request="r", groups=1, version=0),
        ]
        with contextlib.suppress(zmq.Again):
            for message in messages:
                dealer.send_multipart(message, zmq.NOBLOCK)
            for _ in range(200):  # One message without an end.
                dealer.send(bytes(2**20), zmq.NOBLOCK | zmq.SNDMORE)
        time.sleep(0.3)
        context.destroy(linger=0)
        yield "protocol"


def second_runs(run: Run, over: threading.Event, found: Outcome) -> None:
    """Ask for the folder, the address and the keys of the run, and begin in a copy of its folder."""
    listen = run.more or ["--replay.max-lag", "2"]
    number = 0
    while not over.is_set():
        number += 1
        codes = [run.second("--resume", "--run-dir", str(run.run))]
        copy = run.folder / f"copy-{number}"
        with contextlib.suppress(shutil.Error, OSError):  # It changes while it is copied.
            shutil.copytree(run.run, copy, ignore=shutil.ignore_patterns("*.tmp"))
        if run.more:
            codes.append(run.second(*run.models, *listen, "--run-dir", str(run.folder / f"other-{number}")))
            codes.append(run.second("--resume", "--run-dir", str(copy)))
        else:
            # A copy has nothing in common with the run, so it may go on: by itself, and not for ever.
            run.second("--resume", "--run-dir", str(copy), "--updates", "3")
        found.refused += codes.count(2)
        found.let_in += len(codes) - codes.count(2)
        shutil.rmtree(copy, ignore_errors=True)


def another_user(run: Run) -> str:
    """Try as another user to read what is private and to connect; what was possible."""
    script = (
        "import os, pathlib, socket, sys\n"
        f"os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "for name in sys.argv[1:]:\n"
        "    parts = [pathlib.Path(name) / part for part in ('replay', 'identity', 'weights')]\n"
        "    for path in [pathlib.Path(name), *parts]:\n"
        "        try:\n"
        "            if path.is_socket():\n"
        "                socket.socket(socket.AF_UNIX).connect(str(path)); print('connected', path)\n"
        "            elif path.is_dir():\n"
        "                os.listdir(path); print('listed', path)\n"
        "            else:\n"
        "                path.read_bytes(); print('read', path)\n"
        "        except OSError:\n"
        "            pass\n"
    )
    private = (run.run / "sockets").read_text()
    names = [private, str(run.run / "identity.json"), str(run.run / "keys" / "learner.secret")]
    done = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True)
    if "PermissionError" in done.stderr or "Operation not permitted" in done.stderr:
        return "cannot be played here"
    return done.stdout.strip() or "nothing"


def trouble(name: str, folder: Path, models: list[str], more: list[str], settings: Settings) -> Outcome:
    """Start a run, trouble it, end it."""
    run = Run(folder, models, more)
    found = Outcome(name=name, updates=0, acts=0, refused=0, let_in=0, lost=[], ended="")
    over, seen = threading.Event(), run.files()
    thread = threading.Thread(target=second_runs, args=(run, over, found))
    thread.start()
    began, until = run.updates, time.monotonic() + settings.seconds
    for _ in stranger(run, random.Random(settings.seed)):
        found.acts += 1
        seen |= run.files()
        if time.monotonic() > until or run.process.poll() is not None:
            break
    print(f"{name}: another user could reach: {another_user(run)}; TCP ports: {run.ports()}", flush=True)
    over.set()
    thread.join()
    found.updates = run.updates - began
    found.ended = run.end()
    said: list[str] = []
    entries = read_entries(run.run / "replay" / "ledger.log", said.append)
    closed = {entry[key] for entry in entries for key in ("dropped", "filtered", "pruned") if key in entry}
    used = {number for entry in entries for number in entry.get("used", ())}
    for file in sorted(seen - run.files()):
        number = int(Path(file).stem.rpartition("_")[2].rpartition("-")[2])
        if number not in closed and number not in used:
            found.lost.append(file)
    return found


def main() -> None:
    """Trouble the three runs; print the table."""
    settings = tyro.cli(Settings, description=__doc__)
    unshare = shutil.which("unshare")
    if not settings.inside and unshare:
        arguments = [sys.executable, __file__, *sys.argv[1:], "--inside"]
        script = 'ip link set lo up 2>/dev/null; exec "$@"'
        if subprocess.run([unshare, "-n", "true"], capture_output=True).returncode == 0:
            raise SystemExit(
                subprocess.run([unshare, "-n", "bash", "-c", script, "bash", *arguments]).returncode
            )
        print("no namespace of its own can be had: on the loopback device of this host", flush=True)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="strangers-", dir="/tmp") as name:
        base = Path(name)
        base.chmod(0o755)
        models = write_models(base / "models")
        create_keys(base / "key-files", ["learner", "actor-0"])
        listen = ["--replay.listen", "tcp://127.0.0.1:5555"]
        kinds = {"default": [], "listen": listen, "keys": [*listen, "--replay.keys", str(base / "key-files")]}
        for kind, more in kinds.items():
            (base / kind).mkdir()
            outcomes.append(trouble(kind, base / kind, models, more, settings))
            print(json.dumps(outcomes[-1].__dict__), flush=True)
    print("\n| run | updates meanwhile | acts | second runs refused | let in | files lost | ended |")
    print("|---" * 7 + "|")
    for o in outcomes:
        print(f"| {o.name} | {o.updates} | {o.acts} | {o.refused} | {o.let_in} | {len(o.lost)} | {o.ended} |")
    raise SystemExit(any(o.lost or o.let_in or not o.updates or o.ended != "as asked, 0" for o in outcomes))


if __name__ == "__main__":
    main()

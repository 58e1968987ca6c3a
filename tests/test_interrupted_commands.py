"""Signals and closed outputs: every command ends with one line, or does its work, and keeps what was done."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pytest

from asyncrl.commands import collect
from asyncrl.errors import RunError
from asyncrl.fitting.sources import load_recordings
from asyncrl.observability import terminal
from asyncrl.simulators.interface import SimulatorSource
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import Observations
from asyncrl.storage import run_owner
from support import ROOT
from support.recorded import recorded_spec, write_recorded
from support.recorded_run import make_run
from support.run_folders import write_run
from support.simulated import COUNTING
from support.tiny_models import flags_of, write_models
from support.whole_runs import environment, left_over

ENDLESS: Final = {
    "train": "train {flags} --inline --updates 100000 --run-dir {new}/run",
    "train, processes": "train {flags} --updates 100000 --run-dir {new}/run",
    "evaluate": "evaluate {m}/policy --simulator tabletop --episodes 50000 --workers 2",
    "audit": "audit {m}/policy --world {m}/world --simulator tabletop --episodes 10000",
    "collect": "collect --out {new}/data --episodes 100000 --workers 2",
    "fit policy": "fit policy --data {m}/data --out {new}/policy --steps 100000 --batch 8 --device cpu",
    "fit world": "fit world --data {m}/data --out {new}/world --batch 8 --device cpu",
    "fit reward": "fit reward --data {m}/data --world {m}/world --steps 100000 --batch 8 --device cpu",
    "fit decoder": "fit decoder --out {new}/decoder --held-out 1 --decisions 1 --device cpu",
    "pace": "pace --out {new}/pace --policy {m}/policy --world {m}/world --start-states {m}/starts.h5",
    "status": "status {m}/live --watch",
    "actor": "actor --join tcp://127.0.0.1:9",
}
ENDING: Final = {
    "train --dry-run": "train {flags} --dry-run",
    "train, one update": "train {flags} --inline --updates 1 --run-dir {new}/run",
    "train, an actor": "train {flags} --updates 1 --run-dir {new}/run",
    "collect, few": "collect --out {new}/data --episodes 4 --workers 1",
    "fit starts": "fit starts --data {m}/data --out {new}/starts.h5",
    "fit keyframes": "fit keyframes --data {m}/data --out {new}/keys.h5",
    "recordings list": "recordings list {m}/data",
    "recordings stats": "recordings stats {m}/data",
    "simulators list": "simulators list",
    "convert": "convert {m}/policy {new}/converted",
    **{f"replay {one}": f"replay {one} {{m}}/replayed" for one in ("list", "stats", "verify")},
    "check": "check policy {m}/policy",
    "doctor": "doctor",
    "runs": "runs {m}",
    "keys": "keys {new}/keys",
    "metrics": "metrics",
    "--help": "--help",
    "train --help": "train --help",
}
COMMANDS: Final = ENDLESS | ENDING
MOMENTS: Final = {"import": 0.02, "start": 0.3, "middle": 0.6, "end": 0.97, "second": 0.6}
"""Share of a command's time; at `second` another signal follows."""
ENDLESS_SECONDS: Final = 8.0


class Bench(NamedTuple):
    """Models, recordings and runs that all commands read."""

    folder: Path

    def words(self, name: str, new: Path) -> list[str]:
        flags = " ".join(flags_of(self.folder))
        return COMMANDS[name].format(flags=flags, m=self.folder, new=new).split()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("bench")
    write_models(folder)
    spec = recorded_spec(64, simulator="tabletop", trials=0, poses=True)
    write_recorded(folder / "data", spec, (17, 25, 33))
    make_run(folder / "replayed")
    lock = run_owner.acquire(write_run(folder / "live", made=3))
    yield Bench(folder)
    lock.release()


def start(words: Sequence[str], mark: Path, new: Path, closed: str = "") -> subprocess.Popen[str]:
    """Start a command of test `mark` in a process group of its own; `closed` is a shell's redirection."""
    program = [sys.executable, "-m", "asyncrl", *words]
    if closed:
        program = ["bash", "-c", f'exec "$@" {closed}', "bash", *program]
    return subprocess.Popen(
        program,
        env=environment(mark),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=new,
    )


def interrupted(
    process: subprocess.Popen[str], number: signal.Signals, *delays: float
) -> tuple[int, str, str]:
    """Send a signal after each delay, Ctrl-C as a terminal does; return code, output and errors."""
    for delay in delays:
        time.sleep(delay)
        if process.poll() is None:
            (os.killpg if number is signal.SIGINT else os.kill)(process.pid, number)
    said, errors = process.communicate(timeout=120)
    return process.returncode, said, errors


def hung_up(words: Sequence[str], mark: Path, new: Path, delay: float) -> tuple[int, str]:
    """Close the terminal of a command after `delay`; returns its code and all that it wrote there."""
    terminal, inner = pty.openpty()
    program = ["setsid", "--ctty", sys.executable, "-m", "asyncrl", *words]
    process = subprocess.Popen(
        program, env=environment(mark), stdin=inner, stdout=inner, stderr=inner, cwd=new
    )
    os.close(inner)
    said, until = b"", time.monotonic() + delay
    while process.poll() is None and (left := until - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            with contextlib.suppress(OSError):  # It has just ended.
                said += os.read(terminal, 65536)
    os.close(terminal)
    return process.wait(timeout=120), said.decode()


def check_end(code: int, number: signal.Signals, errors: str, mark: Path, usual: int | None) -> None:
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    assert code == 128 + number or code == usual, errors
    if code == 128 + number:
        assert errors.count("interrupted") == 1 or "pace" in errors, errors
        assert errors.rstrip().splitlines()[-1].startswith("asyncrl")
    assert left_over(mark) == []


@pytest.mark.parametrize("name", ["metrics", "keys", "replay list", "runs", "train --help", "--help"])
def test_a_command_works_with_closed_outputs(name: str, bench: Bench, tmp_path: Path) -> None:
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        (new := tmp_path / closed.replace(" ", "")).mkdir()
        process = start(bench.words(name, new), tmp_path, new, closed)
        said, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert bool(said) == (closed == "2>&-")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ENDING)
def test_every_command_works_with_a_closed_output(name: str, bench: Bench, tmp_path: Path) -> None:
    codes = []
    for closed in ("", ">&-"):
        (new := tmp_path / f"new{closed}").mkdir()
        process = start(bench.words(name, new), tmp_path, new, closed)
        errors = process.communicate(timeout=200)[1]
        codes.append(process.returncode)
        assert "Traceback" not in errors
    assert codes[0] == codes[1] in (0, 1)
    if name.startswith("train, "):
        assert (tmp_path / "new>&-/run/checkpoints/update_000001").is_dir()


SENT_AT: Final = """
import atexit, os, sys
def send(name, *_):
    if name == {at!r}:
        os.kill(os.getpid(), {number})
atexit.register(send, "end")
sys.meta_path.insert(0, type("Finder", (), {{"find_spec": staticmethod(send)}}))
sys.argv[1:] = {words!r}
from asyncrl.__main__ import start
start()
"""


@pytest.mark.parametrize(
    ("at", "number", "words", "code", "said"),
    [
        ("asyncrl.errors", 2, "metrics", -2, ""),
        *(
            ("asyncrl.cli", number, "metrics", 128 + number, "asyncrl: interrupted\n")
            for number in (1, 2, 15)
        ),
        ("tyro", 15, "status .", 143, "asyncrl: interrupted\n"),
        *(("end", number, words, 0, "") for number in (1, 2, 15) for words in ("metrics", "status --help")),
        ("end", 2, "status --wrong", 2, None),
    ],
)
def test_a_signal_before_and_behind_the_command_shows_no_traceback(at, number, words, code, said) -> None:
    """It is sent as a module is imported, or at the very end, when the exit code is settled."""
    program = SENT_AT.format(at=at, number=number, words=words.split())
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == code
    assert done.stderr == said or (said is None and "Traceback" not in done.stderr)


def test_without_a_terminal_progress_is_lines_and_never_two_bars(monkeypatch, capsys) -> None:
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    with terminal.progress(total=3, desc="outer") as outer:
        for _ in range(3):
            outer.update(len(list(terminal.progress([1], desc="inner"))))
            assert outer.miniters == 1, "tqdm's thread draws bars that are to be drawn less often"
    said = capsys.readouterr().err
    assert "\r" not in said
    assert len(lines := said.splitlines()) >= 3
    assert all(line.startswith("outer:") for line in lines)
    assert [line.startswith("outer: 100%") for line in lines].index(True) == len(lines) - 1


@pytest.mark.parametrize("ends_by", [KeyboardInterrupt(signal.SIGTERM), RunError("the pool gives up"), None])
def test_collected_episodes_are_kept_whatever_ends_it(ends_by, tmp_path, monkeypatch) -> None:
    """None: the process is killed after a minute. No file is complete by then: one holds 32 episodes."""
    monkeypatch.setattr(collect, "WRITTEN_AFTER", 60.0 if ends_by else 0.0)
    written = list[int]()

    def act(shown: Observations) -> list[np.ndarray]:
        if shown.plays[0].start.seed == 4:
            written.append(len(load_recordings([tmp_path])) if ends_by is None else 0)
            raise ends_by or RunError("killed")
        return [np.zeros((8, 7), np.float32)]

    with SimulatorPool(SimulatorSource(name=COUNTING), workers=0) as pool:
        starts = collect.training_starts(pool.spec, 9, 0)
        with pytest.raises((KeyboardInterrupt, RunError)) as ended:
            collect.record(tmp_path, pool, act, starts, extra_decisions=0, about={})
    assert load_recordings([tmp_path]).seeds.tolist() == [0, 1, 2, 3]
    assert written == [0 if ends_by else 4]
    assert ended.value.__notes__ == [f"4 of 9 episodes are in {tmp_path}"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, None])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_at_any_moment_gets_one_line(name, number, bench, tmp_path) -> None:
    """None: the terminal is closed. It sends SIGHUP too, and what is written afterwards fails."""
    usual, seconds = None, ENDLESS_SECONDS
    if name in ENDING:
        (new := tmp_path / "usual").mkdir()
        began = time.monotonic()
        (process := start(bench.words(name, new), tmp_path, new)).communicate(timeout=300)
        usual, seconds = process.returncode, time.monotonic() - began
    for moment, share in MOMENTS.items():
        (new := tmp_path / moment).mkdir()
        delays = (max(0.06, share * seconds), *([1.2] if moment == "second" else []))
        saved = 0 if name.startswith("train") and moment != "import" else usual
        if number is None:
            code, said = hung_up(bench.words(name, new), tmp_path, new, delays[0])
            at_start = [-signal.SIGHUP] * (moment == "import")  # Python itself may still be starting.
            assert code in (128 + signal.SIGHUP, saved, *at_start), said
            assert "Traceback" not in said
            assert left_over(tmp_path) == []
            continue
        code, _, errors = interrupted(start(bench.words(name, new), tmp_path, new), number, *delays)
        check_end(code, number, errors, tmp_path, saved)

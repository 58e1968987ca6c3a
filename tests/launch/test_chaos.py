"""A run reaches its target although its processes die all the time: nothing is lost, doubled or stale."""

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from asyncrl.observability import process_status
from support.chaos_run import ENTRY, MAX_LAG, Hit, Report
from support.tiny_models import write_models
from support.whole_runs import Program, left_over

TORCHRUN: Final = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
    *("--max-restarts", "1000", "--monitor-interval", "0.1", "--nproc-per-node"),
)
WEIGHTS: Final = {"actor-1": 5, "actor-2": 5, "replay": 5, "learner-0": 2, "rank-1": 1}
"""How often each role is hit, relative to the others."""
SIGNALS: Final = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)
"""What actors and replay get; the ranks of torchrun always get SIGKILL."""
STOPPED_SECONDS: Final = 3.0
MOMENTS: Final = ("", "imagining", "handing over", "receiving", "serving", "broadcasting")
"""What a process should be doing when it is hit, where it does so within a second; '': anything."""
AT_ONCE: Final = 3
"""Processes that are hit in one moment."""
KILLS: Final = int(os.environ.get("ASYNCRL_KILLS", "14"))
"""Of a run; a hundred and more take minutes, by hand."""
UPDATES, DEADLINE = 10 + KILLS, 130.0 + 20 * KILLS


class Chaos:
    """A run of a learner and two actors that is being hit."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        """Start it in `folder`; `flags` name its models."""
        self.folder, self.run = folder, folder / "run"
        self.random, self.report = random.Random(0), Report()
        self._began, self._version = time.monotonic(), 0
        self._share = 0.0
        """Of the kills that are over."""
        self._open_gate()
        settings = {
            "updates": UPDATES,
            "run-dir": self.run,
            "checkpoint-every": 2,
            "replay.max-lag": MAX_LAG,
            "replay.max-gigabytes": 8,
            "weights.timeout": 20,
        }
        more = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        notes = {"CHAOS_NOTES": str(folder / "notes.jsonl")}
        command = [*TORCHRUN, "3", str(ENTRY), *flags, *more]
        self.program = Program(folder, "output", command, more=notes)
        self.process = self.program.process

    def finish(self) -> Report:
        """Hit it often enough, wait for its end, and look at what it left."""
        try:
            while len(self.report.hits) < KILLS and self.process.poll() is None:
                self._share = len(self.report.hits) / KILLS
                self._watch(self.random.uniform(0.0, 1.5))
                self._strike()
            self._share = 1.0
            self._watch_until(lambda: self.process.poll() is not None)
        finally:
            self._end()
        self.report.look_at(self.folder)
        return self.report

    def _open_gate(self) -> None:
        """Let the learner go on up to its share of the updates, and a little further."""
        part = self.folder / "gate.new"
        last = UPDATES if self._share == 1.0 else int(self._share * (UPDATES - 4)) + 3
        part.write_text(str(last))
        part.replace(self.folder / "gate")

    def _strike(self) -> None:
        """Hit some living processes at once, then wait until all roles work again."""
        chosen = set(self.random.choices([*WEIGHTS], [*WEIGHTS.values()], k=AT_ONCE))
        moment, plain = self.random.choice(MOMENTS), self.random.choice(SIGNALS)
        until = time.monotonic() + 1.0
        while moment and not any(moment in d.what for p in self._living() for d in p.activities):
            if time.monotonic() > until:
                break
        hits = []
        for process in self._living():
            if process.role in chosen and len(self.report.hits) < KILLS:
                number = plain if process.role not in ("learner-0", "rank-1") else signal.SIGKILL
                what = "; ".join(activity.what for activity in process.activities) or "nothing"
                os.kill(process.pid, number)
                name = signal.Signals(number).name
                hits.append(
                    Hit(role=process.role, signal=name, doing=what, pid=process.pid, at=time.monotonic())
                )
        self.report.hits += hits
        if any(hit.signal == "SIGSTOP" for hit in hits):
            self._watch(STOPPED_SECONDS)
            for hit in hits:
                if hit.signal == "SIGSTOP":
                    with contextlib.suppress(ProcessLookupError):  # Ended with its parent, which was hit too.
                        os.kill(hit.pid, signal.SIGCONT)
        self._await_recovery(hits)

    def _await_recovery(self, hits: list[Hit]) -> None:
        def recovered() -> bool:
            for process in self._living():
                for hit in hits:
                    anew = process.pid != hit.pid or hit.signal == "SIGSTOP"
                    if hit.role == process.role and hit.recovered is None and anew and at_work(process):
                        hit.recovered = time.monotonic() - hit.at
            return all(hit.recovered is not None for hit in hits)

        self._watch_until(recovered)

    def _watch(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._watch_until(lambda: time.monotonic() > until)

    def _watch_until(self, true: Any) -> None:
        """Look at the run until something is true or it ended."""
        while not true() and self.process.poll() is None:
            if time.monotonic() - self._began > DEADLINE:
                process_status.dump_stacks(self.run)
                time.sleep(1.0)
                doing = [f"{p.role} alive={p.alive}: {p.activities}" for p in process_status.read(self.run)]
                raise AssertionError(f"not done after {DEADLINE:g} s: version {self._version}, {doing}")
            self._open_gate()
            rows = self.run / "metrics.jsonl"
            written = rows.read_text() if rows.exists() else ""
            if lines := written.split("\n")[:-1]:  # What follows is half written.
                self._version = int(json.loads(lines[-1])["step"])
            time.sleep(0.02)

    def _living(self) -> list[process_status.Process]:
        return [process for process in process_status.read(self.run) if process.alive]

    def _end(self) -> None:
        """End torchrun, if it still runs, and with it everything that it started."""
        self.report.seconds = time.monotonic() - self._began
        self.process.kill()
        self.report.returncode = self.process.wait(10)
        self.report.left_over = left_over(self.folder, patience=10.0)
        self.report.output = self.program.said()


def at_work(process: process_status.Process) -> bool:
    """Whether a process has started up."""
    said = " ".join(activity.what for activity in process.activities)
    working = ("imagining", "credit", "serving", "batch", "updating")
    return any(x in said for x in working) or process.role.startswith("rank-")


@pytest.mark.chaos
@pytest.mark.multiprocess
@pytest.mark.timeout(150 + 20 * KILLS)
def test_a_run_survives_kills(tmp_path: Path) -> None:
    report = Chaos(tmp_path, write_models(tmp_path / "models")).finish()
    assert report.returncode == 0, report.output
    assert len(report.hits) >= KILLS
    assert {hit.role for hit in report.hits} >= {"actor-1", "actor-2", "replay", "learner-0"}
    assert report.versions == UPDATES
    assert report.acknowledged > 0
    assert (report.lost, report.doubled, report.too_old, report.left_over) == ([], [], [], [])
    assert list((tmp_path / "tmp").glob("asyncrl-*")) == []

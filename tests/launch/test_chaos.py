"""A run reaches its target although its processes die all the time: nothing is lost, doubled or stale."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from asyncrl.observability import process_status
from support.chaos_run import ENTRY, MAX_LAG, Hit, Report, marked
from support.tiny_models import write_models
from support.whole_runs import environment

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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run with its kills."""

    kills: int = 30
    updates: int = 40
    at_once: int = 3
    """Processes that are hit in one moment."""
    seed: int = 0
    ranks: int = 3
    """One learns, the others imagine."""
    roles: tuple[str, ...] = tuple(WEIGHTS)
    """What may be hit."""
    moments: tuple[str, ...] = MOMENTS
    """When: one of these by chance."""
    deadline: float = 600.0


class Chaos:
    """A run that is being hit."""

    def __init__(self, plan: Plan, folder: Path, flags: Sequence[str], environment: dict[str, str]) -> None:
        """Start it in `folder`; `flags` name its models and win over what is set here."""
        self.plan, self.folder, self.run = plan, folder, folder / "run"
        self.random, self.report = random.Random(plan.seed), Report()
        self._began, self._version = time.monotonic(), 0
        self._share = 0.0
        """Of the kills that are over."""
        self._open_gate()
        self._mark = f"CHAOS_NOTES={folder / 'notes.jsonl'}"
        settings = {
            "updates": plan.updates,
            "run-dir": self.run,
            "checkpoint-every": 2,
            "replay.max-lag": MAX_LAG,
            "replay.max-gigabytes": 8,
            "actor.max-respawns": 1000,
            "weights.timeout": 20,
        }
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(
                [*TORCHRUN, str(plan.ranks), str(ENTRY), *flags]
                + [
                    text
                    for name, value in settings.items()
                    for text in (f"--{name}", str(value))
                    if f"--{name}" not in flags
                ],
                env=environment | {"CHAOS_NOTES": str(folder / "notes.jsonl")},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self) -> Report:
        """Hit it until the plan is fulfilled, wait for its end, and look at what it left."""
        try:
            while len(self.report.hits) < self.plan.kills and self.process.poll() is None:
                self._share = len(self.report.hits) / self.plan.kills
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
        part, plan = self.folder / "gate.new", self.plan
        last = plan.updates if self._share == 1.0 else int(self._share * (plan.updates - 4)) + 3
        part.write_text(str(last))
        part.replace(self.folder / "gate")

    def _strike(self) -> None:
        """Hit some living processes at once, then wait until all roles work again."""
        roles = list(self.plan.roles)
        weights = [WEIGHTS[role] for role in roles]
        chosen = set(self.random.choices(roles, weights, k=self.plan.at_once))
        moment, plain = self.random.choice(self.plan.moments), self.random.choice(SIGNALS)
        until = time.monotonic() + 1.0
        while moment and not any(moment in d.what for p in self._living() for d in p.activities):
            if time.monotonic() > until:
                break
        hits = []
        for process in self._living():
            if process.role in chosen and len(self.report.hits) < self.plan.kills:
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
            if time.monotonic() - self._began > self.plan.deadline:
                process_status.dump_stacks(self.run)
                time.sleep(1.0)
                raise AssertionError(f"not done after {self.plan.deadline:g} s:\n{self.describe()}")
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
        if self.process.poll() is None:
            self.process.kill()
        self.report.returncode = self.process.wait(10)
        until = time.monotonic() + 10
        while (left := marked(self._mark)) and time.monotonic() < until:
            time.sleep(0.05)
        self.report.left_over = left
        self.report.output = (self.folder / "output").read_text()

    def describe(self) -> str:
        """Say what every process does, for an error message."""
        told = [f"{p.role} alive={p.alive}: {p.activities}" for p in process_status.read(self.run)]
        return "\n".join([f"version {self._version}, {len(self.report.hits)} hits", *told])


def at_work(process: process_status.Process) -> bool:
    """Whether a process has started up."""
    said = " ".join(activity.what for activity in process.activities)
    working = ("imagining", "credit", "serving", "batch", "updating")
    return any(x in said for x in working) or process.role.startswith("rank-")


KILLS = int(os.environ.get("ASYNCRL_KILLS", "14"))
"""Of a run; a hundred and more take minutes, by hand."""


@pytest.mark.chaos
@pytest.mark.multiprocess
@pytest.mark.timeout(150 + 20 * KILLS)
def test_a_run_survives_kills(tmp_path: Path) -> None:
    flags = write_models(tmp_path / "models")
    plan = Plan(kills=KILLS, updates=10 + KILLS, deadline=130.0 + 20 * KILLS)
    report = Chaos(plan, tmp_path, flags, environment(tmp_path)).finish()
    assert report.returncode == 0, report.output
    assert len(report.hits) >= plan.kills
    assert {hit.role for hit in report.hits} >= {"actor-1", "actor-2", "replay", "learner-0"}
    assert report.versions == plan.updates
    assert report.acknowledged > 0
    assert (report.lost, report.doubled, report.too_old, report.left_over) == ([], [], [], [])
    assert list((tmp_path / "tmp").glob("asyncrl-*")) == []

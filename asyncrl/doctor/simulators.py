"""Check a simulator: its packages, its renderer, and resets and steps in a worker process."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncrl import registry
from asyncrl.doctor import checks
from asyncrl.doctor.host import GIB, free_memory
from asyncrl.errors import RunError

if TYPE_CHECKING:
    from asyncrl.simulators.interface import SimStart, SimulatorSource, SimulatorSpec
    from asyncrl.simulators.pool import SimulatorPool
    from asyncrl.simulators.pool_worker import Frames

MIB: Final = 2**20
PLAY_DEADLINE: Final = 900.0
ANSWER: Final = 300.0  # seconds for one request
STEPS: Final = 8  # of a request, as of a decision
ROUNDS: Final = 3


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one worker process."""

    spec: SimulatorSpec
    start: float  # seconds until it was ready
    reset: float  # Seconds of the second reset of one place
    undrawn: float  # Seconds of a step of all places without pictures
    drawn: float  # Seconds of a step of all places with pictures of all cameras
    memory: int  # Peak bytes of the process


def examine_simulator(source: SimulatorSource) -> Iterator[checks.Finding]:
    """Check a simulator; if a package or its renderer is missing, play no episode."""
    yield checks.ok("settings", ", ".join([source.name, f"--places {source.places}", *source.settings]))
    found = [
        finding
        for name, check in [("Python", checks.check_python), *_checks_of(source.name)]
        if (finding := checks.run_check(name, check, checks.DEADLINE))
    ]
    yield from found
    if any(finding.verdict is checks.Verdict.BROKEN for finding in found):
        return
    played: list[Measured] = []
    if finding := checks.run_check("simulator", partial(check_play, source, played), PLAY_DEADLINE):
        yield finding
    for measured in played:
        yield describe_speed(measured)
        yield judge_memory(measured)


def _checks_of(name: str) -> list[tuple[str, Callable[[], checks.Finding]]]:
    if name not in registry.BUILT_IN["simulator"]:
        return []
    family = name.partition("_")[0]
    if family == "maniskill":
        from asyncrl.simulators.maniskill.tasks import require_device as require

        needed, drawing = checks.requirements(family), "Vulkan"
    else:
        from asyncrl.simulators.rendering import require_backend as require

        needed = [one for one in checks.requirements() if one.name == "mujoco"]
        needed += checks.requirements(family) if family == "libero" else []
        drawing = "OpenGL"
    packages = [(one.name, partial(checks.check_package, one)) for one in needed]
    return [*packages, (drawing, lambda: checks.ok(drawing, require()))]


def check_play(source: SimulatorSource, played: list[Measured]) -> checks.Finding:
    """Play in one worker process, as `evaluate` does, and describe the simulator; adds to `played`."""
    played.append(measured := measure(source))
    spec = measured.spec
    starts = f"{spec.trials} stored starts each" if spec.trials else "seeds as starts"
    tasks = "any task" if not spec.tasks else "1 task" if len(spec.tasks) == 1 else f"{len(spec.tasks)} tasks"
    size, expert = spec.image_size, "no expert"
    if source.may_have_expert():
        made = not isinstance(registry.resolve("simulator", source.name), type)
        expert = "with an expert" + " if what the function makes has one" * made
    return checks.ok(
        "simulator",
        f"{spec.name}: {tasks}, {starts}, {spec.max_steps} steps, pictures of "
        f"{size} x {size} ({', '.join(spec.cameras)}), {spec.state_dim} numbers of state, actions of "
        f"{spec.action_dim}, reward {spec.reward}; {expert}",
    )


def describe_speed(measured: Measured) -> checks.Finding:
    """Report the times of a start, a reset and a step."""
    places = measured.spec.places
    together = f" of {places} places together" if places > 1 else ""
    return checks.ok(
        "speed",
        f"ready after {measured.start:.1f} s, a reset takes {measured.reset:.2f} s; a step{together} "
        f"{1e3 * measured.drawn:.1f} ms with pictures, {1e3 * measured.undrawn:.1f} without: "
        f"{places / measured.drawn:.0f} and {places / measured.undrawn:.0f} steps/s of a process",
    )


def judge_memory(measured: Measured) -> checks.Finding:
    """Compare the memory of a process with the free memory."""
    places, free = measured.spec.places, free_memory()
    workers, cores = int(free // measured.memory), len(os.sched_getaffinity(0))
    seen = (
        f"a process took {measured.memory / MIB:.0f} MiB, {measured.memory / places / MIB:.0f} per place; "
        f"{free / GIB:.1f} GiB are free"
    )
    if workers < 1:
        return checks.broken("memory", f"{seen}: too little for one.", "Use fewer places.")
    if workers < cores:
        return checks.warning("memory", f"{seen}.", f"Use at most --workers {workers}.")
    return checks.ok("memory", f"{seen}, for {workers} workers; there are {cores} cores")


def measure(source: SimulatorSource) -> Measured:
    """Build the simulator in a worker process, and reset and step all its places."""
    from asyncrl.simulators.interface import random_start, stored_start
    from asyncrl.simulators.pool import SimulatorPool

    begun = time.monotonic()
    with SimulatorPool(source, 1, timeout=ANSWER) as pool:
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
        undrawn, drawn = _time_step(pool, starts, "none"), _time_step(pool, starts, "all")
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # The worker has ended.
    return Measured(spec=spec, start=start, reset=reset, undrawn=undrawn, drawn=drawn, memory=memory)


def _begin(pool: SimulatorPool, starts: Sequence[SimStart]) -> None:
    for slot, start in enumerate(starts):
        pool.reset(slot, start)
    _wait(pool, len(starts))


def _time_step(pool: SimulatorPool, starts: Sequence[SimStart], frames: Frames) -> float:
    idle = np.tile(np.asarray(pool.spec.idle, np.float32), (min(STEPS, pool.spec.max_steps), 1))
    seconds = []
    for _ in range(1 + ROUNDS):
        _begin(pool, starts)
        begun = time.monotonic()
        for slot in range(pool.slots):
            pool.step(slot, idle, frames=frames, past_success=True)
        _wait(pool, pool.slots)
        seconds.append(time.monotonic() - begun)
    return statistics.median(seconds[1:]) / len(idle)  # The first may compile or load something.


def _wait(pool: SimulatorPool, answers: int) -> None:
    while answers:
        found = pool.ready(ANSWER)  # A worker without an answer for as long is lost.
        if lost := next((answer.lost for answer in found if answer.lost), ""):
            raise RunError(lost)
        answers -= len(found)

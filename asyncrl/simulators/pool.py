"""Play many episodes side by side in worker processes, without waiting for the slowest.

Requests and answers are per slot. A worker that dies, raises or hangs is replaced, and its slots report their
episodes as lost. A worker waits for requests until the pipe closes or the parent dies.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import multiprocessing as mp
import os
import time
from dataclasses import asdict, dataclass, field
from multiprocessing import reduction
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import AssetError, AsyncRLError, ConfigError, RunError
from asyncrl.observability import waits
from asyncrl.records import CHUNK
from asyncrl.simulators.build import SimulatorSource
from asyncrl.simulators.interface import Demonstrator, SimStart, Simulator, SimulatorSpec
from asyncrl.simulators.pool_worker import Frames, PlaceArrays, Request, Worker, plain_tuples, worker_main

_log = logging.getLogger(__name__)
MOST_LOST: Final = 5  # Workers that may be lost before the pool gives up.
START_TIMEOUT: Final = 300.0  # Seconds until a worker must be ready: drawing may have to be compiled.
_ERRORS: Final[dict[str, type[AsyncRLError]]] = {"AssetError": AssetError, "ConfigError": ConfigError}


@dataclass(frozen=True, kw_only=True)
class SlotAnswer:
    """Result of a request in one slot, by which S steps were made. Letters as in `pool_worker`."""

    slot: int
    lost: str = ""
    """Why the episode was lost with its worker, else empty. The slot is then free, the other fields void."""
    task: str = ""  # After a reset: the instruction.
    frames: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 1, 0, 0, 3), np.uint8))
    """``[S, K, H, W, 3]`` if all frames were asked for, else the last or the reset's ``[1, ...]``."""
    states: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # [rows, Q].
    poses: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """``[rows of frames, 8]``; ``[rows of frames, 0]`` without `SimulatorSpec.poses`."""
    actions: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """``[S, A]`` carried out; `rewards` and `success` are ``[S]``."""
    rewards: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    success: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    terminated: bool = False
    truncated: bool = False

    @property
    def steps(self) -> int:
        """``S``; 0 after a reset."""
        return len(self.rewards)


class _InProcess:
    """Stands in for a worker process: carries requests out when answers are asked for."""

    def __init__(self, simulator: Simulator, steps: int) -> None:
        self.spec = simulator.spec
        self.arrays = PlaceArrays.over(bytearray(PlaceArrays.nbytes(self.spec, steps)), self.spec, steps)
        self._worker, self._requests = Worker(simulator, self.arrays), list[Request]()
        self.close = simulator.close

    def send(self, request: Request) -> None:
        self._requests.append(request)

    def answers(self) -> list[dict[str, Any]]:
        requests, self._requests = self._requests, []
        return self._worker.take(requests)


class _WorkerProcess:
    def __init__(self, source: SimulatorSource, number: int, steps: int) -> None:
        context = mp.get_context("spawn")
        self.name = f"simulator worker {number}"
        self.spec: SimulatorSpec | None = None
        self.arrays: PlaceArrays | None = None  # None, as the spec, until the worker is ready.
        self.heard = time.monotonic()  # Time of the newest request or answer.
        self._steps, self._unsent = steps, list[Request]()
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=worker_main, name=self.name, args=(theirs, source, steps, os.getpid()), daemon=True
        )
        self.process.start()
        theirs.close()

    def send(self, request: Request) -> None:
        self.heard = time.monotonic()
        if self.arrays is None:
            self._unsent.append(request)
            return
        try:
            self.pipe.send_bytes(json.dumps(request).encode())
        except (BrokenPipeError, ConnectionResetError):
            return  # It died: `check` reports that.

    def answers(self) -> list[dict[str, Any]]:
        found = []
        try:
            while self.pipe.poll():
                message = json.loads(self.pipe.recv_bytes())
                self.heard = time.monotonic()
                if "error" in message:
                    kind, text = message["kind"], message["error"]
                    if kind in _ERRORS:
                        raise _ERRORS[kind](text)
                    raise RunError(f"The {self.name} failed: {kind}: {text}")
                if "spec" in message:
                    self._begin(SimulatorSpec(**plain_tuples(message["spec"])))
                else:
                    found.append(message)
        except (EOFError, ConnectionResetError):
            raise self._dead() from None
        return found

    def _begin(self, spec: SimulatorSpec) -> None:
        memory = reduction.recv_handle(self.pipe)
        size = max(1, PlaceArrays.nbytes(spec, self._steps))
        self.spec, self.arrays = spec, PlaceArrays.over(mmap.mmap(memory, size), spec, self._steps)
        os.close(memory)
        unsent, self._unsent = self._unsent, []
        for request in unsent:
            self.send(request)

    def check(self, patience: float) -> None:
        """Raise `RunError` if the worker died, or was silent for longer than `patience` seconds."""
        # In lockstep a worker may rightly wait for the newest request, so time is counted from there.
        if not self.process.is_alive() and not self.pipe.poll():
            raise self._dead()
        if time.monotonic() - self.heard > patience:
            late = f"did not answer within {patience:.0f} s"
            if self.arrays is None:
                late = f"was not ready after {patience:.0f} s (use fewer workers)"
            raise RunError(
                f"The {self.name} (process {self.process.pid}) {late}, so it hangs or the machine is "
                "overloaded."
            )

    def _dead(self) -> RunError:
        self.process.join(timeout=5)
        return RunError(
            f"The {self.name} died with exit code {self.process.exitcode} (negative: killed by signal). Its "
            "own output above says why; signal 9 often means a lack of memory."
        )

    def close(self, patience: float = 5.0) -> None:
        self.pipe.close()
        self.process.join(timeout=patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(timeout=5)


class SimulatorPool:
    """``max(workers, 1) * source.places`` slots, each with an episode or none.

    Results do not depend on the number of workers, bit for bit. Create the pool in a thread that outlives it:
    on Linux the workers die with that thread.

    Args:
        workers: Processes; 0 runs everything in this process.
        steps: Most steps of a request.
        timeout: Seconds a worker may take for one answer.

    Raises:
        ConfigError: A number is out of range, or the simulator is unknown or cannot be built.
        AssetError: No OpenGL library.
        RunError: The first worker died or did not start in time.
    """

    def __init__(
        self, source: SimulatorSource, workers: int, *, steps: int = CHUNK, timeout: float = 120.0
    ) -> None:
        if workers < 0 or source.places < 1 or steps < 1:
            raise ConfigError(
                f"A pool of {workers} workers with {source.places} places each and requests of {steps} steps "
                "cannot work. Use 0 workers (this process) or more, and at least 1 place and step."
            )
        self._source, self._steps, self._timeout = source, steps, timeout
        self._asked: dict[int, Frames] = {}  # Slot -> frames wanted of the pending request.
        self._tasks: dict[int, int] = {}  # Slot -> task id of the loaded scene.
        self._lost = 0
        self._closed = False
        self._members: list[_InProcess | _WorkerProcess] = []
        try:
            if workers == 0:
                self._members = [_InProcess(source.build(), steps)]
            for number in range(workers):
                self._members.append(_WorkerProcess(source, number, steps))
            self.spec: SimulatorSpec = self._first_spec()
        except BaseException:
            self.close()
            raise
        self.places = self.spec.places  # Slots of each worker.
        self.slots = self.places * len(self._members)

    def reset(self, slot: int, start: SimStart, expert: Demonstrator | None = None) -> None:
        """Ask for an episode; the answer comes with `ready`."""
        self._ask(slot, "last")
        self._tasks[slot] = start.task_id
        demonstrator = None if expert is None else asdict(expert)
        self._send(slot, do="reset", start=asdict(start), expert=demonstrator)

    def step(
        self,
        slot: int,
        actions: NDArray[np.float32] | int,
        *,
        frames: Frames = "last",
        past_success: bool = False,
    ) -> None:
        """Ask for steps; the answer comes with `ready`. They stop early where the episode ends.

        Args:
            actions: ``[S, A]`` float32, finite; or the number of steps that the expert chooses.
        """
        by_expert, width = isinstance(actions, int), self.spec.action_dim
        steps = actions if isinstance(actions, int) else len(actions)
        if not isinstance(actions, int) and (
            actions.shape != (steps, width) or not np.isfinite(actions).all()
        ):
            raise ValueError(f"actions must be finite [steps, {width}], got shape {actions.shape}")
        if not 1 <= steps <= self._steps:
            raise ValueError(f"{steps} steps were asked for, this pool takes 1 to {self._steps} at once")
        self._ask(slot, frames)
        if not by_expert:
            arrays = self._members[slot // self.places].arrays
            assert arrays is not None, "an episode is begun before it is stepped"
            arrays.actions[slot % self.places, :steps] = actions
        self._send(
            slot, do="step", steps=steps, frames=frames, past_success=past_success, by_expert=by_expert
        )

    def leave(self, slot: int) -> None:
        """Abandon the episode of a slot: lockstep no longer waits for it."""
        if self.spec.lockstep:
            self._send(slot, do="leave")

    def loaded_task(self, slot: int) -> int:
        """Return the task id of the scene in a slot, -1 if none: another scene may take seconds."""
        return self._tasks.get(slot, -1)

    def ready(self, patience: float) -> list[SlotAnswer]:
        """Return the answers that have come; wait for the first, at most `patience` seconds."""
        self._check_open()
        deadline = time.monotonic() + patience
        while True:
            answers = [answer for number in range(len(self._members)) for answer in self._answers(number)]
            left = deadline - time.monotonic()
            if answers or not self._asked or left <= 0:
                return answers
            remotes = [member for member in self._members if isinstance(member, _WorkerProcess)]
            if remotes:
                with waits.waiting(waits.SIMULATORS):
                    wait([x for m in remotes for x in (m.pipe, m.process.sentinel)], timeout=min(left, 1.0))

    def close(self) -> None:
        """End all workers. May be called again."""
        self._closed = True
        members, self._members = self._members, []
        for member in members:
            if isinstance(member, _WorkerProcess):
                member.pipe.close()  # All end at the same time.
        for member in members:
            member.close()

    def __enter__(self) -> SimulatorPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _first_spec(self) -> SimulatorSpec:
        first = self._members[0]
        while first.spec is None:
            assert isinstance(first, _WorkerProcess)
            first.answers()
            if first.spec is None:
                first.check(START_TIMEOUT)
                with waits.waiting(waits.SIMULATORS):
                    wait([first.pipe, first.process.sentinel], timeout=1.0)
        return first.spec

    def _check_open(self) -> None:
        if self._closed:
            raise RunError("The simulator pool is closed. Create a new one.")

    def _ask(self, slot: int, frames: Frames) -> None:
        self._check_open()
        if not 0 <= slot < self.slots or slot in self._asked:
            raise ValueError(f"slot {slot} is not one of {self.slots}, or is still asked something")
        self._asked[slot] = frames

    def _send(self, slot: int, **request: Any) -> None:
        self._members[slot // self.places].send(request | {"place": slot % self.places})

    def _answers(self, number: int) -> list[SlotAnswer]:
        member = self._members[number]
        if isinstance(member, _InProcess):
            return [self._read(number, message) for message in member.answers()]
        try:
            found = [self._read(number, message) for message in member.answers()]
            if not found:
                patience = START_TIMEOUT if member.arrays is None else self._timeout
                member.check(patience if self._asked.keys() & self._slots_of(number) else math.inf)
            return found
        except RunError as error:
            return self._replace(number, member, str(error))

    def _replace(self, number: int, member: _WorkerProcess, reason: str) -> list[SlotAnswer]:
        self._lost += 1
        _log.warning("%s Its episodes are played again (%d of %d times).", reason, self._lost, MOST_LOST)
        member.close(patience=0.0)
        if self._lost >= MOST_LOST:
            raise RunError(f"{reason} It is number {self._lost} that was lost, so the pool gives up.")
        self._members[number] = _WorkerProcess(self._source, number, self._steps)
        slots = self._slots_of(number)
        for slot in slots:
            self._asked.pop(slot, None)
            self._tasks.pop(slot, None)
        return [SlotAnswer(slot=slot, lost=reason) for slot in slots]

    def _slots_of(self, number: int) -> range:
        return range(number * self.places, (number + 1) * self.places)

    def _read(self, number: int, message: dict[str, Any]) -> SlotAnswer:
        arrays, place = self._members[number].arrays, message["place"]
        assert arrays is not None
        slot, steps = number * self.places + place, message.get("steps", 0)
        last = max(steps, 1)
        rows = slice(0 if self._asked.pop(slot) == "all" else last - 1, last)
        return SlotAnswer(
            slot=slot,
            task=message.get("task", ""),
            frames=arrays.frames[place, rows].copy(),
            states=arrays.states[place, rows].copy(),
            poses=arrays.poses[place, rows].copy(),
            actions=arrays.actions[place, :steps].copy(),
            rewards=arrays.rewards[place, :steps].copy(),
            success=arrays.success[place, :steps].copy(),
            terminated=message.get("terminated", False),
            truncated=message.get("truncated", False),
        )

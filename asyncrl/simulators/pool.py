"""Play many episodes side by side in worker processes, without waiting for the slowest.

Requests and answers are per slot. A worker that dies, raises or hangs is replaced, and its slots report their
episodes as lost. A worker waits for requests until the pipe closes or the parent dies.
"""

from __future__ import annotations

import logging
import math
import multiprocessing as mp
import os
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import AssetError, AsyncRLError, ConfigError, RunError
from asyncrl.observability import process_status, waits
from asyncrl.observability.signals import starting_child
from asyncrl.simulators.interface import Demonstrator, SimStart, Simulator, SimulatorSource, SimulatorSpec
from asyncrl.simulators.pool_worker import Frames, Message, Worker, pack, plain_tuples, unpack, worker_main

_log = logging.getLogger(__name__)
MOST_LOST: Final = 5  # Workers that may be lost before the pool gives up.
START_TIMEOUT: Final = 300.0  # Seconds until a worker must be ready: drawing may have to be compiled.
_ERRORS: Final[dict[str, type[AsyncRLError]]] = {"AssetError": AssetError, "ConfigError": ConfigError}
_nothing: Final = partial(np.zeros, 0)


@dataclass(frozen=True, kw_only=True)
class SlotAnswer:
    """Result of a request in one slot, which made S steps.

    Letters: K cameras, H W picture size in pixels (equal), Q numbers of state, A numbers per action.
    """

    slot: int
    lost: str = ""  # Why the episode was lost with its worker, else empty; the slot is free then
    task: str = ""  # After a reset: the instruction.
    frames: NDArray[np.uint8] = field(default_factory=_nothing)
    """``[S, K, H, W, 3]`` if all frames were asked for, else the last or the reset's ``[1, ...]``."""
    states: NDArray[np.float32] = field(default_factory=_nothing)  # [rows of frames, Q].
    poses: NDArray[np.float32] = field(default_factory=_nothing)
    """``[rows of frames, 8]``; ``[rows of frames, 0]`` without `SimulatorSpec.poses`."""
    actions: NDArray[np.float32] = field(default_factory=_nothing)
    """``[S, A]`` carried out; `rewards` and `success` are ``[S]``."""
    rewards: NDArray[np.float32] = field(default_factory=_nothing)
    success: NDArray[np.bool_] = field(default_factory=_nothing)
    terminated: bool = False
    truncated: bool = False

    @property
    def steps(self) -> int:
        """``S``; 0 after a reset."""
        return len(self.rewards)


class _InProcess:
    """Replaces a worker process: carries out requests when their answers are asked for."""

    def __init__(self, simulator: Simulator) -> None:
        self.spec = simulator.spec
        self._worker, self._requests = Worker(simulator), list[Message]()
        self.close = simulator.close

    def send(self, request: Message) -> None:
        self._requests.append(request)

    def answers(self) -> list[Message]:
        requests, self._requests = self._requests, []
        return self._worker.take(requests)


class _WorkerProcess:
    def __init__(self, source: SimulatorSource, number: int) -> None:
        context = mp.get_context("spawn")
        self.name = f"simulator worker {number}"
        self.spec: SimulatorSpec | None = None  # None until the worker is ready.
        self.heard = time.monotonic()  # Time of the newest request or answer.
        self._unsent = list[Message]()
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=worker_main, name=self.name, args=(theirs, source, os.getpid()), daemon=True
        )
        with starting_child():  # Ctrl-C is this process's to handle; it closes the pipe.
            self.process.start()
        theirs.close()

    def send(self, request: Message) -> None:
        self.heard = time.monotonic()
        if self.spec is None:
            self._unsent.append(request)
            return
        try:
            self.pipe.send_bytes(pack([request]))
        except (BrokenPipeError, ConnectionResetError):
            return  # It died: `check` reports that.

    def answers(self) -> list[Message]:
        found = []
        try:
            while self.pipe.poll():
                messages = unpack(self.pipe.recv_bytes())
                self.heard = time.monotonic()
                if "error" in messages[0]:
                    kind, text = messages[0]["kind"], messages[0]["error"]
                    if kind in _ERRORS:
                        raise _ERRORS[kind](text)
                    raise RunError(f"The {self.name} failed: {kind}: {text}")
                if "spec" not in messages[0]:
                    found += messages
                    continue
                self.spec = SimulatorSpec(**plain_tuples(messages[0]["spec"]))
                unsent, self._unsent = self._unsent, []
                for request in unsent:
                    self.send(request)
        except (EOFError, OSError):  # It died, perhaps within a message.
            raise self._dead() from None
        return found

    def check(self, patience: float) -> None:
        """Raise `RunError` if the worker died, or was silent for longer than `patience` seconds."""
        # In lockstep a worker may rightly wait for the newest request, so time is counted from there.
        if not self.process.is_alive() and not self.pipe.poll():
            raise self._dead()
        if time.monotonic() - self.heard > patience:
            late = f"did not answer within {patience:.0f} s"
            if self.spec is None:
                late = f"was not ready after {patience:.0f} s (use fewer workers)"
            raise RunError(
                f"The {self.name} (process {self.process.pid}) {late}, so it hangs or the machine is "
                "overloaded."
            )

    def _dead(self) -> RunError:
        self.process.join(timeout=5)
        return RunError(
            f"The {self.name} died with exit code {self.process.exitcode} (negative: killed by signal). Its "
            "own output above has the reason; signal 9 often means a lack of memory."
        )

    def close(self, patience: float = 5.0) -> None:
        self.pipe.close()
        self.process.join(timeout=patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(timeout=5)


class SimulatorPool(AbstractContextManager["SimulatorPool"]):
    """``max(workers, 1) * source.places`` slots, each with an episode or none.

    Results do not depend on the number of workers, bit for bit. Create the pool in a thread that outlives it:
    on Linux, the workers die with that thread.

    Args:
        workers: Processes; 0 runs everything in this process.
        timeout: Seconds a worker may take for one answer.

    Raises:
        ConfigError: The simulator is unknown or cannot be built.
        AssetError: No OpenGL library.
        RunError: The first worker died or did not start in time.
    """

    def __init__(self, source: SimulatorSource, workers: int, *, timeout: float = 120.0) -> None:
        self._source, self._timeout = source, timeout
        self._asked: set[int] = set()  # Slots with a pending request.
        self._starts: dict[int, SimStart] = {}  # Slot -> start of its newest episode.
        self._lost = 0
        self._members: list[_InProcess | _WorkerProcess] = []
        try:
            if not workers:
                self._members.append(_InProcess(source.build()))
            for number in range(workers):
                self._members.append(_WorkerProcess(source, number))
            self.spec: SimulatorSpec = self._first_spec()
        except BaseException:
            self.close()
            raise
        self.places = self.spec.places  # Slots of each worker.
        self.slots = self.places * len(self._members)

    def reset(self, slot: int, start: SimStart, expert: Demonstrator | None = None) -> None:
        """Request an episode; the answer comes with `ready`."""
        self._ask(slot, do="reset", start=asdict(start), expert=expert and asdict(expert))
        self._starts[slot] = start

    def step(
        self,
        slot: int,
        actions: NDArray[np.float32] | int,
        *,
        frames: Frames = "last",
        past_success: bool = False,
    ) -> None:
        """Ask for steps; the answer comes with `ready`. They stop early where the episode ends.

        `actions`: ``[S, A]`` float32, finite; or, if the expert acts, the number of steps.
        """
        if isinstance(actions, int):
            request: dict[str, Any] = {"steps": actions, "actions": None}
        else:
            request = {"steps": len(actions), "actions": actions}
            finite, width = np.isfinite(actions).all(), self.spec.action_dim
            if actions.ndim != 2 or not len(actions) or actions.shape[1] != width or not finite:
                came = f"{list(actions.shape)}{'' if finite else ', not all of them finite'}"
                raise ConfigError(
                    f"The policy chose actions of shape {came} in {self._starts[slot].name}; a decision is "
                    f"[steps, {width}] finite numbers. Look at its weights and at its action statistics."
                )
        self._ask(slot, do="step", frames=frames, past_success=past_success, **request)

    def leave(self, slot: int) -> None:
        """Abandon the episode of a slot: lockstep no longer waits for it."""
        if self.spec.lockstep:
            self._send(slot, do="leave")

    def loaded_task(self, slot: int) -> int:
        """Return the task id of the scene in a slot, -1 if none: another scene may take seconds."""
        return self._starts[slot].task_id if slot in self._starts else -1

    def ready(self, patience: float) -> list[SlotAnswer]:
        """Return the answers that have come; wait for the first, at most `patience` seconds."""
        deadline = time.monotonic() + patience
        while True:
            answers = [answer for number in range(len(self._members)) for answer in self._answers(number)]
            left = deadline - time.monotonic()
            if answers or not self._asked or left <= 0:
                return answers
            remotes = [member for member in self._members if isinstance(member, _WorkerProcess)]
            if remotes:
                with process_status.waiting(waits.SIMULATORS):
                    wait([x for m in remotes for x in (m.pipe, m.process.sentinel)], timeout=min(left, 1.0))

    def close(self) -> None:
        """End all workers. May be called again."""
        members, self._members = self._members, []
        for member in members:
            if isinstance(member, _WorkerProcess):
                member.pipe.close()  # All end at the same time.
        for member in members:
            member.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _first_spec(self) -> SimulatorSpec:
        first = self._members[0]
        while first.spec is None:
            assert isinstance(first, _WorkerProcess)
            first.answers()
            if first.spec is None:
                first.check(START_TIMEOUT)
                with process_status.waiting(waits.SIMULATORS):
                    wait([first.pipe, first.process.sentinel], timeout=1.0)
        return first.spec

    def _ask(self, slot: int, **request: Any) -> None:
        if not 0 <= slot < self.slots or slot in self._asked:
            raise ValueError(f"slot {slot} is not one of {self.slots}, or is still asked something")
        self._asked.add(slot)
        self._send(slot, **request)

    def _send(self, slot: int, **request: Any) -> None:
        self._members[slot // self.places].send(request | {"place": slot % self.places})

    def _answers(self, number: int) -> list[SlotAnswer]:
        member = self._members[number]
        try:
            found = member.answers()
            if not found and isinstance(member, _WorkerProcess):
                patience = START_TIMEOUT if member.spec is None else self._timeout
                member.check(patience if self._asked.intersection(self._slots_of(number)) else math.inf)
        except RunError as error:
            if not isinstance(member, _WorkerProcess):
                raise
            return self._replace(number, member, str(error))
        answers = []
        for message in found:
            slot = number * self.places + message.pop("place")
            self._asked.discard(slot)
            answers.append(SlotAnswer(slot=slot, **message))
        return answers

    def _replace(self, number: int, member: _WorkerProcess, reason: str) -> list[SlotAnswer]:
        self._lost += 1
        _log.warning("%s Its episodes are played again (%d of %d times).", reason, self._lost, MOST_LOST)
        member.close(patience=0.0)
        if self._lost >= MOST_LOST:
            raise RunError(f"{reason} It is number {self._lost} that was lost, so the pool gives up.")
        self._members[number] = _WorkerProcess(self._source, number)
        slots = self._slots_of(number)
        for slot in slots:
            self._asked.discard(slot)
            self._starts.pop(slot, None)
        return [SlotAnswer(slot=slot, lost=reason) for slot in slots]

    def _slots_of(self, number: int) -> range:
        return range(number * self.places, (number + 1) * self.places)

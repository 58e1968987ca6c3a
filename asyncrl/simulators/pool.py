"""Play many episodes side by side in worker processes, without waiting for the slowest.

Requests go out per slot, and answers are taken as they come: a reset, another task's scene or a slow worker
holds up nobody else. A worker that dies, raises or hangs is named and replaced; who plays in it is told
that the episode is lost, and plays it again from its start.

A worker waits for requests without a deadline; its wait ends when the parent sends one, closes the pipe or
dies. The parent waits for answers (`waits.SIMULATORS`) as long as it says, and for no worker longer than
`timeout` seconds without an answer.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, RunError
from asyncrl.observability import waits
from asyncrl.records import CHUNK
from asyncrl.simulators.build import SimulatorSource
from asyncrl.simulators.interface import Demonstrator, SimStart, SimulatorSpec
from asyncrl.simulators.pool_worker import Frames, InProcessMember, Request, WorkerMember

_log = logging.getLogger(__name__)
MOST_LOST: Final = 5
"""Workers that may be lost before the pool gives up."""
START_TIMEOUT: Final = 300.0
"""Seconds a worker may take until it is ready: drawing may have to be compiled first."""


@dataclass(frozen=True, kw_only=True)
class SlotAnswer:
    """What became of a request in one slot. Dimension letters as in `pool_worker`; S steps were made."""

    slot: int
    lost: str = ""
    """Why the episode was lost with its worker; empty: it was not. Then the slot is free, and nothing else of
    this means anything."""
    task: str = ""
    """After a reset: the instruction."""
    frames: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 1, 0, 0, 3), np.uint8))
    """``[S, K, H, W, 3]`` what was seen after each step where every frame was asked for, else ``[1, ...]``:
    after the last one, or after the reset."""
    states: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """``[rows of frames, Q]``."""
    poses: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """``[rows of frames, 8]``; ``[rows of frames, 0]`` of a simulator that says none."""
    actions: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """``[S, A]`` what was carried out."""
    rewards: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """``[S]``."""
    success: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """``[S]``."""
    terminated: bool = False
    truncated: bool = False

    @property
    def steps(self) -> int:
        """Return ``S``; 0 after a reset."""
        return len(self.rewards)


class Pool(Protocol):
    """What plays episodes: `SimulatorPool`, and what stands in for it."""

    @property
    def spec(self) -> SimulatorSpec:
        """Return what is known of the simulator."""
        ...

    @property
    def slots(self) -> int:
        """Return the number of slots."""
        ...

    def reset(self, slot: int, start: SimStart, expert: Demonstrator | None = None) -> None:
        """See `SimulatorPool.reset`."""
        ...

    def step(
        self,
        slot: int,
        actions: NDArray[np.float32] | int,
        *,
        frames: Frames = "last",
        past_success: bool = False,
    ) -> None:
        """See `SimulatorPool.step`."""
        ...

    def leave(self, slot: int) -> None:
        """See `SimulatorPool.leave`."""
        ...

    def ready(self, patience: float) -> list[SlotAnswer]:
        """See `SimulatorPool.ready`."""
        ...

    def loaded_task(self, slot: int) -> int:
        """See `SimulatorPool.loaded_task`."""
        ...


@dataclass(kw_only=True)
class _Asked:
    """What a slot was asked."""

    since: float
    frames: Frames = "last"


class SimulatorPool:
    """``max(workers, 1) * source.places`` slots, numbered through from 0, each with an episode or none.

    Results do not depend on the number of workers, bit for bit. Create the pool in a thread that outlives it:
    on Linux the workers die with that thread.

    Args:
        source: Simulator of every worker.
        workers: Processes; 0 runs everything in this process.
        steps: Steps that a request may have.
        timeout: Seconds that a worker may take for one answer.

    Raises:
        ConfigError: A number is out of range, or the simulator is unknown or lacks what one needs.
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
        self._asked: dict[int, _Asked] = {}
        """Requests under way by slot."""
        self._tasks: dict[int, int] = {}
        """Slot -> task id of the scene that is loaded there."""
        self._lost: list[str] = []
        self._closed = False
        self._members: list[InProcessMember | WorkerMember] = []
        try:
            if workers == 0:
                self._members = [InProcessMember(source.build(), steps)]
            for number in range(workers):
                self._members.append(WorkerMember(source, number, steps))
            self.spec: SimulatorSpec = self._first_spec()
        except BaseException:
            self.close()
            raise
        self.places = self.spec.places
        """Slots of each worker."""
        self.slots = self.places * len(self._members)

    def reset(self, slot: int, start: SimStart, expert: Demonstrator | None = None) -> None:
        """Ask for an episode; the answer comes with `ready`."""
        place = self._ask(slot, _Asked(since=time.monotonic()))
        self._tasks[slot] = start.task_id
        demonstrator = None if expert is None else asdict(expert)
        self._send(slot, {"do": "reset", "place": place, "start": asdict(start), "expert": demonstrator})

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
            actions: ``[S, A]`` float32, finite; or how many steps the expert shall choose. At most the steps
                of the pool.

        Raises:
            ValueError: The actions are not finite or of another shape.
        """
        steps = actions if isinstance(actions, int) else len(actions)
        chosen = None
        if not isinstance(actions, int):
            chosen = actions
            wanted = actions.ndim == 2 and actions.shape[1] == self.spec.action_dim
            if not wanted or not np.isfinite(actions).all():
                raise ValueError(
                    f"actions must be finite [steps, {self.spec.action_dim}], got shape {actions.shape}"
                )
        if not 1 <= steps <= self._steps:
            raise ValueError(f"{steps} steps were asked for, this pool takes 1 to {self._steps} at once")
        place = self._ask(slot, _Asked(since=time.monotonic(), frames=frames))
        arrays = self._members[slot // self.places].arrays
        assert arrays is not None, "an episode is begun before it is stepped"
        if chosen is not None:
            arrays.actions[place, :steps] = chosen
        self._send(
            slot,
            {
                "do": "step",
                "place": place,
                "steps": steps,
                "frames": frames,
                "past_success": past_success,
                "by_expert": chosen is None,
            },
        )

    def leave(self, slot: int) -> None:
        """Say that nobody plays on in a slot whose episode is not over: nobody waits for it any more."""
        if self.spec.lockstep:
            self._send(slot, {"do": "leave", "place": slot % self.places})

    def loaded_task(self, slot: int) -> int:
        """Return the task id of the scene in a slot, -1 where there is none: another one may take seconds."""
        return self._tasks.get(slot, -1)

    def ready(self, patience: float) -> list[SlotAnswer]:
        """Take the answers that have come; wait until there is one, at most `patience` seconds.

        Raises:
            RunError: More than a few workers were lost.
            ConfigError: A worker cannot be built, or refuses a start.
        """
        if self._closed:
            raise RunError("The simulator pool is closed. Create a new one.")
        deadline = time.monotonic() + patience
        while True:
            answers = [answer for number in range(len(self._members)) for answer in self._answers(number)]
            left = deadline - time.monotonic()
            if answers or not self._asked or left <= 0:
                return answers
            remotes = [member for member in self._members if isinstance(member, WorkerMember)]
            if remotes:
                with waits.waiting(waits.SIMULATORS):
                    wait([x for m in remotes for x in (m.pipe, m.process.sentinel)], timeout=min(left, 1.0))

    def close(self) -> None:
        """End all workers. May be called again."""
        self._closed = True
        members, self._members = self._members, []
        for member in members:
            if isinstance(member, WorkerMember):
                member.pipe.close()  # All end at the same time.
        for member in members:
            member.close()

    def __enter__(self) -> SimulatorPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _first_spec(self) -> SimulatorSpec:
        """Wait until the first worker is ready; the others may still be loading."""
        first = self._members[0]
        if isinstance(first, InProcessMember):
            return first.spec
        deadline = time.monotonic() + START_TIMEOUT
        while first.spec is None:
            first.answers()
            if first.spec is not None:
                break
            if time.monotonic() > deadline:
                raise RunError(
                    f"The {first.name} (process {first.process.pid}) was not ready after {START_TIMEOUT:.0f} "
                    "s, so it hangs or the machine is overloaded. Use fewer workers."
                )
            with waits.waiting(waits.SIMULATORS):
                wait([first.pipe, first.process.sentinel], timeout=1.0)
            if not first.process.is_alive() and not first.pipe.poll():
                raise first.dead()
        return first.spec

    def _ask(self, slot: int, asked: _Asked) -> int:
        """Note a request; return the slot's place in its worker."""
        if self._closed:
            raise RunError("The simulator pool is closed. Create a new one.")
        if not 0 <= slot < self.slots or slot in self._asked:
            raise ValueError(f"slot {slot} is not one of {self.slots}, or is still asked something")
        self._asked[slot] = asked
        return slot % self.places

    def _send(self, slot: int, request: Request) -> None:
        self._members[slot // self.places].send(request)

    def _answers(self, number: int) -> list[SlotAnswer]:
        member = self._members[number]
        if isinstance(member, InProcessMember):
            return [self._read(number, message) for message in member.answers()]
        starting = member.arrays is None
        try:
            found = [self._read(number, message) for message in member.answers()]
            if starting and member.arrays is not None:
                self._count_anew(number)  # It was built; only now it begins with what it was asked.
            if not found:
                self._check_alive(number, member)
            return found
        except RunError as error:
            return self._replace(number, member, str(error))

    def _check_alive(self, number: int, member: WorkerMember) -> None:
        """Raise when a worker died, or takes too long for what it was asked."""
        if not member.process.is_alive() and not member.pipe.poll():
            raise member.dead()
        # The newest request: with lockstep a worker may rightly wait for it.
        patience = self._timeout if member.arrays is not None else START_TIMEOUT
        asked = [self._asked[slot].since for slot in self._slots_of(number) if slot in self._asked]
        if asked and time.monotonic() - max(asked) > patience:
            raise RunError(
                f"The {member.name} (process {member.process.pid}) did not answer within {patience:.0f} s, "
                "so it hangs or the machine is overloaded."
            )

    def _count_anew(self, number: int) -> None:
        """Let the time in which a worker has to answer begin now."""
        for slot in self._slots_of(number):
            if slot in self._asked:
                self._asked[slot] = replace(self._asked[slot], since=time.monotonic())

    def _replace(self, number: int, member: WorkerMember, reason: str) -> list[SlotAnswer]:
        """Start another worker in the place of one that is lost; tell all its slots."""
        self._lost.append(reason)
        _log.warning("%s Its episodes are played again (%d of %d times).", reason, len(self._lost), MOST_LOST)
        member.close(patience=0.0)
        if len(self._lost) >= MOST_LOST:
            raise RunError(f"{reason} It is number {len(self._lost)} that was lost, so the pool gives up.")
        self._members[number] = WorkerMember(self._source, number, self._steps)
        slots = list(self._slots_of(number))
        for slot in slots:
            self._asked.pop(slot, None)
            self._tasks.pop(slot, None)
        return [SlotAnswer(slot=slot, lost=reason) for slot in slots]

    def _slots_of(self, number: int) -> range:
        return range(number * self.places, (number + 1) * self.places)

    def _read(self, number: int, message: dict[str, Any]) -> SlotAnswer:
        """Copy an answer out of the shared memory."""
        arrays, place = self._members[number].arrays, message["place"]
        assert arrays is not None
        slot = number * self.places + place
        asked, steps = self._asked.pop(slot), message.get("steps", 0)
        self._count_anew(number)  # Its worker lives: those that wait for it have more time.
        rows = slice(0, steps) if asked.frames == "all" and steps else slice(max(steps, 1) - 1, max(steps, 1))
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

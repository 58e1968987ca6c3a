"""Serve a simulator pool as one worker: play the places of one simulator, answer each place by itself.

Requests and answers are JSON over a pipe; numbers and pictures are in memory that both sides map. All
requests that have come are stepped together; with `SimulatorSpec.lockstep` once every playing place has one.

Letters: P places of the worker, C most steps of a request, K cameras, H W picture size in pixels (equal),
Q numbers of state, A numbers per action.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.observability.signals import die_with_parent
from asyncrl.records import POSE_DIM
from asyncrl.simulators.build import SimulatorSource
from asyncrl.simulators.interface import Demonstrator, HasExpert, Seen, SimStart, Simulator, SimulatorSpec

Frames = Literal["none", "last", "all"]  # Pictures wanted of a request.
Request = dict[str, Any]
Answer = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PlaceArrays:
    """Memory shared by a worker and the parent; row i of a place belongs to step i, or row 0 to a reset."""

    actions: NDArray[np.float32]  # [P, C, A], written by the parent, or by the worker for an expert.
    frames: NDArray[np.uint8]  # [P, C, K, H, W, 3].
    states: NDArray[np.float32]  # [P, C, Q].
    poses: NDArray[np.float32]  # [P, C, 8]; [P, C, 0] without `SimulatorSpec.poses`.
    rewards: NDArray[np.float32]  # [P, C].
    success: NDArray[np.bool_]  # [P, C].

    @classmethod
    def shapes(cls, spec: SimulatorSpec, steps: int) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Return type and shape by name, wider numbers first for the alignment."""
        rows = (spec.places, steps)
        picture = (len(spec.cameras), spec.image_size, spec.image_size, 3)
        return {
            "actions": (np.dtype(np.float32), (*rows, spec.action_dim)),
            "states": (np.dtype(np.float32), (*rows, spec.state_dim)),
            "poses": (np.dtype(np.float32), (*rows, POSE_DIM if spec.poses else 0)),
            "rewards": (np.dtype(np.float32), rows),
            "frames": (np.dtype(np.uint8), (*rows, *picture)),
            "success": (np.dtype(np.bool_), rows),
        }

    @classmethod
    def nbytes(cls, spec: SimulatorSpec, steps: int) -> int:
        """Return the size of the memory that `over` divides."""
        return sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in cls.shapes(spec, steps).values())

    @classmethod
    def over(cls, buffer: Any, spec: SimulatorSpec, steps: int) -> PlaceArrays:
        """View a buffer of `nbytes` as the arrays."""
        arrays, offset = {}, 0
        for name, (dtype, shape) in cls.shapes(spec, steps).items():
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(buffer, dtype, count, offset).reshape(shape)
            offset += count * dtype.itemsize
        return cls(**arrays)


@dataclass(kw_only=True)
class _Turn:
    place: int
    steps: int
    frames: Frames
    past_success: bool
    by_expert: bool
    done: int = 0
    over: bool = False
    terminated: bool = False
    truncated: bool = False

    @property
    def wants_picture(self) -> bool:
        return self.frames == "all" or (self.frames == "last" and self.done == self.steps - 1)


class Worker:
    """Carries out requests for the places of one simulator."""

    def __init__(self, simulator: Simulator, arrays: PlaceArrays) -> None:
        self._simulator, self._arrays = simulator, arrays
        self._experts: dict[int, Callable[[], NDArray[np.float32]]] = {}
        self._playing: set[int] = set()  # Places with an episode that is not over.
        self._waiting: list[_Turn] = []

    def take(self, requests: Sequence[Request]) -> list[Answer]:
        """Carry out what can be; return the answers, in no particular order."""
        answers = []
        for request in requests:
            todo = dict(request)
            match todo.pop("do"):
                case "reset":
                    answers.append(self._reset(**todo))
                case "leave":
                    self._playing.discard(todo["place"])
                case _:
                    self._waiting.append(_Turn(**todo))
        turns = self._waiting
        if turns and (not self._simulator.spec.lockstep or self._playing <= {turn.place for turn in turns}):
            self._waiting = []
            answers += self._play(turns)
        return answers

    def _reset(self, place: int, start: dict[str, Any], expert: dict[str, Any] | None) -> Answer:
        begun = SimStart(**start)
        seen = self._simulator.reset([place], [begun])
        self._write_seen([place], [0], seen)
        self._playing.add(place)
        self._experts.pop(place, None)
        if expert is not None:
            if not isinstance(self._simulator, HasExpert):
                raise ConfigError(
                    f"{self._simulator.spec.name} has no expert. Name a policy, or add the method `expert`: "
                    "docs/extending.md."
                )
            rng = np.random.default_rng([begun.seed, 1])
            self._experts[place] = self._simulator.expert(place, Demonstrator(**plain_tuples(expert)), rng)
        return {"place": place, "task": seen.tasks[0]}

    def _play(self, turns: list[_Turn]) -> list[Answer]:
        arrays = self._arrays
        while going := [turn for turn in turns if not turn.over]:
            places, rows = [turn.place for turn in going], [turn.done for turn in going]
            for turn in going:
                if turn.by_expert:
                    arrays.actions[turn.place, turn.done] = self._experts[turn.place]()
            drawn = any(turn.wants_picture for turn in going)
            stepped = self._simulator.step(places, arrays.actions[places, rows], draw=drawn)
            if stepped.seen is not None:
                self._write_seen(places, rows, stepped.seen)
            arrays.rewards[places, rows] = stepped.rewards
            arrays.success[places, rows] = stepped.success
            for row, turn in enumerate(going):
                turn.done += 1
                turn.terminated, turn.truncated = bool(stepped.terminated[row]), bool(stepped.truncated[row])
                solved = bool(stepped.success[row]) and not turn.past_success
                ended = turn.terminated or turn.truncated or solved
                turn.over = ended or turn.done == turn.steps
                if ended:
                    self._playing.discard(turn.place)
                if turn.over and not drawn and turn.frames != "none":
                    # It ended before the step whose picture was asked for.
                    self._write_seen([turn.place], [turn.done - 1], self._simulator.look([turn.place]))
        return [
            {
                "place": turn.place,
                "steps": turn.done,
                "terminated": turn.terminated,
                "truncated": turn.truncated,
            }
            for turn in turns
        ]

    def _write_seen(self, places: list[int], rows: list[int], seen: Seen) -> None:
        self._arrays.frames[places, rows] = seen.images
        self._arrays.states[places, rows] = seen.states
        spec = self._simulator.spec
        if (seen.poses is not None) != spec.poses:
            raise ConfigError(
                f"{spec.name} shows {'no poses' if seen.poses is None else 'poses'}, but its spec says poses="
                f"{spec.poses}. Let both say the same."
            )
        if seen.poses is not None:
            self._arrays.poses[places, rows] = seen.poses


def plain_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass that was written as JSON."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def worker_main(pipe: Connection, source: SimulatorSource, steps: int, parent: int) -> None:
    """Serve requests of at most so many steps until the pipe closes; errors go to the parent as messages."""
    die_with_parent(parent)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # As a lost terminal is:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes the pipe.
    os.environ.setdefault("LP_NUM_THREADS", "0")  # Mesa draws in this thread: one core per worker.
    simulator: Simulator | None = None
    try:
        simulator = source.build()
        spec = simulator.spec
        memory = os.memfd_create("asyncrl-simulator")
        os.ftruncate(memory, max(1, size := PlaceArrays.nbytes(spec, steps)))
        pipe.send_bytes(json.dumps({"spec": asdict(spec)}).encode())
        reduction.send_handle(pipe, memory, parent)
        worker = Worker(simulator, PlaceArrays.over(mmap.mmap(memory, max(1, size)), spec, steps))
        os.close(memory)
        while True:
            requests = [json.loads(pipe.recv_bytes())]
            while pipe.poll():
                requests.append(json.loads(pipe.recv_bytes()))
            for answer in worker.take(requests):
                pipe.send_bytes(json.dumps(answer).encode())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # The parent closed its end: the normal way to stop.
    except Exception as error:
        pipe.send_bytes(json.dumps({"error": str(error), "kind": type(error).__name__}).encode())
        if not isinstance(error, AsyncRLError):
            raise  # With a traceback: it is a fault of the simulator's, not of what was asked for.
    finally:
        if simulator is not None:
            simulator.close()

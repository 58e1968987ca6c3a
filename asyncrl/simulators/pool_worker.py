"""Serve a simulator pool as one worker: play the places of one simulator, answer each place by itself.

Requests and answers are JSON over a pipe; numbers and pictures are in memory that both sides map. A worker
takes all requests that have come and steps their places together; with `SimulatorSpec.lockstep` it waits
until every place with an episode under way has one.

Dimension letters:
    P  places of the worker      C  steps of a request at most      K  cameras
    H, W  picture size in pixels (equal)      Q  numbers of state      A  numbers per action

What plays a pool's episodes, as the pool sees it: this process, or a worker process behind a pipe.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing as mp
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import AssetError, AsyncRLError, ConfigError, RunError
from asyncrl.observability.signals import die_with_parent
from asyncrl.records import POSE_DIM
from asyncrl.simulators.build import SimulatorSource
from asyncrl.simulators.interface import Demonstrator, HasExpert, Seen, SimStart, Simulator, SimulatorSpec

_KINDS: Final[dict[str, type[AsyncRLError]]] = {"AssetError": AssetError, "ConfigError": ConfigError}


class InProcessMember:
    """Stands in for a worker where no process is wanted: carries requests out when answers are asked for."""

    def __init__(self, simulator: Simulator, steps: int) -> None:
        self._simulator, spec = simulator, simulator.spec
        self.spec = spec
        self.arrays: PlaceArrays | None = PlaceArrays.over(
            bytearray(PlaceArrays.nbytes(spec, steps)), spec, steps
        )
        self._worker = Worker(simulator, self.arrays)
        self._requests: list[Request] = []

    def send(self, request: Request) -> None:
        """Keep a request."""
        self._requests.append(request)

    def answers(self) -> list[dict[str, Any]]:
        """Carry out all that was requested."""
        requests, self._requests = self._requests, []
        return self._worker.take(requests)

    def close(self) -> None:
        """Free the simulator."""
        self._simulator.close()


class WorkerMember:
    """The parent's side of one worker process."""

    def __init__(self, source: SimulatorSource, number: int, steps: int) -> None:
        context = mp.get_context("spawn")
        self.name = f"simulator worker {number}"
        self.arrays: PlaceArrays | None = None
        self.spec: SimulatorSpec | None = None
        """None until it is ready."""
        self._steps = steps
        self._unsent: list[Request] = []
        """Asked for before it was ready."""
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=worker_main, name=self.name, args=(theirs, source, steps, os.getpid()), daemon=True
        )
        self.process.start()
        theirs.close()

    def send(self, request: Request) -> None:
        """Send a request, or keep it until the worker is ready."""
        if self.arrays is None:
            self._unsent.append(request)
            return
        try:
            self.pipe.send_bytes(json.dumps(request).encode())
        except (BrokenPipeError, ConnectionResetError):
            return  # It died: that is noticed, and said, where answers are taken.

    def answers(self) -> list[dict[str, Any]]:
        """Take what has come without waiting."""
        found = []
        try:
            while self.pipe.poll():
                message = json.loads(self.pipe.recv_bytes())
                if "error" in message:
                    kind = _KINDS.get(message["kind"], RunError)
                    raise kind(
                        message["error"]
                        if kind is not RunError
                        else f"The {self.name} failed: {message['kind']}: {message['error']}"
                    )
                if "spec" in message:
                    self._begin(spec_from_json(message["spec"]))
                else:
                    found.append(message)
        except (EOFError, ConnectionResetError):
            raise self.dead() from None
        return found

    def _begin(self, spec: SimulatorSpec) -> None:
        memory = reduction.recv_handle(self.pipe)
        size = max(1, PlaceArrays.nbytes(spec, self._steps))
        self.spec, self.arrays = spec, PlaceArrays.over(mmap.mmap(memory, size), spec, self._steps)
        os.close(memory)
        unsent, self._unsent = self._unsent, []
        for request in unsent:
            self.send(request)

    def dead(self) -> RunError:
        """Say how it died."""
        self.process.join(timeout=5)
        return RunError(
            f"The {self.name} died with exit code {self.process.exitcode} (negative: killed by signal). Its "
            "own output above says why; signal 9 often means a lack of memory."
        )

    def close(self, patience: float = 5.0) -> None:
        """End the process: politely by closing the pipe, by SIGKILL if that takes longer."""
        self.pipe.close()
        self.process.join(timeout=patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(timeout=5)


Frames = Literal["none", "last", "all"]
"""Which pictures of a request somebody looks at."""
Request = dict[str, Any]
Answer = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PlaceArrays:
    """What a worker and the parent both see of every place; row i of a place belongs to step i of a request.

    After a reset, row 0 holds what is seen.
    """

    actions: NDArray[np.float32]
    """``[P, C, A]`` written by the parent, or by the worker where an expert chooses."""
    frames: NDArray[np.uint8]
    """``[P, C, K, H, W, 3]``."""
    states: NDArray[np.float32]
    """``[P, C, Q]``."""
    poses: NDArray[np.float32]
    """``[P, C, 8]``; ``[P, C, 0]`` of a simulator that says none."""
    rewards: NDArray[np.float32]
    """``[P, C]``."""
    success: NDArray[np.bool_]
    """``[P, C]``."""

    @classmethod
    def shapes(cls, spec: SimulatorSpec, steps: int) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Return type and shape by name, those of wider numbers first: they need the alignment."""
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
    """A request for steps that is under way."""

    place: int
    steps: int
    frames: Frames
    past_success: bool
    by_expert: bool
    done: int = 0
    over: bool = False
    """Whether it ends here: all steps are made, the episode ended, or the task is fulfilled."""
    terminated: bool = False
    truncated: bool = False

    @property
    def wants_picture(self) -> bool:
        """Whether somebody looks at what the next step shows."""
        return self.frames == "all" or (self.frames == "last" and self.done == self.steps - 1)


class Worker:
    """Carries out requests in the places of one simulator."""

    def __init__(self, simulator: Simulator, arrays: PlaceArrays) -> None:
        self._simulator, self._arrays = simulator, arrays
        self._experts: dict[int, Callable[[], NDArray[np.float32]]] = {}
        self._playing: set[int] = set()
        """Places with an episode that is not over: what lockstep waits for."""
        self._waiting: list[_Turn] = []

    def take(self, requests: Sequence[Request]) -> list[Answer]:
        """Carry out what can be; return the answers, in no particular order."""
        answers = []
        for request in requests:
            if request["do"] == "reset":
                answers.append(self._reset(request))
            elif request["do"] == "leave":
                self._playing.discard(request["place"])
            else:
                self._waiting.append(_turn(request))
        if self._waiting and self._complete():
            turns, self._waiting = self._waiting, []
            answers += self._play(turns)
        return answers

    def _complete(self) -> bool:
        """Whether the steps that wait can be made now."""
        if not self._simulator.spec.lockstep:
            return True
        return self._playing <= {turn.place for turn in self._waiting}

    def _reset(self, request: Request) -> Answer:
        place, start = request["place"], SimStart(**request["start"])
        seen = self._simulator.reset([place], [start])
        self._write_seen([place], [0], seen)
        self._playing.add(place)
        self._experts.pop(place, None)
        if request["expert"] is not None:
            if not isinstance(self._simulator, HasExpert):
                raise ConfigError(
                    f"{self._simulator.spec.name} has no expert. Name a policy, or add the method `expert`: "
                    "docs/extending.md."
                )
            demonstrator = Demonstrator(**_tuples(request["expert"]))
            rng = np.random.default_rng([start.seed, 1])
            self._experts[place] = self._simulator.expert(place, demonstrator, rng)
        return {"place": place, "task": seen.tasks[0]}

    def _play(self, turns: list[_Turn]) -> list[Answer]:
        """Step all places together until each has made its steps, or ended before."""
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
                ended = turn.terminated or turn.truncated
                solved = bool(stepped.success[row]) and not turn.past_success
                turn.over = ended or solved or turn.done == turn.steps
                if ended or solved:
                    self._playing.discard(turn.place)
                if (
                    turn.over and not drawn and turn.frames != "none"
                ):  # It ended before the step whose picture was asked for.
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


def _turn(request: Request) -> _Turn:
    return _Turn(
        place=request["place"],
        steps=request["steps"],
        frames=request["frames"],
        past_success=request["past_success"],
        by_expert=request["by_expert"],
    )


def spec_from_json(values: Mapping[str, Any]) -> SimulatorSpec:
    """Read what `asdict` wrote of a spec."""
    return SimulatorSpec(**_tuples(values))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def worker_main(pipe: Connection, source: SimulatorSource, steps: int, parent: int) -> None:
    """Serve requests until the pipe closes. What a worker cannot do goes to the parent as a message.

    Args:
        steps: ``C``.
    """
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

"""Serve a simulator pool as one worker: play the places of one simulator, answer each place separately.

Requests received are stepped together; with `SimulatorSpec.lockstep`, once every playing place has a request.
Requests and answers are dicts of plain values and arrays, which `pack` writes for a pipe.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.facts import check_array, check_instructions, check_pictures, check_verdicts
from asyncrl.observability.signals import die_with_parent
from asyncrl.simulators.interface import Demonstrator, HasExpert, Seen, SimStart, Simulator, SimulatorSource

Frames = Literal["none", "last", "all"]  # Pictures wanted of a request.
Message = dict[str, Any]


def pack(messages: Iterable[Mapping[str, Any]]) -> bytes:
    """Write messages as a line of JSON, followed by the numbers of their arrays in order."""
    arrays: list[bytes] = []

    def describe(array: NDArray[Any]) -> Message:
        arrays.append(array.tobytes())
        return {"array": array.dtype.str, "shape": array.shape}

    return b"".join([json.dumps(list(messages), default=describe).encode(), b"\n", *arrays])


def unpack(data: bytes) -> list[Message]:
    """Read messages that `pack` wrote. Their arrays are copies."""
    offset = data.index(b"\n") + 1

    def read(found: Message) -> Any:
        nonlocal offset
        if "array" not in found:
            return found
        count = int(np.prod(found["shape"]))
        array = np.frombuffer(data, found["array"], count, offset)
        offset += array.nbytes
        return array.reshape(found["shape"]).copy()

    return json.loads(data[: offset - 1], object_hook=read)


@dataclass(kw_only=True)
class _Turn:
    place: int
    steps: int
    frames: Frames
    past_success: bool
    actions: NDArray[np.float32] | None  # [steps, A]; None: the expert chooses.
    done: list[tuple[Any, ...]] = field(default_factory=list)  # Action, reward and success of each step.
    seen: list[tuple[Any, ...]] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False
    over: bool = False

    @property
    def wants_picture(self) -> bool:
        """True if the next step's picture is wanted."""
        return self.frames == "all" or (self.frames == "last" and len(self.done) == self.steps - 1)


class Worker:
    """Carries out requests for the places of one simulator."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._experts: dict[int, Callable[[], NDArray[np.float32]]] = {}
        self._playing: set[int] = set()  # Places with an episode that is not over.
        self._waiting: list[_Turn] = []

    def take(self, requests: Sequence[Message]) -> list[Message]:
        """Carry out all possible requests; return the answers, in any order."""
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

    def _reset(self, place: int, start: dict[str, Any], expert: dict[str, Any] | None) -> Message:
        begun, spec = SimStart(**start), self._simulator.spec
        seen = self._simulator.reset([place], [begun])
        self._playing.add(place)
        self._experts.pop(place, None)
        if expert is not None:
            if not isinstance(self._simulator, HasExpert):
                raise ConfigError(
                    f"{spec.name} has no expert. Name a policy, or add a method `expert`: docs/extending.md."
                )
            rng = np.random.default_rng([begun.seed, 1])
            self._experts[place] = self._simulator.expert(place, Demonstrator(**plain_tuples(expert)), rng)
        (task,) = check_instructions(seen.tasks, f"{spec.name}, tasks after a reset", 1)
        if spec.tasks and task not in spec.tasks:
            raise ConfigError(
                f"{spec.name} begins {begun.name} with {task!r}, which is none of its {len(spec.tasks)} "
                "spec.tasks. Let both say the same, or spec.tasks be empty."
            )
        return {"place": place, "task": task, **_stacked(_SEEN, [self._row(seen, 0, 1)])}

    def _play(self, turns: list[_Turn]) -> list[Message]:
        while going := [turn for turn in turns if not turn.over]:
            chosen = [
                self._experts[t.place]() if t.actions is None else t.actions[len(t.done)] for t in going
            ]
            actions = np.stack([np.asarray(action, np.float32) for action in chosen])
            drawn = any(turn.wants_picture for turn in going)
            stepped = self._simulator.step([turn.place for turn in going], actions, draw=drawn)
            where, shape = f"step() of {self._simulator.spec.name}: its", (len(going),)
            rewards = check_array(stepped.rewards, shape, f"{where} rewards")
            success = check_verdicts(stepped.success, shape, f"{where} success")
            terminated = check_verdicts(stepped.terminated, shape, f"{where} terminated")
            truncated = check_verdicts(stepped.truncated, shape, f"{where} truncated")
            for row, turn in enumerate(going):
                wanted = turn.wants_picture
                turn.done.append((actions[row], rewards[row], success[row]))
                turn.terminated, turn.truncated = bool(terminated[row]), bool(truncated[row])
                solved = bool(success[row]) and not turn.past_success
                ended = turn.terminated or turn.truncated or solved
                turn.over = ended or len(turn.done) == turn.steps
                if ended:
                    self._playing.discard(turn.place)
                if wanted or (turn.over and turn.frames == "last"):  # It may end before its last step.
                    if stepped.seen is None:
                        turn.seen.append(self._row(self._simulator.look([turn.place]), 0, 1))
                    else:
                        turn.seen.append(self._row(stepped.seen, row, len(going)))
        return [
            {
                "place": turn.place,
                "terminated": turn.terminated,
                "truncated": turn.truncated,
                **_stacked(_DONE, turn.done),
                **_stacked(_SEEN, turn.seen),
            }
            for turn in turns
        ]

    def _row(self, seen: Seen, row: int, rows: int) -> tuple[Any, ...]:
        spec = self._simulator.spec
        size = (rows, len(spec.cameras), spec.image_size, spec.image_size, 3)
        check_pictures(seen.images, size, f"pictures of {spec.name}")
        states = check_array(seen.states, (rows, spec.state_dim), f"state of {spec.name}")
        if (seen.poses is not None) != spec.poses:
            raise ConfigError(
                f"{spec.name} shows {'no poses' if seen.poses is None else 'poses'}, but its spec has poses="
                f"{spec.poses}. Make them agree."
            )
        pose = np.zeros(0) if seen.poses is None else seen.poses[row].copy()
        return np.array(seen.images[row]), states[row].copy(), pose


_SEEN = {"frames": np.uint8, "states": np.float32, "poses": np.float32}
_DONE = {"actions": np.float32, "rewards": np.float32, "success": np.bool_}


def _stacked(kinds: Mapping[str, Any], rows: Sequence[tuple[Any, ...]]) -> dict[str, NDArray[Any]]:
    columns = zip(kinds.items(), zip(*rows, strict=True), strict=True) if rows else ()
    return {name: np.array(column, kind) for (name, kind), column in columns}


def plain_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the lists of a dataclass read from JSON into tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _receive(pipe: Connection, inbox: SimpleQueue[list[Any]]) -> None:
    # Until the pipe closes, then None: the parent must never wait for a busy worker.
    try:
        while True:
            inbox.put(unpack(pipe.recv_bytes()))
    except (EOFError, OSError):
        inbox.put([None])


def worker_main(pipe: Connection, source: SimulatorSource, parent: int) -> None:
    """Serve requests until the pipe closes; errors go to the parent as messages."""
    die_with_parent(parent)
    os.environ.setdefault("LP_NUM_THREADS", "0")  # Mesa draws in this thread: one core per worker.
    simulator: Simulator | None = None
    try:
        simulator = source.build()
        pipe.send_bytes(pack([{"spec": asdict(simulator.spec)}]))
        worker, inbox = Worker(simulator), SimpleQueue[list[Any]]()
        threading.Thread(target=_receive, args=(pipe, inbox), daemon=True).start()
        while True:
            requests = inbox.get()
            while not inbox.empty():
                requests += inbox.get()
            if None in requests:
                return  # The parent closed its end: the normal way to stop.
            if answers := worker.take(requests):
                pipe.send_bytes(pack(answers))
    except (BrokenPipeError, ConnectionResetError):
        return  # As above.
    except Exception as error:
        pipe.send_bytes(pack([{"error": str(error), "kind": type(error).__name__}]))
        if not isinstance(error, AsyncRLError):
            raise  # With a traceback: it is a fault of the simulator's, not of what was asked for.
    finally:
        if simulator is not None:
            simulator.close()

"""Run many simulators side by side in worker processes.

Each worker is a process that owns `envs_per_worker` environments and serves one request at a time:

1. the parent writes the actions into shared memory and sends a request (JSON bytes) over a pipe;
2. the worker steps its environments, writes frames and success into shared memory, and answers (JSON bytes);
3. the parent copies the results out. Nothing is pickled after start-up.

A worker waits for requests without a deadline; its wait ends when the parent sends one, closes the pipe or
dies. The parent waits for an answer until a deadline; its wait ends early when the worker dies.

Dimension letters:
    n  environments addressed      H, W  picture size in pixels (equal)
"""

import ctypes
import json
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import AssetError, AsyncRLError, ConfigError, RunError
from asyncrl.records import ActionSpec
from asyncrl.simulators.pool_worker import Environments, Server, worker_main

DEFAULT_SPEC: Final = ActionSpec()
_KINDS: Final[dict[str, type[AsyncRLError]]] = {"AssetError": AssetError, "ConfigError": ConfigError}


class _InProcess:
    """Stands in for a worker when no process is wanted."""

    def __init__(self, environments: Environments) -> None:
        self.arrays = environments.arrays(bytearray(environments.nbytes))
        self._server = Server(environments, self.arrays)
        self._answer: dict[str, Any] = {}

    def ask(self, request: dict[str, Any]) -> None:
        self._answer = self._server.serve(request)

    def answer(self, deadline: float) -> dict[str, Any]:
        return self._answer

    def close(self) -> None:
        """Do nothing: there is nothing to stop."""


class _Remote:
    """The parent's side of one worker process."""

    def __init__(self, environments: Environments, number: int) -> None:
        context = mp.get_context("spawn")
        buffer = context.RawArray(ctypes.c_uint8, environments.nbytes)
        self.arrays = environments.arrays(buffer)
        self.name = f"simulator worker {number}"
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=worker_main,
            name=self.name,
            args=(theirs, buffer, environments, os.getpid()),
            daemon=True,
        )
        self._process.start()
        theirs.close()

    def ask(self, request: dict[str, Any]) -> None:
        """Send a request; `answer` must follow before the next one."""
        try:
            self._pipe.send_bytes(json.dumps(request).encode())
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._dead() from error

    def answer(self, deadline: float) -> dict[str, Any]:
        """Wait until the answer is here, the worker dies, or ``time.monotonic()`` passes `deadline`."""
        patience = max(0.0, deadline - time.monotonic())
        if not wait([self._pipe, self._process.sentinel], timeout=patience):
            raise RunError(
                f"The {self.name} (process {self._process.pid}) did not answer before the deadline, so it "
                "hangs or the machine is overloaded. Use fewer workers, or raise the pool's timeout."
            )
        if not self._pipe.poll():
            raise self._dead()
        try:
            message = json.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionResetError) as error:
            raise self._dead() from error
        if "error" in message:
            kind = _KINDS.get(message["kind"], RunError)
            raise kind(
                message["error"] if kind is not RunError else f"The {self.name} failed: {message['error']}"
            )
        return message

    def close(self) -> None:
        """End the process: politely by closing the pipe, by SIGKILL if that takes more than 5 s."""
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(timeout=5)

    def _dead(self) -> RunError:
        self._process.join(timeout=5)
        return RunError(
            f"The {self.name} died with exit code {self._process.exitcode} (negative: killed by signal), "
            "so its episodes are lost. Its own output above says why; signal 9 often means a lack of memory."
        )


class SimulatorPool:
    """``max(workers, 1) * envs_per_worker`` environments, numbered through from 0.

    Results do not depend on the number of workers, bit for bit. Environments keep obeying actions after
    success and after `max_steps`: the caller decides when an episode is over. Create the pool in a thread
    that outlives it: on Linux the workers die with that thread.

    Args:
        name: Simulator: a short name of the registry, or 'package.module:Class'.
        workers: Processes; 0 runs everything in this process.
        envs_per_worker: Environments of each, at least 1.
        image_size: Side of the pictures in pixels.
        settings: Keywords of the simulator's class, as 'key=value' texts.
        action_spec: Steps that are carried out at once, and numbers per step: those of the policy.
        timeout: Seconds that a worker may take for start-up or for one request.

    Raises:
        ConfigError: A number is out of range, or the simulator is unknown or lacks what one needs.
        AssetError: No OpenGL library.
        RunError: A worker died or did not answer in time.
    """

    def __init__(
        self,
        name: str,
        workers: int,
        envs_per_worker: int,
        image_size: int,
        *,
        settings: Sequence[str] = (),
        action_spec: ActionSpec = DEFAULT_SPEC,
        timeout: float = 120.0,
    ) -> None:
        if workers < 0 or envs_per_worker < 1:
            raise ConfigError(
                f"A pool of {workers} workers with {envs_per_worker} environments each cannot work. "
                "Use 0 workers (this process) or more, and at least 1 environment."
            )
        self._envs, self._timeout, self._closed = envs_per_worker, timeout, False
        self.slots = max(workers, 1) * envs_per_worker
        """Number of environments."""
        self._workers: list[_InProcess | _Remote] = []
        self._spec = action_spec
        environments = Environments(
            simulator=name,
            settings=tuple(settings),
            count=envs_per_worker,
            image_size=image_size,
            action_spec=action_spec,
        )
        if workers == 0:
            self._workers.append(_InProcess(environments))
            return
        try:
            for number in range(workers):
                self._workers.append(_Remote(environments, number))
            deadline = time.monotonic() + timeout
            for worker in self._workers:
                worker.answer(deadline)
        except BaseException:
            self.close()
            raise

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> tuple[NDArray[np.uint8], list[str]]:
        """Begin episodes.

        Args:
            indices: n different environments.
            seeds: n seeds, one per index.

        Returns:
            First pictures ``[n, H, W, 3]`` uint8 and n instructions, in the order of `indices`.
        """
        if len(indices) != len(seeds):
            raise ValueError(f"{len(indices)} environments and {len(seeds)} seeds do not belong together")
        tasks = [""] * len(indices)

        def request(positions: list[int], envs: list[int]) -> dict[str, Any]:
            return {"do": "reset", "envs": envs, "seeds": [int(seeds[position]) for position in positions]}

        for positions, answer in self._ask(indices, request):
            for position, task in zip(positions, answer["tasks"], strict=True):
                tasks[position] = task
        images = [worker.arrays.frames[env, 0] for worker, env in map(self._locate, indices)]
        return np.stack(images), tasks

    def step_chunk(
        self, indices: Sequence[int], actions: NDArray[np.floating]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Carry out one decision in each of n environments.

        Args:
            indices: n different environments.
            actions: ``[n, C, A]`` float, finite, in the simulator's units; C is at least 1.

        Returns:
            Frames ``[n, C, H, W, 3]`` uint8 and success ``[n, C]`` bool, in the order of `indices`. Frame and
            success i follow action i. Steps after a success are carried out like any other.
        """
        at_once, width = self._spec.chunk, self._spec.dim
        wanted = actions.ndim == 3 and actions.shape == (len(indices), actions.shape[1], width)
        if not wanted or not actions.shape[1] or not np.isfinite(actions).all():
            raise ValueError(
                f"actions must be finite [{len(indices)}, 1 or more, {width}], got shape {actions.shape}"
            )
        starts = range(0, actions.shape[1], at_once)
        parts = [self._step(indices, actions[:, i : i + at_once]) for i in starts]
        frames, success = zip(*parts, strict=True)
        return np.concatenate(frames, axis=1), np.concatenate(success, axis=1).astype(bool)

    def _step(
        self, indices: Sequence[int], actions: NDArray[np.floating]
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Carry out as many steps as the shared memory holds, or fewer."""
        steps = actions.shape[1]
        located = [self._locate(index) for index in indices]
        for (worker, env), chunk in zip(located, actions, strict=True):
            worker.arrays.actions[env, :steps] = chunk
        self._ask(indices, lambda _, envs: {"do": "step", "envs": envs, "steps": steps})
        frames = np.stack([worker.arrays.frames[env, :steps] for worker, env in located])
        return frames, np.stack([worker.arrays.success[env, :steps] for worker, env in located])

    def close(self) -> None:
        """End all workers. May be called again."""
        self._closed = True
        for worker in self._workers:
            worker.close()
        self._workers = []

    def __enter__(self) -> "SimulatorPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _locate(self, index: int) -> tuple[_InProcess | _Remote, int]:
        return self._workers[index // self._envs], index % self._envs

    def _ask(
        self, indices: Sequence[int], request: Callable[[list[int], list[int]], dict[str, Any]]
    ) -> list[tuple[list[int], dict[str, Any]]]:
        """Let all workers concerned work at once; return each one's positions in `indices` and its answer.

        A failure closes the pool: a late answer must not be taken for the next one.
        """
        if self._closed:
            raise RunError("The simulator pool is closed (or a worker failed before). Create a new one.")
        if len(set(indices)) != len(indices) or not all(0 <= index < self.slots for index in indices):
            raise ValueError(f"indices must be different and in 0..{self.slots - 1}, got {list(indices)}")
        positions_of: dict[int, list[int]] = {}
        for position, index in enumerate(indices):
            positions_of.setdefault(index // self._envs, []).append(position)
        deadline = time.monotonic() + self._timeout
        try:
            for number, positions in positions_of.items():
                self._workers[number].ask(
                    request(positions, [int(indices[p]) % self._envs for p in positions])
                )
            return [
                (positions, self._workers[number].answer(deadline))
                for number, positions in positions_of.items()
            ]
        except AsyncRLError:
            self.close()
            raise

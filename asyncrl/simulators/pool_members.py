"""What plays a pool's episodes, as the pool sees it: this process, or a worker process behind a pipe."""

from __future__ import annotations

import json
import mmap
import multiprocessing as mp
import os
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from typing import Any, Final

from asyncrl.errors import AssetError, AsyncRLError, ConfigError, RunError
from asyncrl.simulators.build import SimulatorSource
from asyncrl.simulators.interface import Simulator, SimulatorSpec
from asyncrl.simulators.pool_worker import PlaceArrays, Request, Worker, spec_from_json, worker_main

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

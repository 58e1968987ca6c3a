"""Serve a simulator pool as one worker: step environments, write pictures and success to shared memory.

Dimension letters:
    E  environments of the worker      C  steps of a request at most      A  numbers per step
    H, W  picture size in pixels (equal)
"""

import json
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl import registry
from asyncrl.errors import ConfigError
from asyncrl.observability.signals import die_with_parent
from asyncrl.records import ActionSpec
from asyncrl.simulators.interface import Simulator


@dataclass(frozen=True, kw_only=True)
class Environments:
    """Which environments a worker has."""

    simulator: str
    """Short name, or 'package.module:Class' of the user."""
    settings: tuple[str, ...]
    """Keywords of the class, as 'key=value' texts."""
    count: int
    image_size: int
    """Side of the pictures in pixels."""
    action_spec: ActionSpec
    """Steps that are carried out at once, and numbers per step."""

    def build(self) -> Simulator:
        """Build one environment.

        Raises:
            ConfigError: Nothing is called so, or the class lacks what a simulator needs or refuses a setting.
            AssetError: A library that it needs is not there.
        """
        kind = registry.resolve("simulator", self.simulator)
        keywords = registry.keywords("--simulator-settings", self.settings)
        try:
            return kind(image_size=self.image_size, **keywords)
        except TypeError as error:
            raise ConfigError(
                f"--simulator {self.simulator} cannot be built: {error}. It is called with image_size and "
                "the keywords of --simulator-settings."
            ) from error

    @property
    def nbytes(self) -> int:
        """Size of the shared buffer that `arrays` divides."""
        step = self.action_spec.dim * 4 + self.image_size**2 * 3 + 1
        return self.count * self.action_spec.chunk * step

    def arrays(self, buffer: Any) -> "Arrays":
        """View one shared buffer as the three arrays (actions first: they need the alignment)."""
        steps = (self.count, self.action_spec.chunk)
        shapes = {
            "actions": (np.dtype(np.float32), (*steps, self.action_spec.dim)),
            "frames": (np.dtype(np.uint8), (*steps, self.image_size, self.image_size, 3)),
            "success": (np.dtype(np.uint8), steps),
        }
        arrays, offset = {}, 0
        for key, (dtype, shape) in shapes.items():
            length = int(np.prod(shape))
            arrays[key] = np.frombuffer(buffer, dtype, length, offset).reshape(shape)
            offset += length * dtype.itemsize
        return Arrays(**arrays)


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """What a worker and the parent both see."""

    actions: NDArray[np.float32]
    """``[E, C, A]`` written by the parent."""
    frames: NDArray[np.uint8]
    """``[E, C, H, W, 3]`` written by the worker; a reset writes its picture to step 0."""
    success: NDArray[np.uint8]
    """``[E, C]`` written by the worker, 0 or 1."""


class Server:
    """Carries out requests on its own environments. The same code runs in a worker and in-process."""

    def __init__(self, environments: Environments, arrays: Arrays) -> None:
        self._arrays = arrays
        self._simulators = [environments.build() for _ in range(environments.count)]

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Reset or step the environments ``request["envs"]``; results go to the shared arrays."""
        if request["do"] == "reset":
            pairs = zip(request["envs"], request["seeds"], strict=True)
            return {"tasks": [self._reset(env, seed) for env, seed in pairs]}
        for env in request["envs"]:
            for step, action in enumerate(self._arrays.actions[env, : request["steps"]]):
                seen = self._simulators[env].step(action)
                self._arrays.frames[env, step] = seen.image
                self._arrays.success[env, step] = seen.success
        return {}

    def _reset(self, env: int, seed: int) -> str:
        seen = self._simulators[env].reset(seed)
        self._arrays.frames[env, 0] = seen.image
        return seen.task


def worker_main(pipe: Connection, buffer: Any, environments: Environments, parent: int) -> None:
    """Serve requests until the pipe closes. What a worker cannot do goes to the parent as a message."""
    die_with_parent(parent)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # As a lost terminal is:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes the pipe
    os.environ.setdefault("LP_NUM_THREADS", "0")  # Mesa draws in this thread: one core per worker
    try:
        server = Server(environments, environments.arrays(buffer))
        pipe.send_bytes(json.dumps({}).encode())
        while True:
            request = json.loads(pipe.recv_bytes())
            pipe.send_bytes(json.dumps(server.serve(request)).encode())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent closed its end: the normal way to stop
    except Exception as error:
        pipe.send_bytes(json.dumps({"error": str(error), "kind": type(error).__name__}).encode())
        raise

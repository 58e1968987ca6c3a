"""Serve a simulator pool as one worker: step environments, write pictures and success to shared memory.

Dimension letters:
    E  environments of the worker      C  steps of a request at most (8)      A  action dimensions (7)
    H, W  picture size in pixels (equal)
"""

import json
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.observability.signals import die_with_parent
from asyncrl.records import ACTION_DIM, CHUNK
from asyncrl.simulators.interface import Simulator

SIMULATORS: Final = ("tabletop",)
"""Names that `build_simulator` knows."""


def build_simulator(name: str, image_size: int) -> Simulator:
    """Build one rendering simulator by its name.

    Raises:
        ConfigError: The name is unknown.
        AssetError: A library that it needs is not there.
    """
    if name != "tabletop":
        raise ConfigError(f"The simulator {name!r} is not known. Choose one of: {', '.join(SIMULATORS)}.")
    from asyncrl.simulators.tabletop.simulator import Tabletop

    return Tabletop(image_size)


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """What a worker and the parent both see."""

    actions: NDArray[np.float32]
    """``[E, C, A]`` written by the parent."""
    frames: NDArray[np.uint8]
    """``[E, C, H, W, 3]`` written by the worker; a reset writes its picture to step 0."""
    success: NDArray[np.uint8]
    """``[E, C]`` written by the worker, 0 or 1."""


def lay_out(buffer: Any, envs: int, image_size: int) -> Arrays:
    """View one shared buffer as the three arrays (actions first: they need the alignment)."""
    shapes = {
        "actions": (np.dtype(np.float32), (envs, CHUNK, ACTION_DIM)),
        "frames": (np.dtype(np.uint8), (envs, CHUNK, image_size, image_size, 3)),
        "success": (np.dtype(np.uint8), (envs, CHUNK)),
    }
    arrays, offset = {}, 0
    for key, (dtype, shape) in shapes.items():
        count = int(np.prod(shape))
        arrays[key] = np.frombuffer(buffer, dtype, count, offset).reshape(shape)
        offset += count * dtype.itemsize
    return Arrays(**arrays)


def buffer_bytes(envs: int, image_size: int) -> int:
    """Compute the size of the shared buffer that `lay_out` divides."""
    return envs * CHUNK * (ACTION_DIM * 4 + image_size * image_size * 3 + 1)


class Server:
    """Carries out requests on its own environments. The same code runs in a worker and in-process."""

    def __init__(self, name: str, arrays: Arrays, image_size: int) -> None:
        self._arrays = arrays
        self._simulators = [build_simulator(name, image_size) for _ in range(len(arrays.actions))]

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


def worker_main(pipe: Connection, buffer: Any, name: str, envs: int, image_size: int, parent: int) -> None:
    """Serve requests until the pipe closes. What a worker cannot do goes to the parent as a message."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes the pipe
    os.environ.setdefault("LP_NUM_THREADS", "0")  # Mesa draws in this thread: one core per worker
    try:
        server = Server(name, lay_out(buffer, envs, image_size), image_size)
        pipe.send_bytes(json.dumps({}).encode())
        while True:
            request = json.loads(pipe.recv_bytes())
            pipe.send_bytes(json.dumps(server.serve(request)).encode())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent closed its end: the normal way to stop
    except Exception as error:
        pipe.send_bytes(json.dumps({"error": str(error), "kind": type(error).__name__}).encode())
        raise

"""Broadcast weights between GPUs, one rank per GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.weights.interface import BufferPair, Link
from asyncrl.weights.packing import Buffers, as_bytes

PIECE: Final = 64 << 20  # Bytes that are broadcast at a time: a deadline counts from the last piece


class NcclTransport:
    """Broadcasts between GPUs, on a stream that is not the models'."""

    def __init__(self, device: torch.device, deadline: float, stream: torch.cuda.Stream) -> None:
        self.device = device
        self._deadline = deadline
        self._stream = stream

    @classmethod
    def build(cls, device: torch.device, deadline: float) -> Self:
        """Return a transport of a GPU."""
        require_gpu("nccl", device)
        return cls(device, deadline, high_priority_stream(device))

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context on the broadcasts' stream."""
        return torch.cuda.stream(self._stream)

    def connect_root(self, store: Store, size: int, buffers: BufferPair) -> Link:
        """Form a link as rank 0."""
        return _NcclLink(self._group(store, 0, size), self._stream, buffers)

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
        """Form a link as another rank."""
        return _NcclLink(self._group(store, rank, size), self._stream, ([], []))

    def _group(self, store: Store, rank: int, size: int) -> Any:
        nccl: Any = dist.ProcessGroupNCCL  # absent from CPU builds of torch
        options = nccl.Options()
        options.is_high_priority_stream = True
        # Far beyond our own deadline: the watchdog's answer to a timeout is to end the process.
        options._timeout = timedelta(seconds=100 * self._deadline + 3600)
        torch.cuda.set_device(self.device)
        with _lenient_watchdog():
            group = nccl(store, rank, size, options)
        group.eager_connect_single_device(self.device)
        return group


class _NcclLink(Link):
    def __init__(self, group: Any, stream: torch.cuda.Stream, buffers: BufferPair) -> None:
        self._group, self._stream, self._buffers = group, stream, buffers
        self._aborted = threading.Event()
        self.moved = 0

    def send(self, buffer_index: int) -> None:
        self._broadcast(self._buffers[buffer_index])

    def receive(self, buffer_index: int, into: Buffers) -> None:
        self._broadcast(into)

    def abort(self) -> None:
        self._group.abort()
        self._aborted.set()  # after it: until the kernels end, the waiting thread keeps their buffers alive

    def _broadcast(self, buffers: Buffers) -> None:
        # A thread starts on the default stream, where it would wait for all that the models have queued.
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            works = [self._group.broadcast([piece], broadcast_options()) for piece in pieces_of(buffers)]
            for work in works:
                while not work.is_completed():
                    if self._aborted.wait(0.0005):
                        raise WeightSyncError("the NCCL link was aborted.")
                work.wait()  # orders this stream after NCCL's, does not block
                self.moved += 1


@contextmanager
def _lenient_watchdog() -> Iterator[None]:
    """Build an NCCL group whose watchdog reports errors but does not end the process."""
    settings = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def require_gpu(name: str, device: torch.device) -> None:
    """Raise ConfigError unless a device is one certain GPU."""
    if device.type != "cuda" or device.index is None:
        raise ConfigError(
            f"--weights.transport is {name}, which carries weights between GPUs, but the device is {device}. "
            "Use shared_memory, or a device such as cuda:0."
        )


def high_priority_stream(device: torch.device) -> torch.cuda.Stream:
    """Make the stream of the weights: kernels that the models have queued would delay another."""
    return torch.cuda.Stream(device, priority=-1)


def broadcast_options() -> Any:
    """Return the options of a broadcast from rank 0."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


def pieces_of(buffers: Buffers) -> Iterator[torch.Tensor]:
    """Divide buffers into the pieces of a broadcast, ``[n]`` uint8."""
    for buffer in buffers:
        yield from as_bytes(buffer).split(PIECE)

"""How one version gets from the learner's buffers into an actor's: one link per epoch, four carriers.

    gloo       a broadcast between CPU buffers over loopback sockets
    nccl       a broadcast between GPUs, one rank per GPU
    cuda_ipc   actors copy out of the learner's buffers, which they mapped: learner and actor share one GPU
    nccl+ipc   the one or the other for each actor, by where it is (`mixed`)

A link need not notice a dead peer: `bounded` gives every action a deadline, and `abort` ends the link.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.weights.packing import Buffers, as_bytes

TransportName = Literal["gloo", "nccl", "cuda_ipc", "nccl+ipc"]
BufferPair = tuple[Buffers, Buffers]
"""The learner's two buffer sets: one is sent while the other is packed."""


class Link(Protocol):
    """The group of one epoch."""

    def send(self, slot: int) -> None:
        """Send the learner's buffers `slot` to all members. Rank 0 only; blocks."""
        ...

    def receive(self, slot: int, into: Buffers) -> None:
        """Fill `into` with what the learner sends from `slot`. Other ranks only; blocks."""
        ...

    def abort(self) -> None:
        """End the link from any thread; what blocks in it is freed at once, or (gloo) at its timeout."""
        ...


class Transport(Protocol):
    """Makes links."""

    device: torch.device
    """Where the buffers are."""

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context whose work on the buffers does not queue behind the models'."""
        ...

    def connect_root(self, store: Store, size: int, slots: BufferPair) -> Link:
        """Form a link as rank 0 of `size`; blocks until all are there."""
        ...

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
        """Form a link as rank `rank` of `size`; blocks until all are there."""
        ...


def build_transport(name: TransportName, device: torch.device, deadline: float) -> Transport:
    """Return the transport called `name`.

    Args:
        name: Which carrier.
        device: This process's device; gloo keeps its buffers on the CPU whatever it is.
        deadline: Seconds after which a broadcast has failed.

    Raises:
        ConfigError: the carrier needs a GPU and `device` is none.
    """
    if name == "gloo":
        return GlooTransport(deadline)
    if device.type != "cuda" or device.index is None:
        raise ConfigError(
            f"--weights.transport is {name}, which carries weights between GPUs, but the device is {device}. "
            "Use gloo, or a device such as cuda:0."
        )
    from asyncrl.weights.transports.cuda_ipc import CudaIpcTransport
    from asyncrl.weights.transports.nccl_and_ipc import NcclAndIpcTransport

    # Of high priority: what the models have queued would otherwise hold a broadcast up for a whole kernel.
    stream = torch.cuda.Stream(device, priority=-1)
    if name == "nccl":
        return NcclTransport(device, deadline, stream)
    if name == "cuda_ipc":
        return CudaIpcTransport(device, stream)
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return NcclAndIpcTransport(CudaIpcTransport(device, stream), NcclTransport(device, deadline, stream), gpu)


class GlooTransport:
    """Broadcasts between CPU buffers."""

    def __init__(self, deadline: float) -> None:
        self.device = torch.device("cpu")
        self._deadline = deadline
        # Bound to the loopback device: gloo would otherwise listen on the address of the host's name.
        self._gloo_device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context that does nothing: the CPU has no streams."""
        return nullcontext()

    def connect_root(self, store: Store, size: int, slots: BufferPair) -> Link:
        """Form a link as rank 0. See `Transport`."""
        return _GlooLink(self._group(store, 0, size), slots)

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
        """Form a link as another rank. See `Transport`."""
        return _GlooLink(self._group(store, rank, size), ([], []))

    def _group(self, store: Store, rank: int, size: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [self._gloo_device]
        options._timeout = timedelta(seconds=self._deadline)
        options._threads = 1
        return gloo(store, rank, size, options)


class _GlooLink:
    def __init__(self, group: Any, slots: BufferPair) -> None:
        self._group: Any = group
        self._slots = slots

    def send(self, slot: int) -> None:
        self._broadcast(self._slots[slot])

    def receive(self, slot: int, into: Buffers) -> None:
        self._broadcast(into)

    def abort(self) -> None:
        self._group = None  # gloo cannot cancel what is under way; its own timeout ends it

    def _broadcast(self, buffers: Buffers) -> None:
        group = self._group  # kept until the broadcast ends: the group's destructor waits for it
        for buffer in buffers:
            group.broadcast([as_bytes(buffer)], broadcast_options()).wait()


class NcclTransport:
    """Broadcasts between GPUs, one rank per GPU, on a stream that is not the models'."""

    def __init__(self, device: torch.device, deadline: float, stream: torch.cuda.Stream) -> None:
        self.device = device
        self._deadline = deadline
        self._stream = stream

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context on the broadcasts' stream."""
        return torch.cuda.stream(self._stream)

    def connect_root(self, store: Store, size: int, slots: BufferPair) -> Link:
        """Form a link as rank 0. See `Transport`."""
        return _NcclLink(self._group(store, 0, size), self._stream, slots)

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
        """Form a link as another rank. See `Transport`."""
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


class _NcclLink:
    def __init__(self, group: Any, stream: torch.cuda.Stream, slots: BufferPair) -> None:
        self._group, self._stream, self._slots = group, stream, slots
        self._aborted = threading.Event()

    def send(self, slot: int) -> None:
        self._broadcast(self._slots[slot])

    def receive(self, slot: int, into: Buffers) -> None:
        self._broadcast(into)

    def abort(self) -> None:
        self._group.abort()
        self._aborted.set()  # after it: until the kernels end, the waiting thread keeps their buffers alive

    def _broadcast(self, buffers: Buffers) -> None:
        # A thread starts on the default stream, where it would wait for all that the models have queued.
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            works = [self._group.broadcast([as_bytes(b)], broadcast_options()) for b in buffers]
            while not all(work.is_completed() for work in works):
                if self._aborted.wait(0.0005):
                    raise WeightSyncError("the NCCL link was aborted.")
            for work in works:
                work.wait()  # orders this stream after NCCL's, does not block


@contextmanager
def _lenient_watchdog() -> Iterator[None]:
    """Build an NCCL group whose watchdog reports errors but does not end the process; the others keep theirs.

    The group reads these variables once, in its constructor.
    """
    settings = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
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


def broadcast_options() -> Any:
    """Return the options of a broadcast from rank 0."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options

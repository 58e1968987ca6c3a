"""Send weights by NCCL between GPUs, one rank per GPU, and by CUDA IPC within the learner's own GPU.

Members on the learner's GPU copy out of its buffers. The learner repacks a set only after all receipts, or in
a new epoch.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.weights.interface import Link, Transport
from asyncrl.weights.packing import BufferPair, Buffers, as_bytes

PIECE: Final = 64 << 20  # Bytes that are broadcast at a time: a deadline counts from the last piece
_WATCHDOG: Final = ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT")


class NcclTransport:
    """Broadcasts between GPUs, on a stream that is not the models'."""

    def __init__(self, device: torch.device, deadline: float, stream: torch.cuda.Stream) -> None:
        self.device = device
        self._deadline = deadline
        self._stream = stream

    @classmethod
    def build(cls, device: torch.device, deadline: float) -> Self:
        """Return a transport of a GPU."""
        return cls(device, deadline, _weights_stream("nccl", device))

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
    # A group that is built within has a watchdog that reports errors but does not end the process.
    names = [f"TORCH_NCCL_{name}" for name in _WATCHDOG]
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update(dict.fromkeys(names, "0"))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
        os.environ.update(before)


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


class CudaIpcTransport:
    """CUDA IPC within rank 0's GPU, NCCL to the others."""

    def __init__(self, near: SameGpu | Transport, far: Transport, name: str) -> None:
        """Join a carrier within the GPU `name` and one to other GPUs, on one stream."""
        self._near, self._far, self._name = near, far, name
        self.device: torch.device = far.device

    @classmethod
    def build(cls, device: torch.device, deadline: float) -> Self:
        """Return a transport of a GPU."""
        stream = _weights_stream("cuda_ipc", device)
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        return cls(SameGpu(device, stream), NcclTransport(device, deadline, stream), gpu)

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context on the transfers' stream."""
        return self._far.side_stream()

    def connect_root(self, store: Store, size: int, buffers: BufferPair) -> Link:
        """Form both links as rank 0."""
        devices = [self._name] + [store.get(f"device/{rank}").decode() for rank in range(1, size)]
        store.set("devices", json.dumps(devices))
        (local, remote), links = divide(devices), list[Link]()
        if remote:
            links.append(self._far.connect_root(PrefixStore("far", store), 1 + len(remote), buffers))
        if local:
            links.append(self._near.connect_root(PrefixStore("near", store), 1 + len(local), buffers))
        return _Links(links)

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
        """Form the link of this member's group."""
        store.set(f"device/{rank}", self._name)
        local, remote = divide(json.loads(store.get("devices")))
        if rank in local:
            near = PrefixStore("near", store)
            return self._near.connect_member(near, 1 + local.index(rank), 1 + len(local))
        far = PrefixStore("far", store)
        return self._far.connect_member(far, 1 + remote.index(rank), 1 + len(remote))


def divide(devices: list[str]) -> tuple[list[int], list[int]]:
    """Divide the ranks into those on rank 0's GPU and others, number i of which has rank i + 1 in NCCL."""
    local = [r for r in range(1, len(devices)) if devices[r] == devices[0]]
    remote = [r for r in range(1, len(devices)) if devices[r] != devices[0]]
    for rank in remote:
        if devices.count(devices[rank]) > 1:
            raise WeightSyncError(
                f"Two actors share GPU {devices[rank]}, which is not the learner's, and NCCL takes one "
                "process per GPU. Give each of them a GPU of its own or the learner's, or use "
                "--weights.transport shared_memory."
            )
    return local, remote


class _Links(Link):
    def __init__(self, links: list[Link]) -> None:
        self._links = links

    def send(self, buffer_index: int) -> None:
        for link in self._links:
            link.send(buffer_index)

    def abort(self) -> None:
        for link in self._links:
            link.abort()


class SameGpu:
    """Makes links within one GPU."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.device, self._stream = device, stream
        self._handles: list[list[str]] = []

    def connect_root(self, store: Store, size: int, buffers: BufferPair) -> Link:
        """Write the handles of both buffer sets into the store."""
        if not self._handles:  # each export wraps the storage once more, so there is only one per buffer
            self._handles = [[export_handle(buffer) for buffer in half] for half in buffers]
        store.set("handles", json.dumps(self._handles))
        return _CudaIpcLink(self._stream, [])

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
        """Map both buffer sets of the learner."""
        handles: list[list[str]] = json.loads(store.get("handles"))
        mapped = [[import_handle(handle, self.device) for handle in half] for half in handles]
        return _CudaIpcLink(self._stream, mapped)


class _CudaIpcLink(Link):
    def __init__(self, stream: torch.cuda.Stream, mapped: list[list[Tensor]]) -> None:
        self._stream, self._mapped = stream, mapped

    def receive(self, buffer_index: int, into: Buffers) -> None:
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            for target, source in zip(into, self._mapped[buffer_index], strict=True):
                as_bytes(target).copy_(source)
            self._stream.synchronize()

    def abort(self) -> None:
        self._mapped = []  # unmaps


def export_handle(buffer: Tensor) -> str:
    """Describe a CUDA buffer, the whole of its storage, for a process on this GPU."""
    exported: Any = buffer.untyped_storage()._share_cuda_()
    return json.dumps([part.hex() if isinstance(part, bytes) else part for part in exported[1:]])


def import_handle(exported: str, device: torch.device) -> Tensor:
    """Map a buffer of another process, as ``[bytes]`` uint8."""
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in json.loads(exported)]
    torch.cuda.init()
    storage_class: Any = torch.UntypedStorage
    storage = storage_class._new_shared_cuda(device.index, *parts)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _weights_stream(name: str, device: torch.device) -> torch.cuda.Stream:
    if device.type != "cuda" or device.index is None:
        raise ConfigError(
            f"--weights.transport is {name}, which carries weights between GPUs, but the device is {device}. "
            "Use shared_memory, or a device such as cuda:0."
        )
    return torch.cuda.Stream(device, priority=-1)  # Kernels that the models have queued would delay another.

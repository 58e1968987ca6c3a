"""Send weights by CUDA IPC to members on the learner's own GPU, and by NCCL to those on other GPUs.

The learner packs a set again only after all receipts, or in a new epoch.
"""

from __future__ import annotations

import itertools
import json
import struct
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import WeightSyncError
from asyncrl.weights.interface import BufferPair, Link, Transport
from asyncrl.weights.packing import Buffers, as_bytes
from asyncrl.weights.transports.nccl import NcclTransport, high_priority_stream, require_gpu

_HEAD = struct.Struct("<QQQBHHH")
"""Storage bytes, storage offset, reference counter offset, event sync flag; lengths of the three handles."""
_LARGEST_HANDLE = 4096


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


class CudaIpcTransport:
    """CUDA IPC within rank 0's GPU, NCCL to the others."""

    def __init__(self, near: SameGpu | Transport, far: Transport, name: str) -> None:
        """Join a carrier within the GPU called `name` and one to others, on one stream."""
        self._near, self._far, self._name = near, far, name
        self.device: torch.device = far.device

    @classmethod
    def build(cls, device: torch.device, deadline: float) -> Self:
        """Return a transport of a GPU."""
        require_gpu("cuda_ipc", device)
        stream = high_priority_stream(device)
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        return cls(SameGpu(device, stream), NcclTransport(device, deadline, stream), gpu)

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context on the stream of both."""
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
        self._handles: list[list[bytes]] = []

    def connect_root(self, store: Store, size: int, buffers: BufferPair) -> Link:
        """Write the handles of both buffer sets into the store."""
        if not self._handles:  # each export wraps the storage once more, so there is only one per buffer
            self._handles = [[export_handle(buffer) for buffer in half] for half in buffers]
        for index, handles in enumerate(self._handles):
            for i, handle in enumerate(handles):
                store.set(f"ipc/{index}/{i}", handle)  # pyright: ignore[reportArgumentType]
        store.set("ipc/buffers", str(len(self._handles[0])))
        return _CudaIpcLink(self._stream, ([], []))

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
        """Map both buffer sets of the learner."""
        count = int(store.get("ipc/buffers"))
        mapped = [
            [import_handle(store.get(f"ipc/{index}/{i}"), self.device) for i in range(count)]
            for index in (0, 1)
        ]
        return _CudaIpcLink(self._stream, (mapped[0], mapped[1]))


class _CudaIpcLink(Link):
    def __init__(self, stream: torch.cuda.Stream, mapped: tuple[list[Tensor], list[Tensor]]) -> None:
        self._stream, self._mapped = stream, mapped

    def receive(self, buffer_index: int, into: Buffers) -> None:
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            for target, source in zip(into, self._mapped[buffer_index], strict=True):
                as_bytes(target).copy_(source)
            self._stream.synchronize()

    def abort(self) -> None:
        self._mapped = ([], [])  # unmaps


def export_handle(buffer: Tensor) -> bytes:
    """Describe a CUDA buffer, the whole of its storage, for a process on this GPU."""
    exported: Any = buffer.untyped_storage()._share_cuda_()
    _, handle, size, offset, counter, counter_offset, event, sync = exported
    head = _HEAD.pack(size, offset, counter_offset, sync, len(handle), len(counter), len(event))
    return head + bytes(handle) + bytes(counter) + bytes(event)


def import_handle(packed: bytes, device: torch.device) -> Tensor:
    """Map a buffer of another process, as ``[bytes]`` uint8."""
    size, offset, counter_offset, sync, *lengths = _HEAD.unpack_from(packed)
    if len(packed) != _HEAD.size + sum(lengths) or max(lengths) > _LARGEST_HANDLE:
        raise WeightSyncError(
            f"The learner's CUDA IPC handle has {len(packed)} bytes, expected {_HEAD.size + sum(lengths)}. "
            "Run learner and actor from the same commit, with the same torch."
        )
    ends = [_HEAD.size, _HEAD.size + lengths[0], _HEAD.size + lengths[0] + lengths[1], len(packed)]
    handle, counter, event = (packed[a:b] for a, b in itertools.pairwise(ends))
    torch.cuda.init()
    storage_class: Any = torch.UntypedStorage
    storage = storage_class._new_shared_cuda(
        device.index, handle, size, offset, counter, counter_offset, event, bool(sync)
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

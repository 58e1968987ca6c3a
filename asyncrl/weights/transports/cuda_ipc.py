"""Copy weights between processes on one GPU: actors map the learner's buffers and copy out of them.

NCCL refuses two ranks on one device. The learner instead puts the raw IPC handles of its two buffer sets
into the store, once per epoch. Ordered steps, per version:

    learner   1  pack a buffer set that no member reads, wait for the copies, announce its number
    actor     2  copy it into its own buffers, wait for the copies
    actor     3  look whether the epoch is still the same; if so the copy is whole: tell the learner
    learner   4  pack that set again only when all have told, or after it announced a new epoch

Handles travel as a fixed struct and raw bytes, never pickled.
"""

from __future__ import annotations

import itertools
import struct
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import WeightSyncError
from asyncrl.weights.packing import Buffers, as_bytes
from asyncrl.weights.transports.interface import BufferPair, Link, high_priority_stream, require_gpu

_HEAD = struct.Struct("<QQQBHHH")
"""Storage bytes, storage offset, reference counter offset, event sync flag; lengths of the three handles."""
_LARGEST_HANDLE = 4096


class CudaIpcTransport:
    """Copies within one GPU."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.device = device
        self._stream = stream
        self._handles: list[list[bytes]] = []

    @classmethod
    def build(cls, device: torch.device, deadline: float) -> Self:
        """Return a transport within a GPU. See `interface.Transport`."""
        require_gpu("cuda_ipc", device)
        return cls(device, high_priority_stream(device))

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context on the copies' stream."""
        return torch.cuda.stream(self._stream)

    def connect_root(self, store: Store, size: int, buffers: BufferPair) -> Link:
        """Hand out the handles of both buffer sets. See `interface.Transport`."""
        if not self._handles:  # each export wraps the storage once more, so there is only one per buffer
            self._handles = [[export_handle(buffer) for buffer in half] for half in buffers]
        for index, handles in enumerate(self._handles):
            for i, handle in enumerate(handles):
                store.set(f"ipc/{index}/{i}", handle)  # pyright: ignore[reportArgumentType]
        store.set("ipc/buffers", str(len(self._handles[0])))
        return _CudaIpcLink(self._stream, ([], []))

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
        """Map both buffer sets of the learner. See `interface.Transport`."""
        count = int(store.get("ipc/buffers"))
        mapped = [
            [import_handle(store.get(f"ipc/{index}/{i}"), self.device) for i in range(count)]
            for index in (0, 1)
        ]
        return _CudaIpcLink(self._stream, (mapped[0], mapped[1]))


class _CudaIpcLink:
    def __init__(self, stream: torch.cuda.Stream, mapped: tuple[list[Tensor], list[Tensor]]) -> None:
        self._stream, self._mapped = stream, mapped

    def send(self, buffer_index: int) -> None:
        """Do nothing: the version already lies where the actors look."""

    def receive(self, buffer_index: int, into: Buffers) -> None:
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            for target, source in zip(into, self._mapped[buffer_index], strict=True):
                as_bytes(target).copy_(source)
            self._stream.synchronize()

    def abort(self) -> None:
        self._mapped = ([], [])  # unmaps


def export_handle(buffer: Tensor) -> bytes:
    """Describe a CUDA buffer so that another process on this GPU can map it.

    Args:
        buffer: ``[E]`` of any dtype, the whole of its storage.
    """
    exported: Any = buffer.untyped_storage()._share_cuda_()
    _, handle, size, offset, counter, counter_offset, event, sync = exported
    head = _HEAD.pack(size, offset, counter_offset, sync, len(handle), len(counter), len(event))
    return head + bytes(handle) + bytes(counter) + bytes(event)


def import_handle(packed: bytes, device: torch.device) -> Tensor:
    """Map a buffer that another process exported.

    Returns:
        ``[bytes]`` uint8 on `device`, the other process's memory.

    Raises:
        WeightSyncError: the description does not have the expected form.
    """
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

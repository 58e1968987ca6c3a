"""Copy weights between processes of a host out of the learner's buffers in memory files (memfd).

A mapping outlives the learner, and the files can neither shrink nor grow. A receiver that is too late
sees a wrong checksum.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import WeightSyncError
from asyncrl.weights.interface import Link
from asyncrl.weights.packing import BufferPair, Buffers, Manifest, as_bytes

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemoryTransport:
    """Copies out of the learner's host memory."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._places: dict[int, str] = {}  # Buffer's address -> its file
        self._mapped: tuple[list[str], list[NDArray[np.uint8]]] = [], []
        """Mapped files of a member, kept over the epochs: mapping costs most of a copy."""

    @classmethod
    def build(cls, device: torch.device, deadline: float) -> Self:
        """Build a transport between CPU buffers, for any device."""
        return cls()

    def allocate(self, manifest: Manifest) -> Buffers:
        """Make a buffer set that members can map."""
        sizes = manifest.sizes
        return [self._buffer(sizes[dtype], getattr(torch, dtype)) for dtype in manifest.dtypes]

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context that does nothing: the CPU has no streams."""
        return nullcontext()

    def connect_root(self, store: Store, size: int, buffers: BufferPair) -> Link:
        """Write path and bytes of the files of both buffer sets into the store."""
        places = [self._places[buffer.data_ptr()] for half in buffers for buffer in half]
        store.set("files", json.dumps(places))
        return _SharedMemoryLink([])

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
        """Map both buffer sets of the learner."""
        places: list[str] = json.loads(store.get("files"))
        if self._mapped[0] != places:
            self._mapped = places, [_map(place) for place in places]
        return _SharedMemoryLink(self._mapped[1])

    def _buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        size = elements * dtype.itemsize
        try:
            file = os.memfd_create("asyncrl-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(file, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            memory = mmap.mmap(file, size)
        except OSError as error:  # The file is closed with the process, which this ends.
            raise WeightSyncError(
                f"{size / 1e9:.3g} GB of memory cannot be shared with the actors ({error.strerror}). Free "
                "memory, or allow more open files."
            ) from error
        # Members of any later epoch open it too, while there is the buffer, which holds the mapping.
        weakref.finalize(memory, os.close, file)
        buffer = torch.frombuffer(memory, dtype=dtype)
        self._places[buffer.data_ptr()] = f"/proc/{os.getpid()}/fd/{file} {size}"
        return buffer


class _SharedMemoryLink(Link):
    may_block = False  # A copy needs no other process

    def __init__(self, mapped: list[NDArray[np.uint8]]) -> None:
        self._sets = mapped[: len(mapped) // 2], mapped[len(mapped) // 2 :]

    def receive(self, buffer_index: int, into: Buffers) -> None:
        for target, source in zip(into, self._sets[buffer_index], strict=True):
            np.copyto(as_bytes(target).numpy(), source)


def _map(place: str) -> NDArray[np.uint8]:
    # The file of a buffer of another process, read-only: ``[bytes]``.
    path, size = place.split()
    try:
        with Path(path).open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), int(size), prot=mmap.PROT_READ), np.uint8)
    except OSError as error:
        raise WeightSyncError(
            f"The learner's weights at {path} cannot be read ({error.strerror}). Learner and actor must be "
            "processes of one user that see each other in /proc."
        ) from error

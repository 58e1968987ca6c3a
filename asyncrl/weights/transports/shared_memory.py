"""Copy weights between processes of a host out of the learner's buffers in memory files (memfd).

A mapping outlives the learner, and the files can neither shrink nor grow. A member that copies too late finds
another checksum.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import stat
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import WeightSyncError
from asyncrl.weights.interface import BufferPair, Link
from asyncrl.weights.packing import Buffers, Manifest, as_bytes

_PLACE: Final = re.compile(r"(/proc/\d+/fd/\d+) (\d+)")  # Path and bytes of a buffer's file
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
        """Write the files of both buffer sets into the store."""
        for index, half in enumerate(buffers):
            for i, buffer in enumerate(half):
                store.set(f"shared/{index}/{i}", self._places[buffer.data_ptr()])
        store.set("shared/buffers", str(len(buffers[0])))
        return _SharedMemoryLink([], 0)

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
        """Map both buffer sets of the learner."""
        count = int(store.get("shared/buffers"))
        keys = [f"shared/{index}/{i}" for index in (0, 1) for i in range(count)]
        places = [store.get(key).decode(errors="replace") for key in keys]
        if self._mapped[0] != places:
            self._mapped = places, [_map(place) for place in places]
        return _SharedMemoryLink(self._mapped[1], count)

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
    def __init__(self, mapped: list[NDArray[np.uint8]], count: int) -> None:
        self._sets = mapped[:count], mapped[count:]

    def receive(self, buffer_index: int, into: Buffers) -> None:
        for target, source in zip(into, self._sets[buffer_index], strict=True):
            np.copyto(as_bytes(target).numpy(), source)


def _map(place: str) -> NDArray[np.uint8]:
    """Map the file of a buffer of another process, read-only: ``[bytes]``."""
    if (match := _PLACE.fullmatch(place)) is None:
        raise WeightSyncError(
            f"The learner says that its weights are at {place[:100]!r}, which is no shared memory. Run "
            "learner and actor from the same commit."
        )
    path, size = match[1], int(match[2])
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            about: Any = os.fstat(file)
            if not stat.S_ISREG(about.st_mode) or about.st_size != size:
                raise WeightSyncError(
                    f"The learner's weights at {path} have {about.st_size} bytes, expected {size}. Run "
                    "learner and actor from the same commit."
                )
            return np.frombuffer(mmap.mmap(file, size, prot=mmap.PROT_READ), np.uint8)
        finally:
            os.close(file)
    except OSError as error:
        raise WeightSyncError(
            f"The learner's weights at {path} cannot be read ({error.strerror}). Learner and actor must be "
            "processes of one user that see each other in /proc."
        ) from error

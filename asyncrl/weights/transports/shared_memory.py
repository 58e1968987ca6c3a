"""Copy weights between processes of a host through memory that both have: no socket carries them.

The learner's two buffer sets lie in files of memory that have no name (memfd). The actors map these, to be
read only, and copy out of them, in the order of steps of `cuda_ipc`. So a version is written once and read
once by each actor, where a socket would copy it twice more and share it out one actor after the other.

A mapping is the kernel's: it outlives the learner, and nothing is left behind when all have ended. The files
can neither shrink nor grow, so whoever reads never meets memory that is gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import stat
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import WeightSyncError
from asyncrl.weights.packing import Buffers, Manifest, as_bytes
from asyncrl.weights.transports.interface import BufferPair, Link

_PLACE: Final = re.compile(r"/proc/\d+/fd/\d+")
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class _Place:
    """Where other processes of the host find a buffer."""

    path: str
    size: int
    """Bytes."""

    def to_text(self) -> str:
        return f"{self.path} {self.size}"

    @classmethod
    def from_text(cls, text: bytes) -> _Place:
        """Read what `to_text` wrote.

        Raises:
            WeightSyncError: It is something else.
        """
        path, _, size = text.decode(errors="replace").partition(" ")
        if not _PLACE.fullmatch(path) or not size.isdecimal():
            raise WeightSyncError(
                f"The learner says that its weights are at {path[:100]!r}, which is no shared memory. Run "
                "learner and actor from the same commit."
            )
        return cls(path, int(size))


class SharedMemoryTransport:
    """Copies out of the learner's host memory."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._places: dict[int, _Place] = {}
        """By the address of each buffer that this process allocated."""

    @classmethod
    def build(cls, device: torch.device, deadline: float) -> Self:
        """Return a transport between CPU buffers, whatever `device` is. See `interface.Transport`."""
        return cls()

    def allocate(self, manifest: Manifest) -> Buffers:
        """Make the learner's buffers. See `interface.AllocatesBuffers`."""
        sizes = manifest.sizes
        return [self._buffer(sizes[dtype], getattr(torch, dtype)) for dtype in manifest.dtypes]

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context that does nothing: the CPU has no streams."""
        return nullcontext()

    def connect_root(self, store: Store, size: int, buffers: BufferPair) -> Link:
        """Say where both buffer sets are. See `interface.Transport`."""
        for index, half in enumerate(buffers):
            for i, buffer in enumerate(half):
                store.set(f"shared/{index}/{i}", self._places[buffer.data_ptr()].to_text())
        store.set("shared/buffers", str(len(buffers[0])))
        return _SharedMemoryLink(([], []))

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
        """Map both buffer sets of the learner. See `interface.Transport`."""
        count = int(store.get("shared/buffers"))
        mapped = [
            [_mapped(_Place.from_text(store.get(f"shared/{index}/{i}"))) for i in range(count)]
            for index in (0, 1)
        ]
        return _SharedMemoryLink((mapped[0], mapped[1]))

    def _buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Make ``[elements]`` zeros that other processes can map.

        Raises:
            WeightSyncError: The host has not so much memory.
        """
        size = elements * dtype.itemsize
        try:
            file = os.memfd_create("asyncrl-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(file, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            memory = mmap.mmap(file, size)
        except OSError as error:  # What it got is given back with the process, which this ends.
            raise WeightSyncError(
                f"{size / 1e9:.3g} GB of memory cannot be shared with the actors ({error.strerror}). Free "
                "memory, or allow more open files."
            ) from error
        # Members of any later epoch open it too, while there is the buffer, which holds the mapping.
        weakref.finalize(memory, os.close, file)
        buffer = torch.frombuffer(memory, dtype=dtype)
        self._places[buffer.data_ptr()] = _Place(f"/proc/{os.getpid()}/fd/{file}", size)
        return buffer


class _SharedMemoryLink:
    def __init__(self, mapped: tuple[list[NDArray[np.uint8]], list[NDArray[np.uint8]]]) -> None:
        self._mapped = mapped

    def send(self, buffer_index: int) -> None:
        """Do nothing: the version already lies where the actors look."""

    def receive(self, buffer_index: int, into: Buffers) -> None:
        for target, source in zip(into, self._mapped[buffer_index], strict=True):
            np.copyto(as_bytes(target).numpy(), source)

    def abort(self) -> None:
        self._mapped = ([], [])  # Unmaps, once nobody copies any more.


def _mapped(place: _Place) -> NDArray[np.uint8]:
    """Map what another process of the host shares: ``[bytes]`` uint8, to be read only.

    Raises:
        WeightSyncError: It is not there, or is something else.
    """
    try:
        file = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            about: Any = os.fstat(file)
            if not stat.S_ISREG(about.st_mode) or about.st_size != place.size:
                raise WeightSyncError(
                    f"The learner's weights at {place.path} have {about.st_size} bytes, expected "
                    f"{place.size}. Run learner and actor from the same commit."
                )
            memory = mmap.mmap(file, place.size, prot=mmap.PROT_READ)
        finally:
            os.close(file)
    except OSError as error:
        raise WeightSyncError(
            f"The learner's weights at {place.path} cannot be read ({error.strerror}). Learner and actor "
            "must be processes of one user that see each other in /proc: use gloo where they do not."
        ) from error
    return np.frombuffer(memory, np.uint8)

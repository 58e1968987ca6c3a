"""Copy weights between processes of a host through memory that both have: no socket carries them.

The learner's two buffer sets lie in files of memory that have no name (memfd). The actors map these, to be
read only, and copy out of them into the tensors with which they act, in the order of steps of
`shared_versions`. So a version is written once and read once by each actor, which needs no room for it.

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
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import WeightSyncError
from asyncrl.weights.packing import Buffers, Manifest
from asyncrl.weights.transports.interface import BufferPair, Link
from asyncrl.weights.transports.shared_versions import WORDS, SharedNotes, SharedVersions

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
        self._notes_place: _Place | None = None
        """Of the notes on them."""
        self._mapped: tuple[list[_Place], SharedVersions] | None = None
        """What a member has mapped: in every epoch the same, since mapping it anew costs most of a copy."""

    @classmethod
    def build(cls, device: torch.device, deadline: float) -> Self:
        """Return a transport between CPU buffers, whatever `device` is. See `interface.Transport`."""
        return cls()

    def allocate(self, manifest: Manifest) -> Buffers:
        """Make the learner's buffers. See `interface.SharesBuffers`."""
        sizes = manifest.sizes
        return [self._buffer(sizes[dtype], getattr(torch, dtype)) for dtype in manifest.dtypes]

    def allocate_notes(self) -> SharedNotes:
        """Make the notes on them. See `interface.SharesBuffers`."""
        words = self._buffer(WORDS, torch.int64)
        self._notes_place = self._places[words.data_ptr()]
        notes = SharedNotes(words.numpy())
        notes.clear()
        return notes

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context that does nothing: the CPU has no streams."""
        return nullcontext()

    def connect_root(self, store: Store, size: int, buffers: BufferPair) -> Link:
        """Say where both buffer sets are, and the notes on them. See `interface.Transport`."""
        for index, half in enumerate(buffers):
            for i, buffer in enumerate(half):
                store.set(f"shared/{index}/{i}", self._places[buffer.data_ptr()].to_text())
        assert self._notes_place is not None  # They are made before there is a version to send.
        store.set("shared/notes", self._notes_place.to_text())
        store.set("shared/buffers", str(len(buffers[0])))
        return _SharingLink()

    def connect_member(self, store: Store, rank: int, size: int) -> SharedMemoryLink:
        """Map both buffer sets of the learner. See `interface.Transport`."""
        count = int(store.get("shared/buffers"))
        keys = ["notes", *(f"{index}/{i}" for index in (0, 1) for i in range(count))]
        places = [_Place.from_text(store.get(f"shared/{key}")) for key in keys]
        if self._mapped is None or self._mapped[0] != places:
            words, *buffers = [_mapped(place) for place in places]
            notes = SharedNotes(words.numpy().view(np.int64))
            self._mapped = places, SharedVersions((buffers[:count], buffers[count:]), notes)
        return SharedMemoryLink(self._mapped[1])

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


class _SharingLink:
    """The learner has nothing to send."""

    def send(self, buffer_index: int) -> None:
        """Do nothing: the version already lies where the actors look."""

    def receive(self, buffer_index: int, into: Buffers) -> None:
        raise AssertionError("a member copies out of the learner's buffers: see mapped_receiver")

    def abort(self) -> None:
        """Do nothing: nobody waits here, and what is mapped can be read without the learner."""


class SharedMemoryLink(_SharingLink):
    """A member copies when its actor wants to. See `shared_versions.SharedLink`."""

    def __init__(self, versions: SharedVersions) -> None:
        self.versions = versions
        """See `SharedLink.versions`."""


class _ReadOnly:
    """Memory that torch takes for a tensor's. It knows none that is only read, and warns of it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory  # Mapped for as long as an array or tensor of it is there.
        address = np.frombuffer(memory, np.uint8).ctypes.data
        about = {"version": 3, "shape": (len(memory),), "typestr": "|u1", "data": (address, False)}
        self.__array_interface__: dict[str, Any] = about


def _mapped(place: _Place) -> Tensor:
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
    return torch.from_numpy(np.asarray(_ReadOnly(memory)))

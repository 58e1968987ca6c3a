"""A ring of shared memory from each actor to the replay on the same host: pictures in, views of them out.

    actor     makes a memory file (memfd), seals its size, maps it, announces (host, name, pid, fd, bytes)
    replay    opens /proc/PID/fd/FD, checks name, size and seals, maps it read-only, answers whether it could
    message   the header's entry of an array says its place in the ring; its frame is empty

The file has no name in a file system: it goes with the last process that maps it. Its size is sealed, so
reading it never faults, whatever the actor does or dies of. A place is reused after the final receipt only.
"""

from __future__ import annotations

import fcntl
import ipaddress
import mmap
import os
import stat
from bisect import bisect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from asyncrl.errors import AsyncRLError, WireError
from asyncrl.records import Episode, Uint8

ALIGNMENT: Final = 64
"""Bytes; every place begins and ends at a multiple."""


class Places:
    """Which parts of a ring are taken: first fit, so that few of its pages are ever touched."""

    def __init__(self, size: int) -> None:
        """Begin with `size` free bytes, rounded down to the alignment."""
        self.free = [(0, size // ALIGNMENT * ALIGNMENT)]
        """(offset, bytes) of the free pieces, in order; no two touch."""
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """Return the offset of `size` bytes that nobody else has, or None."""
        size = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        for index, (offset, length) in enumerate(self.free):
            if length >= size:
                self.free[index : index + 1] = [(offset + size, length - size)] if length > size else []
                self._taken[offset] = size
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Free what `take` gave."""
        begin, end = offset, offset + self._taken.pop(offset)
        index = bisect(self.free, (offset, 0))
        if index < len(self.free) and self.free[index][0] == end:
            end += self.free.pop(index)[1]
        if index and sum(self.free[index - 1]) == begin:
            index -= 1
            begin = self.free.pop(index)[0]
        self.free.insert(index, (begin, end - begin))


SHARED_ARRAYS: Final = ("frames", "final_frame", "video")
"""Arrays that may lie in the ring. Any byte is a legal pixel: what was checked at admission stays true, even
if a hostile actor writes to the ring later."""
SHARED_FROM: Final = 64 * 1024
"""Bytes of an array from which on it goes through the ring."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class RingMissing(WireError):
    """A message says that an array lies in a ring, and this side has mapped none of that peer."""


class RingOutOfReach(AsyncRLError):
    """An announced ring cannot be mapped here, so the socket is used. Not a failure."""


def same_host(endpoint: str) -> bool:
    """Whether the peers of an endpoint are on this host: ipc, or tcp over loopback."""
    kind, _, rest = endpoint.partition("://")
    try:
        return kind == "ipc" or ipaddress.IPv4Address(rest.rpartition(":")[0]).is_loopback
    except ValueError:
        return False


def this_host() -> str:
    """Name this boot of this kernel and this process's namespace of process ids; empty: unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


class RingWriter:
    """The actor's side."""

    def __init__(self, size: int) -> None:
        """Make a ring of `size` bytes; memory is taken when it is written to.

        Raises:
            OSError: The system gives none.
        """
        self.name = f"asyncrl-{os.urandom(8).hex()}"
        self.size = size
        self._fd = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self._bytes = np.frombuffer(mmap.mmap(self._fd, size), np.uint8)
        except BaseException:
            os.close(self._fd)
            raise
        self._places = Places(size)

    def announcement(self) -> dict[str, Any]:
        """Return the fields of the message that announces it."""
        return {
            "host": this_host(),
            "name": self.name,
            "pid": os.getpid(),
            "fd": self._fd,
            "bytes": self.size,
        }

    def put(self, content: Uint8) -> int | None:
        """Copy an array into the ring; its offset, or None when there is no room."""
        offset = self._places.take(content.nbytes)
        if offset is not None:
            self._bytes[offset : offset + content.nbytes].reshape(content.shape)[...] = content
        return offset

    def put_episode(self, episode: Episode) -> dict[str, int]:
        """Copy what is large; returns array -> offset. What finds no room is not in it."""
        offsets: dict[str, int] = {}
        for name in SHARED_ARRAYS:
            array: Uint8 = getattr(episode, name)
            if array.dtype == np.uint8 and array.nbytes >= SHARED_FROM:
                offset = self.put(array)
                if offset is not None:
                    offsets[name] = offset
        return offsets

    def view(self, offset: int, like: Uint8) -> Uint8:
        """Return the array at `offset` with the shape of `like`, read-only and not copied."""
        view = self._bytes[offset : offset + like.nbytes].reshape(like.shape)
        view.setflags(write=False)
        return view

    def give_back(self, offsets: Mapping[str, int]) -> None:
        """Free the places of an episode."""
        for offset in offsets.values():
            self._places.give_back(offset)

    def close(self) -> None:
        """Let go of the file. The memory goes with the last view."""
        os.close(self._fd)


class RingReader:
    """The replay's side of one ring."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        """Map the ring that a peer announced; never waits.

        Args:
            about: host, name, pid, fd, bytes, as the peer said them.

        Raises:
            RingOutOfReach: It lies on another host, in another namespace, or is another user's or gone.
            WireError: What is there is not what was announced.
        """
        if not about["host"] or about["host"] != this_host():
            raise RingOutOfReach("the actor runs on another host or in another namespace of processes.")
        if min(about["pid"], about["fd"] + 1, about["bytes"]) < 1:
            raise WireError("the ring's pid, file descriptor or size is not a positive number.")
        self.size: int = about["bytes"]
        found = _open(f"/proc/{about['pid']}/fd/{about['fd']}", os.O_PATH)  # Opens no device and no pipe.
        try:
            _check_file(found, about["name"], self.size)
            file = _open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK)
        finally:
            os.close(found)
        try:
            _check_seals(file)
            self._bytes = memoryview(mmap.mmap(file, self.size, prot=mmap.PROT_READ))
        except OSError as error:
            raise RingOutOfReach(f"the ring cannot be mapped: {error}.") from None
        finally:
            os.close(file)

    def view(self, offset: int, size: int) -> memoryview:
        """Return `size` bytes at `offset`, read-only and not copied. The mapping lives as long as a view.

        Raises:
            WireError: They do not lie in the ring.
        """
        if not 0 <= offset <= self.size - size:
            raise WireError(f"{size} bytes at {offset} do not lie in a ring of {self.size} bytes.")
        return self._bytes[offset : offset + size]


class Rings:
    """The rings of all actors of a replay."""

    def __init__(self, max_bytes: int) -> None:
        """Map rings of up to `max_bytes` bytes in all."""
        self._max_bytes = max_bytes
        self._readers: dict[bytes, tuple[str, RingReader]] = {}

    def get(self, peer: bytes) -> RingReader | None:
        """Return the ring of a peer, if it has one."""
        return self._readers[peer][1] if peer in self._readers else None

    def announced(self, peer: bytes, about: Mapping[str, Any]) -> str:
        """Map a peer's ring. Announced again, it stays.

        Returns:
            Why the socket must be used; empty: the ring can be.

        Raises:
            WireError: What is there is not what was announced, or the peer has another ring.
        """
        if peer in self._readers:
            if self._readers[peer][0] != about["name"]:
                raise WireError("the peer announced a second ring.")
            return ""
        taken = sum(reader.size for _, reader in self._readers.values())
        if taken + about["bytes"] > self._max_bytes:
            return (
                f"the rings of all actors may have {self._max_bytes} bytes, {taken} are taken, this one has "
                f"{about['bytes']} (--replay.shared-megabytes)"
            )
        try:
            self._readers[peer] = about["name"], RingReader(about)
        except RingOutOfReach as reason:
            return str(reason)
        return ""

    def forget(self, peer: bytes) -> None:
        """Let go of a peer's ring; views of it stay valid."""
        self._readers.pop(peer, None)


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise RingOutOfReach(f"the ring cannot be opened: {error}.") from None


def _check_file(fd: int, name: str, size: int) -> None:
    about, target = os.fstat(fd), Path(f"/proc/self/fd/{fd}").readlink()
    if not stat.S_ISREG(about.st_mode) or str(target) != f"/memfd:{name} (deleted)":
        raise WireError("the announced ring is not a memory file of that name.")
    if about.st_size != size:
        raise WireError(f"the ring has {about.st_size} bytes, announced were {size}.")


def _check_seals(fd: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise WireError("the announced ring is a file that cannot be sealed.") from None
    if seals & _SEALS != _SEALS:
        raise WireError("the size of the announced ring is not sealed, so reading it might fault.")
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        raise WireError("the announced ring has huge pages, and reading might find none left.")

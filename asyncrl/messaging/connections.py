"""Bound what the connections of a listening ZeroMQ socket can take from this process: memory and descriptors.

libzmq collects all parts of a message before it hands the message over, however many there are, and accepts
connections as long as the process may open files. So a thread looks at them, 10 times a second:

    unfinished    what a TCP connection has received since its last whole message, as the kernel counts it
                  (TCP_INFO); one that has more than a message can have, or the largest of all when together
                  they have too much, is disconnected
    too many      of more connections than a share of the descriptors, the oldest that never sent a whole
                  message is disconnected, or else the newest

Who was disconnected is counted (`wire/disconnected`) and named in the log. What it had sent is given back to
the operating system.

Of a unix socket the kernel counts no bytes, so an unfinished message of an ipc connection is not bounded:
only processes of this user that may enter the socket's private folder can make one.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncrl.messaging.episode_codec import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES
from asyncrl.messaging.sockets import BULK_HWM
from asyncrl.observability import waits

UNFINISHED_BYTES: Final = MAX_MESSAGE_BYTES + MAX_FRAME_BYTES
"""Most that one connection may have received since its last whole message: what the protocol allows, and as
much of a next message as arrives between two looks."""
INTERVAL: Final = 0.1
"""Seconds between two looks."""
CLOSE_SECONDS: Final = 10.0
"""Longest wait for the thread to stop; it needs an interval."""
TRIM_AFTER: Final = (0.5, 2.0)
"""Seconds after a disconnection at which freed memory is given back; libzmq frees it on its own thread."""
WORTH_TRIMMING: Final = 1 << 20
"""Bytes. What a connection leaves behind is given back when it is more."""
SHARE_OF_FILES: Final = 0.5
"""Of the descriptors that the process may have, for connections."""
_RECEIVED: Final = struct.Struct("<128xQ")
"""Where tcpi_bytes_received is in TCP_INFO (Linux 4.1 and later)."""
_NAMED: Final = 100
"""Disconnections that the log names."""
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Connection:
    """One that was accepted and is there."""

    inode: int
    """Of its socket: the number of the descriptor may be another file's by now."""
    spoke: bool = False
    """It has sent a whole message."""
    received: int = 0
    whole: int = 0
    """Bytes that it had received when its last whole message was known."""

    @property
    def unfinished(self) -> int:
        """Bytes since then."""
        return self.received - self.whole


class ConnectionGuard:
    """Watches the connections of one listening socket from a thread of its own."""

    def __init__(
        self,
        listening: zmq.Socket[bytes],
        *,
        unfinished: int = UNFINISHED_BYTES,
        all_unfinished: int | None = None,
        connections: int | None = None,
    ) -> None:
        """Begin to watch.

        Args:
            listening: Not bound yet, or connections would be missed. Nothing else may have a monitor on it.
            unfinished: Bytes that a connection may have received since its last whole message.
            all_unfinished: The same for all together; None: twice as much.
            connections: Most that may be there; None: `SHARE_OF_FILES`.
        """
        self._listening, self._unfinished = listening, unfinished
        self._all_unfinished = 2 * unfinished if all_unfinished is None else all_unfinished
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = max(1, int(limit * SHARE_OF_FILES)) if connections is None else connections
        self.disconnected = 0
        """Connections that were disconnected here."""
        self._connections: dict[int, _Connection] = {}
        """Descriptor -> connection, in the order in which they were accepted."""
        self._spoke: set[int] = set()
        """Descriptors from which whole messages came since the last look. Shared; each use is atomic."""
        self._drained = False
        """The reader has had all whole messages since the last look. Shared."""
        self._trims: list[float] = []
        self._monitor: Any = listening.get_monitor_socket(_EVENTS)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)
        self._thread.start()

    # --- the reader's thread ---

    def note(self, frame: zmq.Frame) -> None:
        """Note that a whole message came, of which `frame` is a part."""
        with contextlib.suppress(zmq.ZMQError):  # One without a connection.
            self._spoke.add(int(frame.get(zmq.SRCFD)))  # type: ignore[call-overload]

    def note_drained(self) -> None:
        """Note that no whole message waits to be read."""
        self._drained = True

    def close(self) -> None:
        """Stop watching, before the socket's context ends."""
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)

    def __enter__(self) -> ConnectionGuard:
        """Stop at the end of a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, whatever happened."""
        self.close()

    # --- the guard's thread ---

    def _run(self) -> None:
        try:
            self._watch()
        except Exception:  # The thread's boundary: the socket goes on, unwatched.
            _log.exception("the connections of a listening socket are not watched any more")
        finally:
            # libzmq's own thread waits for whoever has a monitor and does not read its events.
            with contextlib.suppress(zmq.ZMQError):  # It could not be bound, and was closed.
                self._listening.disable_monitor()
            self._monitor.close(0)

    def _watch(self) -> None:
        looked = 0.0
        while not self._closing.is_set():
            if self._monitor.poll(int(1000 * INTERVAL)):
                self._note_event(parse_monitor_message(self._monitor.recv_multipart()))
                self._bound_number()
            if time.monotonic() - looked >= INTERVAL:
                self._look()
                looked = time.monotonic()

    def _note_event(self, event: Any) -> None:
        descriptor = int(event["value"])
        if event["event"] == zmq.EVENT_DISCONNECTED:
            self._forget(descriptor)
            return
        with contextlib.suppress(OSError):  # It is gone already.
            self._forget(descriptor)
            self._connections[descriptor] = _Connection(inode=os.fstat(descriptor).st_ino)

    def _look(self) -> None:
        """Read every connection's count of bytes, and disconnect who has too much."""
        spoke, self._spoke = self._spoke, set()
        drained, self._drained = self._drained, False
        for descriptor, connection in list(self._connections.items()):
            received = _received(descriptor, connection.inode)
            if received is None:
                self._forget(descriptor)
                continue
            connection.received = received
            if descriptor in spoke:
                connection.spoke, connection.whole = True, received
            # Whole messages that the reader has not had yet count as unfinished.
            limit = self._unfinished * (1 if drained else BULK_HWM + 1)
            if connection.unfinished > limit:
                why = (
                    f"it sent {connection.unfinished} bytes without the end of a message, allowed are {limit}"
                )
                self._disconnect(descriptor, why)
        self._bound_sum(drained)
        self._trim()

    def _bound_sum(self, drained: bool) -> None:
        limit = self._all_unfinished * (1 if drained else BULK_HWM + 1)
        while (total := sum(each.unfinished for each in self._connections.values())) > limit:
            descriptor, largest = max(self._connections.items(), key=lambda item: item[1].unfinished)
            self._disconnect(
                descriptor,
                f"all peers together sent {total} bytes without the end of a message, allowed are {limit}, "
                f"and it sent the most, {largest.unfinished}",
            )

    def _bound_number(self) -> None:
        while len(self._connections) > self._most:
            spoke = self._spoke
            descriptor = next(
                (x for x, c in self._connections.items() if not c.spoke and x not in spoke), None
            )
            why = "it never sent a message"
            if descriptor is None:
                descriptor, why = next(reversed(self._connections)), "it is the newest"
            self._disconnect(
                descriptor,
                f"there are more than {self._most} connections, for which half of the open files that the "
                f"process may have are meant (ulimit -n), and {why}",
            )

    def _disconnect(self, descriptor: int, why: str) -> None:
        connection = self._connections[descriptor]
        peer = _shut_down(descriptor, connection.inode)
        self._forget(descriptor)
        if not peer:
            return
        self.disconnected += 1
        waits.count(waits.DISCONNECTED)
        if self.disconnected <= _NAMED:
            _log.warning("the peer at %s was disconnected: %s", peer, why)

    def _forget(self, descriptor: int) -> None:
        connection = self._connections.pop(descriptor, None)
        if connection is not None and connection.unfinished > WORTH_TRIMMING:
            self._trims = [time.monotonic() + seconds for seconds in TRIM_AFTER]

    def _trim(self) -> None:
        """Give memory that libzmq has freed back to the operating system."""
        if self._trims and time.monotonic() >= self._trims[0]:
            self._trims.pop(0)
            with contextlib.suppress(AttributeError):  # Only glibc keeps it, and can be asked.
                ctypes.CDLL(None).malloc_trim(0)


def _received(descriptor: int, inode: int) -> int | None:
    """Bytes that a connection has received, 0 where the kernel does not count; None when it is gone."""
    if not _is(descriptor, inode):
        return None
    try:
        with _borrowed(descriptor) as connection:
            return _count(connection)
    except OSError:  # libzmq has closed it since.
        return None


def _count(connection: socket.socket) -> int:
    try:
        about = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
        return int(_RECEIVED.unpack(about)[0])
    except (OSError, struct.error):
        return 0


def _shut_down(descriptor: int, inode: int) -> str:
    """End a connection, which makes libzmq drop it; returns where its peer is, '' when it is gone."""
    try:
        # So what is looked at and what is shut down are the same, even if libzmq closes its own meanwhile.
        duplicate = os.dup(descriptor)
    except OSError:
        if not _is(descriptor, inode):
            return ""
        # No descriptor is free, which is when it matters most; or libzmq has closed it since.
        with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
            return _end(connection)
        return ""
    with socket.socket(fileno=duplicate) as connection:
        return _end(connection) if _is(duplicate, inode) else ""


def _is(descriptor: int, inode: int) -> bool:
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Use libzmq's own descriptor without ever closing it."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def _end(connection: socket.socket) -> str:
    try:
        peer = connection.getpeername()
        # The peer is told at once, also when it does not read: closing sends a reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return ""
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "a unix socket"

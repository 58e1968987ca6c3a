"""Bells: a datagram between two processes of one host in, an early look at the store out.

Everything that is said lies in the store (`membership`), where everybody looks now and then. A bell only says
"look now", within a fraction of a millisecond. It may be lost, and rung by anyone: nothing else changes.
A store's own waits are no bells: one that times out writes two warnings of torch's each time.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterable

_HOST = "127.0.0.1"


class Bell:
    """One process's bell. One thread waits; any thread may ring others or itself."""

    def __init__(self) -> None:
        """Bind to a port of the loopback device that the system chooses."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((_HOST, 0))
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.port: int = self._socket.getsockname()[1]
        """Where others ring it."""

    def wait(self, seconds: float) -> bool:
        """Wait until the bell is rung, at most `seconds`. Returns whether it was, since the last wait."""
        if not self._poll.poll(1000 * seconds):
            return False
        with contextlib.suppress(BlockingIOError):  # All are read: one look answers them all.
            while True:
                self._socket.recv(1)
        return True

    def ring(self, *ports: int) -> None:
        """Ring the bells at `ports`; 0 is nobody's."""
        for port in ports:
            if port:
                # Full, closed or gone: whoever is there looks later.
                with contextlib.suppress(OSError):
                    self._socket.sendto(b"!", (_HOST, port))

    def ring_all(self, ports: Iterable[int]) -> None:
        """Ring each of these bells once."""
        self.ring(*set(ports))

    def close(self) -> None:
        """Free the port."""
        self._socket.close()

"""Who may talk to whom: keys onto sockets, an allow-list for the replay, and refused handshakes as errors.

CURVE by itself admits every client that knows the server's public key. So the replay's context runs an
authenticator that admits listed keys only, and a socket with keys admits nobody while it does not run. A
refused client would retry for ever in silence; `Handshakes` watches for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from asyncrl.errors import ReplayError
from asyncrl.messaging.keys import Security, ServerKeys

_DOMAIN: Final = "asyncrl"
_BROKEN_OFF: Final = 5
"""Handshakes in a row that the other side broke off without a reason until that counts as refused."""
_MECHANISM_MISMATCH: Final = 0x11000002


def secure(socket: zmq.Socket[bytes], security: Security | None) -> None:
    """Set the keys of a socket that is not bound or connected yet."""
    if security is None:
        return
    socket.setsockopt(zmq.CURVE_PUBLICKEY, security.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, security.secret)
    if isinstance(security, ServerKeys):
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # Without the authenticator nobody gets in.
    else:
        socket.setsockopt(zmq.CURVE_SERVERKEY, security.server)


@contextmanager
def admitting(context: zmq.Context[zmq.Socket[bytes]], security: ServerKeys | None) -> Iterator[None]:
    """Admit the listed clients to the sockets of `context`. Enter before binding, leave before destroying."""
    if security is None:
        yield
        return
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    try:
        authenticator.configure_curve_callback(_DOMAIN, _Listed(security.allowed))
        yield
    finally:
        authenticator.stop()


class _Listed:
    """The allow-list in the form the authenticator asks for."""

    def __init__(self, allowed: frozenset[bytes]) -> None:
        self._allowed = allowed

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client's public key (Z85) is listed."""
        return key in self._allowed


class Handshakes:
    """Watches one connecting socket for refusals."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, who: str = "replay") -> None:
        """Begin before the socket connects; `who` is at the other end."""
        self._who = who
        self._endpoint, self._broken_off = endpoint, 0
        events = (
            zmq.Event.HANDSHAKE_SUCCEEDED
            | zmq.Event.HANDSHAKE_FAILED_AUTH
            | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
            | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
        )
        self._monitor = socket.get_monitor_socket(events)

    def check(self) -> None:
        """Look at what happened since the last call; never waits.

        Raises:
            ReplayError: The replay refuses this process, or is not the one that the keys are for.
        """
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            kind = event["event"]
            if kind == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._broken_off = 0
            elif kind == zmq.Event.HANDSHAKE_FAILED_AUTH:
                raise self._refused(
                    "this process's public key is not on its allow-list. Add the key to DIR/clients on the "
                    "replay's host and restart the replay"
                )
            elif kind == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                raise self._refused(
                    "one side uses keys and the other does not. Set --replay.keys on both"
                    if event["value"] == _MECHANISM_MISMATCH
                    else f"its handshake breaks the protocol ({event['value']:#x}). Is it asyncrl's at all?"
                )
            else:
                self._broken_off += 1
                if self._broken_off >= _BROKEN_OFF:
                    raise self._refused(
                        "it broke off every handshake: DIR/server.public is not its public key. "
                        "Copy server.public again from the replay's host"
                    )

    def _refused(self, why: str) -> ReplayError:
        return ReplayError(f"the {self._who} at {self._endpoint} refused the connection: {why}.")

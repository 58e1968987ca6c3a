"""Put keys onto sockets, admit listed clients only, and report refused handshakes as errors.

CURVE by itself admits every client that knows the server's public key. So the replay's context runs an
authenticator that admits listed keys only, and a socket with keys admits nobody while it does not run. A
refused client would retry for ever in silence; `Handshakes` watches for that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from asyncrl.errors import ConfigError, ReplayError
from asyncrl.messaging.curve_keys import Security, ServerKeys, read_key

_LOG = logging.getLogger(__name__)
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
        authenticator.configure_curve_callback(_DOMAIN, AllowList(security.folder))
        yield
    finally:
        authenticator.stop()


class AllowList:
    """Whom the replay admits: the keys in a folder, read again at the next handshake when a file changed."""

    def __init__(self, folder: Path) -> None:
        """Read the keys in `folder`. Used by one thread."""
        self._folder = folder
        self._files = _about_keys(folder)
        self._keys = self._read()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client's public key (Z85) is listed; the authenticator asks at each handshake."""
        files = _about_keys(self._folder)
        if files != self._files:
            before, self._files = self._keys, files
            self._keys = self._read()
            _report(self._folder, before, self._keys)
        return key in self._keys.values()

    def _read(self) -> dict[str, bytes]:
        """Name -> public key; a file that holds none admits nobody, and is tried again when it changes."""
        keys: dict[str, bytes] = {}
        for name in self._files:
            try:
                keys[name.removesuffix(".public")] = read_key(self._folder / name)
            except ConfigError as error:
                _LOG.warning("this entry of the allow-list admits nobody: %s", error)
        return keys


def _about_keys(folder: Path) -> dict[str, tuple[int, int, int]]:
    """File name -> inode, size and time of writing; nothing when the folder cannot be read."""
    found: dict[str, tuple[int, int, int]] = {}
    for path in sorted(folder.glob("*.public")):
        try:
            about = path.stat()
        except OSError:  # It was taken away this moment, or leads nowhere: nobody is admitted by it.
            continue
        found[path.name] = about.st_ino, about.st_size, about.st_mtime_ns
    return found


def _report(folder: Path, before: dict[str, bytes], now: dict[str, bytes]) -> None:
    added = [name for name in now if before.get(name) != now[name]]
    removed = [name for name in before if now.get(name) != before[name]]
    said = f"added {', '.join(added) or 'none'}; removed {', '.join(removed) or 'none'}"
    _LOG.info("the allow-list %s changed: %s; it has %d keys now", folder, said, len(now))


_ONE_SIDED: Final = "one side uses keys and the other does not. Set --replay.keys on both"
# A server without keys and one with another key look alike to a client with keys, when the server hangs up
# before the client has read its greeting.
_WRONG_SERVER: Final = (
    "it broke off every handshake: one side uses keys and the other does not, or DIR/server.public is not "
    "its public key. Set --replay.keys on both, and copy server.public again from the replay's host"
)


class Handshakes:
    """Watches one connecting socket for refusals."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, who: str = "replay") -> None:
        """Begin before the socket connects; `who` is at the other end."""
        self._who = who
        self._endpoint, self._broken_off = endpoint, 0
        self._without_keys = socket.getsockopt(zmq.MECHANISM) == zmq.NULL
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
                    "replay's host and start this process again"
                )
            elif kind == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                raise self._refused(
                    _ONE_SIDED
                    if event["value"] == _MECHANISM_MISMATCH
                    else f"its handshake breaks the protocol ({event['value']:#x}). Is it asyncrl's at all?"
                )
            else:
                self._broken_off += 1
                if self._broken_off >= _BROKEN_OFF:
                    raise self._refused(_ONE_SIDED if self._without_keys else _WRONG_SERVER)

    def _refused(self, why: str) -> ReplayError:
        return ReplayError(f"the {self._who} at {self._endpoint} refused the connection: {why}.")

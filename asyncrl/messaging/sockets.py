"""ZeroMQ sockets: in a private ipc folder, on loopback tcp, or on any tcp address with `keys`."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import resource
import socket
import stat
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncrl.errors import ConfigError, ReplayError
from asyncrl.messaging.framing import MAX_FRAME_BYTES
from asyncrl.messaging.keys import ClientKeys, Security, ServerKeys, secure
from asyncrl.observability import waits

MAX_IPC_PATH: Final = 107  # bytes
PREFIX: Final = "asyncrl-"
IDENTITY: Final = "identity"
"""File with the run's secret in a private folder, for actors of this host that join."""
LINGER_MS: Final = 1000
LEAVE_SECONDS: Final = 5.0  # Longest wait of a leaving peer for the answer, perhaps of a busy host
HANDSHAKE_MS: Final = 10_000
BULK_HWM: Final = 4  # Messages queued in the direction of episodes. ZeroMQ counts messages, not bytes
CONTROL_HWM: Final = 1024  # Messages queued in the direction of small messages and of a learner's batch
SHARE_OF_FILES: Final = 0.5  # Share of the process's descriptors for connections of one listening socket
_NAMED: Final = 100
_log = logging.getLogger(__name__)


def private_folder() -> Path:
    """Make a folder of mode 0700 for sockets, in the temporary folder: a run's path may be too long."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    if len(os.fsencode(folder)) > MAX_IPC_PATH - 20:
        folder.rmdir()
        raise ConfigError(
            f"TMPDIR is {folder.parent}, but a unix socket's path has at most {MAX_IPC_PATH} bytes. "
            "Set TMPDIR to a shorter folder, for example /tmp."
        )
    return folder


def ipc_endpoint(folder: Path, name: str = "replay") -> str:
    """Return the ipc endpoint `name` in a `private_folder`."""
    return check_endpoint(f"ipc://{folder / name}")


def check_endpoint(
    endpoint: str, security: Security | None = None, *, any_port: bool = False, keys_follow: bool = False
) -> str:
    """Return an endpoint if it is safe with its keys (`keys_follow`: later ones); `any_port` allows 0."""
    kind, _, rest = endpoint.partition("://")
    if kind == "ipc" and rest.startswith("/"):
        _check_ipc(endpoint, Path(rest))
    elif kind == "tcp":
        _check_tcp(endpoint, rest, security, any_port, keys_follow)
    else:
        raise ConfigError(
            f"endpoint {endpoint!r} is not supported. Use ipc:///absolute/path or tcp://127.0.0.1:PORT."
        )
    return endpoint


def _check_ipc(endpoint: str, path: Path) -> None:
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise ConfigError(
            f"endpoint {endpoint!r} has {len(os.fsencode(path))} bytes, but a unix socket's path has at most "
            f"{MAX_IPC_PATH}. Use a shorter folder, for example under /tmp."
        )
    try:
        about = path.parent.stat()
    except OSError as error:
        raise ConfigError(f"endpoint {endpoint!r} lies in a folder that is not there: {error}.") from None
    if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise ConfigError(
            f"endpoint {endpoint!r} lies in a folder that other users can enter, so they could join the run. "
            f"Make it private: chmod 700 {path.parent}"
        )


def _check_tcp(
    endpoint: str, rest: str, security: Security | None, any_port: bool, keys_follow: bool
) -> None:
    host, _, port = rest.rpartition(":")
    try:
        address = ipaddress.IPv6Address(host[1:-1]) if "[" in host else ipaddress.IPv4Address(host)
    except ValueError:
        address = None
    if security is None and not keys_follow and not (address and address.is_loopback):
        raise ConfigError(
            f"endpoint {endpoint!r} can be reached from other hosts, which needs a server key and an "
            "allow-list of client keys, and neither is set. Make both with `asyncrl keys DIR` and give "
            "--replay.keys DIR, or use ipc:// or tcp://127.0.0.1:PORT."
        )
    if isinstance(security, ServerKeys) and not security.allowed:
        raise ConfigError(
            f"endpoint {endpoint!r} has a server key, but its allow-list of client keys is empty, so no "
            "client would be admitted. Make client keys: asyncrl keys DIR --clients learner actor-0"
        )
    if address is None or address.is_unspecified or address.is_multicast:
        raise ConfigError(
            f"endpoint {endpoint!r} does not name one address, and the others connect to the same endpoint. "
            "Use the address of one network interface, for example tcp://10.0.0.5:5555 or tcp://[fd00::5]:5555."
        )
    if not (port.isdecimal() and (not any_port) <= int(port[:6]) < 65536):
        raise ConfigError(f"endpoint {endpoint!r} has no port between 1 and 65535.")


def why_taken(endpoint: str) -> str:
    """Return why an endpoint cannot be opened now; empty if free."""
    kind, _, rest = endpoint.partition("://")
    if kind == "ipc":  # ZeroMQ itself would take it over from its process.
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(rest)
            except (FileNotFoundError, ConnectionRefusedError):
                return ""
            except OSError as error:
                return f"it cannot be used ({error.strerror or error})"
        return "a process listens there already"
    host, _, port = rest.rpartition(":")
    with socket.socket(socket.AF_INET6 if "[" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As ZeroMQ does: a closed one is free.
        try:
            probe.bind((host.strip("[]"), int(port)))
            probe.listen()
        except OSError as error:
            return f"it cannot be opened ({error.strerror})"
    return ""


def _limited(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, LINGER_MS)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return made


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, security: ServerKeys | None = None
) -> zmq.Socket[bytes]:
    """Bind a server's socket; with keys, `context` must be `keys.admitting`, or every client is refused."""
    router = _limited(context, zmq.ROUTER)
    secure(router, security)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # Sending to a vanished peer raises.
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # A returning peer keeps its name.
    router.setsockopt(zmq.RCVHWM, BULK_HWM)
    router.setsockopt(zmq.SNDHWM, CONTROL_HWM)
    router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    try:
        bind(router, endpoint, security)
    except BaseException:
        router.close(0)
        raise
    return router


def bind(router: zmq.Socket[bytes], endpoint: str, security: ServerKeys | None = None) -> None:
    """Bind a server's socket to another endpoint; raises as `bind_router`."""
    check_endpoint(endpoint, security, any_port=True)
    try:
        if endpoint.startswith("ipc") and (why := why_taken(endpoint)):
            raise ConfigError(f"endpoint {endpoint!r} cannot be opened: {why}. Choose another one.")
        router.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))
        router.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"endpoint {endpoint!r} cannot be opened: {error}. Choose another one.") from None


def bind_again(router: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind an ipc endpoint once more if the host cleaned its socket away; connections stay. Call it often."""
    path = Path(endpoint.removeprefix("ipc://"))
    if endpoint.startswith("ipc") and not path.exists():
        with contextlib.suppress(OSError, ConfigError):  # The next call tries again.
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            bind(router, endpoint)


def open_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    identity: bytes,
    security: ClientKeys | None = None,
) -> zmq.Socket[bytes]:
    """Make a peer's socket, which the caller connects to `endpoint`."""
    check_endpoint(endpoint, security)
    dealer = _limited(context, zmq.DEALER)
    secure(dealer, security)
    dealer.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))
    dealer.setsockopt(zmq.ROUTING_ID, identity)
    dealer.setsockopt(zmq.SNDHWM, BULK_HWM)
    dealer.setsockopt(zmq.RCVHWM, CONTROL_HWM)
    dealer.setsockopt(zmq.RECONNECT_IVL, 20)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    return dealer


class WakeableSocket:
    """A socket whose wait another thread can end."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._event)  # Only then: a late `wake` finds no other file.
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._event, zmq.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Wait for a message or `wake`, at most `seconds`; True if a message came."""
        ready = dict(self._poller.poll(int(1000 * seconds)))
        if self._event in ready:
            os.eventfd_read(self._event)
        return self._socket in ready

    def wake(self) -> None:
        """End the wait. Any thread may call it."""
        os.eventfd_write(self._event, 1)


_BROKEN_OFF: Final = 5  # Handshakes in a row, broken off without a reason, that count as a refusal
_MECHANISM_MISMATCH: Final = 0x11000002
_NOT_LISTED: Final = (
    "this process's public key is not on its allow-list. Add the key to DIR/clients on the replay's host and "
    "start this process again"
)
_ONE_SIDED: Final = "one side uses keys and the other does not. Set --replay.keys on both"
# To a client with keys, a server without keys and one with another key are the same if the server hangs up
# before the client has read its greeting.
_WRONG_SERVER: Final = (
    "it broke off every handshake: one side uses keys and the other does not, or DIR/server.public is not "
    "its public key. Set --replay.keys on both, and copy server.public again from the replay's host"
)


class Handshakes:
    """Watches a connecting socket for refusals, after which ZeroMQ would retry for ever in silence."""

    def __init__(self, dealer: zmq.Socket[bytes], endpoint: str, who: str = "replay") -> None:
        self._who = who
        self._endpoint, self._broken_off = endpoint, 0
        self._without_keys = dealer.getsockopt(zmq.MECHANISM) == zmq.NULL
        events = (
            zmq.Event.HANDSHAKE_SUCCEEDED
            | zmq.Event.HANDSHAKE_FAILED_AUTH
            | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
            | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
        )
        self._monitor = dealer.get_monitor_socket(events)

    def check(self) -> None:
        """Raise a ReplayError if the server refused this process since the last call; never waits."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if why := self._refusal(event["event"], event["value"]):
                raise ReplayError(f"the {self._who} at {self._endpoint} refused the connection: {why}.")

    def _refusal(self, kind: int, value: int) -> str:
        if kind == zmq.Event.HANDSHAKE_FAILED_AUTH:
            return _NOT_LISTED
        if kind == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            broken = f"its handshake breaks the protocol ({value:#x}). Is it asyncrl's at all?"
            return _ONE_SIDED if value == _MECHANISM_MISMATCH else broken
        self._broken_off = 0 if kind == zmq.Event.HANDSHAKE_SUCCEEDED else self._broken_off + 1
        if self._broken_off < _BROKEN_OFF:
            return ""
        return _ONE_SIDED if self._without_keys else _WRONG_SERVER


class ConnectionGuard:
    """Limits the connections of a listening socket, so that the process can still open files.

    Beyond the limit, the oldest silent one (else the newest) is ended and counted as `wire/disconnected`.
    """

    def __init__(self, listening: zmq.Socket[bytes], *, connections: int | None = None) -> None:
        limit = int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * SHARE_OF_FILES)
        self._most = max(1, limit) if connections is None else connections
        self.disconnected = 0
        self._spoke = set[int]()
        self._listening, self._closing = listening, threading.Event()
        self._monitor = listening.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)
        self._thread.start()

    def note(self, frame: zmq.Frame) -> None:
        """Record that a message with this frame came."""
        with contextlib.suppress(zmq.ZMQError):  # It has no connection.
            self._spoke.add(int(frame.get(zmq.SRCFD)))  # type: ignore[call-overload]

    def close(self) -> None:
        """Stop watching, before the socket's context ends."""
        self._closing.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        there = dict[int, None]()
        while not self._closing.is_set():
            if not self._monitor.poll(100):
                continue
            event = parse_monitor_message(self._monitor.recv_multipart())
            descriptor = int(event["value"])
            there.pop(descriptor, None)
            if event["event"] == zmq.EVENT_ACCEPTED:
                there[descriptor] = None
            else:
                self._spoke.discard(descriptor)
            if len(there) > self._most:
                silent = next((x for x in there if x not in self._spoke), descriptor)
                del there[silent]
                self._end(silent)
        # libzmq's thread would wait for a monitor that reads no events.
        with contextlib.suppress(zmq.ZMQError):  # It could not be bound, and was closed.
            self._listening.disable_monitor()
        self._monitor.close(0)

    def _end(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):  # It is gone already.
            connection = socket.socket(fileno=descriptor)
            try:
                connection.shutdown(socket.SHUT_RDWR)  # libzmq closes it.
            finally:
                connection.detach()
            self.disconnected += 1
            waits.count(waits.DISCONNECTED)
            if self.disconnected <= _NAMED:
                _log.warning(
                    "a connection was ended: there are %d others, as many as half of the open files that the "
                    "process may have (ulimit -n)",
                    self._most,
                )

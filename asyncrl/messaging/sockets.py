"""Open ZeroMQ sockets: in a private ipc folder, on loopback tcp, or on any tcp address with keys.

Without keys (see `curve_keys`) an address that other hosts can reach is refused.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import zmq

from asyncrl.errors import ConfigError
from asyncrl.messaging.authentication import secure
from asyncrl.messaging.curve_keys import ClientKeys, Security, ServerKeys
from asyncrl.messaging.episode_codec import MAX_FRAME_BYTES

MAX_IPC_PATH: Final = 107
"""Longest path of a unix socket, in bytes."""
PREFIX: Final = "asyncrl-"
"""How the names of private folders begin."""
IDENTITY: Final = "identity"
"""File of a private folder with the run's secret, for actors of this host that join."""
LINGER_MS: Final = 1000
HANDSHAKE_MS: Final = 10_000
"""A connection whose handshake takes longer is ended; it has a few small messages."""
BULK_HWM: Final = 4
"""Messages queued in a direction that carries episodes. ZeroMQ counts messages, not bytes."""
CONTROL_HWM: Final = 1024
"""Messages queued in a direction that carries small messages, and one batch for the learner."""


def private_folder() -> Path:
    """Make a folder for the sockets of one run that only this user can enter (mode 0700).

    The caller removes it. It lies in the system's temporary folder, because the run folder's path may be too
    long for a unix socket.

    Raises:
        ConfigError: The temporary folder's path is too long.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    if len(os.fsencode(folder)) > MAX_IPC_PATH - 20:
        folder.rmdir()
        raise ConfigError(
            f"TMPDIR is {folder.parent}, but a unix socket's path has at most {MAX_IPC_PATH} bytes. "
            "Set TMPDIR to a shorter folder, for example /tmp."
        )
    return folder


def ipc_endpoint(folder: Path, name: str = "replay") -> str:
    """Name the ipc endpoint `name` in a folder made by `private_folder`."""
    return check_endpoint(f"ipc://{folder / name}")


def check_endpoint(
    endpoint: str, security: Security | None = None, *, any_port: bool = False, keys_follow: bool = False
) -> str:
    """Return `endpoint` when it can be used safely.

    Args:
        endpoint: ipc:///absolute/path or tcp://ADDRESS:PORT.
        security: The keys that go with it; None for an address that only this host reaches.
        any_port: Port 0 stands for one that the system chooses.
        keys_follow: The keys are made later, before anything listens there.

    Raises:
        ConfigError: It reaches beyond this host without keys, is open to other users, or cannot be read.
    """
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
        address = ipaddress.IPv4Address(host)
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
            f"endpoint {endpoint!r} has a server key, but its allow-list of client keys is empty, so nobody "
            "would be admitted. Make client keys: asyncrl keys DIR --clients learner actor-0"
        )
    if address is None or address.is_unspecified or address.is_multicast:
        raise ConfigError(
            f"endpoint {endpoint!r} does not name one address, and the others connect to the same endpoint. "
            "Use the IPv4 address of one network interface, for example tcp://10.0.0.5:5555."
        )
    if not (port.isdecimal() and (not any_port) <= int(port[:6]) < 65536):
        raise ConfigError(f"endpoint {endpoint!r} has no port between 1 and 65535.")


def why_taken(endpoint: str) -> str:
    """Say why nobody can listen on an endpoint now; empty when one can. It is free again afterwards.

    ZeroMQ itself would take an ipc endpoint away from the process that has it.
    """
    kind, _, rest = endpoint.partition("://")
    if kind == "ipc":
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(rest)
            except (FileNotFoundError, ConnectionRefusedError):  # Nobody listens, at most a file is left.
                return ""
            except OSError as error:
                return f"it cannot be used ({error.strerror or error})"
        return "a process listens there already"
    host, _, port = rest.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As ZeroMQ does: a closed one is free.
        try:
            probe.bind((host, int(port)))
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
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    security: ServerKeys | None = None,
    prepare: Callable[[zmq.Socket[bytes]], object] = lambda socket: None,
) -> zmq.Socket[bytes]:
    """Bind a server's socket. A vanished peer raises on send; a returning peer takes its name over.

    Args:
        context: Where the socket lives. With keys it must be `authentication.admitting`, or nobody gets in.
        endpoint: See `check_endpoint`; port 0: `zmq.LAST_ENDPOINT` tells the one that the system chose.
        security: The server's keys and its allow-list.
        prepare: Gets the socket before it is bound.

    Raises:
        ConfigError: The endpoint is not allowed, or someone else has it.
    """
    check_endpoint(endpoint, security, any_port=True)
    if endpoint.startswith("ipc") and (why := why_taken(endpoint)):
        raise ConfigError(f"endpoint {endpoint!r} cannot be opened: {why}. Choose another one.")
    router = _limited(context, zmq.ROUTER)
    secure(router, security)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    router.setsockopt(zmq.RCVHWM, BULK_HWM)
    router.setsockopt(zmq.SNDHWM, CONTROL_HWM)
    router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    prepare(router)
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        router.close(0)
        raise ConfigError(f"endpoint {endpoint!r} cannot be opened: {error}. Choose another one.") from None
    return router


def open_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    identity: bytes,
    security: ClientKeys | None = None,
) -> zmq.Socket[bytes]:
    """Make a peer's socket; the caller connects it to `endpoint`, and ZeroMQ reconnects it by itself.

    Args:
        context: Where the socket lives.
        endpoint: Of the replay; see `check_endpoint`.
        identity: Unique for this process's life, so that replies find it after a reconnect.
        security: This client's keys and the replay's public key.
    """
    check_endpoint(endpoint, security)
    dealer = _limited(context, zmq.DEALER)
    secure(dealer, security)
    dealer.setsockopt(zmq.ROUTING_ID, identity)
    dealer.setsockopt(zmq.SNDHWM, BULK_HWM)
    dealer.setsockopt(zmq.RCVHWM, CONTROL_HWM)
    dealer.setsockopt(zmq.RECONNECT_IVL, 20)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    return dealer

"""Endpoints and sockets: a private ipc folder or loopback tcp in, ZeroMQ sockets with safe limits out.

Everything else would need encryption and keys (CURVE), which are not configured, and is refused.
"""

from __future__ import annotations

import ipaddress
import os
import stat
import tempfile
from pathlib import Path
from typing import Final

import zmq

from asyncrl.errors import ConfigError
from asyncrl.messaging.wire import MAX_FRAME_BYTES

MAX_IPC_PATH: Final = 107
"""Longest path of a unix socket, in bytes."""
LINGER_MS: Final = 1000
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
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-"))
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


def check_endpoint(endpoint: str) -> str:
    """Return `endpoint` when it can be used without encryption.

    Raises:
        ConfigError: It reaches beyond this host, is open to other users, or cannot be read.
    """
    kind, _, rest = endpoint.partition("://")
    if kind == "ipc" and rest.startswith("/"):
        _check_ipc(endpoint, Path(rest))
    elif kind == "tcp":
        _check_loopback(endpoint, rest)
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


def _check_loopback(endpoint: str, rest: str) -> None:
    host, _, port = rest.rpartition(":")
    try:
        loopback = ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"endpoint {endpoint!r} can be reached from other hosts, which needs CURVE encryption, and "
            "that is not configured. Use ipc:// or tcp://127.0.0.1:PORT."
        )
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"endpoint {endpoint!r} has no port between 1 and 65535.")


def _limited(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return socket


def bind_router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """Bind the replay's socket. A vanished peer raises on send; a returning peer takes its name over.

    Raises:
        ConfigError: The endpoint is not allowed, or someone else has it.
    """
    check_endpoint(endpoint)
    socket = _limited(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.RCVHWM, BULK_HWM)
    socket.setsockopt(zmq.SNDHWM, CONTROL_HWM)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(f"endpoint {endpoint!r} cannot be opened: {error}. Choose another one.") from None
    return socket


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes
) -> zmq.Socket[bytes]:
    """Connect a peer's socket; ZeroMQ reconnects it by itself.

    Args:
        context: Where the socket lives.
        endpoint: Of the replay.
        identity: Unique for this process's life, so that replies find it after a reconnect.
    """
    check_endpoint(endpoint)
    socket = _limited(context, zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.SNDHWM, BULK_HWM)
    socket.setsockopt(zmq.RCVHWM, CONTROL_HWM)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    socket.connect(endpoint)
    return socket

"""Check sockets, ports, the temporary folder and keys. No torch."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from asyncrl.doctor.findings import Examination, Finding, broken, ok, one_line
from asyncrl.doctor.gpus import placement_of
from asyncrl.errors import ConfigError
from asyncrl.launch import endpoints
from asyncrl.messaging.keys import ALLOWED
from asyncrl.messaging.sockets import ipc_endpoint, private_folder

SOCKET_DEADLINE: Final = 2000
"""Milliseconds that one message may take between two sockets of this process."""


def check_sockets(_: Examination) -> Finding | None:
    """Check whether messages get through loopback and unix sockets."""
    try:
        import zmq
    except (ImportError, OSError):  # The line about pyzmq says so.
        return None
    kinds = {"loopback": "tcp://127.0.0.1:*"}
    with tempfile.TemporaryDirectory() as folder:
        if zmq.has("ipc"):
            kinds["ipc"] = f"ipc://{folder}/doctor"
        for kind, endpoint in kinds.items():
            try:
                exchange(endpoint)
            except (zmq.ZMQError, OSError) as error:
                return broken("sockets", f"{kind} sockets do not work ({one_line(error)}).", "Allow them.")
    return ok("sockets", " and ".join(kinds))


def exchange(endpoint: str) -> None:
    """Send one message through a fresh pair of sockets.

    Raises:
        zmq.ZMQError: it could not be bound, or the message did not arrive in time (zmq.Again).
    """
    import zmq

    with zmq.Context() as context, context.socket(zmq.PAIR) as receiver, context.socket(zmq.PAIR) as sender:
        for end in (receiver, sender):
            end.setsockopt(zmq.LINGER, 0)
            end.setsockopt(zmq.RCVTIMEO, SOCKET_DEADLINE)
            end.setsockopt(zmq.SNDTIMEO, SOCKET_DEADLINE)
        receiver.bind(endpoint)
        sender.connect(receiver.getsockopt_string(zmq.LAST_ENDPOINT))
        sender.send(b"hello")
        receiver.recv()


def check_temporary_folder(_: Examination) -> Finding:
    """Check whether the private folder of a run's sockets can be made, with a short enough path."""
    try:
        folder = private_folder()
        try:
            length = len(os.fsencode(ipc_endpoint(folder).removeprefix("ipc://")))
        finally:
            folder.rmdir()
    except ConfigError as error:
        return broken("TMPDIR", one_line(error))
    except OSError as error:
        advice = "Set TMPDIR to a folder that you can write to."
        return broken("TMPDIR", f"no folder can be made there ({one_line(error)}).", advice)
    return ok("TMPDIR", f"{folder.parent}, socket paths of {length} bytes")


def check_listen(examination: Examination) -> Finding | None:
    """Check whether the replay can listen at --replay.listen now; None without one."""
    config = examination.config
    if not config.replay.listen:
        return None
    name = "replay.listen"
    try:
        endpoints.check_listen(config)
    except ConfigError as error:
        return broken(name, one_line(error))
    host, _, port = config.replay.listen.removeprefix("tcp://").rpartition(":")
    if not config.replay.listen.startswith("tcp://"):
        return ok(name, config.replay.listen)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As ZeroMQ does.
        try:
            listener.bind((host, int(port)))
            listener.listen(1)
        except OSError as error:
            return _cannot_bind(name, host, int(port), error)
    return ok(name, f"{config.replay.listen} is an address of this host, and the port is free")


def _cannot_bind(name: str, host: str, port: int, error: OSError) -> Finding:
    if error.errno == errno.EADDRNOTAVAIL:
        advice = "Use the address of one of its interfaces: ip -brief address"
        return broken(name, f"{host} is no address of this host.", advice)
    if error.errno == errno.EADDRINUSE:
        owner = holder(port) or "a process that is not seen from here"
        return broken(name, f"port {port} is taken by {owner}.", "End it, or choose another port.")
    return broken(name, f"{host}:{port} cannot be opened ({one_line(error)}).", "Choose another port.")


def holder(port: int) -> str:
    """Name the process that listens on an IPv4 port, like 'process 4711 (python)'; '' when it is not seen."""
    inodes = set()
    with suppress(OSError):
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for handle in Path("/proc").glob("[0-9]*/fd/*") if inodes else ():
        with suppress(OSError):  # The process ended, or belongs to another user.
            if str(handle.readlink()) in inodes:
                process = handle.parents[1]
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
    return ""


def check_keys(examination: Examination) -> Finding | None:
    """Check whether --replay.keys has what this run's processes need; None without keys."""
    config = examination.config
    if not config.replay.keys:
        return None
    try:
        endpoints.check(config, placement_of(config))
    except ConfigError as error:
        return broken("keys", one_line(error))
    folder = Path(config.replay.keys).expanduser()
    names = sorted(path.stem for path in (folder / ALLOWED).glob("*.public"))
    return ok("keys", f"{folder}: {len(names)} clients are admitted: {', '.join(names)}")

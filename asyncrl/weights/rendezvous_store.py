"""Open and reach the loopback TCPStore through which learner and actors of a host meet."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import ConfigError, WeightSyncError, first_line

STORE_SECONDS = 30.0
"""Longest wait of a single store request."""
LOST = (DistError, ConnectionError)
"""What a store raises when its learner is gone."""


def open_store(listen: str) -> tuple[TCPStore, str]:
    """Serve a store on the loopback device only.

    Args:
        listen: Address such as '127.0.0.1:0'; port 0 lets the system choose.

    Returns:
        The store and its 'host:port'.

    Raises:
        ConfigError: the address is not loopback, or is taken.
    """
    host, port = split_endpoint(listen)
    if not host.startswith("127."):
        raise ConfigError(
            f"The weight store should listen on {listen}, but whoever reaches it can replace the policy. "
            "Use 127.0.0.1:0; actors on other hosts reach it through an SSH tunnel."
        )
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"The weight store cannot listen on {listen} ({error.strerror}). Use port 0."
        ) from None
    host, port = listener.getsockname()
    # Without a bound socket of ours the store would listen on every interface, whatever host it is given.
    store = TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=STORE_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, f"{host}:{port}"


def connect(endpoint: str, seconds: float) -> TCPStore:
    """Open one more connection to the store at `endpoint`.

    Raises:
        WeightSyncError: nobody answers within `seconds`.
    """
    host, port = split_endpoint(endpoint)
    try:
        return TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
    except LOST as error:
        raise WeightSyncError(
            f"Nobody serves the learner's weight store at {endpoint} ({first_line(error)}). "
            "Is the learner still running?"
        ) from None


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split 'host:port'.

    Raises:
        ConfigError: it is something else.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{endpoint!r} is not an address of a weight store. Expected 127.0.0.1:PORT.")
    return host, int(port)


def epoch_store(endpoint: str, epoch: int, seconds: float) -> Store:
    """Open a connection of its own for the links of one epoch, so that their long waits block nobody else."""
    return PrefixStore(f"e{epoch}/link", connect(endpoint, seconds))

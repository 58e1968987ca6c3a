"""Broadcast weights between CPU buffers, over sockets: of the loopback device, or of one between hosts."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.weights.packing import Buffers
from asyncrl.weights.transports.interface import BufferPair, Link, broadcast_options, pieces_of


class GlooTransport:
    """Broadcasts between CPU buffers."""

    def __init__(self, deadline: float, address: str = "127.0.0.1") -> None:
        """Listen on an address of this host, and on no other: gloo would take that of the host's name.

        Args:
            deadline: Seconds after which a broadcast that makes no progress has failed.
            address: IPv4 address. Unless it is the loopback device's, GLOO_SOCKET_IFNAME goes first.
        """
        self.device = torch.device("cpu")
        self._deadline = deadline
        interface = "" if address == "127.0.0.1" else os.environ.get("GLOO_SOCKET_IFNAME", "")
        where = {"interface": interface} if interface else {"hostname": address}
        self._gloo_device = dist.ProcessGroupGloo.create_device(**where)

    @classmethod
    def build(cls, device: torch.device, deadline: float) -> Self:
        """Return a transport between CPU buffers, whatever `device` is. See `interface.Transport`."""
        return cls(deadline)

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context that does nothing: the CPU has no streams."""
        return nullcontext()

    def connect_root(self, store: Store, size: int, buffers: BufferPair) -> Link:
        """Form a link as rank 0. See `interface.Transport`."""
        return _GlooLink(self._group(store, 0, size), buffers)

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
        """Form a link as another rank. See `interface.Transport`."""
        return _GlooLink(self._group(store, rank, size), ([], []))

    def _group(self, store: Store, rank: int, size: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [self._gloo_device]
        options._timeout = timedelta(seconds=self._deadline)
        options._threads = 1
        return gloo(store, rank, size, options)


class _GlooLink:
    def __init__(self, group: Any, buffers: BufferPair) -> None:
        self._group: Any = group
        self._buffers = buffers
        self.moved = 0
        """See `CountsPieces`."""

    def send(self, buffer_index: int) -> None:
        self._broadcast(self._buffers[buffer_index])

    def receive(self, buffer_index: int, into: Buffers) -> None:
        self._broadcast(into)

    def abort(self) -> None:
        self._group = None  # gloo cannot cancel what is under way; its own timeout ends it

    def _broadcast(self, buffers: Buffers) -> None:
        group = self._group  # kept until the broadcast ends: the group's destructor waits for it
        for piece in pieces_of(buffers):
            group.broadcast([piece], broadcast_options()).wait()
            self.moved += 1

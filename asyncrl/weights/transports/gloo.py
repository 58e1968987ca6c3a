"""Broadcast weights between CPU buffers, over loopback sockets."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.weights.packing import Buffers, as_bytes
from asyncrl.weights.transports.interface import BufferPair, Link, broadcast_options


class GlooTransport:
    """Broadcasts between CPU buffers."""

    def __init__(self, deadline: float) -> None:
        self.device = torch.device("cpu")
        self._deadline = deadline
        # Bound to the loopback device: gloo would otherwise listen on the address of the host's name.
        self._gloo_device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")

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

    def send(self, buffer_index: int) -> None:
        self._broadcast(self._buffers[buffer_index])

    def receive(self, buffer_index: int, into: Buffers) -> None:
        self._broadcast(into)

    def abort(self) -> None:
        self._group = None  # gloo cannot cancel what is under way; its own timeout ends it

    def _broadcast(self, buffers: Buffers) -> None:
        group = self._group  # kept until the broadcast ends: the group's destructor waits for it
        for buffer in buffers:
            group.broadcast([as_bytes(buffer)], broadcast_options()).wait()

"""A broadcast between CPU buffers over sockets: stands in for NCCL where there is no GPU."""

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.weights.interface import Link
from asyncrl.weights.packing import BufferPair, Buffers
from asyncrl.weights.transports.gpu import broadcast_options, pieces_of

GLOO = "support.gloo_transport:GlooTransport"


class GlooTransport:
    """Broadcasts between CPU buffers. A `Transport`."""

    def __init__(self, deadline: float) -> None:
        self.device = torch.device("cpu")
        self._deadline = deadline
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        where = {"interface": interface} if interface else {"hostname": "127.0.0.1"}
        self._gloo_device = dist.ProcessGroupGloo.create_device(**where)

    @classmethod
    def build(cls, device: torch.device, deadline: float) -> Self:
        return cls(deadline)

    def side_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def connect_root(self, store: Store, size: int, buffers: BufferPair) -> Link:
        return _GlooLink(self._group(store, 0, size), buffers)

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
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

    def send(self, buffer_index: int) -> None:
        self._broadcast(self._buffers[buffer_index])

    def receive(self, buffer_index: int, into: Buffers) -> None:
        self._broadcast(into)

    def abort(self) -> None:
        self._group = None  # gloo cannot cancel a broadcast; its own timeout ends it

    def _broadcast(self, buffers: Buffers) -> None:
        group = self._group  # kept until the broadcast ends: the group's destructor waits for it
        for piece in pieces_of(buffers):
            group.broadcast([piece], broadcast_options()).wait()
            self.moved += 1

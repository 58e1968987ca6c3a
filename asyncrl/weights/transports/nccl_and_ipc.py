"""Send weights by CUDA IPC to actors on the learner's own GPU, and by NCCL to those on others of the host.

While the link of an epoch is formed, every member says in the store on which GPU it is; rank 0 answers with
the whole list, so all come to the same two groups:

    local    members on rank 0's GPU, which copy out of its buffers (`cuda_ipc`); NCCL refuses a second
             rank on one GPU
    remote   the others, in the order of their ranks: an NCCL group with rank 0 (`nccl`)

Rank 0 first starts the broadcast, then nothing: the local ones copy when they are told of the version, as the
remote ones take part. Either group may be empty, and then only the other one is made. Deadlines, receipts,
checksums and new epochs are those of the whole link.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Self

import torch
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import WeightSyncError
from asyncrl.weights.packing import Buffers
from asyncrl.weights.transports.cuda_ipc import CudaIpcTransport
from asyncrl.weights.transports.interface import (
    BufferPair,
    Link,
    Transport,
    high_priority_stream,
    require_gpu,
)
from asyncrl.weights.transports.nccl import NcclTransport


@dataclass(frozen=True, kw_only=True)
class LocalAndRemote:
    """Who gets the weights by which way."""

    local: tuple[int, ...]
    """Ranks of the link on rank 0's GPU."""
    remote: tuple[int, ...]
    """The others; remote[i] has rank i + 1 in the NCCL group."""


def divide(devices: list[str]) -> LocalAndRemote:
    """Divide the members of an epoch by where they are.

    Args:
        devices: Name of each rank's GPU; rank 0 is the learner.

    Raises:
        WeightSyncError: two members share a GPU that is not the learner's.
    """
    local = tuple(r for r in range(1, len(devices)) if devices[r] == devices[0])
    remote = tuple(r for r in range(1, len(devices)) if devices[r] != devices[0])
    for rank in remote:
        if devices.count(devices[rank]) > 1:
            raise WeightSyncError(
                f"Two actors share GPU {devices[rank]}, which is not the learner's, and NCCL takes one "
                "process per GPU. Give each of them a GPU of its own or the learner's, or use "
                "--weights.transport gloo."
            )
    return LocalAndRemote(local=local, remote=remote)


class NcclAndIpcTransport:
    """CUDA IPC within rank 0's GPU, NCCL to the others."""

    def __init__(self, near: Transport, far: Transport, name: str) -> None:
        """Join two transports that work on one stream.

        Args:
            near: To members on the same GPU.
            far: To the others.
            name: Of this process's GPU, the same in all processes that use it.
        """
        self._near, self._far, self._name = near, far, name
        self.device: torch.device = far.device
        """See `Transport.device`."""

    @classmethod
    def build(cls, device: torch.device, deadline: float) -> Self:
        """Return a transport of a GPU. See `interface.Transport`."""
        require_gpu("nccl+ipc", device)
        stream = high_priority_stream(device)
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        return cls(CudaIpcTransport(device, stream), NcclTransport(device, deadline, stream), gpu)

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context on the stream of both."""
        return self._far.side_stream()

    def connect_root(self, store: Store, size: int, buffers: BufferPair) -> Link:
        """Form both links as rank 0. See `interface.Transport`."""
        devices = [self._name] + [store.get(f"device/{rank}").decode() for rank in range(1, size)]
        store.set("devices", json.dumps(devices))
        groups, links = divide(devices), list[Link]()
        if groups.remote:
            links.append(self._far.connect_root(PrefixStore("far", store), 1 + len(groups.remote), buffers))
        if groups.local:
            links.append(self._near.connect_root(PrefixStore("near", store), 1 + len(groups.local), buffers))
        return _Links(links)

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
        """Form the link of this member's group. See `interface.Transport`."""
        store.set(f"device/{rank}", self._name)
        groups = divide(json.loads(store.get("devices")))
        if rank in groups.local:
            near = PrefixStore("near", store)
            return self._near.connect_member(near, 1 + groups.local.index(rank), 1 + len(groups.local))
        far = PrefixStore("far", store)
        return self._far.connect_member(far, 1 + groups.remote.index(rank), 1 + len(groups.remote))


class _Links:
    """Rank 0's links, as one."""

    def __init__(self, links: list[Link]) -> None:
        self._links = links

    def send(self, buffer_index: int) -> None:
        for link in self._links:
            link.send(buffer_index)

    def receive(self, buffer_index: int, into: Buffers) -> None:
        raise AssertionError("rank 0 sends")

    def abort(self) -> None:
        for link in self._links:
            link.abort()

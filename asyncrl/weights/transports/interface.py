"""Declare what carries one version from the learner's buffers into an actor's, with one link per epoch.

    gloo       a broadcast between CPU buffers over sockets: of the loopback device, or between hosts
    shared_memory  actors copy out of the learner's CPU buffers, which they mapped, into their own tensors
    nccl       a broadcast between GPUs, one rank per GPU
    cuda_ipc   actors copy out of the learner's buffers, which they mapped: learner and actor share one GPU
    nccl+ipc   the one or the other for each actor, by where it is (`nccl_and_ipc`)

A link need not notice a dead peer: `deadlines` gives every action a deadline, and `abort` ends the link.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, Self, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import ConfigError
from asyncrl.registry import resolve
from asyncrl.weights.packing import Buffers, Manifest, as_bytes

PIECE: Final = 64 << 20
"""Bytes that are broadcast at a time: a deadline counts from the last piece."""
BufferPair = tuple[Buffers, Buffers]
"""The learner's two buffer sets, by buffer index: one is sent while the other is packed."""


class Link(Protocol):
    """The connection of one epoch between the learner (rank 0) and its members."""

    def send(self, buffer_index: int) -> None:
        """Send one of the learner's two buffer sets to all members. Rank 0 only; blocks until it is sent.

        Args:
            buffer_index: 0 or 1, of the pair that `Transport.connect_root` was given.

        Raises:
            Exception: whatever the library raises when a peer is gone or the link was aborted.
        """
        ...

    def receive(self, buffer_index: int, into: Buffers) -> None:
        """Fill `into` with what the learner sends. Other ranks only; blocks until all of it is there.

        Args:
            buffer_index: 0 or 1: which of the learner's buffer sets is sent.
            into: One ``[E]`` buffer per dtype, ``E`` its elements, on `Transport.device`, of the learner's
                sizes and order.

        Raises:
            Exception: as `send` does.
        """
        ...

    def abort(self) -> None:
        """End the link from any thread; what blocks in it is freed at once, or (gloo) at its timeout."""
        ...


@runtime_checkable
class CountsPieces(Protocol):
    """A link that carries a version in pieces, and so shows that a slow network is no dead peer."""

    moved: int
    """Pieces that were carried over this link so far."""


class Transport(Protocol):
    """Makes links. One object per process, used for all epochs of a run."""

    device: torch.device
    """Where the buffers have to be."""

    @classmethod
    def build(cls, device: torch.device, deadline: float) -> Self:
        """Return a transport for a process.

        Args:
            device: This process's device; a transport may keep its buffers elsewhere (gloo: on the CPU).
            deadline: Seconds after which a broadcast has failed.

        Raises:
            ConfigError: the transport needs a GPU and `device` is none.
        """
        ...

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context in which work on the buffers does not queue behind the models'."""
        ...

    def connect_root(self, store: Store, size: int, buffers: BufferPair) -> Link:
        """Form a link as rank 0 of `size`; blocks until all are there.

        Args:
            store: Of this epoch alone; the same for all ranks.
            size: Ranks, the learner included; at least 2.
            buffers: What `Link.send` sends; the same tensors for every link of a run.
        """
        ...

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
        """Form a link as rank `rank` (1 or more) of `size`; blocks until all are there."""
        ...


class BufferNotes(Protocol):
    """Where the learner says what lies in each of its two buffer sets."""

    def packing(self, buffer_index: int) -> None:
        """Say, before the first byte is written, that a set holds no version any more."""
        ...

    def packed(self, buffer_index: int, version: int) -> None:
        """Say that a set holds a version; members may copy it already."""
        ...

    def summed(self, buffer_index: int, version: int, checksum: int) -> None:
        """Say which sum the version in a set has; only then may a member act with its copy."""
        ...


@runtime_checkable
class SharesBuffers(Protocol):
    """A `Transport` whose members copy out of the learner's buffers themselves, when it suits them.

    The learner notes what lies in each set, and packs one only while the other holds a version and its sum.
    """

    def allocate(self, manifest: Manifest) -> Buffers:
        """Make one of the learner's two buffer sets: zeroed ``[E]``, one per dtype, as `packing.allocate`.

        Raises:
            WeightSyncError: There is no room.
        """
        ...

    def allocate_notes(self) -> BufferNotes:
        """Make the notes on the two sets, which say that neither holds a version.

        Raises:
            WeightSyncError: There is no room.
        """
        ...


def build_transport(name: str, device: torch.device, deadline: float) -> Transport:
    """Return the transport called `name`.

    Args:
        name: A built-in one, or 'package.module:Class' of the user.
        device: See `Transport.build`.
        deadline: Seconds after which a broadcast has failed.

    Raises:
        ConfigError: nothing is called so, or the transport needs a GPU and `device` is none.
    """
    transport: type[Transport] = resolve("transport", name)
    return transport.build(device, deadline)


def require_gpu(name: str, device: torch.device) -> None:
    """Check that a device is one certain GPU.

    Raises:
        ConfigError: it is none.
    """
    if device.type != "cuda" or device.index is None:
        raise ConfigError(
            f"--weights.transport is {name}, which carries weights between GPUs, but the device is {device}. "
            "Use gloo, or a device such as cuda:0."
        )


def high_priority_stream(device: torch.device) -> torch.cuda.Stream:
    """Make the stream on which a GPU's weights are carried.

    Of high priority: what the models have queued would otherwise hold a broadcast up for a whole kernel.
    """
    return torch.cuda.Stream(device, priority=-1)


def broadcast_options() -> Any:
    """Return the options of a broadcast from rank 0."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


def pieces_of(buffers: Buffers) -> Iterator[torch.Tensor]:
    """Divide buffers into what is broadcast at a time, the same on both sides.

    Yields:
        ``[n]`` uint8 of the buffers' memory, ``n`` at most `PIECE`.
    """
    for buffer in buffers:
        yield from as_bytes(buffer).split(PIECE)

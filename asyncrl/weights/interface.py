"""Publisher and Receiver, the two ends of the weight channel; Transport, the carrier of its bytes.

All receivers agree with the learner through one socket (`server`); most get the bytes by a carrier:
shared_memory, cuda_ipc or nccl. With `pull` they fetch pieces over the socket, from any host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Final, Protocol, Self

import torch
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import WeightSyncError
from asyncrl.observability.metrics import Metric
from asyncrl.registry import resolve
from asyncrl.weights import packing
from asyncrl.weights.packing import Buffers, Manifest

PULL: Final = "pull"
"""In place of a transport's name: fetch the versions over the socket."""
Named = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]
"""An actor's tensors by name, or a function that returns them."""
BufferPair = tuple[Buffers, Buffers]
"""The learner's two buffer sets, by buffer index: one is sent while the other is packed."""


class WeightSource(Protocol):
    """The learner's weights, in its own types and perhaps spread over its ranks."""

    @property
    def manifest(self) -> Manifest:
        """Names, whole shapes, and the dtypes in which actors hold the weights; fixed for a run."""
        ...

    def write(self, targets: Mapping[str, Tensor]) -> None:
        """Write every tensor, cast, into its place. A collective of the learner ranks if they are sharded.

        Args:
            targets: Rank 0: a tensor for every entry of `manifest`, all on one device. Other ranks: empty.
        """


class WholeTensors:
    """Tensors that lie whole in this process. A `WeightSource`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.manifest = packing.build_manifest(tensors)

    def write(self, targets: Mapping[str, Tensor]) -> None:
        """Copy every tensor into its place."""
        packing.fill(targets, self._tensors)


def as_weight_source(weights: WeightSource | Mapping[str, Tensor]) -> WeightSource:
    """Return tensors by name, of any shapes and dtypes, as a source; a source as it is."""
    return WholeTensors(weights) if isinstance(weights, Mapping) else weights


class ChannelClosed(WeightSyncError):
    """The learner ended the run before an actor had weights. Not a failure: the actor ends too."""


class Publisher(Protocol):
    """The learner's end. Used by one thread of learner rank 0."""

    def publish(self, weights: WeightSource | Mapping[str, Tensor], version: int) -> None:
        """Copy the weights and return at once; a version that was not sent yet is replaced.

        A collective of the learner ranks if `weights` is a sharded source.

        Raises:
            WeightSyncError: `version` is old, the tensors changed their shape, or the channel broke down.
        """

    def wait_for_first(self, version: int, deadline: float, actors: int = 1) -> None:
        """Wait until `actors` actors hold `version` or a newer one, at most `deadline` seconds.

        Raises:
            WeightSyncError: names the actors that hold it and those that do not.
        """

    def status(self) -> dict[Metric, float]:
        """Return the newest metrics `weights/*`."""
        ...

    def close(self) -> None:
        """Announce to the actors that no version will follow, and stop. May be called twice."""


class NullPublisher:
    """A `Publisher` without actors."""

    def publish(self, weights: WeightSource | Mapping[str, Tensor], version: int) -> None:
        """Send this rank's shards to rank 0, which publishes them."""
        as_weight_source(weights).write({})

    def wait_for_first(self, version: int, deadline: float, actors: int = 1) -> None:
        """Do nothing."""

    def status(self) -> dict[Metric, float]:
        """Return nothing."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class Receiver(Protocol):
    """An actor's end. Used by one thread of the actor."""

    def wait_for_first(self, deadline: float) -> int:
        """Wait for the first complete version and return it, without copying it anywhere.

        Raises:
            ChannelClosed: none will follow.
            WeightSyncError: none arrived within `deadline` seconds, or the policies differ.
        """
        ...

    def swap_into(self, tensors: Named) -> int:
        """Copy the newest complete version into the tensors, in place, if it is newer.

        Never waits for the network, nor for the device: the copies run in the order of the current stream.
        A function is called only for a newer version: naming a thousand tensors takes milliseconds.

        Returns:
            The version that `tensors` now hold; -1 before the first.

        Raises:
            WeightSyncError: the policies differ, or the learner has been gone for longer than the deadline.
        """
        ...

    def wait_newer(self, version: int, wait: float) -> None:
        """Wait until a version newer than `version` can be swapped in, at most `wait` seconds."""

    def close(self) -> None:
        """Leave the group and stop. May be called twice."""


class Link(Protocol):
    """The connection of one epoch between the learner (rank 0) and its members; every call may block.

    A link may count in `moved` the pieces that it carried so far: a slow network is no dead peer.
    """

    def send(self, buffer_index: int) -> None:
        """Send a buffer set, 0 or 1, to all members; does nothing where members copy it."""

    def receive(self, buffer_index: int, into: Buffers) -> None:
        """Receive a buffer set, 0 or 1, into ``[E]`` buffers of the learner's sizes on `Transport.device`."""

    def abort(self) -> None:
        """End the link from any thread; a blocked call is freed at once, or at its timeout."""


class Transport(Protocol):
    """Makes links. One object per process, used for all epochs of a run.

    It may have a method `allocate` that makes a buffer set of the learner, as `packing.allocate` does.
    """

    device: torch.device
    """Where the buffers have to be."""

    @classmethod
    def build(cls, device: torch.device, deadline: float) -> Self:
        """Return a transport for a process with this device; a broadcast fails after `deadline` seconds.

        Raises:
            ConfigError: the transport needs a GPU and `device` is none.
        """
        ...

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context in which work on the buffers does not queue behind the models'."""
        ...

    def connect_root(self, store: Store, size: int, buffers: BufferPair) -> Link:
        """Form a link as rank 0 of `size`, at least 2; blocks until all are there.

        The store is this epoch's alone; the buffers are the same tensors for every link of a run.
        """
        ...

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
        """Form a link as rank `rank` (1 or more) of `size`; blocks until all are there."""
        ...


def build_transport(name: str, device: torch.device, deadline: float) -> Transport:
    """Return the transport called `name`: a built-in one, or 'package.module:Class' of the user.

    Raises:
        ConfigError: the name is unknown, or the transport needs a GPU and `device` is none.
    """
    transport: type[Transport] = resolve("transport", name)
    return transport.build(device, deadline)


def open_store(address: str, seconds: float) -> Store:
    """Open the store through which the members of one epoch set up their link.

    Args:
        address: ``file://PATH`` in the run's private folder, so that nothing listens and a process that is
            halted while it locks an old epoch's file blocks no other epoch; or ``tcp://HOST:PORT/PREFIX``.
        seconds: Longest wait for a key.
    """
    from torch.distributed import FileStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    timeout = timedelta(seconds=seconds)
    kind, _, rest = address.partition("://")
    if kind == "file":
        # Of no fixed number of processes (-1): the last one to leave would delete it, but some never come.
        store = FileStore(rest, -1)
        store.set_timeout(timeout)
        return store
    place, _, prefix = rest.partition("/")
    host, _, port = place.rpartition(":")
    tcp = TCPStore(host, int(port), is_master=False, timeout=timeout, wait_for_workers=False)
    return PrefixStore(prefix, tcp)


def stale_version(version: int, newest: int) -> WeightSyncError:
    """Return the error for a version that does not come after the newest one."""
    return WeightSyncError(
        f"Version {version} was published after version {newest}, but actors only ever take a newer one. "
        "Publish once per update, with the update's number."
    )

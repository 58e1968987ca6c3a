"""Declare both ends of the weight channel, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.observability.metrics import Metric
from asyncrl.weights import packing


class WeightSource(Protocol):
    """The learner's weights, in its own types and perhaps spread over its ranks."""

    @property
    def manifest(self) -> packing.Manifest:
        """Return names, whole shapes, and the dtypes in which actors hold the weights; fixed for a run."""
        ...

    def write(self, targets: Mapping[str, Tensor]) -> None:
        """Write every tensor, cast, into its place, in the order of the current stream on CUDA.

        A collective of the learner ranks where the weights are sharded.

        Args:
            targets: Rank 0: a tensor for every entry of `manifest`, by name, of its shape and dtype, all on
                one device. Other ranks: empty.
        """
        ...


class WholeTensors:
    """Tensors that lie whole in this process and are sent as they are."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.manifest = packing.build_manifest(tensors)
        """See `WeightSource.manifest`."""

    def write(self, targets: Mapping[str, Tensor]) -> None:
        """Copy. See `WeightSource.write`."""
        packing.fill(targets, self._tensors)


def as_weight_source(weights: WeightSource | Mapping[str, Tensor]) -> WeightSource:
    """Return tensors by name, of any shapes and dtypes, as a source; a source as it is."""
    return WholeTensors(weights) if isinstance(weights, Mapping) else weights


Named = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]
"""An actor's tensors by name, or what returns them."""


class ChannelClosed(WeightSyncError):
    """The learner ended the run before an actor had weights. Not a failure: the actor ends too."""


class Publisher(Protocol):
    """The learner's end. Used by one thread of learner rank 0."""

    def publish(self, weights: WeightSource | Mapping[str, Tensor], version: int) -> None:
        """Copy the weights and return at once; a version that was not sent yet is replaced.

        Where actors copy out of the learner's memory themselves, it also sums them up before it returns.

        A collective of the learner ranks where the weights are a `WeightSource` that is sharded.

        Args:
            weights: By name, any shapes and dtypes, the same at every call; or a source of them.
            version: Number of updates made.

        Raises:
            WeightSyncError: `version` is not newer than the last one, the tensors changed their shape, or the
                channel itself broke down.
        """
        ...

    def wait_for_first(self, version: int, deadline: float, actors: int = 1) -> None:
        """Wait until `actors` actors hold `version` or a newer one.

        Args:
            version: The version that was published first.
            deadline: Longest wait, in seconds.
            actors: How many actors must take it.

        Raises:
            WeightSyncError: names who took it and who did not.
        """
        ...

    def status(self) -> dict[Metric, float]:
        """Return the newest metrics `weights/*`."""
        ...

    def close(self) -> None:
        """Tell the actors that no version will follow, and stop. May be called twice."""
        ...


class Outlet(Protocol):
    """Sends, by threads of its own, the versions that a publisher packs."""

    def versions_held(self) -> dict[str, int]:
        """Name of everybody who is there -> version held; -1 before the first.

        Raises:
            WeightSyncError: Its thread broke down.
        """
        ...

    def status(self) -> dict[Metric, float]:
        """Return the newest metrics."""
        ...

    def pop_events(self) -> list[str]:
        """Return and forget one line for each who came or went."""
        ...

    def close(self) -> None:
        """Tell them that no version will follow, and stop. May be called twice."""
        ...


class NullPublisher:
    """A `Publisher` without actors."""

    def publish(self, weights: WeightSource | Mapping[str, Tensor], version: int) -> None:
        """Hand this rank's part of the weights to rank 0, which sends them. See `Publisher.publish`."""
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
        """Copy the newest complete version into the tensors, in place, when it is newer.

        Never waits for the network, nor for the device: the copies run in the order of the current stream.
        (Out of memory that is shared with the learner it may copy twice, see `mapped_receiver`.)

        Args:
            tensors: By name, of the shapes and dtypes that the learner publishes. Given as a function they
                are asked for only then: naming a thousand tensors takes milliseconds.

        Returns:
            The version that `tensors` now hold; -1 before the first.

        Raises:
            WeightSyncError: the policies differ, the learner has been gone for longer than the deadline, or
                no version can be copied whole: then the tensors are not to be used.
        """
        ...

    def wait_newer(self, version: int, wait: float) -> None:
        """Wait until a version newer than `version` can be swapped in, at most `wait` seconds."""
        ...

    def close(self) -> None:
        """Leave the group and stop. May be called twice."""
        ...


def stale_version(version: int, newest: int) -> WeightSyncError:
    """Return the error for a version that does not come after the newest one."""
    return WeightSyncError(
        f"Version {version} was published after version {newest}, but actors only ever take a newer one. "
        "Publish once per update, with the update's number."
    )

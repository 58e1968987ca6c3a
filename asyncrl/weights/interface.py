"""Publisher and Receiver, the two ends of the weight channel; Transport, the carrier of its bytes.

All receivers agree with the learner through one socket (`weight_server`). The bytes come by shared memory,
CUDA IPC or NCCL; with `pull` in pieces over the socket, from any host.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Final, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import WeightSyncError, first_line
from asyncrl.observability.metrics import Metric
from asyncrl.observability.signals import BlockingThread
from asyncrl.registry import resolve
from asyncrl.weights.packing import BufferPair, Buffers, WeightSource

ABORT_SECONDS = 10.0  # Longest wait for an aborted link; NCCL needs about half a second
POLL_SECONDS = 0.02  # Seconds between two checks of a bounded action
PULL: Final = "pull"  # In place of a transport's name: fetch the versions over the socket
Named = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]
"""An actor's tensors by name, or a function that returns them."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


class ChannelClosed(WeightSyncError):
    """The learner ended the run before an actor had weights: the actor ends too, without a failure."""


class Publisher(Protocol):
    """The learner's end. Used by one thread of learner rank 0."""

    def publish(self, weights: WeightSource, version: int) -> None:
        """Copy the weights and return at once; collective if sharded. An unsent version is replaced.

        Raises WeightSyncError if `version` is old, a tensor changed its shape, or the channel broke down.
        """
        weights.write({})

    def wait_for_first(
        self, version: int, timeout: float, stop_requested: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until an actor holds `version` or a newer one, or `stop_requested`, which is called often.

        Raises WeightSyncError if none does within `timeout` seconds.
        """

    def status(self) -> dict[Metric, float]:
        """Return the newest metrics `weights/*`."""
        return {}

    def close(self) -> None:
        """Announce that no version will follow, and stop. May be called twice."""


class NullPublisher(Publisher):
    """The end of a rank that only sends its shards to rank 0."""


class Receiver(ABC):
    """An actor's end. Used by one thread of the actor."""

    @abstractmethod
    def wait_for_first(self, deadline: float) -> int:
        """Wait for the first complete version and return its number.

        Raises ChannelClosed if none will follow, WeightSyncError if none came within `deadline` seconds.
        """

    @abstractmethod
    def swap_into(self, tensors: Named) -> int:
        """Copy the newest complete version into the tensors in the current stream's order; return its number.

        -1 before the first. `tensors` may be a slow function: it is called for a newer version only.
        """

    def wait_newer(self, version: int, wait: float) -> None:  # noqa: B027  Nothing comes within a process.
        """Wait until a version newer than `version` can be swapped in, at most `wait` seconds."""

    def close(self) -> None:  # noqa: B027
        """Leave and stop. May be called twice."""


class Link:
    """Connection of one epoch between the learner (rank 0) and its members; every call may block.

    Its optional `moved` counts the pieces carried so far; while it rises, the peer is not dead. With an
    optional `may_block` of False, it is used on the calling thread, without a deadline.
    """

    def send(self, buffer_index: int) -> None:
        """Send a buffer set, 0 or 1, to all members; do nothing if they copy the learner's buffers."""

    def receive(self, buffer_index: int, into: Buffers) -> None:
        """Receive a buffer set, 0 or 1, into ``[E]`` buffers of the learner's sizes."""

    def abort(self) -> None:
        """End the link from any thread; a blocked call is freed at once, or at its timeout."""


class Transport(Protocol):
    """Makes all links; an optional `allocate` makes the learner's buffers, as `packing.allocate`."""

    device: torch.device  # Of the buffers

    @classmethod
    def build(cls, device: torch.device, deadline: float) -> Self:
        """Build the transport of a process; a broadcast fails after `deadline` seconds."""
        ...

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context in which work on the buffers does not queue behind the models'."""
        ...

    def connect_root(self, store: Store, size: int, buffers: BufferPair) -> Link:
        """Form a link as rank 0 of `size`, at least 2, through an epoch's store; `buffers` stay the same."""
        ...

    def connect_member(self, store: Store, rank: int, size: int) -> Link:
        """Form a link as another rank; blocks until all joined."""
        ...


def build_transport(name: str, device: torch.device, deadline: float) -> Transport:
    """Build a built-in transport, or the user's 'package.module:Class'."""
    transport: type[Transport] = resolve("transport", name)
    return transport.build(device, deadline)


def open_store(address: str, seconds: float) -> Store:
    """Open an epoch's store, ``file://PATH`` or ``tcp://HOST:PORT/PREFIX``; keys time out after `seconds`."""
    from torch.distributed import FileStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    kind, _, rest = address.partition("://")
    if kind == "file":
        # Of no fixed number of processes (-1): the last one to leave would delete it, but some never come.
        store = FileStore(rest, -1)
        store.set_timeout(timedelta(seconds=seconds))
        return store
    place, _, prefix = rest.partition("/")
    host, _, port = place.rpartition(":")
    how = {"is_master": False, "timeout": timedelta(seconds=seconds), "wait_for_workers": False}
    return PrefixStore(prefix, TCPStore(host, int(port), **how))


# --- links that may block for ever ---


def run_bounded(
    action: Callable[[], T],
    *,
    seconds: float,
    what: str,
    given_up: Callable[[], str],
    progress: Callable[[], int] = lambda: 0,
    wait: Callable[[float], object] | None = None,
    wake: Callable[[], None] = lambda: None,
) -> T:
    """Run `action` on a thread of its own, which is abandoned `seconds` after the last `progress`."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(action())
        except Exception as error:
            result.set_exception(error)
        wake()

    BlockingThread(run, f"weights: {what}").start()
    until, reached = time.monotonic() + seconds, progress()
    while not result.done():
        if reason := given_up():
            raise WeightSyncError(f"{what} was given up: {reason}.")
        if time.monotonic() > until:
            raise WeightSyncError(f"{what} did not end within {seconds:.2g} s: a member does not take part.")
        wait(POLL_SECONDS) if wait else futures.wait([result], POLL_SECONDS)
        if (now := progress()) != reached:
            until, reached = time.monotonic() + seconds, now
    if (problem := result.exception()) is not None:
        raise WeightSyncError(f"{what} failed: {first_line(problem)}") from problem
    return result.result()


class TransportSession:
    """The link of the current epoch. Used by one thread."""

    def __init__(
        self,
        seconds: float,
        given_up: Callable[[], str],
        wait: Callable[[float], object] | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = partial(run_bounded, seconds=seconds, given_up=given_up, wait=wait, wake=wake)
        self._link: Link | None = None

    @property
    def formed(self) -> bool:
        """True if there is a link."""
        return self._link is not None

    def form(self, what: str, make: Callable[[], Link]) -> None:
        """Make the link; all members do at the same time."""
        self._link = self._run(make, what=what)

    def use(self, what: str, action: Callable[[Link], None]) -> None:
        """Broadcast over the link."""
        link = self._link
        assert link is not None
        if not getattr(link, "may_block", True):
            action(link)
            return
        self._run(lambda: action(link), what=what, progress=lambda: getattr(link, "moved", 0))

    def drop(self) -> None:
        """Abort and free the link, without blocking for long or failing."""
        if self._link is None:
            return
        # Freed where it is aborted: its destructor joins threads of its own, and may wait as well.
        links, self._link = [self._link], None
        what = "ending a weight link"
        try:
            run_bounded(lambda: links.pop().abort(), seconds=ABORT_SECONDS, what=what, given_up=str)
        except WeightSyncError as error:
            _log.warning("%s Its memory is not freed.", error)

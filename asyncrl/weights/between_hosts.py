"""Broadcast the learner's versions to one process of each other host, which hands them on there.

    publisher ──packs──► its buffers ──copy──► those of a second publisher ──gloo or NCCL──► other hosts

the thread   consumes   versions that the publisher sends
             produces   versions of the second publisher, one copy for all hosts
             waits for  a newer version, the device's copy      ended by: the learner, close

The groups of one host and of the hosts are two, so that a host that is lost or cut off holds up the
broadcasts between hosts alone, and these at most for --weights.timeout without progress.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal

import torch

from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import Metric
from asyncrl.weights import packing
from asyncrl.weights.broadcast_receiver import BroadcastReceiver
from asyncrl.weights.double_buffer import DoubleBuffer
from asyncrl.weights.membership import learner_of
from asyncrl.weights.publisher import BroadcastPublisher
from asyncrl.weights.store_table import StoreTable
from asyncrl.weights.swap_buffer import HandsOn
from asyncrl.weights.transports.gloo import GlooTransport
from asyncrl.weights.transports.interface import Transport
from asyncrl.weights.transports.nccl import NcclTransport

LOOK_EVERY: Final = 0.02
"""Seconds between two looks for a newer version."""
Backend = Literal["gloo", "nccl"]
_log = logging.getLogger(__name__)


def build_backend(
    backend: Backend, address: str, device: torch.device | str, deadline: float
) -> GlooTransport | NcclTransport:
    """Return the transport between hosts.

    Args:
        backend: gloo through host memory, or nccl between one GPU of each host.
        address: IPv4 address of this host at which gloo listens; NCCL chooses by NCCL_SOCKET_IFNAME.
        device: Of this process, with its index when it is a GPU.
        deadline: Seconds after which a broadcast without progress has failed.

    Raises:
        ConfigError: NCCL was asked for and `device` is no GPU.
    """
    if backend == "gloo":
        return GlooTransport(deadline, address)
    device = torch.device(device)
    if device.type != "cuda" or device.index is None:
        raise ConfigError(
            "--weights.between-hosts is nccl, which carries weights between GPUs, but the device is "
            f"{device}. Use --weights.between-hosts gloo or tcp, or a device such as cuda:0."
        )
    return NcclTransport.build(device, deadline)


class HostBroadcasts:
    """The learner's end. See `interface.Outlet`; build it with `host_broadcasts`."""

    def __init__(self, buffers: DoubleBuffer, publisher: BroadcastPublisher) -> None:
        """Begin to send.

        Args:
            buffers: Of the publisher whose versions are sent.
            publisher: Of the group of hosts; this closes it.
        """
        self._buffers, self._publisher = buffers, publisher
        self._stream = torch.cuda.Stream(buffers.device) if buffers.device.type == "cuda" else None
        self._version = -1
        self._hosts: frozenset[str] = frozenset()
        self._news: deque[str] = deque(maxlen=1000)
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights to other hosts", daemon=True)
        self._thread.start()

    def versions_held(self) -> dict[str, int]:
        """Name of every other host that takes part -> version it holds. See `Outlet.versions_held`."""
        if self._failure is not None:
            raise WeightSyncError(
                f"The broadcasts to other hosts broke down ({self._failure}): their actors get no new "
                "versions. Restart the run with --resume, or use --weights.between-hosts tcp."
            ) from self._failure
        return self._publisher.members

    def status(self) -> dict[Metric, float]:
        """Return the newest metrics of broadcasts between hosts."""
        sent = self._publisher.sent
        return {m.WEIGHTS_HOSTS: float(sent.members), m.WEIGHTS_HOSTS_SECONDS: sent.seconds}

    def pop_events(self) -> list[str]:
        """Return and forget one line for each host that came or was left behind."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self) -> None:
        """Tell the other hosts that no version will follow, and stop. May be called twice."""
        self._closing.set()
        self._thread.join()
        self._publisher.close()

    def _run(self) -> None:
        try:
            while not self._closing.wait(LOOK_EVERY):
                hosts = frozenset(self._publisher.members)
                # The first one even if nobody is there: hosts compare it with nothing, but wait for it.
                if self._buffers.sending > self._version and (hosts or self._version < 0):
                    self._copy()
                self._tell(hosts)
        except Exception as error:  # the thread's boundary: the learner's next call raises it
            self._failure = error

    def _copy(self) -> None:
        """Pack the version that is sent now into the other publisher's buffers."""
        with self._buffers.holding() as snapshot, self._aside():
            if snapshot.packed is not None:
                snapshot.packed.wait()
            self._publisher.publish(self._buffers.views(snapshot), snapshot.version)
            if self._stream is not None:
                self._stream.synchronize()  # Only then may the learner pack these buffers anew.
        self._version = snapshot.version

    def _aside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _tell(self, hosts: frozenset[str]) -> None:
        count = f"{len(hosts)} other host{'' if len(hosts) == 1 else 's'} now"
        self._news.extend(f"{name} joined ({count})" for name in sorted(hosts - self._hosts))
        gone = "was left behind: it did not answer"
        self._news.extend(f"{name} {gone} ({count})" for name in sorted(self._hosts - hosts))
        self._hosts = hosts


def host_broadcasts(
    table: StoreTable, transport: Transport, deadline: float, silence: float
) -> Callable[[DoubleBuffer], HostBroadcasts]:
    """Return what makes the learner's end, once its buffers are there.

    Args:
        table: See `store_table.serve_table`.
        transport: See `build_backend`.
        deadline: Seconds after which a host that does not take part in a broadcast is left behind.
        silence: Seconds after which one that is not heard of is.
    """

    def make(buffers: DoubleBuffer) -> HostBroadcasts:
        publisher = BroadcastPublisher(transport, table, deadline, silence=silence)
        return HostBroadcasts(buffers, publisher)

    return make


class HostReceiver(HandsOn, BroadcastReceiver):
    """Another host's end: takes whatever tensors the learner has. Build it with `build_host_receiver`."""

    _table: StoreTable

    def require_alive(self) -> None:
        """Check that versions may still come. See `HandsOn.require_alive`.

        Raises:
            WeightSyncError: The learner did not answer for the deadline.
        """
        super().require_alive()
        if self._table.silent > self._deadline:
            raise WeightSyncError(
                f"{self._name} had no answer from the learner at {self._endpoint} for {self._deadline:g} s "
                f"(--weights.timeout) and still has version {self._version}. The learner ended, or the "
                "network is down: see its log."
            )

    def _meet_manifest(self, theirs: packing.Manifest) -> None:
        self._adopt_manifest(theirs)


def build_host_receiver(table: StoreTable, transport: Transport, name: str, deadline: float) -> HostReceiver:
    """Take part in the broadcasts between hosts.

    Args:
        table: At the learner's endpoint.
        transport: See `build_backend`; the learner's.
        name: Of this host.
        deadline: Seconds after which a broadcast has failed, and a learner that does not answer is gone.

    Raises:
        WeightSyncError: No learner answers there.
    """
    return HostReceiver(transport, table, learner_of(table), name, packing.UNKNOWN, deadline)

"""The weights on a host other than the learner's: once over the network, handed on inside the host.

    learner ──pull server or broadcast──► this (the host's lowest rank with an actor) ──gloo──► its actors

the thread   consumes   versions of the learner's pull server or of the broadcasts between hosts
             produces   versions for the host's actors, by a publisher like the learner's
             waits for  a newer version, ended by: the learner, close; after --weights.timeout without it the
                        channel is closed, as at the end of the run

Inside the host through its memory always: buffers on a GPU would take room from the actor there. Where
weights are fetched, an actor that is alone on its host does that by itself.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncrl.config.run import TrainConfig
from asyncrl.errors import AsyncRLError, RunError
from asyncrl.launch import rendezvous
from asyncrl.launch.hosts import Hosts
from asyncrl.launch.placement import Placement
from asyncrl.launch.rendezvous import RunInfo
from asyncrl.messaging.sockets import private_folder
from asyncrl.observability import waits
from asyncrl.storage import run_identity
from asyncrl.storage.atomic import write_text
from asyncrl.storage.bounded_json import load_json
from asyncrl.weights.publisher import build_publisher

if TYPE_CHECKING:
    import torch

    from asyncrl.storage.run_identity import RunIdentity
    from asyncrl.weights.between_hosts import HostBroadcasts, HostReceiver
    from asyncrl.weights.double_buffer import DoubleBuffer
    from asyncrl.weights.pull_client import RelayedReceiver

TRANSPORT: Final = "gloo"
"""See `weights.transports`."""
NOTE: Final = "weights"
"""File in the host's folder of the run that names the folder of the channel, and the start of the run."""
LOOK_EVERY: Final = 0.5
"""Seconds of a wait for a newer version, and between two looks for the note."""
_log = logging.getLogger(__name__)


def actors_here(placement: Placement, hosts: Hosts, rank: int) -> list[int]:
    """Return the ranks with an actor on the host of `rank`, ascending."""
    return [one for one in hosts.ranks(hosts.of(rank)) if placement.imagines(one)]


class HostWeights:
    """Hands the learner's weights on to the actors of this host. Made and closed by one thread."""

    def __init__(self, config: TrainConfig, info: RunInfo, hosts: Hosts, rank: int) -> None:
        """Begin to receive, and tell the other ranks of the host where the channel is."""
        self._folder = private_folder()
        self._publisher = build_publisher(TRANSPORT, self._folder / NOTE, deadline=config.weights.timeout)
        receive = _broadcast if info.hosts_endpoint else _fetched
        self._receiver = receive(config, info, hosts, rank)
        self._closing = threading.Event()
        self._startup_timeout = config.startup_timeout
        self._thread = threading.Thread(target=self._run, name="host weights", daemon=True)
        self._thread.start()
        content = json.dumps({"mark": info.mark, "folder": self.endpoint})
        write_text(rendezvous.status_folder(Path(info.run_dir)) / NOTE, content)

    @property
    def endpoint(self) -> str:
        """Return where the host's actors find it."""
        return self._publisher.endpoint

    def close(self) -> None:
        """Tell the actors that no version will follow, and stop. May be called twice."""
        self._closing.set()
        self._thread.join()
        self._receiver.close()
        self._publisher.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        version = -1
        try:
            while not (self._closing.is_set() or self._receiver.ended):
                self._receiver.wait_newer(version, LOOK_EVERY)
                self._receiver.require_alive()
                version = self._receiver.hand_on(version, self._publisher.publish)
        except AsyncRLError as error:
            _log.warning("The actors of this host get no new weights: %s", error)
        except Exception:  # the thread's boundary: its actors end as those of a learner that is gone
            _log.exception("The actors of this host get no new weights")
        self._publisher.close()


def _fetched(config: TrainConfig, info: RunInfo, hosts: Hosts, rank: int) -> RelayedReceiver:
    """Fetch versions of the pull server, encrypted."""
    from asyncrl.launch import endpoints
    from asyncrl.weights.pull_client import build_relayed_receiver

    identity = replace(run_identity.read(Path(info.run_dir)), attempt=info.attempt)
    keys = endpoints.client_keys(info.keys, f"actor-{rank}")
    name = hosts.name_of(rank)
    return build_relayed_receiver(info.pull_endpoint, name, keys, config.weights.timeout, identity)


def _broadcast(config: TrainConfig, info: RunInfo, hosts: Hosts, rank: int) -> HostReceiver:
    """Take part in the broadcasts between hosts, which are not encrypted."""
    from asyncrl.launch.placement import pick_device
    from asyncrl.weights.between_hosts import build_backend, build_host_receiver
    from asyncrl.weights.store_table import StoreTable

    deadline = config.weights.timeout
    table = StoreTable(info.hosts_endpoint, prefix_of(info.mark, info.attempt), deadline)
    assert config.weights.between_hosts != "tcp"
    device = pick_device(config.device, rank - hosts.ranks(hosts.of(rank)).start)
    address = hosts.addresses[hosts.of(rank)]
    backend = build_backend(config.weights.between_hosts, address, device, deadline)
    return build_host_receiver(table, backend, hosts.name_of(rank), deadline)


def to_other_hosts(
    config: TrainConfig, hosts: Hosts, identity: RunIdentity, device: torch.device
) -> tuple[Callable[[DoubleBuffer], HostBroadcasts], str]:
    """Open on rank 0 what broadcasts weights to the other hosts.

    Returns:
        What makes its end, given where versions are packed; and the address where hosts agree on broadcasts.
    """
    from asyncrl.weights.between_hosts import build_backend, host_broadcasts
    from asyncrl.weights.store_table import serve_table

    assert config.weights.between_hosts != "tcp"
    deadline, address = config.weights.timeout, hosts.addresses[0]
    table = serve_table(address, prefix_of(identity.mark, identity.attempt), deadline)
    backend = build_backend(config.weights.between_hosts, address, device, deadline)
    return host_broadcasts(table, backend, deadline, config.replay.heartbeat_timeout), table.endpoint


def prefix_of(mark: str, attempt: int) -> str:
    """Name a start of a run in the table of the hosts.

    >>> prefix_of("0123abcd", 2)
    '0123abcd-2'
    """
    return f"{mark}-{attempt}"


def wait_for_endpoint(info: RunInfo, deadline: float, stop_requested: Callable[[], bool]) -> str:
    """Wait until the lowest rank of this host with an actor has opened the channel; returns where.

    Args:
        deadline: Longest wait in seconds.
    """
    note, until = rendezvous.status_folder(Path(info.run_dir)) / NOTE, time.monotonic() + deadline
    with waits.waiting(waits.HOST_WEIGHTS, deadline):
        while not stop_requested():
            try:
                row: dict[str, object] = load_json(note, dict)
                if row.get("mark") == info.mark:
                    return str(row["folder"])
            except (OSError, ValueError, KeyError) as error:
                _log.debug("there is no note of this start yet: %s", error)
            if time.monotonic() > until:
                raise RunError(
                    f"Rank {rendezvous.rank()} waited {deadline:g} s (--startup-timeout) for the first "
                    f"actor's rank of its host to say in {note} where the weights are, in vain. See the "
                    "output of torchrun on this host."
                )
            time.sleep(LOOK_EVERY)
    return ""

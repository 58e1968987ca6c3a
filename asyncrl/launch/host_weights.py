"""Chooses how weights reach the actors of each host, and relays them on hosts other than rank 0's.

On rank 0's host a carrier takes them to every actor. To another host they travel once, by NCCL with
--weights.between-hosts nccl and fetched over the socket otherwise: the lowest rank there with an actor is
its host's relay, unless that actor is alone and can fetch them itself.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from asyncrl.config.run import TrainConfig
from asyncrl.errors import RunError
from asyncrl.launch import endpoints, rendezvous
from asyncrl.launch.hosts import Hosts
from asyncrl.launch.placement import Placement, pick_device
from asyncrl.launch.rendezvous import RunInfo
from asyncrl.messaging.sockets import private_folder
from asyncrl.observability import waits
from asyncrl.storage import run_identity
from asyncrl.storage.atomic import write_text
from asyncrl.storage.untrusted import load_json

RELAYED: Final = "shared_memory"
"""The carrier from a relay to the actors of its host."""
NOTE: Final = "weights"
"""File in the host's folder of the run that names the relay's endpoint, and the start of the run."""
LOOK_EVERY: Final = 0.5
"""Seconds between two looks for the note."""
_log = logging.getLogger(__name__)


def transport_of(config: TrainConfig, placement: Placement, here: range) -> str:
    """Choose the carrier of the weights on rank 0's host; every rank comes to the same answer.

    Args:
        config: Of the run.
        placement: Of the run.
        here: Ranks of that host.
    """
    if config.weights.transport != "auto":
        return config.weights.transport
    learner = pick_device(config.device, placement.learners[0])
    actors = [pick_device(config.device, rank) for rank in placement.actors if rank in here]
    # NCCL takes one process of a group per GPU. Other learner ranks may share it: they are in another group.
    remote = [actor for actor in actors if actor != learner]
    if learner.type == "cpu" or len(set(remote)) < len(remote):
        return "shared_memory"  # Also for two actors on a GPU that is not the learner's.
    return "nccl" if len(remote) == len(actors) else "cuda_ipc"


def transport_between(config: TrainConfig, hosts: Hosts, transport: str) -> str:
    """Return the carrier by which relays on other hosts take part in the weight group; empty: they fetch.

    Args:
        config: Of the run.
        hosts: Of the job.
        transport: On rank 0's host.
    """
    reaches = transport != "shared_memory" and config.weights.between_hosts == "nccl"
    return transport if reaches and hosts.broadcasts else ""


def actors_here(placement: Placement, hosts: Hosts, rank: int) -> list[int]:
    """Return the ranks with an actor on the host of `rank`, ascending."""
    return [one for one in hosts.ranks(hosts.of(rank)) if placement.imagines(one)]


class HostWeights:
    """The relay of this host. Made and closed by one thread."""

    def __init__(self, config: TrainConfig, info: RunInfo, hosts: Hosts, rank: int) -> None:
        """Begin to receive, and write the note for the other ranks of the host."""
        from asyncrl.weights.interface import PULL
        from asyncrl.weights.publisher import build_publisher
        from asyncrl.weights.receiver import build_receiver
        from asyncrl.weights.relay import Relay
        from asyncrl.weights.server import ServerSettings

        deadline, identity = config.weights.timeout, identity_of(info)
        self._folder = private_folder()
        # Others can write into torchrun's store: it may not name code.
        trusted = info.hosts_transport in ("nccl", "cuda_ipc", config.weights.transport)
        receiver = build_receiver(
            info.hosts_transport if trusted else PULL,
            info.pull_endpoint,
            hosts.name_of(rank),
            None,
            pick_device(config.device, rank - hosts.ranks(hosts.of(rank)).start),
            deadline,
            endpoints.client_keys(info.keys, f"actor-{rank}"),
            identity,
        )
        publisher = build_publisher(
            RELAYED, self._folder / NOTE, deadline=deadline, settings=ServerSettings(identity=identity)
        )
        self.endpoint = publisher.endpoint
        """Endpoint for the host's actors."""
        self._relay = Relay(receiver, publisher)
        content = json.dumps({"mark": info.mark, "endpoint": self.endpoint})
        write_text(rendezvous.status_folder(Path(info.run_dir)) / NOTE, content)

    def close(self) -> None:
        """Announce to the actors that no version will follow, and stop. May be called twice."""
        self._relay.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def identity_of(info: RunInfo) -> run_identity.RunIdentity:
    """Read the identity of a run, of its start in `info`."""
    return replace(run_identity.read(Path(info.run_dir)), attempt=info.attempt)


def wait_for_endpoint(info: RunInfo, deadline: float, stop_requested: Callable[[], bool]) -> str:
    """Wait for this host's relay to open; returns its endpoint.

    Args:
        deadline: Longest wait in seconds.
    """
    note, until = rendezvous.status_folder(Path(info.run_dir)) / NOTE, time.monotonic() + deadline
    with waits.waiting(waits.HOST_WEIGHTS, deadline):
        while not stop_requested():
            try:
                row: dict[str, object] = load_json(note, dict)
                if row.get("mark") == info.mark:
                    return str(row["endpoint"])
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

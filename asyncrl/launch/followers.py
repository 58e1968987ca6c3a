"""Does the part of every rank but 0: it learns with the others, keeps an actor alive, or both.

    rank k ──spawns──► actor-k, unless it only learns

With one host the actors use the run's private sockets. On another host they reach replay and weights over
the network, with keys that lie in the run's folder, which all hosts see. What rank 0 cannot see there, this
does: it watches over the processes of its host, and notices when rank 0's host is gone.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncrl.config.loading import load_file, to_json
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.launch import balance, rendezvous
from asyncrl.launch.children import ChildProcesses
from asyncrl.launch.hosts import Hosts
from asyncrl.launch.placement import Placement, checked_placement
from asyncrl.launch.rendezvous import RunInfo
from asyncrl.launch.supervisor import Supervisor
from asyncrl.observability import process_status, waits
from asyncrl.observability.process_log import logged_to
from asyncrl.observability.signals import BlockingThread, StopFlag
from asyncrl.observability.watchdog import Watchdog
from asyncrl.storage import run_identity, run_lock

if TYPE_CHECKING:
    from asyncrl.launch.host_weights import HostWeights

SHUTDOWN_TIMEOUT_ACTOR: Final = 8.0
"""Seconds an actor rank gives its actor to end in order, with the run or when it was asked to stop."""
LOOK_FROM_AFAR: Final = 1.0
"""Seconds between two looks, of a rank on another host, whether the run is over."""
FIRST_HOST_LOST: Final = 60.0
"""Seconds without an answer of the job's store after which the first host counts as gone."""
ANSWER_DEADLINE: Final = 2.0
"""Seconds that the job's store has for its last answer."""
FOLDER_DEADLINE: Final = 60.0
"""Seconds that a network file system has to show the run's folder."""
_POLL: Final = 0.5


def follow(config: TrainConfig, hosts: Hosts, stop: StopFlag) -> int:
    """Do the part of a rank other than 0 until rank 0 ends the run."""
    rank = rendezvous.rank()
    told = rendezvous.receive(config.startup_timeout, stop_requested=lambda: stop.set)
    if told is None:
        return 0
    info = told
    run_dir = Path(info.run_dir)
    _wait_for_folder(info)
    config = load_file(run_dir / "config.json")
    config = balance.with_placement(config, info.placement or config.placement)
    placement = checked_placement(config, hosts.size)
    lock = run_lock.join(run_dir)
    role = f"learner-{rank}" if placement.learns(rank) else f"rank-{rank}"
    process_status.publish_as(rendezvous.status_folder(run_dir), role)
    children = ChildProcesses(
        stop,
        report_failure=lambda why: rendezvous.report_failure(told, why=why),
    )
    first_host, weights = FirstHost(info), None
    try:
        with _watched(run_dir):
            info, weights = _with_weights_of_host(config, info, placement, hosts, stop)
            if placement.imagines(rank):
                children.spawn(partial(spawn_actor, config, info, rank))
            if placement.learns(rank):
                from asyncrl.launch import learner_ranks

                with logged_to(run_dir / "logs" / f"learner-{rank}.log"):
                    learner_ranks.run_follower_rank(info, placement, hosts, children)
            else:
                children.run_until_done(over=first_host.run_is_over)
            children.end(SHUTDOWN_TIMEOUT_ACTOR if first_host.learner_lives() else 0.0)
    finally:
        children.end(0.0)
        if weights is not None:
            weights.close()
        first_host.close()
        lock.release()
    if children.failure is not None and not rendezvous.failure_was_taken(info):
        raise children.failure
    return int(children.failure is not None)


def _with_weights_of_host(
    config: TrainConfig, info: RunInfo, placement: Placement, hosts: Hosts, stop: StopFlag
) -> tuple[RunInfo, HostWeights | None]:
    """Say where the actors of this host get their weights: from one of its ranks, where there are several."""
    rank = rendezvous.rank()
    if hosts.of(rank) == 0:
        return info, None
    from asyncrl.launch import host_weights

    actors = host_weights.actors_here(placement, hosts, rank)
    alone = len(actors) == 1 and not info.hosts_transport
    if rank not in actors or alone:
        return replace(info, weights_endpoint=""), None
    if rank != actors[0]:
        endpoint = host_weights.wait_for_endpoint(info, config.startup_timeout, lambda: stop.set)
        return replace(info, weights_endpoint=endpoint), None
    weights = host_weights.HostWeights(config, info, hosts, rank)
    return replace(info, weights_endpoint=weights.endpoint), weights


def spawn_actor(config: TrainConfig, info: RunInfo, rank: int) -> Supervisor:
    """Start the actor of a rank."""
    name = f"actor-{rank}"
    return spawn_role(name, "actor_main", config, info, name)


def spawn_role(name: str, function: str, config: TrainConfig, info: RunInfo, *more: str) -> Supervisor:
    """Start a child process of `roles`, called `name`, with its log in the run's folder."""
    return Supervisor(
        name,
        f"asyncrl.launch.roles:{function}",
        (to_json(config), json.dumps(dataclasses.asdict(info)), *more),
        Path(info.run_dir) / "logs" / f"{name}.log",
        config.actor.max_respawns,
    )


@contextmanager
def _watched(run_dir: Path) -> Iterator[None]:
    """Let the first rank of a host other than rank 0's end what hangs there."""
    here = rendezvous.ranks_here()
    if 0 in here or rendezvous.rank() != here.start:
        yield
        return
    watchdog = Watchdog(rendezvous.status_folder(run_dir), print)
    try:
        yield
    finally:
        watchdog.close()


def _wait_for_folder(info: RunInfo) -> None:
    """Wait until this host sees the run's folder as rank 0 left it."""
    run_dir, until = Path(info.run_dir), time.monotonic() + FOLDER_DEADLINE
    with waits.waiting(waits.FOLDER, FOLDER_DEADLINE):
        while not _is_here(run_dir, info.mark):
            if time.monotonic() > until:
                raise ConfigError(
                    f"Rank {rendezvous.rank()} on {socket.gethostname()} does not see {run_dir}, the folder "
                    "of the run, as rank 0 left it, and through it hosts get keys and checkpoints. "
                    "Set --run-dir to a folder that all hosts have under one path."
                )
            time.sleep(_POLL)


def _is_here(run_dir: Path, mark: str) -> bool:
    try:
        return (run_dir / "config.json").is_file() and run_identity.read(run_dir).mark == mark
    except (ConfigError, OSError):  # It is not all there yet, or another folder has this name.
        return False


class FirstHost:
    """What a rank knows of rank 0: on its host from the operating system, elsewhere from the job's store."""

    def __init__(self, info: RunInfo) -> None:
        """Begin to watch, on a thread where it is another host."""
        self._info, self._near = info, 0 in rendezvous.ranks_here()
        self._answers, self._gone = 0, False
        self._heard, self._silent, self._looked_at = 0, 0.0, time.monotonic()
        self._over, self._asked_at = False, float("-inf")
        self._closing = threading.Event()
        self._thread = BlockingThread(self._ask, "first host")
        if not self._near:
            self._thread.start()

    def run_is_over(self) -> bool:
        """Whether rank 0 has ended the run, or is gone. Asked often."""
        if self._near:
            return not (Path(self._info.sockets).exists() and self.learner_lives())
        now = time.monotonic()
        if not self._over and now - self._asked_at > LOOK_FROM_AFAR:
            self._asked_at = now
            self._over = run_lock.owner(Path(self._info.run_dir)) is None or not self.learner_lives()
        return self._over

    def learner_lives(self) -> bool:
        """Whether rank 0 is there to end the run in order. It is not when something killed it."""
        if self._near:
            processes = process_status.read(Path(self._info.run_dir))
            return any(process.alive for process in processes if process.role == "learner-0")
        now = time.monotonic()
        # Time in which this process itself did not run is nobody's silence.
        self._silent += min(now - self._looked_at, 2 * LOOK_FROM_AFAR)
        self._looked_at = now
        if self._answers != self._heard:
            self._heard, self._silent = self._answers, 0.0
        return not self._gone and self._silent < FIRST_HOST_LOST

    def close(self) -> None:
        """Stop to watch: a thread that comes back from the store while Python ends aborts the process."""
        self._closing.set()
        if not self._near:
            self._thread.join(ANSWER_DEADLINE)

    def _ask(self) -> None:
        """Ask the job's store, which ends with torchrun on the first host; a cut network is heard of late."""
        there: Callable[[], bool] = rendezvous.job_watch()
        while there():
            self._answers += 1
            if self._closing.wait(LOOK_FROM_AFAR):
                return
        self._gone = True

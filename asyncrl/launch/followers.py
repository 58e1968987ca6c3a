"""The part of every rank but 0: it learns with the others, keeps an actor alive, or both.

    rank k ──spawns──► actor-k, unless it only learns

On another host than rank 0's, actors reach the replay over the network with keys from the run's folder.
Weights come there once: the lowest rank with an actor relays them, unless that actor is alone.
"""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from asyncrl.config.run import TrainConfig, load_file
from asyncrl.errors import ConfigError
from asyncrl.launch import endpoints
from asyncrl.launch import job as job_store
from asyncrl.launch.children import ChildProcesses, Supervisor
from asyncrl.launch.job import Hosts, Job, RunInfo
from asyncrl.launch.placement import RELAYED, Placement, checked_placement
from asyncrl.messaging.sockets import private_folder
from asyncrl.observability import process_status, waits
from asyncrl.observability.background_file import logged_to
from asyncrl.observability.process_status import Watchdog
from asyncrl.observability.signals import BlockingThread, StopFlag
from asyncrl.storage import run_owner
from asyncrl.storage.atomic import read_small, write_text
from asyncrl.storage.untrusted import load_json

MAX_RESPAWNS = 5  # restarts in a row of a child that dies; one death more ends the run
SHUTDOWN_TIMEOUT_ACTOR: Final = 8.0
"""Seconds an actor rank gives its actor to end in order, with the run or when it was asked to stop."""
LOOK_FROM_AFAR: Final = 1.0  # seconds between two looks, on another host, whether the run is over
FIRST_HOST_LOST: Final = 60.0  # Seconds of silence of torchrun's store until the first host is gone
ANSWER_DEADLINE: Final = 2.0  # seconds for the last answer of torchrun's store
FOLDER_DEADLINE: Final = 60.0  # Seconds that a network file system has to show the run's folder
NOTE: Final = "weights"  # File in the host's folder: the relay's endpoint and the start's mark
POLL_INTERVAL: Final = 0.5


def follow(config: TrainConfig, job: Job, hosts: Hosts, stop: StopFlag) -> int:
    """Do the part of a rank other than 0 until rank 0 ends the run."""
    rank = job.rank
    info = job_store.receive(job, config.startup_timeout, lambda: stop.requested)
    run_dir = Path(info.run_dir)
    _wait_for_folder(run_dir, info.mark, rank)
    config = load_file(run_dir / "config.json")
    placement = checked_placement(config, hosts.size)
    lock = run_owner.join(run_dir)
    status = job.status_folder(run_dir)
    process_status.publish_as(status, f"learner-{rank}" if rank in placement.learners else f"rank-{rank}")
    children = ChildProcesses(stop, report_failure=partial(job_store.report_failure, info, job))
    first_host = FirstHost(info, job)
    with ExitStack() as ending:
        ending.callback(lock.release)
        ending.callback(first_host.close)
        if not job.on_first_host and rank == job.here.start:
            # Rank 0's watchdog sees the processes of its own host only.
            ending.callback(Watchdog(status, print).close)
        of_actor = info
        if not job.on_first_host:
            of_actor = _with_weights_of_host(config, info, placement, hosts, job, stop, ending)
        ending.callback(children.end, 0.0)
        if rank in placement.actors:
            children.spawn(partial(spawn_actor, config, of_actor, rank))
        if rank in placement.learners:
            from asyncrl.launch.build import learn_as_follower

            with logged_to(run_dir / "logs" / f"learner-{rank}.log"):
                learn_as_follower(info, job, placement, hosts, children.poll)
        else:
            children.run_until_done(over=first_host.run_is_over)
        children.end(SHUTDOWN_TIMEOUT_ACTOR if first_host.learner_lives() else 0.0)
    if children.failure is not None and job_store.failure_file(info, job).exists():
        raise children.failure
    return int(children.failure is not None)


def spawn_actor(config: TrainConfig, info: RunInfo, rank: int) -> Supervisor:
    """Start the actor of a rank."""
    return spawn_role(f"actor-{rank}", "roles:actor_main", config, info, f"actor-{rank}")


def spawn_role(name: str, function: str, config: TrainConfig, info: RunInfo, argument: object) -> Supervisor:
    """Start the child process `name` in `function(config, info, argument)`; the run's folder has its log."""
    log = Path(info.run_dir) / "logs" / f"{name}.log"
    target = f"asyncrl.launch.{function}"
    return Supervisor(name, target, (config, info, argument), log, MAX_RESPAWNS)


def _wait_for_folder(run_dir: Path, mark: str, rank: int) -> None:
    until = time.monotonic() + FOLDER_DEADLINE
    with process_status.waiting(waits.FOLDER, FOLDER_DEADLINE):
        while True:
            with suppress(ConfigError, OSError):  # It is not all there yet, or another folder has this name.
                if (run_dir / "config.json").is_file() and run_owner.read_identity(run_dir).mark == mark:
                    return
            if time.monotonic() > until:
                raise ConfigError(
                    f"Rank {rank} on {socket.gethostname()} does not see {run_dir}, the folder "
                    "of the run, as rank 0 left it, and through it hosts get keys and checkpoints. "
                    "Set --run-dir to a folder that all hosts have under one path."
                )
            time.sleep(POLL_INTERVAL)


class FirstHost:
    """Watches rank 0: on its host through the operating system, elsewhere through torchrun's store."""

    def __init__(self, info: RunInfo, job: Job) -> None:
        self._info, self._near = info, job.on_first_host
        self._answers, self._gone = 0, False
        self._heard, self._silent, self._looked_at = 0, 0.0, time.monotonic()
        self._over, self._asked_at = False, float("-inf")
        self._closing = threading.Event()
        self._thread = BlockingThread(partial(self._ask, job), "first host")
        if not self._near:
            self._thread.start()

    def run_is_over(self) -> bool:
        """Return True if rank 0 has ended the run or is gone. Called often."""
        if self._near:  # Not the folder itself, which the host may clean away.
            with suppress(OSError, ValueError):
                named = read_small(Path(self._info.run_dir) / endpoints.SOCKETS)
                return named != self._info.sockets or not self.learner_lives()
            return True
        now = time.monotonic()
        if not self._over and now - self._asked_at > LOOK_FROM_AFAR:
            self._asked_at = now
            self._over = run_owner.owner(Path(self._info.run_dir)) is None or not self.learner_lives()
        return self._over

    def learner_lives(self) -> bool:
        """Return False if rank 0 was killed and cannot end the run in order."""
        if self._near:
            processes = process_status.read(Path(self._info.run_dir))
            return any(process.alive for process in processes if process.role == "learner-0")
        now = time.monotonic()
        # Time in which this process itself did not run is no silence.
        self._silent += min(now - self._looked_at, 2 * LOOK_FROM_AFAR)
        self._looked_at = now
        if self._answers != self._heard:
            self._heard, self._silent = self._answers, 0.0
        return not self._gone and self._silent < FIRST_HOST_LOST

    def close(self) -> None:
        """Stop watching: a thread returning from the store during Python's exit aborts the process."""
        self._closing.set()
        if not self._near:
            self._thread.join(ANSWER_DEADLINE)

    def _ask(self, job: Job) -> None:
        """Poll torchrun's store, which ends with the run; a cut network is noticed late."""
        import torch.distributed as dist

        with suppress(dist.DistError):
            store = job_store.open_store(job)
            while store.check([job_store.RUN]):
                self._answers += 1
                if self._closing.wait(LOOK_FROM_AFAR):
                    return
        self._gone = True


# ---- weights on another host ---------------------------------------------------------------------


def _with_weights_of_host(
    config: TrainConfig,
    info: RunInfo,
    placement: Placement,
    hosts: Hosts,
    job: Job,
    stop: StopFlag,
    ending: ExitStack,
) -> RunInfo:
    """Point this host's actors to its relay; a single actor fetches from the learner itself."""
    actors = [rank for rank in job.here if rank in placement.actors]
    alone = len(actors) == 1 and not info.hosts_transport
    if job.rank not in actors or alone:
        return replace(info, weights_endpoint="")
    if job.rank == actors[0]:
        endpoint = relay_weights(config, info, hosts, job, ending)
    else:
        endpoint = wait_for_relay(info, job, config.startup_timeout, lambda: stop.requested)
    return replace(info, weights_endpoint=endpoint)


def relay_weights(config: TrainConfig, info: RunInfo, hosts: Hosts, job: Job, ending: ExitStack) -> str:
    """Receive weights for this host and relay them to its actors until `ending`; returns their endpoint."""
    from asyncrl.devices.tensors import pick_device
    from asyncrl.weights.interface import PULL
    from asyncrl.weights.publisher import BroadcastPublisher, Relay
    from asyncrl.weights.receiver import WeightReceiver
    from asyncrl.weights.weight_server import ServerSettings

    deadline, identity, folder = config.weights.timeout, info.identity, private_folder()
    ending.callback(shutil.rmtree, folder, ignore_errors=True)
    # Others can write into torchrun's store: it may not name code.
    trusted = info.hosts_transport in ("nccl", "cuda_ipc", config.weights.transport)
    receiver = WeightReceiver(
        info.hosts_transport if trusted else PULL,
        info.pull_endpoint,
        hosts.names[hosts.of(job.rank)],
        None,
        pick_device(config.device, job.local_rank),
        deadline,
        endpoints.client_keys(info.keys, f"actor-{job.rank}"),
        identity,
    )
    settings = ServerSettings(identity=identity)
    publisher = BroadcastPublisher(RELAYED, folder / NOTE, deadline=deadline, settings=settings)
    ending.callback(Relay(receiver, publisher).close)
    content = json.dumps({"mark": info.mark, "endpoint": publisher.endpoint})
    write_text(job.status_folder(Path(info.run_dir)) / NOTE, content)
    return publisher.endpoint


def wait_for_relay(info: RunInfo, job: Job, deadline: float, stop_requested: Callable[[], bool]) -> str:
    """Wait at most `deadline` seconds for this host's relay, and return its endpoint."""
    note, wait = job.status_folder(Path(info.run_dir)) / NOTE, job_store.RankWait(deadline, stop_requested)
    with process_status.waiting(waits.HOST_WEIGHTS, deadline):
        while True:
            with suppress(OSError, ValueError, KeyError):  # There is no note of this start yet.
                row: dict[str, object] = load_json(note)
                if row["mark"] == info.mark:
                    return str(row["endpoint"])
            wait.pause(
                f"Rank {job.rank} waited {deadline:g} s (--startup-timeout) for the first actor's rank of "
                f"its host to say in {note} where the weights are, in vain. See the output of torchrun "
                "on this host."
            )

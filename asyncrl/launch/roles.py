"""The child processes of a run.

actor      policy, world and reward models; episodes to the replay, weights from the learner
replay     the episode files and their socket; no torch
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncrl.config.run import TrainConfig, to_json
from asyncrl.launch import endpoints
from asyncrl.launch.job import Job, RunInfo, read_job
from asyncrl.launch.placement import RELAYED, Placement, parse_placement, threads_of_actor, transport_of
from asyncrl.observability import process_status, waits
from asyncrl.replay.buffer import Replay
from asyncrl.replay.interface import ANY_FORMAT, EpisodeFormat
from asyncrl.replay.limiter import Limiter
from asyncrl.replay.store import EpisodeStore
from asyncrl.storage import run_owner
from asyncrl.storage.run_folder import REPLAY

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from asyncrl.weights.interface import Receiver

PRIORITY: Final = "CUDA_MPS_CLIENT_PRIORITY"
"""Environment variable of a client of MPS, read when it first uses a GPU. 0: normal, 1: below that."""
SHUTDOWN_TIMEOUT_EPISODES: Final = 5.0  # seconds to hand over the last episodes


def actor_main(config: TrainConfig, info: RunInfo, name: str) -> None:
    """Imagine until the learner ends the run."""
    from asyncrl.launch.environment import build_actor, open_backend
    from asyncrl.launch.named_models import build_policy
    from asyncrl.replay.client import WINDOW, ZmqActorPort

    job = read_job()
    lock = run_owner.join(Path(info.run_dir))
    process_status.publish_as(job.status_folder(Path(info.run_dir)), name)
    process_status.set_activity("loading models", config.startup_timeout)
    placement = parse_placement(config.placement, job.size, joined=True)
    device = use_device(config, placement, job)
    policy = build_policy(config, device)
    backend, starts = open_backend(config, policy)
    receiver = _receiver(config, info, job, placement, name, policy.acting_tensors(), device)
    try:
        port = ZmqActorPort(
            info.replay_endpoint,
            name,
            window=WINDOW + config.actor.slots,
            security=endpoints.client_keys(info.keys, name),
            identity=info.identity,
        )
        build_actor(config, name, backend, starts, port, receiver).run()
        with process_status.waiting(waits.FAREWELL, SHUTDOWN_TIMEOUT_EPISODES):
            port.close(SHUTDOWN_TIMEOUT_EPISODES)
    finally:
        backend.close()
        receiver.close()
        lock.release()


def use_device(config: TrainConfig, placement: Placement, job: Job) -> torch.device:
    """Use the threads and the device of an actor."""
    import torch

    from asyncrl.devices.tensors import take_device, use_compiler_cache

    # One learner mostly waits for the actors; each further one has cores of its own.
    cores = len(os.sched_getaffinity(0)) - (len(placement.learners) - 1) * config.learner.threads
    torch.set_num_threads(threads_of_actor(len(placement.actors), cores))
    give_way(config.device, placement, job)
    device = take_device(config.device, job.local_rank)
    if config.imagination.compile or config.learner.compile:
        use_compiler_cache(device)
    return device


def give_way(name: str, placement: Placement, job: Job) -> None:
    """Give learners' kernels priority over an actor's on their GPU (MPS); call it before CUDA is used."""
    from asyncrl.devices.tensors import pick_device

    learners = [pick_device(name, rank - job.here.start) for rank in placement.learners if rank in job.here]
    device = pick_device(name, job.local_rank)
    if device.type == "cuda" and device in learners:
        os.environ.setdefault(PRIORITY, "1")


def _receiver(
    config: TrainConfig,
    info: RunInfo,
    job: Job,
    placement: Placement,
    name: str,
    tensors: Mapping[str, Tensor],
    device: torch.device,
) -> Receiver:
    from asyncrl.weights.interface import PULL
    from asyncrl.weights.receiver import WeightReceiver

    keys, endpoint = endpoints.client_keys(info.keys, name), info.weights_endpoint or info.pull_endpoint
    if not info.weights_endpoint:
        transport = PULL
    elif job.on_first_host:
        transport = transport_of(config, placement, job.here)
    else:
        transport, keys = RELAYED, None  # Only this user reaches the relay's socket.
    timeout = config.weights.timeout
    return WeightReceiver(transport, endpoint, name, tensors, device, timeout, keys, info.identity)


def replay_main(config: TrainConfig, info: RunInfo, episodes: EpisodeFormat) -> None:
    """Run the replay until the learner ends the run."""
    from asyncrl.replay.connection import JoinSettings
    from asyncrl.replay.server import serve_replay

    run_dir = Path(info.run_dir)
    lock, identity = run_owner.join(run_dir), info.identity
    process_status.publish_as(run_dir, "replay")
    process_status.set_activity("opening the files", config.startup_timeout)
    endpoints.restore_folder(Path(info.sockets), identity)
    serve_replay(
        open_run_replay(run_dir / REPLAY, config, episodes=episodes),
        info.replay_endpoint,
        security=endpoints.server_keys(info.keys),
        settings=JoinSettings(config=to_json(config), weights=info.pull_endpoint, identity=identity),
        identity=identity,
    )
    lock.release()


def open_run_replay(
    folder: Path,
    config: TrainConfig,
    warn: Callable[[str], None] = print,
    *,
    episodes: EpisodeFormat = ANY_FORMAT,
) -> Replay:
    """Open a run's replay folder, with the settings of the run, and recover it."""
    size, max_bytes = config.algorithm.group_size, int(config.replay.max_gigabytes * 1e9)
    # The oldest checkpoint that is kept, while the next one is being written.
    window = config.checkpoint_every * (config.keep_checkpoints + 1)
    limiter = Limiter(config.replay, config.algorithm, episode_format=episodes, resume_window=window)
    return Replay(EpisodeStore(folder, group_size=size, max_bytes=max_bytes, warn=warn), limiter, warn)

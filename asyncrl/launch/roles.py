"""Runs the child processes of a run: actors and the replay.

actor      policy, world and reward models; episodes to the replay, weights from the learner
replay     the HDF5 store and its socket; no torch
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.loading import overlay
from asyncrl.config.run import TrainConfig
from asyncrl.launch.rendezvous import RunInfo, local_rank, rank, ranks_here, status_folder, world_size
from asyncrl.observability import process_status, signals, waits
from asyncrl.replay.interface import NEW_RUN, RunStart
from asyncrl.replay.replay import Replay, open_replay
from asyncrl.storage import run_identity, run_lock
from asyncrl.storage.run_folder import REPLAY

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from asyncrl.launch.placement import Placement
    from asyncrl.weights.interface import Receiver

SHUTDOWN_TIMEOUT_EPISODES = 5.0
"""Seconds an actor has to hand over its last episodes."""


def actor_main(config_json: str, info_json: str, name: str) -> None:
    """Imagine until the learner ends the run."""
    from asyncrl.launch import endpoints
    from asyncrl.launch.build import actor_offload, build_acting, build_actor, starts_of
    from asyncrl.launch.environment import build_environment
    from asyncrl.launch.host_weights import RELAYED, transport_of
    from asyncrl.launch.named_models import build_policy
    from asyncrl.launch.placement import parse_placement
    from asyncrl.replay.actor_client import WINDOW, ZmqActorPort

    config, info = _read(config_json, info_json)
    run_dir = Path(info.run_dir)
    lock, identity = run_lock.join(run_dir), run_identity.read(run_dir)
    process_status.publish_as(status_folder(run_dir), name)
    process_status.set_activity("loading models", config.startup_timeout)
    placement = parse_placement(config.placement, world_size(), 0, joined=True)
    device, world_device = _use_devices(config, placement)
    policy = build_policy(config, device)
    environment = build_environment(config, world_device)
    acting = build_acting(config, policy, environment)
    here = ranks_here()
    transport = transport_of(config, placement, here) if 0 in here else RELAYED
    receiver = _receiver(config, info, name, policy.acting_tensors(), transport, device)
    try:
        port = ZmqActorPort(
            info.replay_endpoint,
            name,
            window=WINDOW + config.actor.slots,
            security=endpoints.client_keys(info.keys, name),
            identity=replace(identity, attempt=info.attempt),
        )
        actor = build_actor(
            config,
            name,
            acting,
            starts_of(config, environment),
            port,
            receiver,
            actor_offload(config, acting),
        )
        actor.run()
        with waits.waiting(waits.FAREWELL, SHUTDOWN_TIMEOUT_EPISODES):
            port.close(SHUTDOWN_TIMEOUT_EPISODES)
    finally:
        acting.close()
        receiver.close()
        lock.release()


def _use_devices(config: TrainConfig, placement: Placement) -> tuple[torch.device, torch.device]:
    """Take an actor's share of the cores, its device and compiler cache; returns the world's device too."""
    import torch

    from asyncrl.launch.own_device import give_way, make_current, use_compiler_cache
    from asyncrl.launch.placement import actor_devices, threads_of_actor

    # One learner mostly waits for the actors; each further one has cores of its own.
    taken = (len(placement.learners) - 1) * config.learner.threads
    cores = len(os.sched_getaffinity(0)) - taken
    torch.set_num_threads(config.actor.threads or threads_of_actor(len(placement.actors), cores))
    device, world_device = actor_devices(config.device, placement, rank(), local_rank())
    give_way(config, placement, {device, world_device})
    if world_device != device:
        make_current(world_device)
    make_current(device)  # The last one stays "the" device.
    use_compiler_cache(config, device)
    return device, world_device


def _receiver(
    config: TrainConfig,
    info: RunInfo,
    name: str,
    tensors: Mapping[str, Tensor],
    transport: str,
    device: torch.device | str = "cpu",
) -> Receiver:
    """Receive the learner's weights: by the carrier of the host, or fetched by one alone on another host."""
    from asyncrl.launch import endpoints
    from asyncrl.launch.host_weights import identity_of
    from asyncrl.weights.interface import PULL
    from asyncrl.weights.receiver import build_receiver

    near = info.weights_endpoint
    # A relay's socket, which only this user reaches, takes no keys.
    keys = None if near and 0 not in ranks_here() else endpoints.client_keys(info.keys, name)
    return build_receiver(
        transport if near else PULL,
        near or info.pull_endpoint,
        name,
        tensors,
        device,
        config.weights.timeout,
        keys,
        identity_of(info),
    )


def replay_main(config_json: str, info_json: str, start_json: str = "") -> None:
    """Keep the run's episodes until the learner ends the run; `start_json` is a `RunStart`."""
    from asyncrl.launch import endpoints
    from asyncrl.replay.connection import JoinSettings
    from asyncrl.replay.server import serve_replay

    config, info = _read(config_json, info_json)
    run_dir = Path(info.run_dir)
    lock, identity = run_lock.join(run_dir), replace(run_identity.read(run_dir), attempt=info.attempt)
    process_status.publish_as(run_dir, "replay")
    process_status.set_activity("opening the files", config.startup_timeout)
    replay = open_run_replay(run_dir / REPLAY, config, start=RunStart.from_json(start_json))
    serve_replay(
        replay,
        info.replay_endpoint,
        security=endpoints.server_keys(info.keys),
        settings=JoinSettings(
            config=config_json,
            weights=info.pull_endpoint,
            identity=identity,
        ),
        identity=identity,
    )
    lock.release()


def open_run_replay(
    folder: Path,
    config: TrainConfig,
    warn: Callable[[str], None] = print,
    *,
    start: RunStart = NEW_RUN,
) -> Replay:
    """Open a run's replay folder with the settings of the run; see `open_replay`."""
    return open_replay(
        folder,
        replace(config.replay, max_lag=config.max_lag),
        config.algorithm,
        start=start,
        seed=config.seed,
        # The oldest checkpoint that is kept, while the next one is being written.
        horizon=config.checkpoint_every * (config.keep_checkpoints + 1),
        warn=warn,
    )


def _read(config_json: str, info_json: str) -> tuple[TrainConfig, RunInfo]:
    signals.raise_limit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = overlay(TrainConfig(), json.loads(config_json), "the run's settings")
    return config, RunInfo(**json.loads(info_json))

"""Joins a running run as one more actor: ask the replay for settings, load, fetch weights, imagine, leave.

A run that is started again (torchrun's restarts, --resume at the same address) may continue from an earlier
version than an actor holds. The actor then drops its episodes and joins again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

from asyncrl.config.bounds import THREADS, AtLeast, Bounded
from asyncrl.config.run import TrainConfig, overlay
from asyncrl.errors import AttemptEnded, ConfigError
from asyncrl.launch.children import log_errors
from asyncrl.messaging.keys import ClientKeys, load_client_keys
from asyncrl.observability.signals import StopFlag, raise_limit
from asyncrl.registry import MODELS

if TYPE_CHECKING:
    from asyncrl.actors.actor import Actor
    from asyncrl.replay.client import ZmqActorPort
    from asyncrl.replay.connection import JoinSettings
    from asyncrl.weights.receiver import WeightReceiver

ANSWER_DEADLINE: Final = 30.0  # Seconds the replay has to tell the run's settings
SHUTDOWN_TIMEOUT_EPISODES: Final = 5.0  # Seconds the replay has to take the last finished episodes
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_RESERVED: Final = re.compile(r"actor-\d+|learner|replay|inline")


@dataclass(frozen=True, kw_only=True)
class JoinOptions(Bounded):
    """Join a running run: imagine for it until it ends or this process is asked to stop (Ctrl-C, SIGTERM)."""

    join: str
    """Where the run's replay listens: its --replay.listen, or the address that its console shows."""
    keys: str = ""
    """Folder with server.public and this actor's key NAME.secret, for a run with --replay.keys."""
    key: str = ""
    """Which key of --keys. Empty: that of --name, or the only one besides the server's and the learner's."""
    name: str = ""
    """Name of this actor, unique in the run. Empty: made from the host's name."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the models run. auto: cuda if there is a GPU. CUDA_VISIBLE_DEVICES chooses it."""
    threads: Annotated[int, AtLeast(0, "it counts threads.", "Use 0.", highest=THREADS)] = 0
    """CPU threads. 0: two if there are two cores, else one."""
    policy: str = ""
    """The run's policy, if its path differs on this host. It must hold the same files. A policy, world or
    reward that is a class (package.module:Class@FOLDER) must be named here again: a peer never names code."""
    world: str = ""
    """The run's world model, if its path differs on this host. It must hold the same files."""
    reward: str = ""
    """The run's reward model, if its path differs on this host. It must be the same."""
    start_states: str = ""
    """The run's start states, if their path differs on this host. They must be the same files."""


def run(settings: JoinOptions) -> int:
    """Join, imagine, leave."""
    raise_limit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = replace(settings, join=resolved(settings.join))
    name, keys = _pick_name(settings.name), pick_key(settings)
    while True:
        try:
            joined = _join(settings, name, keys)  # Interrupted, it has no grants yet.
            over = _imagine(joined)
        except AttemptEnded as ended:
            print(f"{name}: {ended} What the replay does not have is given up; it joins again", flush=True)
            joined = None  # Its models make room for those that are loaded next.
            continue
        print(f"{name}: {'the run is over' if over else 'left the run'}", flush=True)
        return 0


def resolved(address: str) -> str:
    """Return --join as an endpoint: add ``tcp://`` if it is missing, and look up the host's name."""
    kind, _, rest = address.rpartition("://")
    host, _, port = rest.rpartition(":")
    if kind not in ("", "tcp") or not host or host[0] == "[":  # IPv6
        return f"tcp://{rest}" if host[:1] == "[" else address
    try:
        return f"tcp://{socket.gethostbyname(host)}:{port}"
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--join {address}: {host} has no IPv4 address here ({error}). Use the address that the run's "
            "console shows."
        ) from None


class _Joined(NamedTuple):
    actor: Actor
    port: ZmqActorPort
    receiver: WeightReceiver


def _imagine(joined: _Joined) -> bool:
    port, receiver = joined.port, joined.receiver
    leave = partial(port.leave, SHUTDOWN_TIMEOUT_EPISODES)
    with StopFlag().listening() as stop:
        try:
            joined.actor.run(should_leave=lambda: stop.requested or receiver.ended)
            return port.stopped or receiver.ended
        except AttemptEnded:
            leave = partial(port.leave, 0.0)  # No part of the run waits for its episodes.
            raise
        finally:
            log_errors(leave, print)
            joined.actor.backend.close()
            receiver.close()


def pick_key(settings: JoinOptions) -> ClientKeys | None:
    """Choose an actor's key: the one given, the one of its name, or the only one."""
    if not settings.keys:
        return None
    folder = Path(settings.keys).expanduser()
    found = sorted(path.stem for path in folder.glob("*.secret") if path.stem not in ("server", "learner"))
    if settings.key or settings.name in found:
        return load_client_keys(folder, settings.key or settings.name)
    if len(found) != 1:
        raise ConfigError(
            f"--keys is {settings.keys}, with {len(found)} keys of actors ({', '.join(found) or 'none'}), "
            "so it is not clear which one to use. Name one with --key, or copy one there with server.public."
        )
    return load_client_keys(folder, found[0])


def _join(settings: JoinOptions, name: str, keys: ClientKeys | None) -> _Joined:
    import torch

    from asyncrl.devices.tensors import take_device, use_compiler_cache
    from asyncrl.launch.environment import build_actor, open_backend
    from asyncrl.launch.named_models import build_policy
    from asyncrl.launch.placement import threads_of_actor
    from asyncrl.replay.client import WINDOW, ZmqActorPort
    from asyncrl.replay.connection import ask_settings
    from asyncrl.weights.interface import PULL
    from asyncrl.weights.receiver import WeightReceiver

    device = take_device(settings.device)
    offer = ask_settings(settings.join, name, keys, ANSWER_DEADLINE)
    config = _settings_here(settings, offer)
    torch.set_num_threads(settings.threads or threads_of_actor(1, len(os.sched_getaffinity(0))))
    if config.imagination.compile or config.learner.compile:
        use_compiler_cache(device)
    policy = build_policy(config, device)
    with ExitStack() as closing:
        backend, starts = open_backend(config, policy)
        closing.callback(backend.close)
        timeout, tensors = config.weights.timeout, policy.acting_tensors()
        receiver = WeightReceiver(PULL, offer.weights, name, tensors, "cpu", timeout, keys, offer.identity)
        closing.callback(receiver.close)
        version = receiver.wait_for_first(config.startup_timeout)
        print(f"{name}: joined {settings.join} at version {version}, {device}", flush=True)
        window = WINDOW + config.actor.slots
        port = ZmqActorPort(settings.join, name, window=window, security=keys, identity=offer.identity)
        actor = build_actor(config, name, backend, starts, port, receiver)
        closing.pop_all()  # It worked: who leaves closes them.
    return _Joined(actor, port, receiver)


def _settings_here(settings: JoinOptions, offer: JoinSettings) -> TrainConfig:
    from asyncrl.launch.named_models import refuse_foreign_code

    config: TrainConfig = overlay(TrainConfig(), json.loads(offer.config), "the run's settings")
    here = {name: path for name in (*MODELS, "start_states") if (path := getattr(settings, name))}
    config, own = (replace(each, **here) for each in (config, TrainConfig()))
    refuse_foreign_code(config, own, "the run that is joined", MODELS)
    return config


def _pick_name(name: str) -> str:
    if not name:
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()).strip("-")[:40] or "host"
        return f"{host}-{os.getpid()}-{os.urandom(2).hex()}"
    if not _NAME.fullmatch(name) or _RESERVED.fullmatch(name):
        raise ConfigError(
            f"--name is {name!r}. Names have letters, digits, '.', '-' and '_'; the run's own processes are "
            "called learner, replay, actor-0, actor-1 ... Use another one, like the host's, or leave it out."
        )
    return name

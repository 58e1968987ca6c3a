"""`asyncrl actor --join ENDPOINT`: join a running run as one more actor, from any host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

import tyro

from asyncrl.config.bounds import THREADS, AtLeast, Bounded
from asyncrl.launch.join import JoinOptions


@dataclass(frozen=True, kw_only=True)
class ActorConfig(Bounded):
    """Join a running run: imagine for it until it ends or this process is asked to stop (Ctrl-C, SIGTERM)."""

    join: str
    """Where the run's replay listens: its --replay.listen, or the address that its console shows."""
    keys: str = ""
    """Folder with server.public and this actor's key NAME.secret, for a run with --replay.keys."""
    key: str = ""
    """Which key of --keys. Empty: that of --name, or the only one besides the server's and the learner's."""
    name: str = ""
    """What the run calls this actor; unique in it. Empty: made of the host's name."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the models run. auto: cuda where there is a GPU. CUDA_VISIBLE_DEVICES chooses it."""
    threads: Annotated[int, AtLeast(0, "it counts threads.", "Use 0.", highest=THREADS)] = 0
    """CPU threads. 0: two where there are two cores, else one."""
    policy: str = ""
    """The run's policy, where its path differs on this host. It must hold the same files. A policy, world or
    reward that is a class (package.module:Class@FOLDER) must be named here again: a peer never names code."""
    world: str = ""
    """The run's world model, where its path differs on this host. It must hold the same files."""
    reward: str = ""
    """The run's reward model, where its path differs on this host. It must be the same."""
    start_states: str = ""
    """The run's start states, where their path differs on this host. They must be the same files."""


ARGUMENTS: Final = ActorConfig


def main(arguments: list[str]) -> int:
    """Join, imagine, leave."""
    config = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl actor")
    from asyncrl.launch.join import run

    parts = ("policy", "world", "reward", "start_states")
    return run(
        JoinOptions(
            endpoint=config.join,
            keys=config.keys,
            key=config.key,
            name=config.name,
            device=config.device,
            threads=config.threads,
            paths={name: path for name in parts if (path := getattr(config, name))},
        )
    )

"""Decides where the replay of a run listens, with which keys, and checks both."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.placement import Placement
from asyncrl.messaging.curve_keys import ClientKeys, ServerKeys, load_client_keys, load_server_keys
from asyncrl.messaging.sockets import PREFIX, check_endpoint, ipc_endpoint, private_folder

SOCKETS = "sockets"
"""File of the run folder that names the private folder of its sockets."""

if TYPE_CHECKING:
    from asyncrl.weights.pull_server import PullSettings


def check(config: TrainConfig, placement: Placement) -> None:
    """Check before anything starts that the replay may listen where it should.

    Raises:
        ConfigError: The address is not safe, or a key of this run's processes is missing or not admitted.
    """
    server = check_listen(config)
    if server is None:
        return
    names = ["learner", *(f"actor-{rank}" for rank in placement.actors)]
    for name in names:
        keys = client_keys(config, name)
        assert keys is not None
        if keys.public not in server.allowed:
            raise ConfigError(
                f"--replay.keys is {config.replay.keys}, but the public key of {name} is not in its folder "
                f"'clients', so the replay would refuse it. Put it back: asyncrl keys {config.replay.keys} "
                f"--clients {' '.join(names)}"
            )
    if not placement.actors and len(server.allowed) == 1:
        raise ConfigError(
            f"--placement names no actor, and {config.replay.keys}/clients admits nobody but the learner, "
            f"so no actor could join. Make a key: asyncrl keys {config.replay.keys} --clients learner far"
        )


def check_listen(config: TrainConfig) -> ServerKeys | None:
    """Check the addresses alone; returns the keys that it is used with.

    Raises:
        ConfigError: The address is not safe, or the replay's own keys cannot be used.
    """
    server = server_keys(config)
    if config.replay.listen:
        check_endpoint(config.replay.listen, server)
    if config.weights.listen:
        check_endpoint(config.weights.listen, server, any_port=True)
    return server


def server_keys(config: TrainConfig) -> ServerKeys | None:
    """The replay's keys and whom it admits; None without --replay.keys."""
    return load_server_keys(_folder(config)) if config.replay.keys else None


def client_keys(config: TrainConfig, name: str) -> ClientKeys | None:
    """The keys of one process of the run, 'learner' or 'actor-N'; None without --replay.keys."""
    return load_client_keys(_folder(config), name) if config.replay.keys else None


@contextmanager
def opened(config: TrainConfig, run_dir: Path) -> Iterator[tuple[Path, str]]:
    """Make the private folder that marks a living run, remove it at the end; yields it and the endpoint.

    The run's folder names it, so that the next process of the run can remove what a killed one left.
    """
    _remove_left_over(run_dir / SOCKETS)
    folder = private_folder()
    (run_dir / SOCKETS).write_text(str(folder))
    try:
        yield folder, config.replay.listen or ipc_endpoint(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        (run_dir / SOCKETS).unlink()


def _remove_left_over(note: Path) -> None:
    if note.exists():
        folder = Path(note.read_text())
        if folder.name.startswith(PREFIX) and folder.is_dir() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder)


def pull_settings(config: TrainConfig, folder: Path) -> PullSettings:
    """Where actors that join fetch the weights: beside the replay, unless --weights.listen says otherwise.

    Args:
        config: Of the run.
        folder: The private folder of its sockets.
    """
    from asyncrl.weights.pull_server import PullSettings  # Loads torch, which the replay must not.

    replay = config.replay.listen
    beside = f"{replay.rpartition(':')[0]}:0" if replay.startswith("tcp") else ipc_endpoint(folder, "pull")
    return PullSettings(
        listen=config.weights.listen or beside,
        security=server_keys(config),
        silence=config.replay.heartbeat_timeout,
    )


def _folder(config: TrainConfig) -> Path:
    return Path(config.replay.keys).expanduser()

"""The addresses where a run listens, and the keys of its replay."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.job import Hosts, Job
from asyncrl.launch.placement import Placement
from asyncrl.messaging import sockets
from asyncrl.messaging.keys import ClientKeys, ServerKeys, create_keys, load_client_keys, load_server_keys
from asyncrl.replay import limiter
from asyncrl.storage.atomic import read_small, write_private, write_text
from asyncrl.storage.run_owner import LEAVE_DEADLINE, RunIdentity

SOCKETS = "sockets"  # File of the run folder that names the private folder of its sockets
KEYS = "keys"  # Folder of the run's own keys, where it listens on the network without --replay.keys
JOINED = "joined"  # Name of the key in it for actors that join

if TYPE_CHECKING:
    from asyncrl.weights.weight_server import ServerSettings


def check(config: TrainConfig, placement: Placement, hosts: Hosts, job: Job) -> None:
    """Check before anything starts that addresses are safe and free, and keys admit this run's processes."""
    server = server_keys(config.replay.keys)
    given = (("--replay.listen", config.replay.listen), ("--weights.listen", config.weights.listen))
    for flag, endpoint in given:
        if not endpoint:
            continue
        if hosts.several and endpoint.startswith(("ipc://", "tcp://127.", "tcp://localhost")):
            raise ConfigError(
                f"{flag} is {endpoint}, which only {hosts.names[0]} itself can reach, but torchrun started "
                f"ranks on {hosts.names[1]} too. Leave it out, or name an address that all hosts reach: "
                "tcp://ADDRESS:PORT."
            )
        any_port, own = flag == "--weights.listen", hosts.several and server is None
        sockets.check_endpoint(endpoint, server, any_port=any_port, keys_follow=own)
        # Ranks that torchrun started again wait for the end of the former.
        until = time.monotonic() + (LEAVE_DEADLINE if job.restarts else 0.0)
        while (why := sockets.why_taken(endpoint)) and time.monotonic() < until:
            time.sleep(0.1)
        if why:
            raise ConfigError(
                f"{flag} is {endpoint}, but {why}: perhaps another run. Choose another address, or end what "
                "has it. Nothing was started."
            )
    if server is None:
        return
    names = _names(placement)
    for name in names:
        keys = client_keys(config.replay.keys, name)
        assert keys is not None
        if keys.public not in server.allowed:
            raise ConfigError(
                f"--replay.keys is {config.replay.keys}, but the public key of {name} is not in its folder "
                f"'clients', so the replay would refuse it. Put it back: asyncrl keys {config.replay.keys} "
                f"--clients {' '.join(names)}"
            )
    if not placement.actors and len(server.allowed) == 1:
        raise ConfigError(
            f"--placement names no actor, and {config.replay.keys}/clients admits the learner alone, "
            f"so no actor could join. Make a key: asyncrl keys {config.replay.keys} --clients learner far"
        )


def with_addresses(config: TrainConfig, hosts: Hosts) -> Hosts:
    """Add a run's endpoints from its settings; for several hosts, addresses and ports are filled in."""
    if not hosts.several:
        return replace(hosts, replay=config.replay.listen, weights=config.weights.listen)
    return replace(
        hosts,
        replay=_on_first_host("--replay.listen", config.replay.listen, hosts),
        weights=_on_first_host("--weights.listen", config.weights.listen, hosts),
    )


def _on_first_host(flag: str, endpoint: str, hosts: Hosts) -> str:
    address, port = address_of(endpoint)
    address = address or hosts.addresses[0]
    try:
        with socket.create_server((address, port)) as probe:
            return f"tcp://{address}:{probe.getsockname()[1]}"
    except OSError as error:
        raise ConfigError(
            f"{hosts.names[0]} cannot listen at {address} ({error.strerror}), where {hosts.names[1]} reaches "
            f"it. Set {flag} to an address that it has and all hosts reach: tcp://ADDRESS:PORT."
        ) from None


def address_of(endpoint: str) -> tuple[str, int]:
    """Split 'tcp://ADDRESS:PORT'; a missing part is '' or 0."""
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return address, int(port or 0)


def keys_of_run(config: TrainConfig, run_dir: Path, placement: Placement, hosts: Hosts) -> str:
    """Return the folder of the replay's keys, made here if --replay.keys names none; empty without TCP."""
    if config.replay.keys or not any(x.startswith("tcp") for x in (hosts.replay, hosts.weights)):
        return config.replay.keys
    folder = run_dir / KEYS
    create_keys(folder, [*_names(placement), JOINED])
    return str(folder)


def _names(placement: Placement) -> list[str]:
    return ["learner", *(f"actor-{rank}" for rank in placement.actors)]


def server_keys(folder: str) -> ServerKeys | None:
    """Load the replay's keys and the clients it admits; None without a folder of keys."""
    return load_server_keys(Path(folder).expanduser()) if folder else None


def client_keys(folder: str, name: str) -> ClientKeys | None:
    """Load the keys of one process of the run, 'learner' or 'actor-N'; None without a folder of keys."""
    return load_client_keys(Path(folder).expanduser(), name) if folder else None


@contextmanager
def opened(hosts: Hosts, run_dir: Path, identity: RunIdentity) -> Iterator[tuple[Path, str]]:
    """Make the private folder of a living run, remove it at the end; yields it and the replay's endpoint."""
    # The secret inside is for actors of this host that join, and shows whose folder it is.
    note = run_dir / SOCKETS
    _remove_left_over(note, identity)
    folder = sockets.private_folder()
    write_private(folder / sockets.IDENTITY, identity.secret)
    write_text(note, str(folder))
    try:
        yield folder, hosts.replay or sockets.ipc_endpoint(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        note.unlink(missing_ok=True)


def restore_folder(folder: Path, identity: RunIdentity) -> None:
    """Make the private folder of a living run again if the host cleaned it away."""
    if not (folder / sockets.IDENTITY).exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(folder / sockets.IDENTITY, identity.secret)


def _remove_left_over(note: Path, identity: RunIdentity) -> None:
    """Remove the private folder of a start that was killed, if it has this run's secret."""
    try:
        folder = Path(read_small(note))
        whose = read_small(folder / sockets.IDENTITY)
    except (OSError, ValueError):  # None was left, or it is no folder of sockets.
        return
    if folder.is_absolute() and folder.name.startswith(sockets.PREFIX) and identity.knows(whose):
        shutil.rmtree(folder)


def weight_settings(config: TrainConfig, hosts: Hosts, keys: str, identity: RunIdentity) -> ServerSettings:
    """Return settings of the weights' socket: by default at the replay's address, on a free port."""
    from asyncrl.weights.weight_server import ServerSettings  # Loads torch, which the replay must not.

    default = f"{hosts.replay.rpartition(':')[0]}:0" if hosts.replay.startswith("tcp") else ""
    return ServerSettings(
        listen=hosts.weights or default,
        security=server_keys(keys),
        silence=limiter.HEARTBEAT_TIMEOUT,
        identity=identity,
    )

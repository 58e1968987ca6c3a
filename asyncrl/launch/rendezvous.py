"""Lets the ranks of one torchrun job agree on a run: rank 0 decides, the others are told.

    rank 0        decides the run folder and opens the endpoints, then `share`s them
    other ranks   `receive` them         waits for: rank 0's share     ended by: rank 0, or the deadline

The facts travel as JSON through the store that torchrun's agent keeps anyway. Where there is none (something
else started the ranks and set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT), rank 0 hosts one until all have
read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError, RunError, first_line
from asyncrl.observability import waits
from asyncrl.storage.atomic import write_text
from asyncrl.storage.untrusted import shortened

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

DEADLINE = 600.0
"""Seconds that all ranks of a job have to meet, where no setting says so."""
POLL_INTERVAL = 0.1
"""Seconds between two looks of a rank that waits for rank 0."""
STORE_DEADLINE = 30.0
"""Seconds that the store of another host has to answer."""
HOSTS = "hosts"
"""Folder of a run with a folder for each host but the first, named by the lowest rank there."""
START = "ASYNCRL_JOB_START"
"""Environment variable that names this start of a job on several hosts, see `meeting`."""
_KEY, _RUN_KEY = "run_facts", "run_dir"
_MOST_RANKS = 4096
_FAILED = "failed-rank-"
"""Begin of the name of a file among the run's sockets or, from another host, in its folder of hosts."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What every rank of a run must know and only rank 0 can decide."""

    run_dir: str
    """Absolute path of the run folder."""
    replay_endpoint: str
    """ZeroMQ address of the replay."""
    weights_endpoint: str
    """Endpoint of the learner's weights for processes of its host."""
    sockets: str = ""
    """Private folder that lies there as long as the run: rank 0 removes it as its last act."""
    checkpoint: str = ""
    """Folder from which the learners go on; empty: a new run."""
    pull_endpoint: str = ""
    """Endpoint of the learner's weights for other hosts and actors that join."""
    hosts_transport: str = ""
    """Carrier by which other hosts take part in the broadcasts of weights; empty: they fetch weights."""
    keys: str = ""
    """Folder of the keys that the replay is used with; empty: none."""
    placement: str = ""
    """What --placement auto became; empty: as the settings say."""
    attempt: int = 0
    """Number of this start of the run. Its secret is read from the folder: this travels through torchrun's
    store, which others can read."""
    mark: str = ""
    """See `RunIdentity.mark`: by it a host knows that it sees the same folder."""
    shown: str = ""
    """What decisions look at (`placeholders.Shown`), for learners that compile early; empty: not known."""


def rank(environ: Mapping[str, str] = os.environ) -> int:
    """This process's number in the job; 0 when it was started alone."""
    return _number("RANK", 0, environ, most=world_size(environ) - 1)


def world_size(environ: Mapping[str, str] = os.environ) -> int:
    """Number of ranks in the job; 1 when this process was started alone."""
    return _number("WORLD_SIZE", 1, environ, least=1, most=_MOST_RANKS)


def local_world_size(environ: Mapping[str, str] = os.environ) -> int:
    """Number of ranks of the job on this host; all of them where nothing says so."""
    return _number("LOCAL_WORLD_SIZE", world_size(environ), environ, least=1, most=_MOST_RANKS)


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """This process's number on its host, which is also its device's."""
    return _number("LOCAL_RANK", 0, environ, most=_MOST_RANKS)


def ranks_here(environ: Mapping[str, str] = os.environ) -> range:
    """Return the ranks of this host, which are numbered host by host; all where nothing says so."""
    first = max(0, rank(environ) - local_rank(environ)) if "LOCAL_WORLD_SIZE" in environ else 0
    return range(first, first + local_world_size(environ))


def share(info: RunInfo, deadline: float = DEADLINE, environ: Mapping[str, str] = os.environ) -> None:
    """Tell the other ranks. Called by rank 0; does nothing when it is alone.

    Raises:
        RunError: the store cannot be reached, or a rank did not come to read.
    """
    assert rank(environ) == 0, "only rank 0 decides"
    if (ranks := world_size(environ)) == 1:
        return
    import torch.distributed as dist

    until = time.monotonic() + deadline
    reader = 0
    try:
        store = job_store(deadline, environ)
        store.set(_KEY, json.dumps(dataclasses.asdict(info)))
        if not _agent_has_store(environ):
            for reader in range(1, ranks):
                store.wait([f"{_KEY}/read/{reader}"], _left(until))
    except dist.DistError as error:
        who = f"rank {reader} did not come to read" if reader else "the job's store cannot be used"
        raise RunError(
            f"Rank 0 could not tell the other ranks about the run within {deadline:g} s at "
            f"{place(environ)}: {who} ({first_line(error)}). "
            "Look at the output of the other ranks for the cause."
        ) from None


def receive(
    deadline: float = DEADLINE,
    environ: Mapping[str, str] = os.environ,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
) -> RunInfo | None:
    """Wait for what rank 0 decided. Called by every other rank.

    Returns:
        None when a stop was requested before rank 0 said anything.

    Raises:
        RunError: rank 0 said nothing within `deadline` seconds.
    """
    me = rank(environ)
    assert me > 0, "rank 0 decides, it has nobody to ask"
    import torch.distributed as dist

    until = time.monotonic() + deadline
    try:
        store = job_store(deadline, environ)
        with waits.waiting(waits.MEETING, deadline):
            while not store.check([_KEY]):
                if stop_requested():
                    return None
                if time.monotonic() > until:
                    raise dist.DistStoreError("it has not said anything")
                time.sleep(POLL_INTERVAL)
        text = store.get(_KEY).decode()
        store.set(f"{_KEY}/read/{me}", "yes")
    except dist.DistError as error:
        raise RunError(
            f"Rank {me} waited {deadline:g} s at {place(environ)} for rank 0 to say where the run is, in "
            f"vain ({first_line(error)}). Rank 0 has failed or cannot be reached: see its output, and on "
            "several hosts check that this address is open between them."
        ) from None
    return RunInfo(**json.loads(text))


def job_watch(environ: Mapping[str, str] = os.environ) -> Callable[[], bool]:
    """Open the job's store; returns what tells whether it is still there, for a rank that is on another host.

    It lies with torchrun on the first host, and ends with it.

    Raises:
        RunError: The store cannot be reached.
    """
    import torch.distributed as dist

    try:
        store = job_store(STORE_DEADLINE, environ)
    except dist.DistError as error:
        raise RunError(
            f"Rank {rank(environ)} could not reach the job's store at {place(environ)} within "
            f"{STORE_DEADLINE:g} s ({first_line(error)}). See the output of torchrun on the first host."
        ) from None

    def there() -> bool:
        try:
            return store.check([_KEY])
        except dist.DistError:
            return False

    return there


def report_failure(info: RunInfo, environ: Mapping[str, str] = os.environ, *, why: str) -> None:
    """Tell rank 0 why this rank cannot go on. Rank 0 saves and ends the run."""
    with contextlib.suppress(FileNotFoundError):  # The run has ended by itself.
        write_text(_notice(info, environ), why)


def take_failure(*folders: Path) -> str:
    """Rank 0: read and forget why another rank cannot go on; empty while all can."""
    for notice in (path for folder in folders for path in folder.glob(f"{_FAILED}[0-9]*")):
        if notice.suffix != ".tmp":
            why = notice.read_text(encoding="utf-8")
            notice.unlink()
            return f"Rank {notice.name.removeprefix(_FAILED)}: {why}"
    return ""


def failure_was_taken(info: RunInfo, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether rank 0 has read what this rank reported, and says it itself."""
    return not _notice(info, environ).exists()


def _notice(info: RunInfo, environ: Mapping[str, str]) -> Path:
    """Only rank 0's host sees the folder of the sockets."""
    folder = Path(info.sockets) if 0 in ranks_here(environ) else Path(info.run_dir) / HOSTS
    return folder / f"{_FAILED}{rank(environ)}"


def torchrun_pid(environ: Mapping[str, str] = os.environ) -> int | None:
    """Process id of torchrun, which started this process; None when something else did."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in environ else None


def restart_count(environ: Mapping[str, str] = os.environ) -> int:
    """How often torchrun started the ranks again (`--max-restarts`)."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0, environ)


def remember_run(run_dir: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Leave the run folder for the rank 0 of a next attempt; does nothing where there will be none."""
    if _agent_has_store(environ):
        job_store(DEADLINE, environ, every_attempt=True).set(_RUN_KEY, str(run_dir))


def run_of_earlier_attempt(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of the run that torchrun started again; None in the first attempt, or when it had none."""
    # When a host comes back, torchrun starts all ranks again and counts that as no restart.
    if not ((restart_count(environ) or environ.get(START)) and _agent_has_store(environ)):
        return None
    store = job_store(DEADLINE, environ, every_attempt=True)
    return Path(store.get(_RUN_KEY).decode()) if store.check([_RUN_KEY]) else None


def require_torchrun(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse ranks on several hosts that torchrun did not start.

    Raises:
        ConfigError: Something else did.
    """
    if not _agent_has_store(environ):
        raise ConfigError(
            f"WORLD_SIZE is {world_size(environ)} and LOCAL_WORLD_SIZE {local_world_size(environ)}, so that "
            "ranks are on several hosts, but torchrun did not start them, and they meet in its store. Start "
            "them with torchrun --nnodes N --rdzv-backend c10d --rdzv-endpoint HOST:PORT."
        )


def status_folder(run_dir: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the processes of this host say what they do: numbers of processes belong to one host."""
    here = ranks_here(environ)
    return run_dir if 0 in here else run_dir / HOSTS / str(here.start)


def learners_store(deadline: float = DEADLINE, environ: Mapping[str, str] = os.environ) -> Store:
    """Open the store in which several learner ranks meet; it lives as long as torchrun.

    Raises:
        ConfigError: something else than torchrun started the ranks.
        RunError: the store cannot be reached.
    """
    if not _agent_has_store(environ):
        raise ConfigError(
            "--placement names several learner ranks, but torchrun did not start them, and they meet in its "
            "store. Start them with torchrun, or use one learner."
        )
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    try:
        return PrefixStore("learners", job_store(deadline, environ))
    except dist.DistError as error:
        raise RunError(
            f"Learner rank {rank(environ)} could not reach torchrun's store at {place(environ)} within "
            f"{deadline:g} s ({first_line(error)}). See torchrun's output."
        ) from None


def job_store(
    deadline: float, environ: Mapping[str, str] = os.environ, *, every_attempt: bool = False
) -> Store:
    """Open the job's store, in the part of this start of the ranks.

    Raises:
        DistError: It cannot be reached.
    """
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    host, port = _address(environ)
    listener: int | None = None
    if rank(environ) == 0 and not _agent_has_store(environ):
        listener = _listen(host, port, environ)
    store = TCPStore(
        host,
        port,
        is_master=listener is not None,
        timeout=timedelta(seconds=deadline),
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    part = "job" if every_attempt else environ.get(START) or restart_count(environ)
    return PrefixStore(f"asyncrl/{environ.get('TORCHELASTIC_RUN_ID', '')}/{part}", store)


def _listen(host: str, port: int, environ: Mapping[str, str]) -> int:
    """Open the store's port. A store left to itself would listen on every interface, even for one host."""
    one_host = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE") or host in (
        "127.0.0.1",
        "localhost",
    )
    try:
        family, *_, address = socket.getaddrinfo(
            host if one_host else None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise RunError(
            f"Rank 0 cannot listen on {host}:{port} ({error.strerror}). "
            "Set MASTER_ADDR to its own address and MASTER_PORT to a free port."
        ) from None
    return listener.detach()


def check_address(environ: Mapping[str, str] = os.environ) -> None:
    """Check where the ranks meet, before anything is started.

    Raises:
        ConfigError: There are several, and the address cannot be one.
    """
    if world_size(environ) > 1:
        _address(environ)


def _agent_has_store(environ: Mapping[str, str]) -> bool:
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _address(environ: Mapping[str, str]) -> tuple[str, int]:
    if not environ.get("MASTER_ADDR") or not environ.get("MASTER_PORT"):
        raise ConfigError(
            f"WORLD_SIZE is {world_size(environ)}, but MASTER_ADDR or MASTER_PORT is not set, so the ranks "
            "cannot meet. Start them with torchrun, or unset WORLD_SIZE for a single process."
        )
    return environ["MASTER_ADDR"], _number("MASTER_PORT", 0, environ, least=1, most=65_535)


def place(environ: Mapping[str, str] = os.environ) -> str:
    """Return HOST:PORT of the job's store."""
    return f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"


def _number(name: str, absent: int, environ: Mapping[str, str], *, least: int = 0, most: int = 10**9) -> int:
    text = environ.get(name) or str(absent)
    if not (text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise ConfigError(
            f"The environment variable {name} is {shortened(text)}, expected a whole number of {least} to "
            f"{most}. torchrun sets it; unset it for a single process."
        )
    return int(text)


def _left(until: float) -> timedelta:
    # The store reads a timeout of 0 as none at all.
    return timedelta(seconds=max(until - time.monotonic(), 0.001))

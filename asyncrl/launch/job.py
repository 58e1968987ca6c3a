"""A process's place in its torchrun job, and the messages of ranks through torchrun's store.

Rank 0 opens the run and shares `RunInfo`, the others receive it. Hosts have met before (`hosts.meet`).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncrl.errors import AsyncRLError, ConfigError, RunError, first_line
from asyncrl.observability import process_status, waits
from asyncrl.storage import run_owner
from asyncrl.storage.atomic import write_text
from asyncrl.storage.untrusted import shortened

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

HOSTS: Final = "hosts"  # Folder of a run with one for each host but the first, named by its lowest rank
STORE_DEADLINE: Final = 30.0
POLL_INTERVAL: Final = 0.05
RUN, _RUN_DIR = "run_facts", "run_dir"
_FAILED: Final = "failed-rank-"


@dataclass(frozen=True, kw_only=True)
class Job:
    """This process's place in its torchrun job; the defaults are those of a process started alone."""

    rank: int = 0
    size: int = 1  # ranks of all hosts
    local_rank: int = 0  # on this host, also its device's number
    local_size: int = 1
    store: tuple[str, int] = ("", 0)  # address of torchrun's store; empty without torchrun
    name: str = ""
    restarts: int = 0  # by this host's torchrun
    start: str = ""  # name of this start, which `meet` makes up on several hosts

    @property
    def here(self) -> range:
        """Return the ranks of this host: they are numbered host by host."""
        first = max(0, self.rank - self.local_rank)
        return range(first, first + self.local_size)

    @property
    def on_first_host(self) -> bool:
        """True if rank 0 is on this host."""
        return 0 in self.here

    def status_folder(self, run_dir: Path) -> Path:
        """Return the folder of this host's process status: process ids belong to one host."""
        return run_dir if self.on_first_host else run_dir / HOSTS / str(self.here.start)


def read_job(environ: Mapping[str, str] = os.environ) -> Job:
    """Read torchrun's variables."""

    def number(name: str, absent: int = 0) -> int:
        text = environ.get(name) or str(absent)
        if not text.isdecimal() or len(text) > 18:
            raise ConfigError(
                f"The environment variable {name} is {shortened(text)}, expected a whole number. torchrun "
                "sets it; unset it for a single process."
            )
        return int(text)

    size, by_torchrun = number("WORLD_SIZE", 1), environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if size > 1 and "RANK" not in environ:
        raise ConfigError(
            f"WORLD_SIZE is {size} in the environment, but RANK is not there: it is left over from a job. "
            "Unset it for a single process, or start the ranks with torchrun."
        )
    return Job(
        rank=number("RANK"),
        size=size,
        local_rank=number("LOCAL_RANK"),
        local_size=number("LOCAL_WORLD_SIZE", size),
        store=(environ.get("MASTER_ADDR", ""), number("MASTER_PORT")) if by_torchrun else ("", 0),
        name=environ.get("TORCHELASTIC_RUN_ID", ""),
        restarts=number("TORCHELASTIC_RESTART_COUNT"),
    )


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a job in the order of their ranks; rank 0 is on the first one."""

    names: tuple[str, ...] = ("this host",)
    first_ranks: tuple[int, ...] = (0,)
    size: int = 1  # ranks of the job
    addresses: tuple[str, ...] = ("",)  # IPv4 address at which others reach each; empty with one host
    replay: str = ""  # Address where the replay listens; empty: on a private socket of its host
    weights: str = ""  # Address where the weights are fetched; empty: next to the replay's
    broadcasts: tuple[int, ...] = ()  # Numbers of the hosts between which weights are broadcast; empty: none

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> Hosts:
        """Return hosts of which only the numbers of ranks are known."""
        return cls(
            names=tuple(f"host {number}" for number in range(len(sizes))),
            first_ranks=(0, *accumulate(sizes[:-1])),
            size=sum(sizes),
            addresses=("",) * len(sizes),
        )

    @property
    def several(self) -> bool:
        """True if there is more than one host."""
        return len(self.names) > 1

    def of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return bisect_right(self.first_ranks, rank) - 1

    def ranks(self, number: int) -> range:
        """Return the ranks of host `number`."""
        edges = (*self.first_ranks, self.size)
        return range(edges[number], edges[number + 1])


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Facts of a run that rank 0 decides and every process needs."""

    run_dir: str
    replay_endpoint: str
    weights_endpoint: str  # Of the learner's weights on its host; empty: fetch them at `pull_endpoint`
    sockets: str = ""  # Private folder of the sockets; rank 0 removes it as its last act
    checkpoint: str = ""  # of a resumed run, else empty
    pull_endpoint: str = ""  # Endpoint of the weights for other hosts and actors that join
    hosts_transport: str = ""  # Carrier of the broadcasts between hosts; empty: other hosts fetch weights
    keys: str = ""  # folder of the replay's keys; empty: none
    attempt: int = 0
    """Number of this start. The run's secret is read from its folder: torchrun's store is open to others."""
    mark: str = ""  # `RunIdentity.mark`: by it a host knows that it sees the same folder
    tasks: list[str] = field(default_factory=list)
    """All instructions of the run; compiled learners pad prompts to the longest."""

    @property
    def identity(self) -> run_owner.RunIdentity:
        """Read the identity of this start from the run's folder."""
        return replace(run_owner.read_identity(Path(self.run_dir)), attempt=self.attempt)


@contextmanager
def store_errors(job: Job, doing: str) -> Iterator[None]:
    """Raise errors of the store as a RunError that names the rank and its activity, `doing`."""
    import torch.distributed as dist

    try:
        yield
    except dist.DistError as error:
        raise RunError(
            f"Rank {job.rank} could not {doing}: it lost torchrun's store at {':'.join(map(str, job.store))} "
            f"({first_line(error)}). Rank 0 has failed or cannot be reached: see its output, and on several "
            "hosts check that this address is open between them."
        ) from None


def open_store(job: Job, deadline: float = STORE_DEADLINE, *, every_start: bool = False) -> Store:
    """Open torchrun's store, under the prefix of this start or of all starts."""
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    host, port = job.store
    with store_errors(job, "meet the other ranks"):
        seconds = timedelta(seconds=deadline)
        store = TCPStore(host, port, is_master=False, timeout=seconds, wait_for_workers=False)
    return PrefixStore(f"asyncrl/{job.name}/{'job' if every_start else job.start or job.restarts}", store)


class Stopped(AsyncRLError):
    """A wait for another rank ended because this process was asked to stop."""


class RankWait:
    """A wait of `seconds` for other ranks, which a request to stop ends."""

    def __init__(self, seconds: float, stop_requested: Callable[[], bool]) -> None:
        self._until, self._stop_requested = time.monotonic() + seconds, stop_requested

    def pause(self, why: str) -> None:
        """Sleep a moment; raises Stopped after a request, or RunError(`why`) when the time is over."""
        if self._stop_requested():
            raise Stopped("A stop was asked for.")
        if time.monotonic() > self._until:
            raise RunError(why)
        time.sleep(POLL_INTERVAL)


def share(info: RunInfo, job: Job, deadline: float) -> None:
    """Publish the run to the other ranks; rank 0 only."""
    if job.size > 1:
        with store_errors(job, "publish the run"):
            open_store(job, deadline).set(RUN, json.dumps(asdict(info)))


def receive(job: Job, deadline: float, stop_requested: Callable[[], bool]) -> RunInfo:
    """Wait `deadline` seconds for the run that rank 0 publishes; raises Stopped if asked to stop first."""
    wait = RankWait(deadline, stop_requested)
    with store_errors(job, "learn where the run is"), process_status.waiting(waits.MEETING, deadline):
        store = open_store(job, deadline)
        while not store.check([RUN]):
            wait.pause(
                f"Rank {job.rank} waited {deadline:g} s at {':'.join(map(str, job.store))} for rank 0 to "
                "publish the run, in vain. See the output of rank 0."
            )
        return RunInfo(**json.loads(store.get(RUN)))


def remember_run(job: Job, run_dir: Path) -> None:
    """Store the run's folder for the rank 0 of a later start."""
    if job.store[0]:
        open_store(job, every_start=True).set(_RUN_DIR, str(run_dir))


def run_of_earlier_start(job: Job) -> Path | None:
    """Return the folder of the run that torchrun started again; None if there is none."""
    # A host that comes back starts all ranks again without a count, so on several hosts always look.
    if not (job.store[0] and (job.restarts or job.start)):
        return None
    store = open_store(job, every_start=True)
    return Path(store.get(_RUN_DIR).decode()) if store.check([_RUN_DIR]) else None


def report_failure(info: RunInfo, job: Job, why: str) -> None:
    """Store the reason why this rank cannot go on; rank 0 saves and ends the run."""
    with contextlib.suppress(FileNotFoundError):  # The run has ended by itself.
        write_text(failure_file(info, job), why)


def pop_failure(*folders: Path) -> str:
    """Read and remove the reason why another rank cannot go on; empty if all can."""
    for path in (path for folder in folders for path in folder.glob(f"{_FAILED}[0-9]*")):
        if path.suffix != ".tmp":
            why = path.read_text(encoding="utf-8")
            path.unlink()
            return f"Rank {path.name.removeprefix(_FAILED)}: {why}"
    return ""


def failure_file(info: RunInfo, job: Job) -> Path:
    """Return the file of `report_failure`, which rank 0 removes; only its host sees the folder of sockets."""
    folder = Path(info.sockets) if job.on_first_host else Path(info.run_dir) / HOSTS
    return folder / f"{_FAILED}{job.rank}"

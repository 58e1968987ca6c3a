"""The meeting of the hosts of a run: they compare facts, and rank 0 gives one verdict.

    every rank   publishes its facts under the name of the start     waits for: rank 0's plan
    rank 0       compares them, opens ports, publishes the plan      waits for: the facts of all ranks
    first ranks  of other hosts try the ports                        waits for: the verdict

Facts and plan lie in torchrun's store, which others can read: settings are compared by digest.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import json
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import asyncrl
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.endpoints import address_of
from asyncrl.launch.job import Hosts, Job, RankWait, open_store, store_errors
from asyncrl.observability import process_status, waits
from asyncrl.observability.logger import flat

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

REACH_DEADLINE: Final = 5.0
_START: Final = "start"  # Key of the newest start's name: torchrun's store keeps what earlier ones published
_SIOCGIFADDR: Final = 0x8915
Checks = Callable[[Hosts, "list[HostFacts]"], Hosts]
"""Raises ConfigError if the run cannot use these hosts, else adds endpoints; called on rank 0."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Facts of one host, published by its first rank."""

    name: str
    code: str  # version and digest of asyncrl's files
    torch: str
    settings: dict[str, str] = field(default_factory=dict)
    """Flag -> digest of its value; with --resume one digest of all arguments."""
    address: str = ""  # IPv4 address of this host towards torchrun's store
    store_address: str = ""  # IPv4 address of the store's host as this host reaches it
    gpus: int = 0  # seen by PyTorch; 0 with --device cpu


def digests(config: TrainConfig, arguments: Sequence[str]) -> dict[str, str]:
    """Digest every setting, by flag; with --resume the arguments, because settings are in the folder."""
    settings = {"resume": list(arguments)} if config.resume else flat(asdict(config))
    return {flag: _digest(str(value).encode()) for flag, value in settings.items()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def check_agree(hosts: Sequence[HostFacts]) -> None:
    """Check that all hosts have the same code and settings."""
    first = hosts[0]
    for other in hosts[1:]:
        for what, here, there in (("asyncrl", first.code, other.code), ("torch", first.torch, other.torch)):
            if here != there:
                raise ConfigError(
                    f"{other.name} has {what} {there}, but {first.name}, the first host, has {here}, and all "
                    "hosts of a run need the same. Install the same on both."
                )
        flags = sorted({*first.settings, *other.settings})
        if differing := [x for x in flags if first.settings.get(x) != other.settings.get(x)]:
            flag = "other arguments" if first.settings.keys() == {"resume"} else f"another --{differing[0]}"
            more = f" (and {len(differing) - 1} more flags)" if len(differing) > 1 else ""
            raise ConfigError(
                f"{other.name} was started with {flag} than {first.name}, the first host{more}. Give "
                "torchrun the same arguments, and the same configuration file, on every host."
            )


def bind_gloo(address: str) -> None:
    """Bind gloo to this host's address; if empty, gloo uses the address of the host's name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex() if address else ():
            with suppress(OSError):  # It has no address.
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def meet(
    config: TrainConfig, job: Job, checks: Checks, *, stop_requested: Callable[[], bool] = lambda: False
) -> tuple[Job, Hosts]:
    """Meet the other hosts on every rank; returns the job with the name of this start, and its hosts."""
    if job.size > 1 and not job.store[0]:
        raise ConfigError(
            f"WORLD_SIZE is {job.size}, but torchrun did not start this process, and ranks meet in its "
            "store. Start them with torchrun, or unset WORLD_SIZE for a single process."
        )
    if job.local_size == job.size:
        hosts = Hosts(size=job.size)
        return job, hosts if job.rank else checks(hosts, [])
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    seconds = config.startup_timeout
    store = PrefixStore("meeting", open_store(job, seconds, every_start=True))
    with store_errors(job, "meet the other hosts"), process_status.waiting(waits.HOSTS, seconds):
        own = asdict(_own_facts(config, job)) if job.rank == job.here.start else None
        meeting = _Meeting(job, own, store, RankWait(seconds, stop_requested))
        start, hosts = meeting.follow() if job.rank else meeting.lead(checks)
    return replace(job, start=start), hosts


@dataclass(frozen=True)
class _Meeting:
    job: Job
    own: dict[str, Any] | None  # facts of this host, on its first rank
    store: Store
    wait: RankWait

    def lead(self, checks: Checks) -> tuple[str, Hosts]:
        start = secrets.token_hex(8)
        self.store.set(_START, start)
        numbers, by_rank = self._gather(start)
        facts = list(by_rank.values())
        why, hosts = "", Hosts()
        with ExitStack() as open_ports:
            try:
                check_agree(facts)
                hosts = checks(_placed(by_rank, self.job.size), facts)
                for endpoint in (hosts.replay, hosts.weights):
                    open_ports.enter_context(socket.create_server(address_of(endpoint), backlog=1024))
            except (ConfigError, OSError) as error:
                why = str(error)
            plan = {"numbers": numbers, "why": why, "hosts": asdict(hosts)}
            self.store.set(f"{start}/plan", json.dumps(plan))
            for number, rank in enumerate(hosts.first_ranks[1:], 1):
                who = f"The first rank of {hosts.names[number]} (rank {rank})"
                why = why or self._take(f"{start}/tried/{rank}", who)
        self.store.set(f"{start}/verdict", why)
        if why:
            raise ConfigError(why)
        return start, hosts

    def _gather(self, start: str) -> tuple[dict[int, str], dict[int, HostFacts]]:
        numbers, missing = dict[int, str](), list(range(1, self.job.size))
        facts = {0: HostFacts(**self.own or {})}
        while missing:
            self._pause(f"Rank {missing[0]}")
            for rank in [rank for rank in missing if self.store.check([f"{start}/facts/{rank}"])]:
                missing.remove(rank)
                row: Any = json.loads(self.store.get(f"{start}/facts/{rank}"))
                numbers[rank] = row["number"]
                if row["facts"]:
                    facts[rank] = HostFacts(**row["facts"])
        return numbers, dict(sorted(facts.items()))

    def follow(self) -> tuple[str, Hosts]:
        """Do the part of a rank other than 0; start over when another rank 0 leads."""
        me, number = self.job.rank, secrets.token_hex(8)
        while True:
            start = self._take(_START, "Rank 0")
            own = {"number": number, "facts": self.own}
            self.store.set(f"{start}/facts/{me}", json.dumps(own))
            plan: Any = json.loads(self._take(f"{start}/plan", "Rank 0", start) or "{}")
            if plan.get("numbers", {}).get(str(me)) == number:
                break
            while self._leads(start):  # This is the plan of an earlier start.
                self._pause("Rank 0")
        if why := plan["why"]:
            raise ConfigError(why)
        row: dict[str, Any] = {k: tuple(x) if isinstance(x, list) else x for k, x in plan["hosts"].items()}
        hosts = Hosts(**row)
        if self.own:
            self.store.set(f"{start}/tried/{me}", _try_ports(hosts, hosts.names[hosts.of(me)]))
        if why := self._take(f"{start}/verdict", "Rank 0"):
            raise ConfigError(why)
        return start, hosts

    def _leads(self, start: str) -> bool:
        return self.store.get(_START).decode() == start

    def _take(self, key: str, who: str, start: str = "") -> str:
        """Wait for a key; returns '' if the rank 0 of `start` was replaced by another."""
        while not self.store.check([key]):
            if start and not self._leads(start):
                return ""
            self._pause(who)
        return self.store.get(key).decode()

    def _pause(self, who: str) -> None:
        why = f"{who} did not come to the meeting of the hosts (--startup-timeout). See the output of "
        self.wait.pause(f"{why}torchrun there.")


def _own_facts(config: TrainConfig, job: Job) -> HostFacts:
    import torch

    from asyncrl.devices.tensors import count_gpus

    host, port = job.store
    try:
        place = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
        with socket.socket() as link:
            link.settimeout(REACH_DEADLINE)
            link.connect(place)
            address, store_address = link.getsockname()[0], link.getpeername()[0]
    except OSError as error:
        raise RunError(
            f"The job's store at {host}:{port} cannot be reached over IPv4 ({error.strerror or error}), "
            "by which the hosts of a run find their addresses. Give torchrun an IPv4 address: "
            "--rdzv-endpoint HOST:PORT and --local-addr."
        ) from None
    folder = Path(asyncrl.__file__).parent
    files = sorted(folder.rglob("*.py"))
    digest = _digest(b"".join(f"{x.relative_to(folder)}".encode() + x.read_bytes() for x in files))
    return HostFacts(
        name=socket.gethostname(),
        code=f"{asyncrl.__version__} ({digest})",
        torch=torch.__version__.partition("+")[0],
        settings=digests(config, sys.argv[1:]),
        address=address,
        store_address=store_address,
        gpus=count_gpus(config.device),
    )


def _placed(facts: dict[int, HostFacts], size: int) -> Hosts:
    first, second, *more = facts.values()
    address = first.address
    if ipaddress.ip_address(address).is_loopback:  # It reached itself so; the others as they reach the store.
        address = second.store_address
    return Hosts(
        names=tuple(host.name for host in facts.values()),
        first_ranks=tuple(facts),
        size=size,
        addresses=(address, *(host.address for host in (second, *more))),
    )


def _try_ports(hosts: Hosts, name: str) -> str:
    """Return an error if host `name` cannot reach a port of the first host; empty if it reaches all."""
    listening = (("--replay.listen", hosts.replay, "the replay"),)
    for flag, endpoint, who in (*listening, ("--weights.listen", hosts.weights, "the learner's weights")):
        address, port = address_of(endpoint)
        try:
            socket.create_connection((address, port), timeout=REACH_DEADLINE).close()
        except OSError as error:
            return (
                f"{name} cannot reach {address}:{port}, where {who} of {hosts.names[0]} listens "
                f"({flag}): {error.strerror or error}. Set {flag} to an address of a network that all "
                "hosts share, and open the ports between the hosts."
            )
    return ""

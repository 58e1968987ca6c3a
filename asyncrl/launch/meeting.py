"""Lets the hosts of a job meet before anything is loaded, and refuses those that cannot work together.

    rank k > 0                                     rank 0
    1  hello: a number made up now
                                                   2  welcome to that number: the name of this start
    3  facts (the first rank of a host; the others only that they came)
                                                   4  compares them, opens the ports it will need, leaves a
                                                      file where the run's folder will be, says where
    5  the first rank of each host tries these ports, those of other learners' hosts, and the file
                                                   6  verdict, closes the ports
    7  all go on, or all end with the same sentence

torchrun starts the ranks again under the same number when a host comes back, and what the ranks before them
said is still in the store: so the ranks know each other by a number made up now, and all that follows has
the name of this start. torchrun's own count of restarts is no such name: every host counts for itself. On
one host nobody meets.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from asyncrl.config.run import TrainConfig
from asyncrl.errors import AsyncRLError, ConfigError, RunError, first_line
from asyncrl.launch import host_facts, networks, rendezvous
from asyncrl.launch.host_facts import HostFacts
from asyncrl.launch.hosts import Hosts
from asyncrl.observability import waits
from asyncrl.storage import run_folder

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

_START: Final = "start"
"""Key: the name of the start that is led."""
SEE_DEADLINE: Final = 15.0
"""Seconds that a network file system has to show what another host wrote."""
POLL_INTERVAL: Final = 0.05
"""Seconds between two looks into the store."""
Checks = Callable[[Hosts, list[HostFacts]], Hosts]
"""Raises ConfigError for what cannot work on these hosts; says where the first one will listen."""


class Stopped(AsyncRLError):
    """The meeting ended because this process was asked to."""


class _StartedAnew(Exception):
    """The rank 0 that gave this rank a welcome is gone, and another one leads."""


@dataclass(frozen=True, kw_only=True)
class _Seat:
    """This rank's way to the others."""

    store: Store
    until: float
    stop_requested: Callable[[], bool]

    def take(self, key: str, who: str, start: str = "") -> str:
        """Wait for a key."""
        while not self.store.check([key]):
            if start and self.store.get(_START).decode() != start:
                raise _StartedAnew
            self.pause(who)
        return self.store.get(key).decode()

    def pause(self, who: str) -> None:
        """Let a moment pass, unless the meeting is over. `who` is missing."""
        if self.stop_requested():
            raise Stopped("A stop was asked for.")
        if time.monotonic() > self.until:
            raise RunError(
                f"{who} did not come to the meeting of the hosts (--startup-timeout). See the output of "
                "torchrun there."
            )
        time.sleep(POLL_INTERVAL)


def meet(
    config: TrainConfig,
    checks: Checks,
    *,
    environ: MutableMapping[str, str] = os.environ,
    stop_requested: Callable[[], bool] = lambda: False,
    now: Callable[[], float] = time.time,
) -> Hosts:
    """Meet the other hosts of this job; called by every rank. With one host it returns at once."""
    here, ranks = rendezvous.ranks_here(environ), rendezvous.world_size(environ)
    if len(here) == ranks:
        hosts = Hosts(size=ranks)
        return hosts if rendezvous.rank(environ) else checks(hosts, [])
    rendezvous.require_torchrun(environ)
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    deadline = config.startup_timeout
    try:
        seat = _Seat(
            store=PrefixStore("meeting", rendezvous.job_store(deadline, environ, every_attempt=True)),
            until=time.monotonic() + deadline,
            stop_requested=stop_requested,
        )
        with waits.waiting(waits.HOSTS, deadline):
            if rendezvous.rank(environ) == 0:
                name, hosts = _lead(seat, config, checks, environ, now)
            else:
                name, hosts = _follow(seat, config, environ, now)
    except dist.DistError as error:
        raise RunError(
            f"Rank {rendezvous.rank(environ)} lost the job's store at {rendezvous.place(environ)} while the "
            f"hosts met ({first_line(error)}). Rank 0 has failed or cannot be reached: see its output, and "
            "check that this address is open between the hosts."
        ) from None
    environ[rendezvous.START] = name
    return hosts


def _lead(
    seat: _Seat, config: TrainConfig, checks: Checks, environ: Mapping[str, str], now: Callable[[], float]
) -> tuple[str, Hosts]:
    """Rank 0's part."""
    start = secrets.token_hex(8)
    seat.store.set(_START, start)
    with ExitStack() as open_ports:
        said = _gather(seat, start, rendezvous.world_size(environ), now)
        said[0] = _own(config, environ, open_ports).to_json()
        why, file, hosts, tried = "", Path(), Hosts(), list[_Port]()
        try:
            facts = [host_facts.read(text, rank) for rank, text in sorted(said.items()) if text]
            host_facts.check_agree(facts)
            hosts = checks(_placed(facts), facts)
            tried = _open(hosts, config, open_ports)
            file = _leave_file(config, start, open_ports)
        except ConfigError as error:
            why = str(error)
        ports = [port.row() for port in tried]
        places = {"why": why, "hosts": hosts.to_row(), "ports": ports, "file": str(file)}
        seat.store.set(f"{start}/places", json.dumps(places))
        if why:
            raise ConfigError(why)
        for rank in hosts.first_ranks[1:]:
            key = f"{start}/reached/{rank}"
            why = why or seat.take(key, f"The first rank of {hosts.name_of(rank)} (rank {rank})")
        seat.store.set(f"{start}/verdict", why)
    if why:
        raise ConfigError(why)
    return start, hosts


def _gather(seat: _Seat, start: str, ranks: int, now: Callable[[], float]) -> dict[int, str]:
    """Welcome every rank, however often it comes anew, until all said what they have to say."""
    said: dict[int, str] = {}
    welcomed: dict[int, str] = {}
    while True:
        for rank in range(1, ranks):
            if rank in said:
                continue
            if seat.store.check([key := f"{start}/facts/{rank}"]):
                said[rank] = seat.store.get(key).decode()
            elif seat.store.check([f"hello/{rank}"]):
                number = seat.store.get(f"hello/{rank}").decode()
                if number != welcomed.get(rank):
                    welcomed[rank] = number
                    welcome = json.dumps({"start": start, "now": now()})
                    seat.store.set(f"welcome/{rank}/{number[:64]}", welcome)
        if len(said) == ranks - 1:
            return said
        seat.pause(f"Rank {next(rank for rank in range(1, ranks) if rank not in said)}")


def _follow(
    seat: _Seat, config: TrainConfig, environ: Mapping[str, str], now: Callable[[], float]
) -> tuple[str, Hosts]:
    """The part of any other rank, again from the beginning when another rank 0 leads meanwhile."""
    while True:
        with contextlib.suppress(_StartedAnew):
            return _come(seat, config, environ, now)


def _come(
    seat: _Seat, config: TrainConfig, environ: Mapping[str, str], now: Callable[[], float]
) -> tuple[str, Hosts]:
    me, number = rendezvous.rank(environ), secrets.token_hex(8)
    asked = now()
    seat.store.set(f"hello/{me}", number)
    welcome = json.loads(seat.take(f"welcome/{me}/{number}", "Rank 0"))
    ahead, start = _ahead(asked, now(), welcome["now"]), str(welcome["start"])
    first = me == rendezvous.ranks_here(environ).start
    with ExitStack() as open_ports:
        facts = ""
        if first:
            facts = replace(_own(config, environ, open_ports), clock_ahead=ahead).to_json()
        seat.store.set(f"{start}/facts/{me}", facts)
        places: Any = json.loads(seat.take(f"{start}/places", "Rank 0", start))
        if why := places["why"]:
            raise ConfigError(why)
        hosts = Hosts.from_row(places["hosts"])
        if first:
            ports = [_Port(*row) for row in places["ports"]]
            why = _try(ports, hosts, hosts.of(me)) or _see(Path(places["file"]), hosts, hosts.of(me))
            seat.store.set(f"{start}/reached/{me}", why)
        if why := seat.take(f"{start}/verdict", "Rank 0", start):
            raise ConfigError(why)
    return start, hosts


def _ahead(asked: float, answered: float, first_host: float) -> float:
    """Seconds that this clock is ahead of another's, at least: that was read between two readings of this."""
    if asked <= first_host <= answered:
        return 0.0
    return asked - first_host if asked > first_host else answered - first_host


def _own(config: TrainConfig, environ: Mapping[str, str], open_ports: ExitStack) -> HostFacts:
    """This host's facts, with a port that others can try for as long as the meeting lasts."""
    host, _, port = rendezvous.place(environ).rpartition(":")
    try:
        address, store_address = networks.addresses_towards(host, int(port), networks.REACH_DEADLINE)
        # A first host that reaches itself so is reached by the others at another address.
        own = "0.0.0.0" if networks.is_loopback(address) else address  # noqa: S104
        probe = open_ports.enter_context(networks.listen(own))
    except OSError as error:
        raise RunError(
            f"The job's store at {host}:{port} cannot be reached over IPv4 ({error.strerror or error}), by "
            "which the hosts of a run find their addresses. Give torchrun an IPv4 address: --rdzv-endpoint "
            "HOST:PORT and --local-addr."
        ) from None
    return host_facts.own(
        config,
        rendezvous.ranks_here(environ),
        environ,
        address=address,
        store_address=store_address,
        port=int(probe.getsockname()[1]),
    )


def _placed(facts: list[HostFacts]) -> Hosts:
    """Say who is where. The first host has the store, and so the address by which others reach that."""
    last = facts[-1]
    first = facts[0].address
    if networks.is_loopback(first):  # It reached itself so.
        first = facts[1].store_address
    return Hosts(
        names=tuple(host.name for host in facts),
        first_ranks=tuple(host.first_rank for host in facts),
        size=last.first_rank + last.ranks,
        addresses=(first, *(host.address for host in facts[1:])),
        ports=tuple(host.port for host in facts),
    )


@dataclass(frozen=True)
class _Port:
    """One that is tried."""

    host: int
    """Number of the host that has it."""
    address: str
    port: int
    flag: str
    """That changes it."""
    what: str
    """Who listens there."""
    tried_by: Sequence[int]
    """Numbers of the hosts that need it."""
    remedy: str
    """What to do when one of them cannot reach it."""

    def row(self) -> list[object]:
        """Write it for the store."""
        return [self.host, self.address, self.port, self.flag, self.what, list(self.tried_by), self.remedy]


def _open(hosts: Hosts, config: TrainConfig, open_ports: ExitStack) -> list[_Port]:
    """Open the ports that the run will need, so that the others can try them."""
    found: list[_Port] = []
    for flag, endpoint, what in (
        ("--replay.listen", hosts.replay, "the replay"),
        ("--weights.listen", hosts.weights, "the learner's weights"),
    ):
        address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        if not endpoint:
            continue
        try:
            open_ports.enter_context(networks.listen(address, int(port)))
        except OSError as error:
            raise ConfigError(
                f"{flag} is {endpoint} on {hosts.names[0]}, but it cannot be opened ({error.strerror}). "
                "Choose another address, or end what has it."
            ) from None
        remedy = f"Set {flag} to an address of a network that all hosts share"
        found.append(_Port(0, address, int(port), flag, what, range(len(hosts.names)), remedy))
    backend = "gloo" if config.device == "cpu" else "NCCL"
    network = "let torchrun use it: --local-addr and --rdzv-endpoint"
    for flag, numbers, what, remedy in (
        (
            "--placement",
            hosts.learners,
            f"a learner rank, with {backend},",
            "Place learners on hosts of one network",
        ),
        (
            "--weights.between-hosts",
            hosts.broadcasts,
            f"the broadcast of weights, with {config.weights.between_hosts},",
            "Use --weights.between-hosts tcp, or hosts of one network",
        ),
    ):
        for number in numbers if len(numbers) > 1 else ():
            address, port = hosts.addresses[number], hosts.ports[number]
            found.append(_Port(number, address, port, flag, what, numbers, f"{remedy}, or {network}"))
    return found


def _try(ports: list[_Port], hosts: Hosts, me: int) -> str:
    """Say which port of another host this one cannot reach; empty: none."""
    for port in ports:
        concerned = port.host != me and me in port.tried_by
        if concerned and (why := networks.why_unreachable(port.address, port.port)):
            return (
                f"{hosts.names[me]} cannot reach {port.address}:{port.port}, where {port.what} of "
                f"{hosts.names[port.host]} listens ({port.flag}): {why}. {port.remedy}, and open the ports "
                "between the hosts."
            )
    return ""


def _leave_file(config: TrainConfig, start: str, closing: ExitStack) -> Path:
    """Leave a file beside the run's folder, which all hosts must see; it goes with the meeting."""
    file = run_folder.parent_of(config) / f".asyncrl-{start}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
    except OSError as error:
        raise ConfigError(
            f"--run-dir is {config.run_dir}, but {file.parent} cannot be written ({error.strerror}). Choose "
            "another folder."
        ) from None
    closing.callback(file.unlink, missing_ok=True)
    return file


def _see(file: Path, hosts: Hosts, me: int) -> str:
    """Say that this host does not see the file of the first one; empty when it does."""
    until = time.monotonic() + SEE_DEADLINE
    while not file.exists():
        if time.monotonic() > until:
            return (
                f"{hosts.names[me]} does not see the folder {file.parent} of {hosts.names[0]}, in which "
                "--run-dir lies, and through it hosts get the run's keys, checkpoints and worlds. Set "
                "--run-dir to a folder that all hosts see under one path, or start actors there with "
                "`asyncrl actor --join`, which need none."
            )
        time.sleep(POLL_INTERVAL)
    return ""

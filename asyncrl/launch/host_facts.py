"""What every host of a job says of itself before anything is loaded, and what must agree. Pure but for `own`.

The facts travel through torchrun's store, which others can read: settings are compared by their digests.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import asyncrl
from asyncrl.config.loading import to_json
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch import networks

CLOCK_TOLERANCE: Final = 10.0
"""Seconds that the clocks of two hosts may differ: locks of network file systems and the order of files are
judged by time."""
MOST_CHARACTERS: Final = 1 << 20
"""Of one host's facts."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Of one host, said by its first rank."""

    name: str
    """What the host is called."""
    first_rank: int
    ranks: int
    """How many it has, from the first one on."""
    code: str
    """Version and digest of asyncrl's files."""
    torch: str
    """Version of PyTorch."""
    settings: dict[str, str] = field(default_factory=dict)
    """Flag -> digest of its value; with --resume one digest of all arguments."""
    address: str = ""
    """IPv4 address of this host towards the job's store."""
    store_address: str = ""
    """IPv4 address of the store's host as this host reaches it."""
    port: int = 0
    """Of `address`, on which it can be tried for the length of the meeting; 0: none."""
    gpus: int = 0
    """That PyTorch sees; 0 with --device cpu."""
    missing_interface: str = ""
    """See `networks.missing_interface`."""
    clock_ahead: float = 0.0
    """Seconds that its clock is ahead of the first host's, at least; negative: behind."""

    def to_json(self) -> str:
        """Write it for the store."""
        return json.dumps(asdict(self))


def own(
    config: TrainConfig, ranks: range, environ: Mapping[str, str] = os.environ, **measured: Any
) -> HostFacts:
    """Return this host's facts."""
    import torch

    return HostFacts(
        name=socket.gethostname(),
        first_rank=ranks.start,
        ranks=len(ranks),
        code=f"{asyncrl.__version__} ({digest_of_code()})",
        torch=torch.__version__.partition("+")[0],
        settings=digests(config, sys.argv[1:]),
        gpus=torch.cuda.device_count() if config.device != "cpu" else 0,
        missing_interface=networks.missing_interface(environ, networks.interfaces()),
        **measured,
    )


def digests(config: TrainConfig, arguments: Sequence[str]) -> dict[str, str]:
    """Sum up every setting by its flag; a resumed run's come from its folder, so there the arguments."""
    if config.resume:
        return {"resume": _digest(json.dumps(list(arguments)))}
    found: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                walk(f"{prefix}.{name}" if prefix else name, inner)
        else:
            found[prefix.replace("_", "-")] = _digest(json.dumps(value, sort_keys=True))

    walk("", json.loads(to_json(config)))
    return found


def digest_of_code() -> str:
    """Sum up the package's Python files."""
    folder, found = Path(asyncrl.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def read(text: str, rank: int) -> HostFacts:
    """Read what another host wrote into the store."""
    kinds = {"str": str, "int": int, "float": (int, float), "dict[str, str]": dict}
    try:
        row: Any = json.loads(text[:MOST_CHARACTERS])
        for each in fields(HostFacts):
            if not isinstance(row[each.name], kinds[str(each.type)]):
                raise TypeError(each.name)
        return HostFacts(**row)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunError(
            f"Rank {rank} said something of its host that cannot be read ({error!r}). Do all hosts run the "
            "same asyncrl, and does nobody else write into torchrun's store?"
        ) from None


def check_agree(hosts: Sequence[HostFacts]) -> None:
    """Check that all hosts have the same code and settings, and clocks that agree."""
    first = hosts[0]
    for other in hosts[1:]:
        for what, here, there in (("asyncrl", first.code, other.code), ("torch", first.torch, other.torch)):
            if here != there:
                raise ConfigError(
                    f"{other.name} has {what} {there}, but {first.name}, the first host, has {here}, and all "
                    "hosts of a run need the same. Install the same on both."
                )
        differing = [
            name
            for name in sorted({*first.settings, *other.settings})
            if first.settings.get(name) != other.settings.get(name)
        ]
        if differing:
            flag = "other arguments" if first.settings.keys() == {"resume"} else f"another --{differing[0]}"
            more = f" (and {len(differing) - 1} more flags)" if len(differing) > 1 else ""
            raise ConfigError(
                f"{other.name} was started with {flag} than {first.name}, the first host{more}. Give "
                "torchrun the same arguments, and the same configuration file, on every host."
            )
        if abs(other.clock_ahead) > CLOCK_TOLERANCE:
            way = "ahead of" if other.clock_ahead > 0 else "behind"
            raise ConfigError(
                f"The clock of {other.name} is {abs(other.clock_ahead):.0f} s {way} that of {first.name}, "
                f"and more than {CLOCK_TOLERANCE:.0f} s make locks and files of --run-dir look too old or "
                "too new. Set it, for example with chronyc makestep."
            )


def check_devices(hosts: Sequence[HostFacts], learners: Sequence[int]) -> None:
    """Check that learner ranks have GPUs of their own and interfaces to talk over."""
    counts = [(host, sum(_has(host, rank) for rank in learners)) for host in hosts]
    concerned = [(host, count) for host, count in counts if count]
    for host, count in concerned:
        if bool(host.gpus) != bool(hosts[0].gpus):
            raise ConfigError(
                f"--device: {host.name} has {host.gpus} GPUs and {hosts[0].name} {hosts[0].gpus}, but "
                "learner ranks compute all on GPUs or all on CPUs. Use --device cpu, or other hosts."
            )
        if host.gpus and count > host.gpus:
            raise ConfigError(
                f"--placement names {count} learner ranks on {host.name}, which has {host.gpus} GPU(s), and "
                "NCCL takes one rank per GPU. Name fewer there, or use --device cpu."
            )
        if len(concerned) > 1 and host.missing_interface:
            raise ConfigError(
                f"{host.name} has no network interface that {host.missing_interface} names, so its learner "
                f"ranks (--placement) could not reach those of {hosts[0].name}. Set the variable on each "
                "host to an interface of the network that they share, or unset it."
            )


def check_broadcasts(hosts: Sequence[HostFacts], numbers: Sequence[int], transport: str) -> None:
    """Check that hosts can broadcast weights to each other."""
    for host in (hosts[number] for number in numbers):
        if not host.gpus and ":" not in transport:
            raise ConfigError(
                f"--weights.between-hosts is nccl, which carries weights between GPUs, but {host.name} has "
                "none (or --device is cpu). Use --weights.between-hosts tcp, which is encrypted."
            )
        if host.missing_interface:
            raise ConfigError(
                f"{host.name} has no network interface that {host.missing_interface} names, so weights "
                "could not be broadcast to it (--weights.between-hosts nccl). Set the variable on each host "
                "to an interface of the network that they share, or unset it."
            )


def _has(host: HostFacts, rank: int) -> bool:
    return host.first_rank <= rank < host.first_rank + host.ranks


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]

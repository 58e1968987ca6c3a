"""Parse --placement: the ranks that learn and that imagine, and their devices. Pure.

auto                                a word, see `WORDS`
learner=0-1,actor=2-3               role=rank or role=first-last, in numbers of the whole job
learner=0-7@0,actor=0-7@1           the same in numbers of a host: the 0th and the 1st, in the order of ranks
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest

from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.job import Hosts

RELAYED = "shared_memory"  # The carrier from a relay to the actors of its host
ROLES = ("learner", "actor")
WORDS = ("auto", "collocated", "disaggregated")  # Placements that fit any number of ranks; see `_by_word`
EXAMPLE = "Write for example 'learner=0,actor=1-3' or 'learner=0-1,actor=2-3', or leave --placement out."
_ITEM = re.compile(r"(?:(?P<role>[a-z]+)=)?(?P<first>\d{1,4})(?:-(?P<last>\d{1,4}))?(?:@(?P<host>\d{1,4}))?")


def read_ranks(text: str) -> dict[str, list[int]]:
    """Return the ranks of every role, ascending, counted over all hosts."""
    items = _items(text)
    before = (0, *accumulate(_sizes(items)))
    ranks: dict[str, list[int]] = {role: [] for role in ROLES}
    for role, named, host in items:
        first = before[host or 0]
        ranks[role] += range(first + named.start, first + named.stop)
    return {role: sorted(found) for role, found in ranks.items()}


def sizes_of_hosts(text: str) -> tuple[int, ...]:
    """Return the number of ranks of each host that the text names; () if it names no hosts."""
    return () if text in WORDS else _sizes(_items(text))


def span(first: int, count: int) -> str:
    """Write `count` ranks from `first` on: '0' or '2-3'."""
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


_Item = tuple[str, range, int | None]  # Role, ranks of the host or else of the job, host's number


def _items(text: str) -> list[_Item]:
    found: list[_Item] = []
    role = ""
    for item in text.replace(" ", "").split(","):
        match = _ITEM.fullmatch(item)
        role = (match and match["role"]) or role
        if match is None or not role:
            raise ConfigError(
                f"--placement is {text!r}, but {item!r} is not role=rank or role=first-last, nor is the text "
                f"one of {', '.join(WORDS)}. {EXAMPLE}"
            )
        if role not in ROLES:
            raise ConfigError(
                f"--placement names the role {role!r}, but there are only {', '.join(ROLES)}. {EXAMPLE}"
            )
        first, last = int(match["first"]), int(match["last"] or match["first"])
        if last < first:
            raise ConfigError(
                f"--placement has the range {item!r}, which ends before it begins. Use {last}-{first}."
            )
        found.append((role, range(first, last + 1), None if match["host"] is None else int(match["host"])))
    without = [named for _, named, host in found if host is None]
    if without and len(without) < len(found):
        raise ConfigError(
            f"--placement is {text!r}, which names the host of some ranks (@) and not of rank "
            f"{without[0].start}. Name it for all, or number all ranks over the whole job."
        )
    return found


def _sizes(items: list[_Item]) -> tuple[int, ...]:
    """Return each host's number of ranks: every rank has a role, so the highest one named is the last."""
    stops: dict[int, int] = {}
    for _, named, host in items:
        if host is not None:
            stops[host] = max(stops.get(host, 0), named.stop)
    return tuple(stops.get(number, 0) for number in range(max(stops, default=-1) + 1))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The ranks of both roles, ascending. A rank may have both."""

    learners: tuple[int, ...]
    actors: tuple[int, ...]

    def roles(self, rank: int) -> list[str]:
        """Return the roles of a rank, in the words of `ROLES`."""
        return [role for role, of in zip(ROLES, (self.learners, self.actors), strict=True) if rank in of]

    @property
    def ranks(self) -> list[int]:
        """All ranks, ascending."""
        return sorted({*self.learners, *self.actors})

    @property
    def summary(self) -> str:
        """A description for the console, like '1 learner + 2 actors'."""
        counts = zip(map(len, (self.learners, self.actors)), ROLES, strict=True)
        return " + ".join(f"{count} {role}{'s' * (count > 1)}" for count, role in counts if count)


def parse_placement(text: str, world_size: int, *, joined: bool = False) -> Placement:
    """Read `--placement` for `world_size` ranks; with `joined`, actors may join later."""
    if text in WORDS:
        return _by_word(text, world_size)
    ranks = read_ranks(text)
    _check_roles(ranks, joined)
    _check_ranks(ranks, world_size)
    if ranks["learner"] != list(range(len(ranks["learner"]))):
        named = ", ".join(map(str, ranks["learner"]))
        raise ConfigError(
            f"--placement puts learners on rank {named}, but rank 0 leads them: it opens the run folder, the "
            "replay and the weight channel. Give the learners the first ranks: learner=0, or learner=0-1."
        )
    return Placement(learners=tuple(ranks["learner"]), actors=tuple(ranks["actor"]))


def checked_placement(config: TrainConfig, world_size: int) -> Placement:
    """Read the placement of a run; an update needs at least one group per learner rank."""
    placement = parse_placement(config.placement, world_size, joined=bool(config.replay.listen))
    groups, ranks = config.algorithm.groups_per_update, len(placement.learners)
    if groups < ranks:
        raise ConfigError(
            f"--algorithm.groups-per-update is {groups}, but --placement names {ranks} learner "
            f"ranks, and each needs a group of episodes to learn from. Use {ranks} or a multiple of it, or "
            "name fewer learner ranks."
        )
    return placement


def _by_word(word: str, ranks: int) -> Placement:
    everyone, half = tuple(range(ranks)), ranks // 2
    if word == "auto":
        return Placement(learners=(0,), actors=everyone[1:] or (0,))
    if word == "disaggregated":
        return Placement(learners=everyone[:half] or (0,), actors=everyone[half:])
    return Placement(learners=everyone, actors=everyone)


def check_on_hosts(config: TrainConfig, hosts: Hosts, gpus: Mapping[int, int]) -> tuple[Placement, Hosts]:
    """Check the placement on these hosts and GPUs; return it, and the hosts with `broadcasts` filled in."""
    check_sizes(config.placement, hosts)
    placement = checked_placement(config, hosts.size)
    check_learner_devices(placement, hosts, gpus)
    copies_of(config, placement, hosts)
    others = {hosts.of(rank) for rank in placement.actors} - {0}
    if others and config.weights.between_hosts == "nccl":
        hosts = replace(hosts, broadcasts=(0, *sorted(others)))
        check_broadcasts(hosts, gpus, config.weights.transport)
    return placement, hosts


def check_sizes(text: str, hosts: Hosts) -> None:
    """Check the hosts that a placement names against those that torchrun started ranks on."""
    if named := sizes_of_hosts(text):
        started = (len(hosts.ranks(number)) for number in range(len(hosts.names)))
        for number, (wanted, there) in enumerate(zip_longest(named, started, fillvalue=0)):
            if wanted != there:
                where = f" ({hosts.names[number]})" if number < len(hosts.names) else ""
                raise ConfigError(
                    f"--placement names {wanted} ranks on host {number}{where}, but torchrun started {there} "
                    "there. Hosts are numbered from 0 in the order of their ranks: start as many with "
                    "--nproc-per-node and --nnodes, or name others."
                )


def check_learner_devices(placement: Placement, hosts: Hosts, gpus: Mapping[int, int]) -> None:
    """Check that all learner ranks have their own GPUs, or none; `gpus`: host number -> number of GPUs."""
    first = next(iter(gpus))
    for number, count in gpus.items():
        name, learners = hosts.names[number], sum(rank in hosts.ranks(number) for rank in placement.learners)
        if learners and bool(count) != bool(gpus[first]):
            raise ConfigError(
                f"--device: {name} has {count} GPUs and {hosts.names[first]} {gpus[first]}, but "
                "learner ranks compute all on GPUs or all on CPUs. Use --device cpu, or other hosts."
            )
        if count and learners > count:
            raise ConfigError(
                f"--placement names {learners} learner ranks on {name}, which has {count} GPU(s), and "
                "NCCL takes one rank per GPU. Name fewer there, or use --device cpu."
            )


def check_broadcasts(hosts: Hosts, gpus: Mapping[int, int], transport: str) -> None:
    """Check that hosts can broadcast weights to each other; a transport of the user's may need no GPU."""
    without = [number for number in hosts.broadcasts if not gpus[number]]
    if ":" not in transport and without:
        raise ConfigError(
            "--weights.between-hosts is nccl, which carries weights between GPUs, but "
            f"{hosts.names[without[0]]} has none (or --device is cpu). Use --weights.between-hosts tcp, "
            "which is encrypted."
        )


def transport_of(config: TrainConfig, placement: Placement, here: range) -> str:
    """Choose the carrier of the weights on rank 0's host, whose ranks are `here`."""
    from asyncrl.devices.tensors import pick_device

    if config.weights.transport != "auto":
        return config.weights.transport
    learner = pick_device(config.device, placement.learners[0])
    actors = [pick_device(config.device, rank) for rank in placement.actors if rank in here]
    # NCCL takes one process of a group per GPU. Other learner ranks may share it: they are in another group.
    remote = [actor for actor in actors if actor != learner]
    if learner.type == "cpu" or len(set(remote)) < len(remote):
        return "shared_memory"  # Also for two actors on a GPU that is not the learner's.
    return "nccl" if len(remote) == len(actors) else "cuda_ipc"


def copies_of(config: TrainConfig, placement: Placement, hosts: Hosts) -> int:
    """Return the number of copies of the policy over the learner ranks: one, or one on each host."""
    counts = Counter(hosts.of(rank) for rank in placement.learners)
    if config.learner.shard == "all" or len(counts) == 1:
        return 1
    if len(set(counts.values())) > 1:
        by_host = ", ".join(f"{count} on {hosts.names[number]}" for number, count in sorted(counts.items()))
        raise ConfigError(
            f"--learner.shard is host, but --placement names different numbers of learner ranks ({by_host}), "
            "and each of a host has the same part as one of every other. Name as many on each, or use "
            "--learner.shard all."
        )
    return len(counts)


def threads_of_actor(actors: int, cores: int) -> int:
    """Return the CPU threads of each actor: a second one only if no two actors compete for a core."""
    return 2 if cores >= 2 * actors else 1


def ranks_named(text: str) -> int:
    """Return the number of ranks that `--placement` needs; 1 for a word, which fits any number."""
    if text in WORDS:
        return 1
    return 1 + max((rank for named in read_ranks(text).values() for rank in named), default=0)


def only_learns(text: str) -> bool:
    """Return True if `--placement` names no actor: all of them join later."""
    return text not in WORDS and not read_ranks(text)["actor"]


def _check_roles(ranks: dict[str, list[int]], joined: bool) -> None:
    if not ranks["learner"]:
        raise ConfigError(f"--placement names no learner, but a run needs one. {EXAMPLE}")
    if not (ranks["actor"] or joined):
        raise ConfigError(
            "--placement names no actor, and without --replay.listen no actor can join the run. Set "
            f"--replay.listen tcp://ADDRESS:PORT and start actors with `asyncrl actor --join`. {EXAMPLE}"
        )


def _check_ranks(ranks: dict[str, list[int]], world_size: int) -> None:
    for role, named in ranks.items():
        if twice := [rank for rank, count in Counter(named).items() if count > 1]:
            raise ConfigError(f"--placement names rank {twice[0]} twice as {role}. Name it once.")
    used = {rank for named in ranks.values() for rank in named}
    started = f"{world_size} ranks (0-{world_size - 1})" if world_size > 1 else "1 rank (0)"
    if (highest := max(used)) >= world_size:
        raise ConfigError(
            f"--placement names rank {highest}, but torchrun started {started}. "
            f"Start more with --nproc-per-node {highest + 1} or name only ranks that exist."
        )
    if idle := [rank for rank in range(world_size) if rank not in used]:
        raise ConfigError(
            f"--placement gives rank {idle[0]} nothing to do, but torchrun started {started}. "
            f"Add actor={idle[0]} or start fewer with --nproc-per-node."
        )

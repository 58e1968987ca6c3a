"""Check the GPUs, and the ranks that --placement puts on them."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Final

import torch

from asyncrl.config.run import TrainConfig
from asyncrl.devices.tensors import count_gpus, pick_device
from asyncrl.doctor.checks import Examination, Finding, Sizes, broken, ok, one_line, warning
from asyncrl.doctor.host import GIB, free_memory, placement_of
from asyncrl.errors import ConfigError
from asyncrl.launch import placement as placements
from asyncrl.launch.job import Hosts
from asyncrl.launch.placement import RELAYED, Placement, transport_of

HOST: Final = "memory of the host"


def check_devices(_: Examination) -> Finding:
    """Name the GPUs, or the reason why torch sees none."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        properties = [torch.cuda.get_device_properties(index) for index in range(count)]
        return ok("devices", ", ".join(f"{x.name} {x.total_memory / GIB:.0f} GiB" for x in properties))
    if torch.version.cuda and said:
        why = one_line(said[0].message)
        return warning("devices", f"CPU; torch is built for CUDA {torch.version.cuda}, but: {why}")
    return ok("devices", "CPU (no CUDA device)")


def hosts_of(examination: Examination) -> Hosts:
    """Return the hosts of --placement; one host with all ranks if it names none."""
    text, number = examination.config.placement, examination.host
    sizes = placements.sizes_of_hosts(text) or (placements.ranks_named(text),)
    if number >= len(sizes):
        raise ConfigError(
            f"--host is {number}, but --placement {text} names {len(sizes)} host(s), counted from 0. Name "
            "this host's number there."
        )
    return Hosts.of_sizes(sizes)


def check_placement(examination: Examination) -> Finding:
    """Check that ranks, devices and the transport of the weights fit together on this host."""
    from asyncrl.weights.interface import build_transport

    config = examination.config
    try:
        hosts = hosts_of(examination)
        placement = placements.checked_placement(config, hosts.size)
        placements.check_learner_devices(placement, hosts, {examination.host: count_gpus(config.device)})
        by_rank = devices_of(config, placement, hosts.ranks(examination.host))
        first = next(iter(by_rank.values()))
        transport = RELAYED if examination.host else transport_of(config, placement, hosts.ranks(0))
        if first.type == "cpu":
            build_transport(transport, first, config.weights.timeout)
    except ConfigError as error:
        return broken("placement", one_line(error))
    spread = ", ".join(
        f"rank {rank} ({' + '.join(placement.roles(rank))}) on {on}" for rank, on in by_rank.items()
    )
    seen = f"{spread}; weights by {transport}"
    if hosts.several:
        between = config.weights.between_hosts
        seen = f"host {examination.host} of {len(hosts.names)}: {seen}, between hosts by {between}"
        if between == "nccl" and first.type == "cpu":
            advice = "Use --weights.between-hosts tcp, which is encrypted."
            return broken("placement", f"{seen}, but NCCL takes a GPU of each host.", advice)
    gpus = torch.cuda.device_count() if first.type == "cuda" else 0
    actors = [by_rank[rank] for rank in placement.actors if rank in by_rank]
    if transport == "nccl" and len({first, *actors}) < 1 + len(actors):
        advice = "Use --weights.transport auto, or place every actor on a GPU of its own."
        return broken("placement", f"{seen}, but NCCL takes one process per GPU.", advice)
    sharing = sum(device.type == "cuda" for device in by_rank.values())
    if gpus and sharing > gpus:
        advice = f"Name at most {gpus} ranks for the best speed."
        return warning("placement", f"{seen}; {sharing} ranks share {gpus} GPU(s).", advice)
    if config.placement in placements.WORDS and gpus > 1:
        seen += f" (torchrun --nproc-per-node {gpus} uses all {gpus} GPUs)"
    return ok("placement", seen)


def placed_here(examination: Examination) -> tuple[Placement, dict[int, torch.device]] | None:
    """Return the placement and the device of every rank of this host; None if they are invalid."""
    try:
        placement = placement_of(examination.config)
        here = hosts_of(examination).ranks(examination.host)
        return placement, devices_of(examination.config, placement, here)
    except ConfigError:  # Reported by the check of the placement.
        return None


def devices_of(config: TrainConfig, placement: Placement, here: range) -> dict[int, torch.device]:
    """Return the device of every rank of this host."""
    return {rank: pick_device(config.device, rank - here.start) for rank in placement.ranks if rank in here}


def check_device_memory(examination: Examination) -> Finding | None:
    """Compare the estimated need of each device with its free memory; None while either is unknown."""
    sizes = examination.sizes
    if sizes is None or (placed := placed_here(examination)) is None:
        return None
    needed: Counter[str] = Counter()
    for rank, device in placed[1].items():
        name = str(device) if device.type == "cuda" else HOST
        needed[name] += rank_needs(examination.config, sizes, placed[0], rank)
    free = {name: free_on(name) for name in needed}
    seen = "; ".join(
        f"{name}: {needed[name] / GIB:.2f} of {free[name] / GIB:.1f} GiB that are free" for name in needed
    )
    unknown = "" if sizes.acting and sizes.slot.kept else "; the activations of a class of yours come on top"
    seen = f"models, training state and activations, estimated: {seen}{unknown}"
    tight = [name for name in needed if needed[name] > free[name]]
    if tight:
        return warning(
            "device memory",
            f"{seen}: too much for {', '.join(tight)}.",
            "For a learner use --lora.rank, --learner.precision bf16, --learner.gradient-checkpointing, a "
            "smaller --algorithm.micro-batch or more learner ranks; for an actor fewer --actor.slots, "
            "or --actor.pipeline-stages 2.",
        )
    return ok("device memory", seen)


def rank_needs(config: TrainConfig, sizes: Sizes, placement: Placement, rank: int) -> int:
    """Estimate the bytes on a rank's device: weights, training state, versions on their way, activations."""
    from asyncrl.actors.backend import split_slots

    roles = placement.roles(rank)
    needed = (
        learner_needs(config, sizes, len(placement.learners), first=rank == 0) if "learner" in roles else 0
    )
    if "actor" in roles:
        rows = max(map(len, split_slots(config.actor.slots, config.actor.pipeline_stages)))
        # One complete version is kept while the next one arrives.
        needed += sizes.policy + 2 * sizes.version + rows * sizes.acting
        drawing = sizes.slot.drawing(rows, graphs=config.imagination.compile)
        needed += sizes.environment + config.actor.slots * sizes.slot.kept + drawing
    return needed


def learner_needs(config: TrainConfig, sizes: Sizes, learners: int, *, first: bool) -> int:
    """Estimate the bytes of one of several learner ranks; the first one sends the versions."""
    spread = sizes.float32_masters - sizes.unsharded + sizes.training
    needed = sizes.unsharded + spread // learners
    if learners > 1 and not sizes.unsharded:
        # A block is gathered while the one before it computes.
        needed += sizes.policy if config.learner.reshard_after == "step" else 2 * sizes.block
    if config.algorithm.kl_coef and not config.lora.rank:
        needed += sizes.policy  # The frozen reference.
    if first:
        needed += 2 * sizes.version  # One version is sent while the next one is packed.
    return needed + config.algorithm.micro_batch * sizes.learning


def free_on(name: str) -> int:
    """Read the bytes that are free on 'cuda:N', or for this process in the host's memory."""
    return free_memory() if name == HOST else int(torch.cuda.mem_get_info(torch.device(name))[0])

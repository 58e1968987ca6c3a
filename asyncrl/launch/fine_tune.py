"""Fine-tune a policy or a world's network on recordings: adapters or all weights, on all ranks of torchrun.

Every rank reads the recordings and computes its part of every batch; rank 0 gathers and writes the network.
A world's autoencoder stays as it is.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncrl.devices.tensors import take_device
from asyncrl.errors import ConfigError
from asyncrl.fitting.fit_models import action_statistics, check_imitable, fit_policy, write_statistics
from asyncrl.fitting.loop import FitRanks, Schedule, parts_of
from asyncrl.fitting.recording_files import Frames, Recordings
from asyncrl.fitting.settings import FitPolicy, FitWorld
from asyncrl.fitting.world import WorldOptions, check_same_size, fit_class, load_fitted
from asyncrl.launch.job import read_job
from asyncrl.launch.named_models import named_policy
from asyncrl.learner.fsdp import shard, spread
from asyncrl.learner.ranks import LearnerRanks, joined_ranks
from asyncrl.learner.weight_export import ADAPTER_FOLDER, copy_policy, gather_to_host
from asyncrl.policies.acceleration import enable_gradient_checkpointing, recompute
from asyncrl.policies.lora import adapt, adapter_tensors, add_lora, merged_tensors, save_adapter
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from asyncrl.storage.assets import world_folder
from asyncrl.worlds.files import is_published, world_kind, world_title


def _ranks(config: FitPolicy | FitWorld, device: torch.device) -> AbstractContextManager[LearnerRanks]:
    job, who = read_job(), f"the other ranks that fine-tune a {config.MODEL}"
    return joined_ranks(device, job.rank, job.size, config.precision, who, who, remedy="start it again")


def _count_trained(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


def _report(config: FitPolicy | FitWorld, loss: str, trained: int) -> str:
    how = f"adapters of rank {config.lora.rank}" if config.lora.rank else "all weights"
    return f"{config.MODEL} in {config.out}: {loss}; {how}, {trained / 1e6:.1f} million numbers"


def fine_tune_policy(
    config: FitPolicy, recordings: Recordings, device: torch.device, drawn: Frames | None = None
) -> str:
    """Fine-tune and write the policy, merged, and adapters to ``out/adapter``; rank 0 returns a line."""
    torch.manual_seed(config.seed)
    policy = _load(config, recordings, device)
    with _ranks(config, device) as ranks:
        trained = _count_trained(policy)
        shard(policy, device, config.precision)
        loss = fit_policy(
            policy,
            recordings,
            Schedule.of(config, FitRanks(rank=ranks.rank, size=ranks.size, sum=ranks.sum)),
            drawn=drawn,
            average=config.average,
            pictures_on_device=False,  # Moments, averages and activations come later, and need the room.
        )
        write = copy_policy(policy, ranks)
        if ranks.rank > 0:
            return ""
        config.out.mkdir(parents=True, exist_ok=True)
        write(config.out)
        write_statistics(config.out, policy, recordings)
    return _report(config, f"{loss:.3f} nats per action token", trained)


def _load(config: FitPolicy, recordings: Recordings, device: torch.device) -> OpenVLAOFTPolicy:
    policy = named_policy(config.refine, config.policy_settings).load(device)
    if not isinstance(policy, OpenVLAOFTPolicy):
        raise ConfigError(
            f"--refine {config.refine} is a {type(policy).__name__}; imitation is written for OpenVLA-OFT's "
            "action tokens. Give an OpenVLA-OFT policy."
        )
    if config.statistics != "auto":
        key, statistics = "", dict[str, Any]()
        if config.statistics != "none":
            key, statistics = recordings.simulator, {recordings.simulator: action_statistics(recordings)}
        policy.config = dataclasses.replace(policy.config, norm_key=key, norm_stats=statistics)
    check_imitable(policy, recordings)
    policy.drop_critic()
    if config.lora.rank:
        add_lora(policy, config.lora.rank, config.lora.alpha, config.lora.targets)
    else:
        policy.requires_grad_(True)
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(policy)
    return policy


def fine_tune_world(config: FitWorld, recordings: Recordings) -> str:
    """Fine-tune and write the world, merged, and adapters to ``out/adapter``; rank 0 returns a line."""
    check_fine_tuning(config)
    source = world_folder(config.refine)
    options = WorldOptions.of(config)
    torch.manual_seed(config.seed)
    device = take_device(config.device, read_job().local_rank)
    world: Any = load_fitted(source, device, torch.bfloat16 if config.precision == "bf16" else torch.float32)
    check_same_size(world, recordings, "refine")
    world.check_fine_tuning(recordings, options)
    network: Any = world.network.requires_grad_(not config.lora.rank)
    if config.lora.rank:
        named = network.named_modules()  # Attention and MLP of every block.
        adapted = {n for n, layer in named if n.startswith("blocks.") and isinstance(layer, nn.Linear)}
        adapt(network, adapted, config.lora.rank, config.lora.alpha)
    if config.gradient_checkpointing:
        recompute(network.blocks)
    with _ranks(config, device) as ranks:
        trained = _count_trained(network)
        # Positions and times would be rounded if blocks had their inputs cast.
        spread(network, network.blocks, device, config.precision, cast_inputs=False)
        schedule = Schedule.of(config, FitRanks(rank=ranks.rank, size=ranks.size, sum=ranks.sum))
        loss = world.fine_tune(recordings, schedule, options)
        _write(world, config, source, ranks)
    return "" if ranks.rank else _report(config, f"velocity error {loss:.4f}", trained)


def check_fine_tuning(config: FitWorld) -> None:
    """Make the checks that need neither recordings nor weights."""
    source = world_folder(config.refine)
    parts_of(config.batch, read_job().size, config.micro_batch)
    if not fit_class(world_kind(source)).fine_tunes:
        raise ConfigError(
            f"--refine {config.refine} is a world of {world_title(source)}. Several ranks, --lora.rank, "
            "--precision bf16, --micro-batch and --gradient-checkpointing are there for Wan worlds only. "
            "Leave them out, and start it without torchrun: it is then refined in one process, in float32."
        )
    if is_published(source) and config.version:
        raise ConfigError(
            f"--version is {config.version}, but --refine {config.refine} has the published layout. "
            "The result has it too, and there is no place for a version in it. Leave it out."
        )
    if config.out.exists() and (not config.out.is_dir() or any(config.out.iterdir())):
        raise ConfigError(
            f"--out {config.out} is there already. All files of --refine are copied to it, and would be "
            "mixed with what it holds. Name a new folder."
        )


def _write(world: Any, config: FitWorld, source: Path, ranks: LearnerRanks) -> None:
    types = world.types(source)
    merged = ((name, tensor.to(types[name])) for name, tensor in merged_tensors(world.network))
    tensors = gather_to_host(ranks, merged)
    adapters = gather_to_host(ranks, adapter_tensors(world.network).items())
    if ranks.rank == 0:
        world.rewrite(source, config.out, tensors, config.version)
        if adapters:
            save_adapter(world.network, config.out / ADAPTER_FOLDER, tensors=adapters)

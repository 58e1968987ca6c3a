"""Fine-tune a world's network on recordings: adapters or all weights, spread over the ranks of torchrun.

The autoencoder stays as it is; every rank encodes a part of the episodes with it. See `fine_tune`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from asyncrl.errors import ConfigError
from asyncrl.fitting.loop import Schedule
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.settings import FitWorld
from asyncrl.fitting.shares import parts_of
from asyncrl.fitting.worlds.interface import (
    FineTunes,
    FittedWorld,
    WorldOptions,
    check_same_size,
    fit_class,
    load_fitted,
)
from asyncrl.launch import rendezvous
from asyncrl.launch.fine_tune import count_trained, fine_tuning_ranks, fit_ranks, report
from asyncrl.launch.own_device import take_device
from asyncrl.learner.fsdp import make_float32_masters, spread
from asyncrl.learner.ranks import LearnerRanks, SingleRank
from asyncrl.learner.weight_export import ADAPTER_FOLDER, gather_to_host
from asyncrl.policies.acceleration import recompute
from asyncrl.policies.lora import adapt, adapter_tensors, merged_tensors, save_adapter
from asyncrl.storage.asset_paths import world_folder
from asyncrl.worlds.kinds import is_published, world_kind, world_title

WHAT: Final = "the other ranks that fine-tune a world"


def can_fine_tune(folder: Path) -> bool:
    """Tell whether the world in a folder is of a kind that can be fine-tuned; reads no weights."""
    return issubclass(fit_class(world_kind(folder)), FineTunes)


def fine_tune_world(config: FitWorld, recordings: Recordings) -> str:
    """Fine-tune and write the world as it was read: adapters merged, and alone in ``out/adapter``.

    Returns:
        What was done, in a line; empty on other ranks than 0.

    Raises:
        ConfigError: The world cannot be fine-tuned, cannot imagine the recordings or cannot be written to
            --out, or the batch cannot be shared out.
        RunError: The loss stopped being finite, or another rank is gone.
    """
    check_fine_tuning(config)
    source = world_folder(config.refine)
    options = WorldOptions(context_sigma=config.context_sigma, camera=config.camera)
    torch.manual_seed(config.seed)
    device = take_device(config.device, rendezvous.local_rank())
    world: Any = load_fitted(source, device, torch.bfloat16 if config.precision == "bf16" else torch.float32)
    _prepare(world, config, recordings, options)
    with fine_tuning_ranks(WHAT, config.precision, device) as ranks:
        trained = count_trained(world.network())
        if isinstance(ranks, SingleRank):
            make_float32_masters(world.network(), config.precision)
        else:
            # Positions and times would be rounded if blocks had their inputs cast.
            spread(world.network(), world.blocks(), device, config.precision, cast_inputs=False)
        loss = world.fine_tune(recordings, _schedule(config, ranks), options)
        _write(world, config, source, ranks)
    return "" if ranks.rank else report(config, f"velocity error {loss:.4f}", trained)


def check_fine_tuning(config: FitWorld) -> None:
    """Check what can be known before recordings and weights are read.

    Raises:
        ConfigError: See `fine_tune_world`.
    """
    source = world_folder(config.refine)
    parts_of(config.batch, rendezvous.world_size(), config.micro_batch)
    if not can_fine_tune(source):
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


def _prepare(world: Any, config: FitWorld, recordings: Recordings, options: WorldOptions) -> None:
    fitted: FittedWorld = world
    check_same_size(fitted, recordings, "refine")
    world.check_fine_tuning(recordings, options)
    world.network().requires_grad_(not config.lora.rank)
    if config.lora.rank:
        adapt(world.network(), world.adapted_layers(), config.lora.rank, config.lora.alpha)
    if config.gradient_checkpointing:
        recompute(world.blocks())


def _schedule(config: FitWorld, ranks: LearnerRanks) -> Schedule:
    return Schedule(
        steps=config.steps,
        batch=config.batch,
        learning_rate=config.learning_rate,
        seed=config.seed,
        compiled=config.compile,
        micro_batch=config.micro_batch,
        ranks=fit_ranks(ranks),
    )


def _write(world: FineTunes, config: FitWorld, source: Path, ranks: LearnerRanks) -> None:
    """Gather the weights with all ranks, in the types that they have in files, and write them on rank 0."""
    types = world.types(source)
    merged = ((name, tensor.to(types[name])) for name, tensor in merged_tensors(world.network()))
    tensors = gather_to_host(ranks, merged)
    adapters = gather_to_host(ranks, adapter_tensors(world.network()).items())
    if ranks.rank == 0:
        world.rewrite(source, config.out, tensors, config.version)
        if adapters:
            save_adapter(world.network(), config.out / ADAPTER_FOLDER, tensors=adapters)

"""Load the settings' models as a run would, check that they fit together, and measure their sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor

from asyncrl.config.algorithm import LearnerSettings
from asyncrl.config.run import TrainConfig
from asyncrl.doctor.findings import Examination, Finding, Sizes, broken, ok, one_line
from asyncrl.errors import AsyncRLError, CheckpointError
from asyncrl.launch.environment import EnvironmentFiles, with_world_defaults
from asyncrl.launch.learner_start import load_models
from asyncrl.launch.named_models import named_world
from asyncrl.launch.simulated import SimulatorFiles, simulator_named
from asyncrl.policies.acceleration import frozen_float8_bytes
from asyncrl.policies.interface import CountsActivations
from asyncrl.records import SlotBytes
from asyncrl.storage import asset_paths, checkpoint, run_folder
from asyncrl.worlds.interface import CountsSlots

MIB: Final = 2**20
SHIPPED: Final = "tabletop"


def check_shipped_files(examination: Examination) -> Finding | None:
    """Check whether the shipped models are complete; None when the settings name others only."""
    config = examination.config
    if SHIPPED not in (config.policy, config.world, config.start_states):
        return None
    try:
        found = (
            asset_paths.policy_folder(SHIPPED),
            asset_paths.world_folder(SHIPPED),
            asset_paths.start_states_path(SHIPPED, SHIPPED),
        )
    except CheckpointError:
        return broken(
            "shipped files",
            f"asyncrl/assets/{SHIPPED} is incomplete (policy, world, start_states.h5).",
            "Install asyncrl again, or rebuild them with torchrun_scripts/rebuild_assets.sh",
        )
    files = [path for root in found for path in (root, *root.rglob("*")) if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return ok("shipped files", f"{SHIPPED} policy, world and start states, {size / MIB:.1f} MiB")


def check_models(examination: Examination) -> Finding:
    """Load the policy on the CPU, check the others, note the sizes; with --resume verify the checkpoint."""
    try:
        config, _ = with_world_defaults(examination.config)
        # What is rounded is only counted: a host takes minutes for what a GPU does in seconds.
        exact = replace(config, learner=replace(config.learner, frozen_precision="stored"))
        policy, environment = load_models(exact, torch.device("cpu"))
        resumed = _verify_checkpoint(config)
    except AsyncRLError as error:
        return broken("models", one_line(error))
    examination.config = config
    examination.starts = environment.starts if isinstance(environment, EnvironmentFiles) else ()
    examination.sizes = sizes = measure(config, policy, environment, slot_of(config))
    return ok(
        "models",
        f"policy {_millions(sizes.parameters)} parameters ({_millions(sizes.trained)} trained), "
        f"{sizes.policy / MIB:.1f} MiB; world and reward {sizes.environment / MIB:.1f} MiB; "
        f"{environment.summary}{resumed}",
    )


def slot_of(config: TrainConfig) -> SlotBytes:
    """Ask the world what slots take; nothing is known of a world that does not say it.

    Args:
        config: With what the world says where its user said nothing.
    """
    if simulator_named(config.world):
        return SlotBytes()
    world = named_world(config.world, config.world_settings)
    if not isinstance(world.kind, CountsSlots):
        return SlotBytes()
    decisions = config.actor.max_decisions
    return world.kind.slot_bytes(world.folder, config.imagination, decisions=decisions, **world.settings)


def measure(
    config: TrainConfig, policy: Any, environment: EnvironmentFiles | SimulatorFiles, slot: SlotBytes
) -> Sizes:
    """Add up the bytes of the models of a run.

    Args:
        config: Of the run.
        policy: As `policies.build_learning_policy` returns it, with no layer rounded; may be on device meta.
        environment: World and reward model.
        slot: Of the world.

    Raises:
        ConfigError: There is nothing that --learner.frozen-precision could round.
    """
    parameters = list(policy.parameters())
    wide = config.learner.precision == "fp32"
    frozen = [p for p in parameters if not p.requires_grad]
    ready = wide or all(p.dtype == torch.bfloat16 for p in frozen)  # as `sharding.shard` decides
    itemsize = 4 if wide else 2
    blocks = [sum(p.numel() for p in block.parameters()) * itemsize for block in policy.blocks()]
    acting = learning = kept = 0
    counts: object = policy
    if isinstance(counts, CountsActivations):
        acting = counts.activation_bytes(1, "acting", policy.dtype.itemsize)
        learning = _learning_bytes(config.learner, counts, itemsize)
        kept = counts.activation_bytes(1, "kept", itemsize)
    return Sizes(
        policy=_bytes(chain(parameters, policy.buffers())),
        parameters=sum(p.numel() for p in policy.parameters()),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        float32_masters=sum(p.numel() * 4 if wide or p.requires_grad else p.nbytes for p in parameters),
        unsharded=sum(p.numel() * 4 if wide else p.nbytes for p in frozen) if ready else 0,
        rounded=frozen_float8_bytes(policy) if config.learner.frozen_precision == "float8" else 0,
        version=_bytes(policy.acting_tensors().values()),
        environment=environment.nbytes,
        frame=3 * environment.image_size**2,
        action_spec=policy.action_spec,
        block=max(blocks, default=0),
        acting=acting,
        learning=learning,
        kept=kept,
        slot=slot,
    )


def _learning_bytes(learner: LearnerSettings, policy: CountsActivations, itemsize: int) -> int:
    """Activations of a decision in a pass with gradient: of layers that keep all, or only their input."""
    kept = policy.activation_bytes(1, "kept", itemsize)
    if not learner.gradient_checkpointing:
        return kept
    saved = kept - policy.activation_bytes(1, "checkpointed", itemsize)
    return kept - saved // learner.gradient_checkpointing_every


def _verify_checkpoint(config: TrainConfig) -> str:
    if not config.resume:
        return ""
    folder = checkpoint.latest(run_folder.locate(config))
    assert folder is not None  # The run folder was found by its checkpoints.
    notes = checkpoint.verify(folder).notes
    return "; ".join(["", f"goes on from {folder.name}", *notes])


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M"

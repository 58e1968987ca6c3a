"""Load the models of a run, check that they fit together, measure their sizes, and try the world."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor

from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import LearnerSettings
from asyncrl.doctor.checks import Examination, Finding, Sizes, broken, ok, one_line
from asyncrl.doctor.gpus import placed_here
from asyncrl.doctor.host import GIB
from asyncrl.errors import AsyncRLError
from asyncrl.launch.build import load_models
from asyncrl.launch.conformance import CHECKS, check_world
from asyncrl.launch.environment import WorldFiles
from asyncrl.launch.named_models import named_world
from asyncrl.launch.simulated import SimulatorFiles
from asyncrl.policies.interface import Policy
from asyncrl.records import SlotBytes
from asyncrl.storage import checkpoint, run_folder
from asyncrl.storage.assets import simulator_named

MIB: Final = 2**20
MOST_ON_CPU: Final = GIB  # Bytes of models up to which decisions take seconds without a GPU
ROOM: Final = 1.3  # Free bytes per byte of weights, so that decisions of a few slots fit too


def check_models(examination: Examination) -> Finding:
    """Load the policy on the CPU, check the others, record the sizes; with --resume verify the checkpoint."""
    try:
        config, _, policy, environment = load_models(examination.config, torch.device("cpu"))
        resumed = ""
        if config.resume and (folder := checkpoint.latest(run_folder.locate(config))):
            checkpoint.verify(folder)
            resumed = f"; goes on from {folder.name}"
    except AsyncRLError as error:
        return broken("models", one_line(error))
    examination.config = config
    examination.starts = environment.starts
    examination.sizes = sizes = measure(config, policy, environment, slot_of(config))
    return ok(
        "models",
        f"policy {sizes.parameters / 1e6:.1f} M parameters ({sizes.trained / 1e6:.1f} M trained), "
        f"{sizes.policy / MIB:.1f} MiB; world and reward {sizes.environment / MIB:.1f} MiB; "
        f"{len(environment.starts)} start states, {environment.image_size} pixels{resumed}",
    )


def slot_of(config: TrainConfig) -> SlotBytes:
    """Return the memory of the world's slots; empty for a world that does not report it."""
    if simulator_named(config.world):
        return SlotBytes()
    world = named_world(config.world, config.world_settings)
    if not hasattr(world.kind, "slot_bytes"):
        return SlotBytes()
    decisions = config.actor.max_decisions
    return world.kind.slot_bytes(world.folder, config.imagination, decisions=decisions, **world.settings)


def measure(
    config: TrainConfig, policy: Any, environment: WorldFiles | SimulatorFiles, slot: SlotBytes
) -> Sizes:
    """Add up the bytes of the models of a run; the policy may be on meta."""
    parameters = list(policy.parameters())
    wide = config.learner.precision == "fp32"
    frozen = [p for p in parameters if not p.requires_grad]
    ready = wide or all(p.dtype == torch.bfloat16 for p in frozen)  # as `sharding.shard` decides
    itemsize = 4 if wide else 2
    blocks = [sum(p.numel() for p in block.parameters()) * itemsize for block in policy.blocks()]
    acting = learning = 0
    if hasattr(policy, "activation_bytes"):
        acting = policy.activation_bytes(1, "acting", policy.dtype.itemsize)
        learning = _learning_bytes(config.learner, policy, itemsize)
    return Sizes(
        policy=_bytes(chain(parameters, policy.buffers())),
        parameters=sum(p.numel() for p in policy.parameters()),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        float32_masters=sum(p.numel() * 4 if wide or p.requires_grad else p.nbytes for p in parameters),
        unsharded=sum(p.numel() * 4 if wide else p.nbytes for p in frozen) if ready else 0,
        version=_bytes(policy.acting_tensors().values()),
        environment=environment.nbytes,
        frame=3 * environment.image_size**2,
        action_spec=policy.action_spec,
        block=max(blocks, default=0),
        acting=acting,
        learning=learning,
        slot=slot,
    )


def _learning_bytes(learner: LearnerSettings, policy: Policy, itemsize: int) -> int:
    kept = policy.activation_bytes(1, "kept", itemsize)
    if not learner.gradient_checkpointing:
        return kept
    saved = kept - policy.activation_bytes(1, "checkpointed", itemsize)
    return kept - saved // learner.gradient_checkpointing_every


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def check_world_model(examination: Examination) -> Finding | None:
    """Try a few decisions of the world; None for a simulator, or if the models did not load."""
    sizes, config = examination.sizes, examination.config
    if sizes is None or not examination.starts or (placed := placed_here(examination)) is None:
        return None
    device = next((on for rank, on in placed[1].items() if rank in placed[0].actors), None)
    if device is None:
        return ok("world", "not tried: no rank of this placement imagines here")
    if reason := _reason_to_skip(device, sizes.environment):
        return ok("world", f"not tried: {reason}. Try it by `asyncrl check world {config.world}`")
    began = time.monotonic()
    try:
        named = named_world(config.world, config.world_settings)
        world: Any = named.load(device, config.imagination)
        for _ in check_world(world, examination.starts):
            pass
    except AsyncRLError as error:
        return broken("world", one_line(error))
    finally:
        world = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return ok(
        "world",
        f"keeps what runs rest on: {len(CHECKS)} checks in {time.monotonic() - began:.1f} s on {device}",
    )


def _reason_to_skip(device: torch.device, nbytes: int) -> str:
    if device.type == "cpu" and nbytes > MOST_ON_CPU:
        return f"{nbytes / GIB:.1f} GiB of models would take minutes without a GPU"
    if device.type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < ROOM * nbytes:
        needed = f"{nbytes / GIB:.1f} GiB of models"
        return f"of {device} only {free / GIB:.1f} GiB are free, too little for {needed}"
    return ""

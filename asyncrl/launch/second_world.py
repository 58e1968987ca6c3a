"""Checks and loads the world of --guard.world, which draws what is imagined again.

It opens the slots of its episodes itself, so it may have another autoencoder. But they live in one state with
those of --world, so what both remember of a slot must have the same tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from asyncrl import registry
from asyncrl.config.run import TrainConfig
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.launch.named_models import NamedModel, named_world
from asyncrl.records import ModelSummary, StartState
from asyncrl.storage import asset_paths
from asyncrl.worlds.interface import CountsSlots, World
from asyncrl.worlds.kinds import world_class

_REMEDY = "Give one that was fitted from it (asyncrl fit world --refine), or leave --guard.world out."


def check_second_world(config: TrainConfig) -> ModelSummary:
    """Check that --guard.world can go on beside --world, without loading weights.

    Raises:
        ConfigError: It is no folder, or a world of another kind, size or memory.
        CheckpointError: A file is missing, or does not fit the others.
    """
    first = named_world(config.world, config.world_settings)
    second = _named(config, first)
    found = [one.kind.check(one.folder, config.imagination, **one.settings) for one in (first, second)]
    differs = [
        (what, ours, theirs)
        for what, ours, theirs in (
            ("pixels of a picture's side", *(one.image_size for one in found)),
            ("steps of a decision", *(one.action_spec.chunk for one in found)),
            ("numbers of an action", *(one.action_spec.dim for one in found)),
            ("bytes that it remembers of a slot", *(_kept(config, one) for one in (first, second))),
        )
        if ours != theirs
    ]
    if differs:
        what, ours, theirs = differs[0]
        raise ConfigError(
            f"--guard.world {config.guard.world} cannot draw beside --world {config.world}: {what} are "
            f"{theirs} there, and {ours} here. {_REMEDY}"
        )
    return found[1]


def load_second_world(config: TrainConfig, world: World[Any], start: StartState) -> World[Any]:
    """Load --guard.world onto the device of `world`, and try that their states go together.

    Args:
        config: Of the run.
        world: That of --world.
        start: Any start state of the run.

    Raises:
        ConfigError: What both remember of a slot differs.
        CheckpointError: See `check_second_world`.
    """
    check_second_world(config)
    named = _named(config, named_world(config.world, config.world_settings))
    second = named.kind.load(named.folder, world.device, config.imagination, **named.settings)
    decisions = config.actor.max_decisions
    with torch.inference_mode():
        beside = world.start([start, start], decisions=decisions)
        try:
            beside.write_rows([0], second.start([start], decisions=decisions))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ConfigError(
                f"--guard.world {config.guard.world} remembers something else of a slot than --world "
                f"{config.world}: {error}. {_REMEDY}"
            ) from error
    return second


def _named(config: TrainConfig, first: NamedModel) -> NamedModel:
    """Find the second world: of the class and with the settings of the first one."""
    text = config.guard.world
    try:
        folder = asset_paths.world_folder(text)
    except CheckpointError:
        where = Path(text).absolute()
        raise ConfigError(f"--guard.world is {text}, but {where} is no folder. {_REMEDY}") from None
    try:
        kind = first.kind if registry.names_code(config.world) else world_class(folder)
    except CheckpointError as error:
        found = str(error).removeprefix("--world ")
        raise ConfigError(f"--guard.world {text} holds no world. {found}") from error
    if kind is not first.kind:
        raise ConfigError(
            f"--guard.world {text} is a {kind.__name__}, but --world {config.world} a {first.kind.__name__}: "
            f"they do not remember the same. {_REMEDY}"
        )
    return NamedModel(kind=kind, folder=folder, settings=first.settings)


def _kept(config: TrainConfig, world: NamedModel) -> int:
    """Count the bytes that a world remembers of a slot; 0: it does not say."""
    if not isinstance(world.kind, CountsSlots):
        return 0
    decisions = max(1, config.actor.max_decisions)
    return world.kind.slot_bytes(world.folder, config.imagination, decisions=decisions, **world.settings).kept

"""Load the world model of a run and try on it what the run rests on."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any, Final

import torch

from asyncrl.doctor.findings import Examination, Finding, broken, ok, one_line
from asyncrl.doctor.gpus import devices_of, hosts_of, placement_of
from asyncrl.doctor.host import GIB
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.launch.named_models import named_world
from asyncrl.launch.world_conformance import CHECKS, check_world

if TYPE_CHECKING:
    pass

MOST_ON_CPU: Final = GIB
"""Bytes of models up to which decisions take seconds without a GPU."""
ROOM: Final = 1.3
"""Bytes that are free must be so many times those of the weights: decisions of a few slots need some too."""


def check_world_model(examination: Examination) -> Finding | None:
    """Try a few decisions of the world; None for a simulator, or while the models are not known to fit."""
    sizes, config = examination.sizes, examination.config
    if sizes is None or not examination.starts:
        return None
    try:
        device = _device(examination)
    except ConfigError:  # The line about the placement says so.
        return None
    if device is None:
        return ok("world", "not tried: no rank of this placement imagines here")
    if reason := _reason_to_skip(device, sizes.environment):
        return ok("world", f"not tried: {reason}. Try it by `asyncrl check world {config.world}`")
    began = time.monotonic()
    try:
        _try(examination, device)
    except AsyncRLError as error:
        return broken("world", one_line(error))
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return ok(
        "world",
        f"keeps what runs rest on: {len(CHECKS)} checks in {time.monotonic() - began:.1f} s on {device}",
    )


def _device(examination: Examination) -> torch.device | None:
    """Return where the first rank of this host that imagines does so; None: there is none."""
    config = examination.config
    placement = placement_of(config)
    by_rank = devices_of(config, placement, hosts_of(examination).ranks(examination.host))
    imagine = (on for rank, on in by_rank.items() if {"actor", "world"} & set(placement.roles(rank)))
    return next(imagine, None)


def _reason_to_skip(device: torch.device, nbytes: int) -> str:
    """Say why a world of so many bytes is not tried on a device; empty: it is."""
    if device.type == "cpu" and nbytes > MOST_ON_CPU:
        return f"{nbytes / GIB:.1f} GiB of models would take minutes without a GPU"
    if device.type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < ROOM * nbytes:
        return (
            f"of {device} only {free / GIB:.1f} GiB are free, too little for {nbytes / GIB:.1f} GiB of models"
        )
    return ""


def _try(examination: Examination, device: torch.device) -> None:
    config = examination.config
    named = named_world(config.world, config.world_settings)
    world: Any = named.kind.load(named.folder, device, config.imagination, **named.settings)
    for _ in check_world(world, examination.starts):
        pass

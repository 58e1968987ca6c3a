"""The text of `--device` and a rank in, a device out; an actor may have two."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from asyncrl.launch.placement import Placement


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Choose the device of a process.

    Args:
        name: cpu, cuda, or auto: cuda where there is a GPU.
        local_rank: The process's number on its host; ranks beyond the number of GPUs share them.

    Raises:
        ConfigError: cuda was asked for and there is none, or `name` is something else.
    """
    import torch

    if name not in ("cpu", "cuda", "auto"):
        raise ConfigError(f"--device is {name!r}. Use cpu, cuda or auto.")
    count = torch.cuda.device_count() if name != "cpu" else 0
    if name == "cuda" and not count:
        raise ConfigError(
            "--device is cuda, but PyTorch sees no CUDA device. Use --device cpu, or run `asyncrl doctor`."
        )
    return torch.device("cuda", local_rank % count) if count else torch.device("cpu")


def actor_devices(
    name: str, placement: Placement, rank: int, local_rank: int
) -> tuple[torch.device, torch.device]:
    """Choose the devices of an actor: of its policy, and of its world and reward models.

    Args:
        name: See `pick_device`.
        placement: Of the run.
        rank: Supervises the actor.
        local_rank: Its number on its host.

    Raises:
        ConfigError: As `pick_device`, or the rank that lends its device to the world is on another host.
    """
    other = local_rank + placement.world_of(rank) - rank
    # Ranks are numbered host by host.
    if not 0 <= other < int(os.environ.get("LOCAL_WORLD_SIZE") or other + 1):
        raise ConfigError(
            f"--placement makes policy rank {rank} and world rank {placement.world_of(rank)} one actor, but "
            "they are on different hosts, and frames travel inside one only. Pair ranks of one host."
        )
    return pick_device(name, local_rank), pick_device(name, other)

"""Takes the device that a process computes on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from asyncrl.config.run import TrainConfig
from asyncrl.launch import rendezvous
from asyncrl.launch.placement import Placement, pick_device

if TYPE_CHECKING:
    import torch

PRIORITY: Final = "CUDA_MPS_CLIENT_PRIORITY"
"""Environment variable of a client of MPS, read when it first uses a GPU. 0: normal, 1: below that."""


def take_device(name: str, local_rank: int = 0) -> torch.device:
    """Choose the device of this process, see that it multiplies right, and make it the current one.

    Args:
        name: See `pick_device`, which only plans and leaves the device alone.

    Raises:
        ConfigError: As `pick_device`, or the GPU gives wrong products.
    """
    device = pick_device(name, local_rank)
    make_current(device)
    return device


def make_current(device: torch.device) -> None:
    """See that a device multiplies right, and let what asks for "the" device get this one."""
    import torch

    from asyncrl.devices.tensors import check_matrix_products

    if device.type == "cuda":
        torch.cuda.set_device(device)
        check_matrix_products(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def give_way(config: TrainConfig, placement: Placement, devices: set[torch.device]) -> None:
    """Let kernels of a learner go before those of this process, an actor, where both share a GPU by MPS.

    Without a server of MPS the variable means nothing, and one that the user set stays. No GPU has been used
    by this process yet.
    """
    here = rendezvous.ranks_here()
    learners = {pick_device(config.device, rank - here.start) for rank in placement.learners if rank in here}
    if any(device.type == "cuda" for device in learners & devices):
        os.environ.setdefault(PRIORITY, "1")

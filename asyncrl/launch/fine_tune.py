"""Fine-tune a large network on recordings: what is alike for policies and worlds.

    torchrun --nproc-per-node 4 -m asyncrl fit policy --refine PUBLISHED --lora.rank 32 --precision bf16 ...
    torchrun --nproc-per-node 4 -m asyncrl fit world --refine PUBLISHED --precision bf16 ...

every rank   reads the recordings and the network; computes its part of every batch     waits for: the others
rank 0       shows the progress; gathers the network and writes it                      waits for: the others
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.fitting.loop import FitRanks
from asyncrl.fitting.settings import FitPolicy, FitWorld
from asyncrl.launch import rendezvous
from asyncrl.learner.fsdp import Precision
from asyncrl.learner.ranks import (
    COLLECTIVE_DEADLINE,
    DistributedRanks,
    LearnerRanks,
    SingleRank,
    default_group,
)

AGAIN: Final = "start it again"


@contextmanager
def fine_tuning_ranks(what: str, precision: Precision, device: torch.device) -> Iterator[LearnerRanks]:
    """Meet the other ranks of torchrun for the time of the block.

    Args:
        precision: Passes in bfloat16 need a group also where a rank is alone (`fsdp`).
    """
    size = rendezvous.world_size()
    if size == 1 and precision == "fp32":
        yield SingleRank()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    alone: dict[str, Any] = {"store": HashStore(), "rank": 0, "size": 1} if size == 1 else {}
    with default_group(device, what, what, remedy=AGAIN, **alone):
        yield DistributedRanks(COLLECTIVE_DEADLINE, remedy=AGAIN)


def fit_ranks(ranks: LearnerRanks) -> FitRanks:
    """Return ranks as the fits know them."""
    return FitRanks(rank=ranks.rank, size=ranks.size, sum=ranks.sum)


def count_trained(network: nn.Module) -> int:
    """Count the numbers that are trained; asked before they are spread."""
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


def report(config: FitPolicy | FitWorld, loss: str, trained: int) -> str:
    """Say in a line what was done."""
    how = f"adapters of rank {config.lora.rank}" if config.lora.rank else "all weights"
    return f"{config.MODEL} in {config.out}: {loss}; {how}, {trained / 1e6:.1f} million numbers"

"""Fine-tune a policy on recordings: adapters or all weights, spread over the ranks of torchrun.

    torchrun --nproc-per-node 4 -m asyncrl fit policy --refine PUBLISHED --lora.rank 32 --precision bf16 ...

every rank   reads the recordings and the policy; computes its part of every batch     waits for: the others
rank 0       shows the progress; gathers the policy and writes it                      waits for: the others
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.config.algorithm import LoraSettings
from asyncrl.errors import ConfigError
from asyncrl.fitting.fit_policy import check_imitable, fit_policy
from asyncrl.fitting.frame_file import Frames
from asyncrl.fitting.fresh_models import action_statistics, write_statistics
from asyncrl.fitting.loop import FitRanks
from asyncrl.fitting.recordings import Recordings
from asyncrl.launch import rendezvous
from asyncrl.launch.named_models import named_policy
from asyncrl.launch.placement import pick_device
from asyncrl.learner.distributed_ranks import (
    COLLECTIVE_DEADLINE,
    DistributedRanks,
    abandon_group,
    explain_lost_peer,
)
from asyncrl.learner.fsdp import Precision, make_float32_masters, shard
from asyncrl.learner.ranks import LearnerRanks, SingleRank
from asyncrl.learner.weight_export import copy_policy
from asyncrl.policies.acceleration import enable_gradient_checkpointing
from asyncrl.policies.lora import add_lora
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy

Statistics = Literal["auto", "q01_q99", "none"]
WHAT: Final = "to fine-tune a policy together"


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """How a policy is fine-tuned."""

    source: str
    """Policy to begin with: a folder of ours, a published one, a run, or a shipped name."""
    settings: tuple[str, ...]
    """Of a published folder: what it does not say about itself, as key=value."""
    lora: LoraSettings
    precision: Precision
    gradient_checkpointing: bool
    statistics: Statistics
    """What tokens span from now on. auto: as before."""
    steps: int
    batch: int
    micro_batch: int
    learning_rate: float
    average: float
    seed: int
    device: str
    compiled: bool


def fine_tune(plan: FineTuning, recordings: Recordings, out: Path, drawn: Frames | None = None) -> str:
    """Fine-tune and write the policy, with adapters merged, and the adapters alone into ``out/adapter``.

    Args:
        plan: How.
        recordings: To imitate; the same on all ranks.
        out: Folder for the policy, written by rank 0.
        drawn: See `fit_policy`.

    Returns:
        What was done, in a line; empty on other ranks than 0.

    Raises:
        ConfigError: The policy cannot imitate the recordings, or the batch cannot be shared out.
        RunError: The loss stopped being finite, or another rank is gone.
    """
    torch.manual_seed(plan.seed)
    device = pick_device(plan.device, rendezvous.local_rank())
    policy = _load(plan, recordings, device)
    with _group(plan, device) as ranks:
        trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
        anything: Any = policy
        if isinstance(ranks, SingleRank):
            make_float32_masters(anything, plan.precision)
        else:
            shard(anything, device, plan.precision)

        def mean(value: Tensor) -> Tensor:
            return ranks.sum(value) / ranks.size

        loss = fit_policy(
            policy,
            recordings,
            steps=plan.steps,
            batch=plan.batch,
            learning_rate=plan.learning_rate,
            seed=plan.seed,
            drawn=drawn,
            compiled=plan.compiled,
            average=plan.average,
            micro_batch=plan.micro_batch,
            pictures_on_device=False,  # Moments, averages and activations come later, and need the room.
            ranks=FitRanks(rank=ranks.rank, size=ranks.size, mean=mean),
        )
        write = copy_policy(policy, ranks)
        if ranks.rank > 0:
            return ""
        out.mkdir(parents=True, exist_ok=True)
        write(out)
        write_statistics(out, policy, recordings)
    how = f"adapters of rank {plan.lora.rank}" if plan.lora.rank else "all weights"
    return f"policy in {out}: {loss:.3f} nats per action token; {how}, {trained / 1e6:.1f} million numbers"


def _load(plan: FineTuning, recordings: Recordings, device: torch.device) -> OpenVLAOFTPolicy:
    named = named_policy(plan.source, plan.settings)
    policy = named.kind.load(named.folder, device, **named.settings)
    if not isinstance(policy, OpenVLAOFTPolicy):
        raise ConfigError(
            f"--refine {plan.source} is a {type(policy).__name__}; imitation is written for OpenVLA-OFT's "
            "action tokens. Give an OpenVLA-OFT policy."
        )
    if plan.statistics != "auto":
        policy.config = dataclasses.replace(policy.config, **_statistics(plan, recordings))
    check_imitable(policy, recordings)
    policy.drop_critic()
    if plan.lora.rank:
        add_lora(policy, plan.lora.rank, plan.lora.alpha, plan.lora.targets)
    else:
        policy.requires_grad_(True)
    if plan.gradient_checkpointing:
        enable_gradient_checkpointing(policy)
    return policy


def _statistics(plan: FineTuning, recordings: Recordings) -> dict[str, Any]:
    if plan.statistics == "none":
        return {"norm_key": "", "norm_stats": {}}
    key = recordings.simulator
    return {"norm_key": key, "norm_stats": {key: action_statistics(recordings)}}


@contextmanager
def _group(plan: FineTuning, device: torch.device) -> Iterator[LearnerRanks]:
    """Meet the other ranks of torchrun for the time of the block."""
    size = rendezvous.world_size()
    if size == 1 and plan.precision == "fp32":
        yield SingleRank()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    deadline = timedelta(seconds=COLLECTIVE_DEADLINE)
    with explain_lost_peer(WHAT):
        if size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=deadline)
        else:
            dist.init_process_group(backend, timeout=deadline)  # As torchrun's environment says.
    try:
        with explain_lost_peer(WHAT):
            yield DistributedRanks(COLLECTIVE_DEADLINE)
    except BaseException:
        abandon_group(device)
        raise
    dist.destroy_process_group()

"""Fine-tune a policy on recordings: adapters or all weights, on all ranks of torchrun (see `fine_tune`)."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch

from asyncrl.errors import ConfigError
from asyncrl.fitting.fit_policy import check_imitable, fit_policy
from asyncrl.fitting.frame_file import Frames
from asyncrl.fitting.fresh_models import action_statistics, write_statistics
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.settings import FitPolicy
from asyncrl.launch.fine_tune import count_trained, fine_tuning_ranks, fit_ranks, report
from asyncrl.launch.named_models import named_policy
from asyncrl.learner.fsdp import make_float32_masters, shard
from asyncrl.learner.ranks import SingleRank
from asyncrl.learner.weight_export import copy_policy
from asyncrl.policies.acceleration import enable_gradient_checkpointing
from asyncrl.policies.lora import add_lora
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy

WHAT: Final = "the other ranks that fine-tune a policy"


def fine_tune_policy(
    config: FitPolicy, recordings: Recordings, device: torch.device, drawn: Frames | None = None
) -> str:
    """Fine-tune and write the policy, with adapters merged, and the adapters alone into ``out/adapter``.

    Returns:
        What was done, in a line; empty on other ranks than 0.

    Raises:
        ConfigError: The policy cannot imitate the recordings, or the batch cannot be shared out.
        RunError: The loss stopped being finite, or another rank is gone.
    """
    torch.manual_seed(config.seed)
    policy = _load(config, recordings, device)
    with fine_tuning_ranks(WHAT, config.precision, device) as ranks:
        trained = count_trained(policy)
        anything: Any = policy
        if isinstance(ranks, SingleRank):
            make_float32_masters(anything, config.precision)
        else:
            shard(anything, device, config.precision)
        loss = fit_policy(
            policy,
            recordings,
            steps=config.steps,
            batch=config.batch,
            learning_rate=config.learning_rate,
            seed=config.seed,
            drawn=drawn,
            compiled=config.compile,
            average=config.average,
            micro_batch=config.micro_batch,
            pictures_on_device=False,  # Moments, averages and activations come later, and need the room.
            ranks=fit_ranks(ranks),
        )
        write = copy_policy(policy, ranks)
        if ranks.rank > 0:
            return ""
        config.out.mkdir(parents=True, exist_ok=True)
        write(config.out)
        write_statistics(config.out, policy, recordings)
    return report(config, f"{loss:.3f} nats per action token", trained)


def _load(config: FitPolicy, recordings: Recordings, device: torch.device) -> OpenVLAOFTPolicy:
    named = named_policy(config.refine, config.policy_settings)
    policy = named.kind.load(named.folder, device, **named.settings)
    if not isinstance(policy, OpenVLAOFTPolicy):
        raise ConfigError(
            f"--refine {config.refine} is a {type(policy).__name__}; imitation is written for OpenVLA-OFT's "
            "action tokens. Give an OpenVLA-OFT policy."
        )
    if config.statistics != "auto":
        policy.config = dataclasses.replace(policy.config, **_statistics(config, recordings))
    check_imitable(policy, recordings)
    policy.drop_critic()
    if config.lora.rank:
        add_lora(policy, config.lora.rank, config.lora.alpha, config.lora.targets)
    else:
        policy.requires_grad_(True)
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(policy)
    return policy


def _statistics(config: FitPolicy, recordings: Recordings) -> dict[str, Any]:
    if config.statistics == "none":
        return {"norm_key": "", "norm_stats": {}}
    key = recordings.simulator
    return {"norm_key": key, "norm_stats": {key: action_statistics(recordings)}}

"""Count what an OpenVLA policy computes for a decision, from its sizes alone."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch.utils.flop_counter import FlopCounterMode

from asyncrl.devices.float8 import float8_flops
from asyncrl.policies.action_tokens import BINS
from asyncrl.policies.interface import PolicyInputs
from asyncrl.policies.lora import Targets, target_layers
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.memory import PROMPT
from asyncrl.policies.openvla.parallel import OpenVLAOFT


@torch.no_grad()
def forward_flops(config: OpenVLAOFTConfig, prompt: int = PROMPT) -> float:
    """Count the FLOPs of a forward pass that sees a whole decision, as the learner makes it.

    Matrix products, convolutions and attention count, two FLOPs per multiplication and addition. Nothing is
    computed: the tensors have no numbers (torch's device meta). A policy that draws one token after the other
    computes about as much for a decision; its tokens' passes are small and many, which is not in the count.

    Args:
        config: Sizes of the policy.
        prompt: Tokens of the prompt.
    """
    policy, seen = _without_numbers(config, prompt)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        policy.readout(seen)
    head = 2 * config.slots * config.llm_width * BINS
    return float(counter.get_total_flops() + head)


def frozen_flops(config: OpenVLAOFTConfig, targets: str, prompt: int = PROMPT) -> float:
    """Count those of `forward_flops` in linear layers of blocks that can be rounded below adapters.

    Args:
        config: Sizes of the policy.
        targets: Which layers have adapters: language or all.
        prompt: Tokens of the prompt.
    """
    policy, seen = _without_numbers(config, prompt)
    inside = {module for block in policy.blocks() for module in block.modules()}
    layers = [layer for layer in target_layers(policy, cast("Targets", targets)).values() if layer in inside]
    with torch.device("meta"):
        return float8_flops(lambda: policy.readout(seen), layers)


def _without_numbers(config: OpenVLAOFTConfig, prompt: int) -> tuple[OpenVLAOFT, PolicyInputs]:
    """Build a policy, and a row of inputs for it, on the device meta."""
    with torch.device("meta"):
        policy = OpenVLAOFT(replace(config, decoding="parallel", value_head="none"))
        policy.restore_buffers()
        pictures = () if config.images == 1 else (config.images,)
        seen = PolicyInputs(
            pixels=torch.empty(1, *pictures, config.image_size, config.image_size, 3, dtype=torch.uint8),
            input_ids=torch.ones(1, prompt, dtype=torch.int64),
            attention_mask=torch.ones(1, prompt, dtype=torch.int64),
            padded=False,
            proprio=torch.zeros(1, config.proprio_dim) if config.proprio_dim else None,
        )
    return policy, seen

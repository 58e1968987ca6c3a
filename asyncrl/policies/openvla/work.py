"""Count what an OpenVLA policy computes for a decision, from its sizes alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from asyncrl.policies.action_tokens import BINS
from asyncrl.policies.interface import PolicyInputs
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
        with FlopCounterMode(display=False) as counter:
            policy.readout(seen)
    head = 2 * config.slots * config.llm_width * BINS
    return float(counter.get_total_flops() + head)

"""Gradient checkpointing: blocks compute their activations again in the backward pass, which saves memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from asyncrl.policies.openvla_oft import OpenVLAOFT


def enable_gradient_checkpointing(policy: OpenVLAOFT) -> None:
    """Let every Llama layer and vision block keep only its input, in eval mode as well.

    Gradients stay the same. Only `forward` of each block's instance is replaced: no module is wrapped and no
    name changes, and hooks of the block (sharding) run outside. Calling it twice changes nothing more.
    """
    for block in blocks(policy):
        block.forward = MethodType(_recomputed, block)  # bound, so that a deep copy runs its own block


def blocks(policy: OpenVLAOFT) -> Iterator[nn.Module]:
    """Vision blocks and Llama layers in the order in which they run: also what is sharded one by one."""
    yield from policy.vision.dino.encoder.layer
    yield from policy.vision.siglip.encoder.layers
    yield from policy.llm.layers


def _recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = type(block).forward
    if not torch.is_grad_enabled():
        return forward(block, *args, **kwargs)
    # No block draws random numbers, so there is no generator state to keep.
    return checkpoint(forward, block, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

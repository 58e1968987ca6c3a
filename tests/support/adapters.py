"""A tiny policy with adapters that matter, and what it computes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.policies.interface import PolicyInputs
from asyncrl.policies.lora import add_lora, is_adapter
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from support.published import TOWERS, some_policy

TASKS = ["put the red cube on the white plate", "lift it"]
RANK, ALPHA = 4, 6.0
SCALE = 1.5


def small(**changes: Any) -> OpenVLAOFTPolicy:
    return some_policy(OpenVLAOFTConfig.tiny(**(TOWERS | {"llm_layers": 2} | changes)), 0.05)


def move_adapters(policy: OpenVLAOFTPolicy, seed: int = 1, size: float = 0.1) -> None:
    """Pretend to train: random numbers in all adapters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if is_adapter(name):
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))


def adapted(targets: Any = "all", **changes: Any) -> OpenVLAOFTPolicy:
    """The policy of `small` with adapters that were trained."""
    policy = small(**changes)
    add_lora(policy, RANK, ALPHA, targets)
    move_adapters(policy)
    return policy


def some_inputs(policy: OpenVLAOFTPolicy) -> PolicyInputs:
    frames = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    return policy.preprocess(frames, TASKS)


@torch.no_grad()
def logits_of(policy: OpenVLAOFTPolicy) -> Tensor:
    return policy.lm_head(policy.readout(some_inputs(policy)))


def some_tokens() -> Tensor:
    return torch.randint(0, 256, (2, 8, 7), generator=torch.Generator().manual_seed(2), dtype=torch.int32)

"""The language model's parts: the Llama trunk, its mask and positions, the action rows of its output layer.

Dimension letters:
    B  rows      S  places      Q  places that ask      K  tokens of a decision      N = 256 action bins
    D  width of the language model
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from asyncrl.policies.action_tokens import BINS
from asyncrl.policies.openvla_config import OpenVLAOFTConfig


class ActionHead(nn.Linear):
    """The vocabulary's output layer, of which only the action rows are ever multiplied."""

    def __init__(self, config: OpenVLAOFTConfig) -> None:
        super().__init__(config.llm_width, config.vocab_size, bias=False)
        self.first = config.first_action_id

    def forward(self, input: Tensor) -> Tensor:
        """``[B, K, D]`` hidden states to ``[B, K, N]`` float32 logits of the action bins."""
        with torch.autocast(input.device.type, enabled=False):
            return nn.functional.linear(input.float(), self.weight[self.first : self.first + BINS].float())


class ProprioProjector(nn.Module):
    """The robot's own state to one token: two layers with exact GELU between them."""

    def __init__(self, numbers: int, llm_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(numbers, llm_width)
        self.fc2 = nn.Linear(llm_width, llm_width)

    def forward(self, proprio: Tensor) -> Tensor:
        """``[B, numbers]`` float32 to ``[B, 1, D]``."""
        hidden = nn.functional.gelu(self.fc1(proprio.to(self.fc1.weight.dtype)))
        return self.fc2(hidden).unsqueeze(1)


def build_llm(config: OpenVLAOFTConfig) -> LlamaModel:
    """A Llama model; for parallel decoding it attends in both directions, or OFT loses half its successes."""
    return LlamaModel(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.llm_width,
            intermediate_size=config.llm_mlp,
            num_hidden_layers=config.llm_layers,
            num_attention_heads=config.llm_heads,
            rms_norm_eps=config.rms_eps,
            initializer_range=config.llm_width**-0.5,  # The usual 0.02 keeps a narrow model from learning.
            pad_token_id=config.token_count,
            is_causal=config.causal,  # type: ignore[call-arg]  # an extra field that the mask builder reads
            use_cache=False,
        )
    )


def attention_of(mask_BS: Tensor | None, *, causal: bool, asking: int = 0) -> dict[str, Tensor]:
    """Mask and positions for the Llama model.

    The mask has four dimensions: transformers uses such a one as it is, while it looks at the numbers of a
    two-dimensional one, which waits for the device. Padding takes no position: a padded prompt gets those of
    an unpadded one.

    Args:
        mask_BS: ``[B, S]``, 0 = padding, over everything there is to see; None: no padding.
        causal: Whether a place sees only those up to itself.
        asking: ``Q``: only the last so many places are computed, the others are in a cache. 0: all.

    Returns:
        Keyword arguments of the model: mask ``[B, 1, Q, S]`` bool and positions ``[B, Q]`` int64; nothing
        without padding, which the model itself knows how to mask and to count.
    """
    if mask_BS is None:
        return {}
    seen = mask_BS.shape[1]
    asking = asking or seen
    attends_B1QS = mask_BS.bool()[:, None, None, :].expand(-1, 1, asking, -1)
    if causal:
        before_QS = torch.ones(asking, seen, dtype=torch.bool, device=mask_BS.device).tril(seen - asking)
        attends_B1QS = attends_B1QS & before_QS
    positions_BS = (mask_BS.cumsum(dim=1) - 1).clamp(min=0)
    return {"attention_mask": attends_B1QS, "position_ids": positions_BS[:, -asking:]}

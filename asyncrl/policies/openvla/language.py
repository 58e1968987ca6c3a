"""Build and run the language model: the Llama trunk, its mask and positions, and the heads on it.

Dimension letters:
    B  rows      S  positions      Q  new positions      K  tokens of a decision      N = 256 action bins
    D  width of the language model
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, LlamaModel

from asyncrl.policies.action_tokens import BINS
from asyncrl.policies.openvla.config import OpenVLAOFTConfig


class ValueHead(nn.Module):
    """Three linear layers with exact GELU between them; the last has no bias and starts near zero.

    Names and shapes follow RLinf's `value_head.mlp.{0,2,4}`, so that its critics can be read. The arithmetic
    is float32, whatever the type of the weights and of autocast.
    """

    def __init__(self, width: int, hidden: tuple[int, int], outputs: int) -> None:
        """Build with fresh random weights, drawn from torch's generator.

        Args:
            width: ``D``.
            hidden: Features of the two hidden layers.
            outputs: ``V``.
        """
        super().__init__()
        first, second = hidden
        layers = nn.Linear(width, first), nn.Linear(first, second), nn.Linear(second, outputs, bias=False)
        for layer in layers[:2]:
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        nn.init.normal_(layers[2].weight, std=0.02)
        self.mlp = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])

    def forward(self, hidden_BD: Tensor) -> Tensor:
        """Turn hidden states ``[B, D]`` of any float dtype into values ``[B, V]`` float32."""
        values = hidden_BD.float()
        with torch.autocast(hidden_BD.device.type, enabled=False):
            for layer in self.mlp:
                if isinstance(layer, nn.Linear):
                    bias = None if layer.bias is None else layer.bias.float()
                    values = nn.functional.linear(values, layer.weight.float(), bias)
                else:
                    values = layer(values)
        return values


class ActionHead(nn.Linear):
    """The vocabulary's output layer, of which only the action rows are ever multiplied."""

    def __init__(self, config: OpenVLAOFTConfig) -> None:
        super().__init__(config.llm_width, config.vocab_size, bias=False)
        self.first = config.first_action_id

    def forward(self, input: Tensor) -> Tensor:
        """Turn hidden states ``[B, K, D]`` of any float dtype into logits ``[B, K, N]`` float32 of bins."""
        with torch.autocast(input.device.type, enabled=False):
            return nn.functional.linear(input.float(), self.weight[self.first : self.first + BINS].float())


class ProprioProjector(nn.Module):
    """The robot's own state to one token: two layers with exact GELU between them."""

    def __init__(self, numbers: int, llm_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(numbers, llm_width)
        self.fc2 = nn.Linear(llm_width, llm_width)

    def forward(self, proprio: Tensor) -> Tensor:
        """Turn ``[B, numbers]`` float32 into one token ``[B, 1, D]`` in the weights' dtype."""
        hidden = nn.functional.gelu(self.fc1(proprio.to(self.fc1.weight.dtype)))
        return self.fc2(hidden).unsqueeze(1)


def build_llm(config: OpenVLAOFTConfig) -> LlamaModel:
    """Build a Llama model; for parallel decoding it attends both ways, or OFT loses half its successes."""
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


def run_trunk(
    llm: LlamaModel, x_BQD: Tensor, mask_BS: Tensor | None, *, causal: bool, cache: Cache | None = None
) -> Tensor:
    """Run the layers and the final norm over some more positions.

    Not by the model's own `forward`: that looks at the numbers of a mask, which waits for the device, and
    makes a mask where none is needed once it is compiled or captured, which costs the fast attention.

    Args:
        llm: Its layers, rotary embedding and final norm are used.
        x_BQD: ``[B, Q, D]`` embeddings in the weights' dtype.
        mask_BS: ``[B, S]`` integer or bool, 0 = padding, over all positions so far; None: no padding. Padding
            is not counted: the rotary positions of a padded prompt are those of an unpadded one.
        causal: Whether a position sees only those up to itself.
        cache: Keys and values of the positions before; takes in those of the new ones.

    Returns:
        ``[B, Q, D]`` final hidden states in the weights' dtype.
    """
    new = x_BQD.shape[1]
    before = cache.get_seq_length() if cache is not None else 0
    attends_B1QS = None
    if mask_BS is None:
        positions = torch.arange(before, before + new, device=x_BQD.device)[None]
    else:
        attends_B1QS = _attends(mask_BS, new, causal=causal)
        positions = (mask_BS.cumsum(dim=1) - 1).clamp(min=0)[:, -new:]
    rotary = llm.rotary_emb(x_BQD, position_ids=positions)
    for layer in llm.layers:
        x_BQD = layer(
            x_BQD,
            attention_mask=attends_B1QS,
            position_ids=positions,
            position_embeddings=rotary,
            past_key_values=cache,
            use_cache=cache is not None,
            is_causal=causal and new > 1,
        )
    return llm.norm(x_BQD)


def _attends(mask_BS: Tensor, new: int, *, causal: bool) -> Tensor:
    """Tell which positions the last Q see: ``[B, 1, Q, S]`` bool."""
    seen = mask_BS.shape[1]
    attends_B1QS = mask_BS.bool()[:, None, None, :].expand(-1, 1, new, -1)
    if not causal:
        return attends_B1QS
    before_QS = torch.ones(new, seen, dtype=torch.bool, device=mask_BS.device).tril(seen - new)
    return attends_B1QS & before_QS

"""One block of Wan's transformer, whose modulation comes per latent frame and not per token.

The published block wants six vectors for every token, in float32: more memory traffic than the activations
themselves. All tokens of a latent frame share them, so here they stay ``[B, F, 6, D]`` and are broadcast.

Dimension letters:
    B  samples      F  latent frames      P  tokens of a latent frame      S = F * P      D  width
    T  actions      E  channels of a head
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor
from torch.nn import functional

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, ``[1, S, 1, E]`` float32, every number twice."""


class WanBlock(WanTransformerBlock):
    """diffusers' block with its weights and numbers, reading the modulation per latent frame."""

    def __init__(self, width: int, ffn_dim: int, heads: int) -> None:
        super().__init__(width, ffn_dim, heads, "rms_norm_across_heads", True)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_BFPD: Tensor, context_BTD: Tensor, modulation_BF6D: Tensor, rotary: Rotary
    ) -> Tensor:
        """Mix the tokens.

        Args:
            x_BFPD: ``[B, F, P, D]`` tokens in the dtype of the weights.
            context_BTD: ``[B, T, D]`` action tokens.
            modulation_BF6D: ``[B, F, 6, D]``: shift, scale, gate of the attention, then of the MLP.
            rotary: Of all S places.

        Returns:
            ``[B, F, P, D]``.
        """
        table = self.scale_shift_table.unsqueeze(0) + modulation_BF6D.float()
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = table.unsqueeze(3).unbind(2)
        y = (self.norm1(x_BFPD.float()) * (1 + scale) + shift).type_as(x_BFPD)
        y = attend(self.attn1, y.flatten(1, 2), None, rotary).view_as(x_BFPD)
        x_BFPD = (x_BFPD.float() + y * gate).type_as(x_BFPD)

        y = self.norm2(x_BFPD.float()).type_as(x_BFPD)
        x_BFPD = x_BFPD + attend(self.attn2, y.flatten(1, 2), context_BTD, None).view_as(x_BFPD)

        y = (self.norm3(x_BFPD.float()) * (1 + mlp_scale) + mlp_shift).type_as(x_BFPD)
        return (x_BFPD.float() + self.ffn(y).float() * mlp_gate).type_as(x_BFPD)


def attend(layer: Any, x_BSD: Tensor, context_BTD: Tensor | None, rotary: Rotary | None) -> Tensor:
    """Attention of `x_BSD` over itself, or over `context_BTD`: ``[B, S, D]``."""
    source = x_BSD if context_BTD is None else context_BTD
    query, key = layer.norm_q(layer.to_q(x_BSD)), layer.norm_k(layer.to_k(source))
    q, k, v = (part.unflatten(2, (layer.heads, -1)) for part in (query, key, layer.to_v(source)))
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(q, k, v)
    return layer.to_out[0](mixed.transpose(1, 2).flatten(2))


def rotate(x_BSHE: Tensor, rotary: Rotary) -> Tensor:
    """Turn neighbouring channels against each other by the angles of their place, in float32."""
    cos, sin = (part[..., 0::2] for part in rotary)
    first, second = x_BSHE.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.flatten(-2).type_as(x_BSHE)

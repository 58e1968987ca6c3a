"""Predict flow velocities of noisy latents: Wan 2.2 (TI2V-5B) steered by robot actions.

Actions enter twice: one token per action for cross-attention, and one vector per latent frame that is added
to the time embedding (WoVR, arXiv 2602.13977). There is no text.

Dimension letters:
    B  samples     Z  latent channels   F  latent frames (4)   h, w  latent height and width
    T  actions = 1 + 4 (F - 1)          S  tokens = F * tokens per latent frame             D  model width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel, WanTransformerBlock
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from asyncrl.records import ACTION_DIM
from asyncrl.storage.untrusted import Typed
from asyncrl.worlds.files import renamed
from asyncrl.worlds.layers import sinusoid
from asyncrl.worlds.wan.vae import FRAMES_PER_LATENT

Rotary = tuple[Tensor, Tensor]  # Cosines and sines, [1, S, 1, E] float32, every number twice.
# Patterns in names of Wan's authors, and the text that diffusers has in their place; applied in order.
_TRANSFORMER_NAMES: Final = (
    (r"^pipe\.dit\.", ""),
    (r"^time_embedding\.0\.", "condition_embedder.time_embedder.linear_1."),
    (r"^time_embedding\.2\.", "condition_embedder.time_embedder.linear_2."),
    (r"^time_projection\.1\.", "condition_embedder.time_proj."),
    (r"^head\.head\.", "proj_out."),
    (r"^head\.modulation$", "scale_shift_table"),
    (r"\.modulation$", ".scale_shift_table"),
    (r"\.self_attn\.", ".attn1."),
    (r"\.cross_attn\.", ".attn2."),
    (r"\.(attn\d)\.([qkv])\.", r".\1.to_\2."),
    (r"\.(attn\d)\.o\.", r".\1.to_out.0."),
    (r"\.norm3\.", ".norm2."),
    (r"\.ffn\.0\.", ".ffn.net.0.proj."),
    (r"\.ffn\.2\.", ".ffn.net.2."),
)


class WanBlock(WanTransformerBlock):
    """diffusers' block with its weights and numbers, but one modulation per latent frame."""

    def __init__(self, width: int, ffn_dim: int, heads: int) -> None:
        super().__init__(width, ffn_dim, heads, "rms_norm_across_heads", True)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_BFPD: Tensor, context_BTD: Tensor, modulation_BF6D: Tensor, rotary: Rotary
    ) -> Tensor:
        """Mix the tokens; the modulation is shift, scale, gate of the attention, then of the MLP."""
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
    """Attend over the tokens, or over a context: ``[B, S, D]`` in the dtype of the weights."""
    source = x_BSD if context_BTD is None else context_BTD
    query, key = layer.norm_q(layer.to_q(x_BSD)), layer.norm_k(layer.to_k(source))
    q, k, v = (part.unflatten(2, (layer.heads, -1)) for part in (query, key, layer.to_v(source)))
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(q, k, v)
    return layer.to_out[0](mixed.transpose(1, 2).flatten(2))


def rotate(x_BSHE: Tensor, rotary: Rotary) -> Tensor:
    """Rotate neighbouring channels of ``[B, S, heads, E]`` by the angles of their token, in float32."""
    cos, sin = (part[..., 0::2] for part in rotary)
    first, second = x_BSHE.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.flatten(-2).type_as(x_BSHE)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Typed):
    """Size of an action-conditioned Wan transformer."""

    heads: int
    head_dim: int  # Channels per head; the three-way rotary split must stay even (24, 48, 64 and 128 do)
    layers: int
    ffn_dim: int
    channels: int  # Latent channels
    patch: int  # Latent pixels per token in height and width
    freq_dim: int = 256  # Channels of the sinusoid of the time
    round_timestep: bool = False  # Round times to bfloat16 first, as in published training (952.38: 952)
    action_dim: int = ACTION_DIM

    @classmethod
    def tiny(cls) -> TransformerConfig:
        """Return the shipped size: 64-pixel images with 4x4 latents."""
        return cls(heads=4, head_dim=48, layers=4, ffn_dim=768, channels=32, patch=1)

    @classmethod
    def small(cls) -> TransformerConfig:
        """Return a size of seven million parameters, for the latents of the tiny autoencoder."""
        return cls(heads=4, head_dim=64, layers=6, ffn_dim=1024, channels=32, patch=1)

    @classmethod
    def full(cls) -> TransformerConfig:
        """Return the published size: 829 tensors, 5,025,334,464 parameters."""
        return cls(
            heads=24, head_dim=128, layers=30, ffn_dim=14336, channels=48, patch=2, round_timestep=True
        )


class ActionWanTransformer(WanTransformer3DModel):
    """Wan's transformer with the text encoder's place taken by actions."""

    def __init__(self, size: TransformerConfig) -> None:
        super().__init__(
            patch_size=(1, size.patch, size.patch),
            num_attention_heads=size.heads,
            attention_head_dim=size.head_dim,
            in_channels=size.channels,
            out_channels=size.channels,
            text_dim=1,
            freq_dim=size.freq_dim,
            ffn_dim=size.ffn_dim,
            num_layers=0,
        )
        width = size.heads * size.head_dim
        self.size = size
        self.blocks = nn.ModuleList(WanBlock(width, size.ffn_dim, size.heads) for _ in range(size.layers))
        self.condition_embedder.register_module("text_embedder", nn.Identity())
        self.action_mlp1 = nn.Sequential(
            nn.Linear(size.action_dim, width), nn.GELU(), nn.Linear(width, width)
        )
        self.action_mlp2 = nn.Sequential(
            nn.Linear(FRAMES_PER_LATENT * size.action_dim, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
        )

    def forward(self, latents_BZFhw: Tensor, times_BF: Tensor, actions_BTA: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Predict the velocity ``noise - clean`` of every latent: ``[B, Z, F, h, w]`` in the weights' dtype.

        Args:
            latents_BZFhw: h and w are multiples of the patch.
            times_BF: 1000 * sigma of each latent frame; 0 for those that are conditions.
            actions_BTA: Raw actions; action i produced frame i; the first is the dummy.
        """
        latents = latents_BZFhw.to(self.patch_embedding.weight.dtype)
        rotary = self.rope(latents)
        tokens_BFPD = self.patch_embedding(latents).flatten(3).permute(0, 2, 3, 1).contiguous()
        context_BTD, embedding_BFD, modulation_BF6D = self._condition(times_BF, actions_BTA)
        for block in self.blocks:
            inputs = (tokens_BFPD, context_BTD, modulation_BF6D, rotary)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                tokens_BFPD = checkpoint(block, *inputs, use_reentrant=False)
            else:
                tokens_BFPD = block(*inputs)
        shift_scale_BF2D = self.scale_shift_table.unsqueeze(0) + embedding_BFD.unsqueeze(2)
        shift, scale = shift_scale_BF2D.unsqueeze(3).unbind(2)
        tokens_BFPD = (self.norm_out(tokens_BFPD.float()) * (1 + scale) + shift).type_as(tokens_BFPD)
        return self._unpatch(self.proj_out(tokens_BFPD).flatten(1, 2), latents)

    def _condition(self, times_BF: Tensor, actions_BTA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embedder = self.condition_embedder
        dtype = self.patch_embedding.weight.dtype
        # Frame 0 is alone in its latent frame: its action is repeated until every latent frame has four.
        repeated = actions_BTA[:, :1].expand(-1, FRAMES_PER_LATENT - 1, -1)
        padded = torch.cat([repeated, actions_BTA], dim=1)
        per_latent = padded.unflatten(1, (times_BF.shape[1], FRAMES_PER_LATENT)).flatten(2)
        times = times_BF.to(torch.bfloat16) if self.size.round_timestep else times_BF
        waves = sinusoid(times, self.size.freq_dim).to(dtype)
        embedding_BFD = embedder.time_embedder(waves) + _enter(self.action_mlp2, per_latent)
        modulation_BF6D = embedder.time_proj(functional.silu(embedding_BFD)).unflatten(2, (6, -1))
        return _enter(self.action_mlp1, actions_BTA), embedding_BFD, modulation_BF6D

    def _unpatch(self, tokens_BSP: Tensor, like_BZFhw: Tensor) -> Tensor:
        patch = self.size.patch
        frames, height, width = like_BZFhw.shape[2:]
        places = (frames, height // patch, width // patch)
        grid = tokens_BSP.unflatten(2, (patch, patch, -1)).unflatten(1, places)
        # [B, F, h/p, w/p, p, p, Z] -> [B, Z, F, h/p, p, w/p, p]
        return grid.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)


def _enter(mlp: Any, actions: Tensor) -> Tensor:
    first, activation, last = mlp
    return last(activation(first(actions.to(first.weight.dtype))).to(last.weight.dtype))


def transformer_name(name: str) -> str:
    """Translate a tensor name of Wan's authors to diffusers'; diffusers' names stay."""
    return renamed(name, _TRANSFORMER_NAMES)

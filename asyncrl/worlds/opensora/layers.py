"""The parts of STDiT3: attention within a frame, attention along time, and their blocks.

Modules and their attributes have the published names, since the names of the tensors follow from them.

Dimension letters:
    B  samples    F  frames    S  tokens of a frame    D  model width    E  channels of a head
    N  sequences  L  tokens of a sequence              K  frames that are attended to
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.worlds.few_frames import attend_few

EPS: Final = 1e-6
"""Of all norms."""
Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of the angles of each frame, ``[F, E / 2]`` float32."""
KeysValues = tuple[Tensor, Tensor]
"""Keys (turned) and values of some frames, ``[B * S, heads, F, E]`` in the dtype of the weights."""


class Attention(nn.Module):
    """Multi-head attention whose queries and keys are normalised per head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm = nn.RMSNorm(width // heads, eps=EPS)
        self.k_norm = nn.RMSNorm(width // heads, eps=EPS)
        self.proj = nn.Linear(width, width)

    def project(self, x_NLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised queries, normalised keys, and values: ``[N, heads, L, E]`` each."""
        parts = self.qkv(x_NLD).unflatten(2, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(query), self.k_norm(key), value

    def join(self, mixed_NHLE: Tensor) -> Tensor:
        """Join the heads: ``[N, heads, L, E]`` to ``[N, L, D]``."""
        return self.proj(mixed_NHLE.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers with GELU (tanh) between them."""

    def __init__(self, width_in: int, hidden: int, width_out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width_in, hidden)
        self.fc2 = nn.Linear(hidden, width_out)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width_in]`` to ``[..., width_out]``."""
        return self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))


class TextAttention(nn.Module):
    """The text's cross-attention: in the published files, in no computation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_linear = nn.Linear(width, width)
        self.kv_linear = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)


class Block(nn.Module):
    """What spatial and temporal blocks share: attention and MLP between modulated norms."""

    def __init__(self, width: int, heads: int, hidden: int, *, text: bool) -> None:
        """Make the layers.

        Args:
            width: ``D``.
            heads: Attention heads.
            hidden: Inner width of the MLP.
            text: Whether the unused cross-attention is there.
        """
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.randn(6, width) / width**0.5)
        self.attn = Attention(width, heads)
        if text:
            self.cross_attn = TextAttention(width)
        self.mlp = Mlp(width, hidden, width)

    def modulation(self, shared_BF6D: Tensor) -> tuple[Tensor, ...]:
        """Return shift, scale, gate of the attention, then of the MLP: ``[B, F, 1, D]`` each."""
        return (self.scale_shift_table + shared_BF6D).unsqueeze(3).unbind(2)

    def add_mlp(self, x_BFSD: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        """Return ``x + gate * mlp(norm(x) * (1 + scale) + shift)``, ``[B, F, S, D]``."""
        return x_BFSD + gate * self.mlp(modulate(x_BFSD, shift, scale))


class SpatialBlock(Block):
    """Mixes the tokens of each frame by full attention."""

    def forward(self, x_BFSD: Tensor, shared_BF6D: Tensor) -> Tensor:
        """Mix the tokens.

        Args:
            x_BFSD: ``[B, F, S, D]`` in the dtype of the weights.
            shared_BF6D: ``[B, F, 6, D]`` in the same, or with 1 for B and F: the modulation that all blocks
                share.

        Returns:
            ``[B, F, S, D]``.
        """
        shift, scale, gate, *of_mlp = self.modulation(shared_BF6D)
        query, key, value = self.attn.project(modulate(x_BFSD, shift, scale).flatten(0, 1))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x_BFSD = x_BFSD + gate * self.attn.join(mixed).view_as(x_BFSD)
        return self.add_mlp(x_BFSD, *of_mlp)


class TemporalBlock(Block):
    """Mixes the frames of each token by causal attention: a frame sees itself and those before it."""

    def forward(
        self,
        x_BFSD: Tensor,
        shared_BF6D: Tensor,
        rotary: Rotary,
        visible_FK: Tensor,
        before: KeysValues | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Mix the frames.

        Args:
            x_BFSD: ``[B, F, S, D]`` in the dtype of the weights.
            shared_BF6D: As in `SpatialBlock`.
            rotary: Of these frames.
            visible_FK: ``[F, K]`` bool: which of the frames before and these each frame sees.
            before: Keys and values of the frames before; None: there are none.

        Returns:
            ``[B, F, S, D]``, and keys and values of these frames.
        """
        shift, scale, gate, *of_mlp = self.modulation(shared_BF6D)
        by_token = modulate(x_BFSD, shift, scale).transpose(1, 2)
        query, key, value = self.attn.project(by_token.flatten(0, 1))
        query, own = rotate(query, rotary), (rotate(key, rotary), value)
        keys, values = own
        if before is not None:
            keys, values = torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)
        mixed = attend_few(query, keys, values, visible_FK)
        x_BFSD = x_BFSD + gate * self.attn.join(mixed).view_as(by_token).transpose(1, 2)
        return self.add_mlp(x_BFSD, *of_mlp), own


def modulate(x_BFSD: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return ``norm(x) * (1 + scale) + shift``: adaptive layer norm (DiT, arXiv 2212.09748).

    Args:
        x_BFSD: ``[B, F, S, D]`` of any float dtype.
        shift: ``[B, F, 1, D]`` in the same dtype.
        scale: As `shift`.

    Returns:
        ``[B, F, S, D]``.
    """
    return functional.layer_norm(x_BFSD, x_BFSD.shape[-1:], eps=EPS) * (1 + scale) + shift


def rotate(x_NHFE: Tensor, rotary: Rotary) -> Tensor:
    """Turn neighbouring channels against each other by the angles of their frame (RoPE, arXiv 2104.09864).

    Args:
        x_NHFE: ``[N, heads, F, E]`` of any float dtype.
        rotary: Of these frames.

    Returns:
        The same shape and dtype; computed in float32 at least.
    """
    cos, sin = rotary
    exact = x_NHFE.to(torch.promote_types(x_NHFE.dtype, torch.float32))
    # Of channels a, b: a * cos - b * sin and b * cos + a * sin.
    signed = torch.stack([-sin, sin], dim=-1).flatten(-2)
    across = exact.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (exact * cos.repeat_interleave(2, dim=-1) + across * signed).type_as(x_NHFE)

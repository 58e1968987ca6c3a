"""Layers that several kinds of worlds share: attention between few frames, and waves of times.

Dimension letters: N places, H heads, F frames that see, K frames that are seen, E channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def attend_few(
    query_NHFE: Tensor, key_NHKE: Tensor, value_NHKE: Tensor, visible_FK: Tensor | None = None
) -> Tensor:
    """Compute scaled dot-product attention between the few frames of a window, at every place of a picture.

    Args:
        visible_FK: ``[F, K]`` bool; None: every frame sees all.
    """
    # On an H200 the fused kernels take eight times as long as two products for tens of thousands of sequences
    # of a dozen frames: they compute a whole tile each.
    if query_NHFE.is_cuda:
        return attend_by_products(query_NHFE, key_NHKE, value_NHKE, visible_FK)
    return functional.scaled_dot_product_attention(query_NHFE, key_NHKE, value_NHKE, attn_mask=visible_FK)


def attend_by_products(
    query_NHFE: Tensor, key_NHKE: Tensor, value_NHKE: Tensor, visible_FK: Tensor | None = None
) -> Tensor:
    """Compute the same by two batched products; the softmax is in float32 at least."""
    exact = torch.promote_types(query_NHFE.dtype, torch.float32)
    scores_NHFK = (query_NHFE @ key_NHKE.transpose(2, 3)).to(exact) * query_NHFE.shape[-1] ** -0.5
    if visible_FK is not None:
        scores_NHFK = scores_NHFK.masked_fill(~visible_FK, float("-inf"))
    return scores_NHFK.softmax(-1).type_as(value_NHKE) @ value_NHKE


def sinusoid(times: Tensor, channels: int) -> Tensor:
    """Encode times ``[...]`` of 0..1000 as ``[..., channels]`` float64 waves; sin(1000) needs the digits."""
    half = channels // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=times.device) / half)
    angles = times.double().unsqueeze(-1) * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)

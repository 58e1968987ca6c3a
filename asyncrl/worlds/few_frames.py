"""Attention between the few frames of a window, at every place of a picture.

Dimension letters: N places, H heads, F frames that see, K frames that are seen, E channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def attend_few(
    query_NHFE: Tensor, key_NHKE: Tensor, value_NHKE: Tensor, visible_FK: Tensor | None = None
) -> Tensor:
    """Mix the values of the frames that each frame sees: scaled dot-product attention.

    Of tens of thousands of sequences of a dozen frames a GPU's fused kernels compute a whole tile each:
    on an H200 that takes eight times as long as two products. A CPU has no tiles to waste.

    Args:
        query_NHFE: ``[N, H, F, E]`` of any float dtype.
        key_NHKE: ``[N, H, K, E]`` in the same.
        value_NHKE: As `key_NHKE`.
        visible_FK: ``[F, K]`` bool; None: every frame sees all.

    Returns:
        ``[N, H, F, E]`` in the same dtype.
    """
    if query_NHFE.is_cuda:
        return attend_by_products(query_NHFE, key_NHKE, value_NHKE, visible_FK)
    return functional.scaled_dot_product_attention(query_NHFE, key_NHKE, value_NHKE, attn_mask=visible_FK)


def attend_by_products(
    query_NHFE: Tensor, key_NHKE: Tensor, value_NHKE: Tensor, visible_FK: Tensor | None = None
) -> Tensor:
    """Compute what `attend_few` returns by two batched products; shares in float32 at least."""
    exact = torch.promote_types(query_NHFE.dtype, torch.float32)
    scores_NHFK = (query_NHFE @ key_NHKE.transpose(2, 3)).to(exact) * query_NHFE.shape[-1] ** -0.5
    if visible_FK is not None:
        scores_NHFK = scores_NHFK.masked_fill(~visible_FK, float("-inf"))
    return scores_NHFK.softmax(-1).type_as(value_NHKE) @ value_NHKE

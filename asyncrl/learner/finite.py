"""Weights in, those that are not finite out: one pass over them, and one wait for the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from asyncrl.learner.group import LearnerGroup


def not_finite(tensors: Mapping[str, Tensor], group: LearnerGroup) -> list[str]:
    """Names of the tensors that hold a number which is not finite, on any rank; the same on all ranks.

    Args:
        tensors: Not empty, any shapes and float types; this rank's part where they are sharded.
        group: All its ranks have to call this.
    """
    bad_T = torch.stack([~_own_part(tensor).isfinite().all() for tensor in tensors.values()])
    found = group.max(bad_T.float()).tolist()
    return [name for name, bad in zip(tensors, found, strict=True) if bad]


def _own_part(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

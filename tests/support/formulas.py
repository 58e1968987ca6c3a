"""Layers by their equations, for the slow references."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def standardised(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Give the last axis the mean 0 and the variance 1."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def layer_norm(x: Tensor, w: Mapping[str, Tensor], name: str, eps: float = 1e-6) -> Tensor:
    return standardised(x, eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

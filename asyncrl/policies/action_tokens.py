"""Action tokens: the distribution that acting and learning share, and the actions that tokens mean.

A token is the bin ``j``, 0..255, everywhere: vocabulary id = first_action_id + j (31744 + j for Llama 2).
OpenVLA counts bins from the end of the vocabulary: j = 255 is -1, j = 0 is +1. 256 edges make 255 cells, and
j = 0 (only the value +1 exactly) decodes like j = 1.

Dimension letters: B rows, K tokens of one decision (56), N action bins (256), A action dimensions, Q numbers
of proprioception, D width of the policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.devices.tensors import constant_to_device, to_device
from asyncrl.policies.interface import SamplingParams
from asyncrl.records import Bounds

BINS: Final = 256  # Action tokens in the vocabulary.

_EDGES = np.linspace(-1.0, 1.0, BINS)
_CENTERS = (_EDGES[:-1] + _EDGES[1:]) / 2
_DECODED = _CENTERS[np.minimum(BINS - 1 - np.arange(BINS), BINS - 2)].astype(np.float32)
_EPSILON = 1e-8


Gripper = Literal["none", "libero", "maniskill"]


@dataclass(frozen=True, kw_only=True)
class NormStats(Bounds):
    """Range of each action dimension, and of proprioception where the data has it."""

    proprio: Bounds | None = None  # [Q] of proprioception; None: the data has none.

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> NormStats:
        """Read an `action` entry, with `proprio` inside it as `OpenVLAOFTConfig.to_json` has it."""
        action, proprio = Bounds.from_json(fields), fields.get("proprio")
        own = None if proprio is None else Bounds.from_json(proprio)
        return cls(q01=action.q01, q99=action.q99, mask=action.mask, proprio=own)

    @classmethod
    def from_published(cls, entry: Mapping[str, Any]) -> NormStats:
        """Read one data set of a published `dataset_statistics.json`: `action` and perhaps `proprio`."""
        return cls.from_json({**entry["action"], "proprio": entry.get("proprio")})

    def to_published(self) -> dict[str, Any]:
        """Return an entry that `from_published` reads."""
        entries = {"action": self, "proprio": self.proprio}
        return {
            name: {"q01": list(b.q01), "q99": list(b.q99), "mask": list(b.mask)}
            for name, b in entries.items()
            if b is not None
        }


def encode(actions: NDArray[np.floating]) -> NDArray[np.int32]:
    """Return the bins ``[...]`` int32 of actions normalised to [-1, 1]; others are clipped."""
    return (BINS - np.digitize(np.clip(actions, -1.0, 1.0), _EDGES)).astype(np.int32)


def decode(tokens: Tensor) -> Tensor:
    """Return the centers of the tokens' cells, ``[...]`` float32 in [-0.99608, 0.99608], on their device."""
    return _decoded_on(tokens.device)[tokens.long()]


@lru_cache(maxsize=32)
def _decoded_on(device: torch.device) -> Tensor:
    return constant_to_device(_DECODED, device)


def unnormalise(actions: Tensor, stats: Bounds) -> Tensor:
    """Scale ``[..., A]`` float32 in [-1, 1] back: ``(a + 1) / 2 * (q99 - q01 + 1e-8) + q01`` where masked."""
    low, width, mask = _bounds_on(stats.q01, stats.q99, stats.mask, actions.device)
    return torch.where(mask, 0.5 * (actions + 1) * width + low, actions)


@lru_cache(maxsize=32)
def _bounds_on(
    q01: tuple[float, ...], q99: tuple[float, ...], mask: tuple[bool, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    low = np.array(q01, np.float32)
    width = np.array(q99, np.float32) - low + np.float32(_EPSILON)
    return (
        constant_to_device(low, device),
        constant_to_device(width, device),
        constant_to_device(np.array(mask), device),
    )


def normalise(values: NDArray[np.floating], stats: Bounds, *, clip: bool = True) -> NDArray[np.float32]:
    """Scale ``[..., Q]`` float32, to [-1, 1] if clipped: ``2 (x - q01) / (q99 - q01 + 1e-8) - 1``."""
    low, high = np.array(stats.q01), np.array(stats.q99)
    scaled = 2 * (values - low) / (high - low + _EPSILON) - 1
    scaled = np.where(stats.mask, scaled, values).astype(np.float32)
    return np.clip(scaled, -1, 1) if clip else scaled


def with_gripper(actions: Tensor, gripper: Gripper) -> Tensor:
    """Map the last number of every action, 0 = closed to 1 = open in the data, to the robot's command."""
    if gripper == "none":
        return actions
    opening = actions[..., -1:]
    if gripper == "libero":
        command = -torch.sign(2 * opening - 1)
    else:
        command = 2 * (opening > 0.5).to(actions.dtype) - 1
    return torch.cat([actions[..., :-1], command], dim=-1)


def opening_of(actions: NDArray[np.floating], gripper: Gripper) -> NDArray[np.floating]:
    """Undo `with_gripper` of an open or closed gripper: commands become 0 = closed to 1 = open."""
    if gripper == "none":
        return actions
    command = actions[..., -1:] if gripper == "maniskill" else -actions[..., -1:]
    return np.concatenate([actions[..., :-1], (command + 1) / 2], axis=-1)


# ---- sampling ----


class SampledTokens(NamedTuple):
    """Sampled tokens of a policy, on the device."""

    tokens: Tensor  # [B, K] int64 bins.
    logprobs: Tensor  # [B, K, N] float32, of the distribution that was sampled.
    hidden: Tensor  # [B, 1 or more, D] final hidden states; the first is at the last prompt token.


def action_distribution(
    logits_BKN: Tensor, sampling: SamplingParams, taken_BK: Tensor | None = None
) -> Tensor:
    """Compute the log-probs ``[B, K, N]`` float32 that are sampled from, after temperature and top-k.

    `taken_BK`: tokens that stay possible outside the `top_k` most likely: other weights or another kernel
    may rank them lower, and a ratio needs a finite number.
    """
    logits_BKN = logits_BKN.float()
    if sampling.temperature == 0:
        return logits_BKN.log_softmax(dim=-1)
    logits_BKN = logits_BKN / sampling.temperature
    if 0 < sampling.top_k < logits_BKN.shape[-1]:
        allowed_BKN = torch.zeros_like(logits_BKN, dtype=torch.bool)
        allowed_BKN.scatter_(-1, logits_BKN.topk(sampling.top_k, dim=-1).indices, True)
        if taken_BK is not None:
            allowed_BKN.scatter_(-1, taken_BK.long().unsqueeze(-1), True)
        logits_BKN = logits_BKN.masked_fill(~allowed_BKN, float("-inf"))
    return logits_BKN.log_softmax(dim=-1)


def uniforms_for(
    sampling: SamplingParams, seeds: Sequence[int], count: int, device: torch.device
) -> Tensor | None:
    """Draw ``[B, count]`` float64 in [0, 1), row b from ``seeds[b]`` alone; None at temperature 0."""
    if sampling.temperature == 0:
        return None
    streams = [torch.Generator().manual_seed(seed) for seed in seeds]
    rows = [torch.rand(count, generator=stream, dtype=torch.float64) for stream in streams]
    return to_device(torch.stack(rows).numpy(), device)


def take_tokens(logprobs_BKN: Tensor, uniforms_BK: Tensor | None) -> Tensor:
    """Pick bins ``[B, K]`` int64 where the cumulated probability exceeds the uniform; None: the likeliest."""
    if uniforms_BK is None:
        return logprobs_BKN.argmax(dim=-1)
    cumulated_BKN = logprobs_BKN.double().exp().cumsum(dim=-1)
    total_BK1 = cumulated_BKN[..., -1:]
    picked_BK = (cumulated_BKN <= uniforms_BK.unsqueeze(-1) * total_BK1).sum(dim=-1)
    last_possible_BK = (cumulated_BKN < total_BK1).sum(dim=-1)
    return torch.minimum(picked_BK, last_possible_BK)  # rounding must not reach behind the last possible bin


def logprob_of(logprobs_BKN: Tensor, tokens_BK: Tensor) -> Tensor:
    """Look up the log-probs ``[B, K]`` float32 of the integer tokens ``[B, K]`` in ``[B, K, N]`` float32."""
    return logprobs_BKN.gather(-1, tokens_BK.long().unsqueeze(-1)).squeeze(-1)


def entropy_of(logprobs_BKN: Tensor) -> Tensor:
    """Compute the entropy ``[B, K]`` float32 in nats; impossible bins count nothing and pass no gradient."""
    finite_BKN = logprobs_BKN.masked_fill(logprobs_BKN == float("-inf"), 0.0)
    return -(logprobs_BKN.exp() * finite_BKN).sum(dim=-1)

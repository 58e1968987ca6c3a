"""Settings of an EVAC world and the memory of its slots.

Dimension letters: B slots, C steps, P frames remembered, N frames there is room for, Z latent channels, h/w
latent size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import torch
from torch import Tensor

from asyncrl.config.sections import ImaginationSettings
from asyncrl.errors import ConfigError
from asyncrl.worlds.slots import TensorState

_OWN: Final = {"guidance": 100.0, "guidance_rescale": 1.0, "eta": 1.0}
"""Settings of ``[world.settings]``, and the largest value of each; none is below 0."""


@dataclass(frozen=True, kw_only=True)
class EvacOptions:
    """Settings of the sampler."""

    steps: int = 0
    """Network calls per decision; 0: the folder's number."""
    guidance: float = 1.0
    """Scale of classifier-free guidance; 1 disables it, as in RLinf, others cost twice as much."""
    guidance_rescale: float = 0.7
    """See `ddim.guided`."""
    eta: float = 1.0
    """Share of fresh noise in each step; 0: only the first noise counts."""

    @classmethod
    def from_settings(cls, settings: ImaginationSettings, own: Mapping[str, Any]) -> EvacOptions:
        """Read the settings of a run."""
        if settings.context == "frames":
            raise ConfigError(
                "--imagination.context is frames, but an EVAC world remembers the latents that it drew and "
                "encodes none again. Use auto or latents."
            )
        if settings.decoder == "tiny":
            raise ConfigError(
                "--imagination.decoder is tiny, but there is no distilled decoder for EVAC's autoencoder. "
                "Use full."
            )
        if settings.precision == "float8":
            raise ConfigError(
                "--imagination.precision is float8, but of an EVAC world's denoiser most are convolutions, "
                "which have no 8-bit products. Use stored or bf16."
            )
        if settings.steps > 1000:
            raise ConfigError(
                f"--imagination.steps is {settings.steps}, but EVAC has 1000 noise levels. Use 1 to 1000, or "
                "0 for the folder's number."
            )
        for name, value in own.items():
            if name not in _OWN:
                raise ConfigError(
                    f"--world-settings has {name}, which an EVAC world does not know. It takes "
                    f"{', '.join(_OWN)}."
                )
            number = float(value) if type(value) in (int, float) else math.nan
            if not 0 <= number <= _OWN[name]:
                raise ConfigError(
                    f"--world-settings {name} is {value!r}, expected a number from 0 to {_OWN[name]:g}."
                )
        return cls(steps=settings.steps, **{name: float(value) for name, value in own.items()})


def memory_index(count_B: Tensor, remembered: int) -> Tensor:
    """Choose the frames that the network sees of an episode so far: three spread over it, and the last one.

    The first frame counts `P` times (EnerVerse-AC's sampler): of ``n = count + P - 1`` frames the network
    sees ``n * i // (P - 1)`` for i from 0 to P - 2, and the last one.

    Args:
        count_B: ``[B]`` int64 frames so far; at least 1.
        remembered: ``P``, at least 2.

    Example:
        >>> memory_index(torch.tensor([1, 9]), 4).tolist()
        [[0, 0, 0, 0], [0, 1, 5, 8]]
    """
    copies = remembered - 1  # of the first frame, besides itself
    spread = torch.arange(copies, device=count_B.device) * (count_B[:, None] + copies) // copies - copies
    return torch.cat([spread.clamp(min=0), count_B[:, None] - 1], dim=1)


@dataclass(frozen=True, kw_only=True)
class EvacState(TensorState):
    """Memory of `B` slots; `finite` covers latents, pixels and poses."""

    history: Tensor
    """``[B, N, Z, h, w]`` float32 latents of all frames so far; behind them zeros."""
    poses: Tensor
    """``[B, N, 8]`` float32 pose of the hand at each of them."""
    count: Tensor
    """``[B]`` int64 frames so far."""
    first: Tensor
    """``[B, H, W, 3]`` uint8: the first frame."""
    left: Tensor
    """``[B]`` int64 decisions that there is still room for, on the CPU, so that reading never waits."""

    def write_rows(self, indices: Sequence[int], other: Self) -> Self:  # pyright: ignore
        """See `TensorState.write_rows`; both need room for as many frames."""
        if other.history.shape[1] != self.history.shape[1]:
            raise ConfigError(
                f"a state with room for {other.history.shape[1]} frames cannot go into one with room for "
                f"{self.history.shape[1]}. Start both with the same number of decisions."
            )
        return super().write_rows(indices, other)

    def to(self, device: torch.device | str) -> EvacState:
        """Return this state on `device`."""
        return replace(super().to(device), left=self.left.clone())

    def remembered(self, frames: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return latents ``[B, P, Z, h, w]``, their poses ``[B, P, 8]``, and the poses one frame earlier."""
        rows = torch.arange(len(self), device=self.count.device)[:, None]
        index = memory_index(self.count, frames)
        before = (index - 1).clamp(min=0)
        return self.history[rows, index], self.poses[rows, index], self.poses[rows, before]

    def check_room(self) -> None:
        """Check that another decision fits."""
        left = self.left.tolist()
        if 0 in left:
            raise ConfigError(
                f"slot {left.index(0)} has imagined as many decisions as its memory was made for, and "
                "another one does not fit. Start with more decisions (--actor.max-decisions)."
            )

    def extended(self, latents: Tensor, poses: Tensor, finite: Tensor) -> EvacState:
        """Append the latents ``[B, C, Z, h, w]`` and poses ``[B, C, 8]`` of a decision."""
        rows = torch.arange(len(self), device=self.count.device)[:, None]
        places = self.count[:, None] + torch.arange(latents.shape[1], device=self.count.device)
        return EvacState(
            history=self.history.index_put((rows, places), latents),
            poses=self.poses.index_put((rows, places), poses),
            count=self.count + latents.shape[1],
            first=self.first.clone(),
            finite=self.finite & finite,
            left=self.left - 1,
        )

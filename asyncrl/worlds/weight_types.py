"""Say in which types the weights of a world are loaded: the one rule for all kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from asyncrl.config.imagination import ImaginationSettings

EXACT: Final = torch.float32


@dataclass(frozen=True, kw_only=True)
class WeightTypes:
    """What the weights of a world become."""

    dtype: torch.dtype
    """Of nearly all: what the world computes in."""
    exact: frozenset[str] = frozenset()
    """Names, in any of its networks, of those that are float32 all the same."""

    @property
    def float32(self) -> bool:
        """Whether the world computes in float32."""
        return self.dtype == EXACT

    def nbytes(self, network: nn.Module) -> int:
        """Add up what the parameters of a network take, whatever they are now; it may be on device meta."""
        return sum(
            parameter.numel() * (EXACT if name in self.exact else self.dtype).itemsize
            for name, parameter in network.named_parameters()
        )


def weight_types(
    settings: ImaginationSettings, *, published: bool, exact: frozenset[str] = frozenset()
) -> WeightTypes:
    """Say what weights become under --imagination.precision.

    A published world is computed in bfloat16, all of it, as where it was published. One that asyncrl fitted
    is computed in float32, unless bf16 is set.

    Args:
        settings: Of the run.
        published: Whether the folder has a published layout and not ours.
        exact: Names of weights that a fit leaves float32 because rounded ones would mean something else.
    """
    if published:
        return WeightTypes(dtype=torch.bfloat16)
    return WeightTypes(dtype=torch.bfloat16 if settings.precision == "bf16" else EXACT, exact=exact)

"""Folders of worlds: the parts that all kinds share.

A folder has the published layout of its kind. One that asyncrl wrote has ``world.json`` too, with the facts
that shapes of tensors do not tell; without it the facts of the published worlds apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import nn

from asyncrl.config.imagination import ImaginationSettings, WorldDefaults
from asyncrl.errors import ConfigError

AS_SAVED: Final = ImaginationSettings()
"""Everything as the folder says."""
EXACT: Final = torch.float32
MAX_DECISIONS: Final = 32
"""256 steps, the length of episodes in RLinf's files for its worlds."""
TEMPERATURE: Final = 1.6
"""At which RLinf's GRPO samples the policy in its worlds."""


@dataclass(frozen=True, kw_only=True)
class WeightTypes:
    """Types of a world's weights once loaded."""

    dtype: torch.dtype
    """Of nearly all weights, and of the computation."""
    exact: frozenset[str] = frozenset()
    """Names of weights, in any of the networks, that are float32 all the same."""

    @property
    def float32(self) -> bool:
        """True if the world computes in float32."""
        return self.dtype == EXACT

    def nbytes(self, network: nn.Module) -> int:
        """Return the bytes that the parameters of a network will take; it may be on device meta."""
        return sum(
            parameter.numel() * (EXACT if name in self.exact else self.dtype).itemsize
            for name, parameter in network.named_parameters()
        )


@dataclass(frozen=True, kw_only=True)
class WorldFolder:
    """A world on disk without its weights."""

    EXACT_WEIGHTS: ClassVar[frozenset[str]] = frozenset()
    """See `WeightTypes.exact`: rounded, these weights would mean something else."""

    folder: Path
    image_size: int
    schedule_steps: int
    """Network calls per decision."""
    version: int
    published: bool
    """True if the folder has no world.json."""

    def types(self, settings: ImaginationSettings = AS_SAVED) -> WeightTypes:
        """Return the types of weights: published worlds compute in bfloat16, fitted ones in float32."""
        if self.published:
            return WeightTypes(dtype=torch.bfloat16)
        dtype = torch.bfloat16 if settings.precision == "bf16" else EXACT
        return WeightTypes(dtype=dtype, exact=self.EXACT_WEIGHTS)

    def defaults(self, settings: ImaginationSettings = AS_SAVED) -> WorldDefaults:
        """Return the settings of episodes for a run that sets none; published: those of RLinf."""
        if not self.published:
            return WorldDefaults(source="the world's folder", steps=self.schedule_steps)
        return WorldDefaults(
            source="published defaults",
            steps=self.schedule_steps,
            max_decisions=MAX_DECISIONS,
            temperature=TEMPERATURE,
        )


def refuse_own_settings(own: Mapping[str, Any], world: str) -> None:
    """Check that --world-settings is empty, for a world that takes none.

    Args:
        own: The settings.
        world: The world's name for people, with its article.

    Raises:
        ConfigError: There are some; names the settings that exist instead.
    """
    if own:
        unguided = " and draws without guidance" if "guidance" in own else ""
        raise ConfigError(
            f"--world-settings has {', '.join(own)}, but {world} takes none{unguided}. Leave it out; what "
            "can be chosen are --imagination.steps, .context, .decoder and .precision."
        )

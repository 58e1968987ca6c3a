"""How an EVAC world samples, from --imagination.* and its own settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.config.sections import ImaginationSettings
from asyncrl.errors import ConfigError

_OWN: Final = {"guidance": 100.0, "guidance_rescale": 1.0, "eta": 1.0}
"""Settings of ``[world.settings]``, and the largest value of each; none is below 0."""


@dataclass(frozen=True, kw_only=True)
class EvacOptions:
    """How frames are drawn."""

    steps: int = 0
    """Network calls per decision; 0: as many as the folder says."""
    guidance: float = 1.0
    """How much further than without guidance a drawing follows its conditions; 1: off, as in RLinf. Others
    cost twice as much."""
    guidance_rescale: float = 0.7
    """How far guidance leaves the spread of the velocity as it was."""
    eta: float = 1.0
    """Share of fresh noise in each step; 0: only the first noise counts."""

    @classmethod
    def from_settings(cls, settings: ImaginationSettings, own: Mapping[str, Any]) -> EvacOptions:
        """Read the settings of a run.

        Raises:
            ConfigError: One of them is unknown, out of bounds, or not in this world's power.
        """
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

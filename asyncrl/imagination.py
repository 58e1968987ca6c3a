"""How exactly and how fast a world imagines: what a user can trade. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ImaginationSettings:
    """What the world model computes, and how fast. docs/approximations.md says what each choice costs."""

    memory: Literal["frames", "latents"] = "latents"
    """What the next decision begins with. frames: the last four frames as uint8 pixels, encoded again, and
    the decoder starts anew behind the first frame, as published. latents: the last latent, and the decoder
    goes on from where it stopped."""
    decoder: Literal["full", "tiny"] = "full"
    """Which decoder draws the frames. tiny: one distilled from the full one by `asyncrl fit decoder`."""
    steps: int = 0
    """Network calls per decision; 0 = as many as the world's folder says (published: 5)."""
    compile: bool = False
    """Compile the networks of the actor: about a minute at the start, then up to twice as fast on a GPU."""

    def __post_init__(self) -> None:
        if self.memory == "frames" and self.decoder == "tiny":
            raise ConfigError(
                "--imagination.memory is frames and --imagination.decoder is tiny: frames are the exact "
                "path, and a distilled decoder is not exact. Use --imagination.memory latents, or the full "
                "decoder."
            )
        if self.steps < 0:
            raise ConfigError(
                f"--imagination.steps is {self.steps}, but it counts network calls. Use 0 for the folder's."
            )

"""Settings of --imagination: what the world model computes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from asyncrl.config.bounds import AtLeast, Bounded
from asyncrl.errors import ConfigError

Precision = Literal["stored", "bf16", "float8"]
"""See `ImaginationSettings.precision`."""


@dataclass(frozen=True, kw_only=True)
class WorldDefaults:
    """What a world says about a run where its user said nothing."""

    source: str
    """What the run's banner calls them."""
    context: Literal["frames", "latents"] = "latents"
    """For --imagination.context auto."""
    steps: int = 0
    """For --imagination.steps 0; 0: the world does not count network calls."""
    max_decisions: int = 6
    """For --actor.max-decisions 0."""
    temperature: float = 0.0
    """At which those who published the world sampled the policy, for the banner only: how far a policy must
    be flattened depends on the policy and the algorithm. 0: nothing is known."""
    simulated: bool = False
    """Whether it is a simulator, for which only `max_decisions` means something."""


@dataclass(frozen=True, kw_only=True)
class ImaginationSettings(Bounded):
    """What the world model computes, and how fast. docs/approximations.md says what each choice costs."""

    SECTION: ClassVar[str] = "imagination."

    context: Literal["auto", "frames", "latents"] = "auto"
    """What the next decision begins with. frames: the last four frames as uint8 pixels, encoded again, and
    the decoder starts anew behind the first frame, as published. latents: the last latent, and the decoder
    goes on from where it stopped. auto: what the world says; frames in a published folder, else latents."""
    decoder: Literal["full", "tiny"] = "full"
    """Which decoder draws the frames. tiny: one distilled from the full one by `asyncrl fit decoder`."""
    steps: Annotated[
        int, AtLeast(0, "it counts network calls.", "Use 0 for the folder's.", highest=10_000)
    ] = 0
    """Network calls per decision; 0 = as many as the world's folder says (published: 5)."""
    precision: Precision = "stored"
    """What the world computes in. stored: a published world in bfloat16, one that asyncrl fitted in float32.
    bf16: every world in bfloat16, which takes half of the memory and on a GPU a fraction of the time. float8:
    as stored, but the denoiser's linear layers multiply numbers of 8 bits, for GPUs from H100 on: half of the
    memory; with compile Wan draws 1.1 times as many frames, 1.3 times with the tiny decoder."""
    compile: bool = False
    """Compile the networks of the actor: about a minute at the start, then up to twice as fast on a GPU."""
    fixed_shape: bool = False
    """Give every pass as many rows as it can have: what is free is filled up with copies. An episode then has
    the same bits whatever is imagined beside it; a pass always costs as much as with all --actor.slots."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context == "frames" and self.decoder == "tiny":
            raise ConfigError(
                "--imagination.context is frames and --imagination.decoder is tiny: frames are the exact "
                "path, and a distilled decoder is not exact. Use --imagination.context latents, or the full "
                "decoder."
            )

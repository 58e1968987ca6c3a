"""What a world draws its frames with: latents in, frames out, as streams whose memory has a row per slot."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from asyncrl.worlds.wan_vae import Cache, WanVae, decode_step


class Decoder(Protocol):
    """The full decoder, or a `TinyDecoder`."""

    def decode(self, latents_BZFhw: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """Draw the next frames of `B` videos; see `wan_vae.decode_step`."""
        ...

    def speed_up(self) -> None:
        """Compile for one fixed batch size."""
        ...


class FullDecoder:
    """The autoencoder's own decoder."""

    def __init__(self, vae: WanVae) -> None:
        self.vae = vae

    def decode(self, latents_BZFhw: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """Draw the next frames; see `wan_vae.decode_step`."""
        return decode_step(self.vae, latents_BZFhw, cache)

    def speed_up(self) -> None:
        """Leave it as it is: diffusers' layers do not compile into one graph."""

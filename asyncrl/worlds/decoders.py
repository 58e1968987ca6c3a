"""What a world draws its frames with: latents in, frames out, as streams whose memory has a row per slot."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from asyncrl.worlds.vae_stream import Layers, decode_layers
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
        self._layers: Layers = decode_layers

    def decode(self, latents_BZFhw: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """Draw the next frames; single latents open videos, in numbers that vary: not compiled for."""
        layers = decode_layers if latents_BZFhw.shape[2] == 1 else self._layers
        return decode_step(self.vae, latents_BZFhw, cache, layers=layers)

    def speed_up(self) -> None:
        """Compile the layers into one graph."""
        self._layers = torch.compile(decode_layers, fullgraph=True, dynamic=False)

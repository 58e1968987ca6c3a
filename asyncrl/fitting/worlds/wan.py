"""Fit a Wan world: its causal autoencoder, then its transformer by flow matching.

Letters: W windows, B windows of a batch, N latents of all episodes, z latent channels, h w latent grid,
A numbers per action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.fitting.autoencoder import Latents, fit_autoencoder
from asyncrl.fitting.frame_file import FrameFile
from asyncrl.fitting.loop import Schedule, minimise, prepared
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.shares import Shares
from asyncrl.fitting.worlds.interface import (
    Size,
    WorldOptions,
    check_picture_size,
    check_recordings,
    refuse_options,
)
from asyncrl.fitting.worlds.wan_actions import (
    entrances,
    measured_scale,
    take_raw,
    take_scaled,
)
from asyncrl.fitting.worlds.wan_latents import (
    WanAutoencoder,
    encode_recordings,
    redraw,
)
from asyncrl.fitting.worlds.wan_windows import Windows, windows
from asyncrl.worlds.wan.files import open_world, rewrite_world
from asyncrl.worlds.wan.flow_matching import WindowNoise, window_loss
from asyncrl.worlds.wan.tiny_decoder import TinyDecoder, TinyDecoderConfig, save_decoder
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig
from asyncrl.worlds.wan.vae import SPATIAL, VaeConfig, WanVae
from asyncrl.worlds.wan.world import WanWorld, load_world, save_world


class WanFit:
    """`FittedWorld`, `FineTunes` and `DistilsDecoder` of Wan."""

    options: ClassVar = frozenset({"context_sigma"})

    def __init__(self, world: WanWorld) -> None:
        self.world = world
        self._scaled = False

    @classmethod
    def fresh(cls, size: Size, vae_size: Size, recordings: Recordings, options: WorldOptions) -> WanFit:
        """Make a world of the recordings' picture size. See `FittedWorld.fresh`."""
        refuse_options(options, WanFit, "wan")
        side = check_picture_size(recordings, SPATIAL)
        check_recordings(recordings)
        transformer: TransformerConfig = getattr(TransformerConfig, size)()
        transformer = replace(transformer, action_dim=recordings.actions.shape[1])
        vae: VaeConfig = getattr(VaeConfig, vae_size)()
        return cls(WanWorld(ActionWanTransformer(transformer), WanVae(vae), image_size=side))

    @classmethod
    def load(cls, folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> WanFit:
        """Read a folder of ours or a published one."""
        return cls(load_world(folder, device=device, dtype=dtype))

    @property
    def image_size(self) -> int:
        """Height and width of the frames in pixels."""
        return self.world.image_size

    def to(self, device: torch.device) -> None:
        """Move all networks."""
        self.world.to(device)

    def fit_autoencoder(self, recordings: Recordings, schedule: Schedule) -> float:
        """Train the autoencoder in place."""
        return fit_autoencoder(WanAutoencoder(self.world.vae), recordings, schedule)

    def take_autoencoder(self, source: object) -> None:
        """Refuse: see `FittedWorld.take_autoencoder`."""
        raise ConfigError(
            "--autoencoder is of the kinds opensora and evac. A wan world keeps the autoencoder of the one "
            "that it is refined from (--refine)."
        )

    def fit_network(self, recordings: Recordings, schedule: Schedule, options: WorldOptions) -> float:
        """Train the transformer. See `FittedWorld.fit_network` and `fit_transformer`."""
        refuse_options(options, WanFit, "wan")
        check_recordings(recordings, self.world.action_spec.dim)
        self.world.vae.requires_grad_(False)
        trained, scale = self.world.transformer.requires_grad_(True), measured_scale(recordings)
        cut = windows(recordings, self.encode(recordings), scale)
        if scale is not None:
            take_scaled(trained, scale)
        loss = fit_transformer(trained, cut, schedule, context_sigma=options.context_sigma)
        if scale is not None:
            take_raw(trained, scale)
        self._scaled = scale is not None
        return loss

    def encode(self, recordings: Recordings) -> Latents:
        """Encode all episodes as causal videos."""
        return encode_recordings(self.world.vae, recordings)

    def redraw(self, recordings: Recordings) -> FrameFile:
        """Draw the recorded frames as the autoencoder draws them."""
        return redraw(self.world.vae, self.encode(recordings), recordings)

    def save(self, folder: Path, version: int) -> None:
        """Write the world in bfloat16."""
        self.world.version = version
        # Rounded, layers that take actions of any unit would not cancel what is far from zero: they stay.
        kept = entrances(self.world.transformer) if self._scaled else ()
        exact = [{n: p.detach().clone() for n, p in layer.named_parameters()} for layer in kept]
        for module in (self.world.transformer, self.world.vae):
            torch.nn.Module.to(module, torch.bfloat16)  # halves the files; imagination computes in float32
        for layer, numbers in zip(kept, exact, strict=True):
            for name, parameter in layer.named_parameters():
                parameter.data = numbers[name]
        save_world(folder, self.world)

    def network(self) -> ActionWanTransformer:
        """Return the transformer."""
        return self.world.transformer

    def blocks(self) -> Iterable[torch.nn.Module]:
        """Return the transformer's blocks."""
        return self.network().blocks

    def adapted_layers(self) -> set[str]:
        """Return the names of the linear layers of all blocks: attention and MLP."""
        named = self.network().named_modules()
        return {n for n, layer in named if n.startswith("blocks.") and isinstance(layer, torch.nn.Linear)}

    def types(self, source: Path) -> dict[str, torch.dtype]:
        """Return the types of the transformer's weights in a folder, by diffusers' names."""
        files = open_world(source).transformer
        return {name: files.spec(name).dtype for name in files.names()}

    def check_fine_tuning(self, recordings: Recordings, options: WorldOptions) -> None:
        """Check that actions can be taken as they are. See `FineTunes.check_fine_tuning`."""
        refuse_options(options, WanFit, "wan")
        check_recordings(recordings, self.world.action_spec.dim)
        if measured_scale(recordings) is not None:
            raise ConfigError(
                "--data has actions that are not 7 numbers between -1 and 1 (1st to 99th percentile). "
                "A world that is written as it was read takes actions as they are, and those of other units "
                "are far from what it knows. Record them scaled to -1..1, or refine a world of your own in "
                "one process and without flags of fine-tuning: their range is measured then."
            )

    def fine_tune(self, recordings: Recordings, schedule: Schedule, options: WorldOptions) -> float:
        """Train what is trainable of the transformer. See `FineTunes.fine_tune`."""
        kept = torch.device("cpu")  # Moments and averages come later, and need the device's room.
        vae = self.world.vae.requires_grad_(False)
        latents = encode_recordings(vae, recordings, kept=kept, ranks=schedule.ranks)
        torch.nn.Module.to(vae, "meta")  # Nobody needs its weights any more: its file stays as it is.
        cut = windows(recordings, latents)
        return fit_transformer(self.network(), cut, schedule, context_sigma=options.context_sigma)

    def rewrite(self, source: Path, folder: Path, tensors: Mapping[str, Tensor], version: int) -> None:
        """Write the folder again with other weights. See `FineTunes.rewrite`."""
        rewrite_world(source, folder, tensors, version)

    def fresh_decoder(self) -> TinyDecoder:
        """Make a tiny decoder with fresh weights on the CPU."""
        return TinyDecoder(TinyDecoderConfig.for_world(self.world.vae.size.z_dim, self.image_size))

    def save_decoder(self, folder: Path, decoder: torch.nn.Module, fit: Mapping[str, Any]) -> None:
        """Write a tiny decoder, and of which autoencoder's latents it is."""
        assert isinstance(decoder, TinyDecoder)
        size = self.world.vae.size
        save_decoder(
            folder, decoder, latents_mean=size.latents_mean, latents_std=size.latents_std, fit=dict(fit)
        )


def fit_transformer(
    transformer: ActionWanTransformer, windows: Windows, schedule: Schedule, *, context_sigma: float
) -> float:
    """Train by flow matching on the two new latents; the memory latent is noised (see `window_loss`).

    Args:
        context_sigma: Noise level of the memory latent, in [0, 1].

    Returns:
        Mean loss of the last tenth.
    """
    shares = Shares.of(schedule.batch, schedule.ranks, schedule.micro_batch)
    return minimise(
        "world",
        transformer,
        window_losses(transformer, windows, schedule, shares, context_sigma=context_sigma),
        steps=schedule.steps,
        learning_rate=schedule.learning_rate,
        warmup=schedule.warmup,
        average=0.9995,
        parts=shares.parts,
        ranks=schedule.ranks,
    )


def window_losses(
    transformer: ActionWanTransformer,
    windows: Windows,
    schedule: Schedule,
    shares: Shares,
    *,
    context_sigma: float,
) -> Callable[[int], Tensor]:
    """Return what `minimise` asks for losses; see `fit_transformer`.

    All ranks draw a whole step's windows and noise, so that a step is the same however it is shared out.
    """
    generator = torch.Generator().manual_seed(schedule.seed)
    device = next(transformer.parameters()).device
    velocity = prepared(transformer, device, compiled=schedule.compiled)
    own: list[Tensor] = []

    def loss_at(count: int) -> Tensor:
        part = count % shares.parts
        if part == 0:
            chosen = torch.randint(len(windows), (schedule.batch,), generator=generator)
            noise = WindowNoise.drawn(schedule.batch, windows.latents.shape[1:], generator)
            own[:] = map(shares.own, (chosen, *noise))
        chosen, *drawn = (shares.part(tensor, part) for tensor in own)
        latents_B, actions_B = (t.to(device) for t in windows.take(chosen.to(windows.rows.device)))
        noise = WindowNoise(*drawn)
        return window_loss(velocity, latents_B, actions_B, noise, context_sigma=context_sigma).loss

    return loss_at

"""Fit a Wan world: its causal autoencoder, then its transformer by flow matching.

Letters: W windows, B windows of a batch, N latents of all episodes, z latent channels, h w latent grid,
A numbers per action.

Cut recorded episodes into what each decision of a Wan world sees and makes.

Letters: W windows, B windows of a batch, N latents of all episodes, z latent channels, h w latent grid,
A numbers per action.

Let a Wan transformer learn from actions of any unit: scaled while it is fitted, raw when it imagines.

The published network takes actions as they are, for they lie between -1 and 1. Pixels, degrees or radians
do not: a network with fresh weights would learn little from them. So it is fitted on actions that are scaled
by what was recorded, and the scale is then worked into the two layers that actions enter through, which is
exact.

Letters: A numbers per action, D inputs of a layer (A, or A of each of the four frames of a latent).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.errors import ConfigError
from asyncrl.fitting.autoencoder import Latents, fit_autoencoder
from asyncrl.fitting.fit_policy import executed
from asyncrl.fitting.frame_file import FrameFile
from asyncrl.fitting.loop import Schedule, Shares, minimise, prepared
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.worlds.interface import (
    Size,
    WorldOptions,
    check_picture_size,
    check_recordings,
    refuse_options,
)
from asyncrl.fitting.worlds.wan_latents import (
    WanAutoencoder,
    encode_recordings,
    redraw,
)
from asyncrl.records import ACTION_DIM, CHUNK, dummy_action
from asyncrl.worlds.wan.files import open_world, rewrite_world
from asyncrl.worlds.wan.flow_matching import WindowNoise, window_loss
from asyncrl.worlds.wan.tiny_decoder import TinyDecoder, TinyDecoderConfig, save_decoder
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig
from asyncrl.worlds.wan.vae import SPATIAL, VaeConfig, WanVae
from asyncrl.worlds.wan.world import WanWorld, load_world, save_world

MEMORY = 4
"""Frames that the memory latent stands for."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """What each decision sees and makes. Latents are shared by neighbours and kept once."""

    latents: Tensor
    """``[N, z, h, w]`` float32 of all episodes."""
    rows: Tensor
    """``[W, 4]`` int64: the latents of each window."""
    actions: Tensor
    """``[W, 13, A]`` float32, scaled where `windows` was given a scale."""

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents ``[B, z, 4, h, w]`` and actions ``[B, 13, A]`` of windows ``[B]`` int64."""
        return self.latents[self.rows[chosen]].transpose(1, 2).contiguous(), self.actions[chosen]


def windows(recordings: Recordings, latents: Latents, scale: ActionScale | None = None) -> Windows:
    """Cut episodes into windows.

    Decision k of an episode has the anchor latent 0, the memory latent 2k + 1 and the new latents 2k + 2 and
    2k + 3; its actions are the dummy, the last 4 and the 8 new ones.

    Args:
        scale: Of the actions; None: raw.
    """
    check_recordings(recordings)
    dummy = dummy_action(recordings.actions.shape[1])
    rows_W: list[np.ndarray] = []
    actions_W: list[np.ndarray] = []
    for episode in range(len(recordings)):
        actions = recordings.actions[recordings.span(episode)]
        padded = np.concatenate([np.repeat(dummy[None], MEMORY, 0), actions[1:]])
        for decision in range((len(actions) - 1) // CHUNK):
            start = CHUNK * decision
            new = 2 * decision + np.arange(1, 4)
            rows_W.append(latents.offsets[episode] + np.array([0, *new]))
            actions_W.append(np.concatenate([dummy[None], padded[start : start + MEMORY + CHUNK]]))
    device, stacked = latents.all.device, np.stack(actions_W)
    return Windows(
        latents=latents.all,
        rows=torch.from_numpy(np.stack(rows_W)).to(device),
        actions=torch.from_numpy(scale.apply(stacked) if scale else stacked).to(device),
    )


LEAST_RANGE: Final = 1e-3
"""Width, in its own unit, that a number has at least which (nearly) never changed: never divide by zero."""


@dataclass(frozen=True, kw_only=True)
class ActionScale:
    """What makes an action a number around [-1, 1]: ``gain * a + offset``."""

    gain: NDArray[np.float64]
    """``[A]``."""
    offset: NDArray[np.float64]
    """``[A]``."""

    def apply(self, actions: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scale actions ``[..., A]``."""
        return (self.gain * actions + self.offset).astype(np.float32)


def measured_scale(recordings: Recordings) -> ActionScale | None:
    """Measure what recorded actions are scaled by; None: they are as the published network takes them.

    Those are 7 numbers whose first and 99th percentiles lie between -1 and 1.
    """
    actions = executed(recordings)
    low, high = np.quantile(actions.astype(np.float64), [0.01, 0.99], axis=0)
    if actions.shape[1] == ACTION_DIM and low.min() >= -1.0 and high.max() <= 1.0:
        return None
    gain = 2 / np.maximum(high - low, LEAST_RANGE)
    return ActionScale(gain=gain, offset=-gain * (low + high) / 2)


@torch.no_grad()
def take_raw(transformer: ActionWanTransformer, scale: ActionScale) -> None:
    """Make a network that takes scaled actions take raw ones instead, with the same outputs."""
    for layer, gain, offset in _entrances(transformer, scale):
        layer.bias.add_((layer.weight.double() @ offset).to(layer.bias.dtype))
        layer.weight.mul_(gain.to(layer.weight.dtype))


@torch.no_grad()
def take_scaled(transformer: ActionWanTransformer, scale: ActionScale) -> None:
    """Do the opposite of `take_raw`."""
    for layer, gain, offset in _entrances(transformer, scale):
        layer.weight.div_(gain.to(layer.weight.dtype))
        layer.bias.sub_((layer.weight.double() @ offset).to(layer.bias.dtype))


def entrances(transformer: ActionWanTransformer) -> tuple[nn.Linear, nn.Linear]:
    """Return the two layers that actions enter through: of each action, and of the four of a latent."""
    first, second = transformer.action_mlp1[0], transformer.action_mlp2[0]
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    return first, second


def _entrances(
    transformer: ActionWanTransformer, scale: ActionScale
) -> Iterator[tuple[nn.Linear, torch.Tensor, torch.Tensor]]:
    """Yield the layers with what belongs to each of their inputs, ``[D]`` float64."""
    for layer in entrances(transformer):
        times = layer.in_features // len(scale.gain)
        device = layer.weight.device
        gain, offset = (
            torch.from_numpy(np.tile(part, times)).to(device) for part in (scale.gain, scale.offset)
        )
        yield layer, gain, offset


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

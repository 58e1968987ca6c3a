"""Fit a Wan world: its causal autoencoder, then its transformer by flow matching.

Letters: B batch, T frames, W windows, E episodes, N latents of all episodes, L of one, z latent channels,
h w latent grid, A numbers per action, D inputs of a layer (A, or A of each of the four frames of a latent).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.devices.tensors import require_finite, to_uint8
from asyncrl.errors import ConfigError
from asyncrl.fitting import world as fits
from asyncrl.fitting.fit_models import LEAST_RANGE, action_range
from asyncrl.fitting.loop import ONE_RANK, FitRanks, Schedule, minimise, prepared
from asyncrl.fitting.recording_files import FrameFile, Recordings
from asyncrl.fitting.settings import Size
from asyncrl.fitting.world import CLIP_FRAMES, FittedWorld, Latents, WorldOptions
from asyncrl.observability import process_status
from asyncrl.observability.terminal import progress
from asyncrl.records import ACTION_DIM, CHUNK, dummy_action
from asyncrl.worlds.wan.files import open_world, rewrite_world
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig
from asyncrl.worlds.wan.vae import SPATIAL, VaeConfig, WanVae, decode_stream, encode_stream
from asyncrl.worlds.wan.world import WanWorld, WindowNoise, denoise, save_world, window_loss

MEMORY: Final = 4  # Frames of the memory latent.
DRAWN_EVERY: Final = 8  # Steps between two batches of imagined memories.
DRAWN_AT_ONCE: Final = {"cuda": 64, "cpu": 4}  # Most episodes drawn at once; more overflow a CPU's cache.


class WanFit(FittedWorld):
    """`FittedWorld` of Wan, whose network can be spread over ranks."""

    kind: ClassVar = "wan"
    options: ClassVar = frozenset({"context_sigma", "imagined_memory"})
    fine_tunes: ClassVar = True
    world: WanWorld
    autoencoder: WanVae
    _scaled = False

    def __init__(self, world: WanWorld) -> None:
        super().__init__(world)
        self.network = world.transformer

    @classmethod
    def fresh(cls, size: Size, vae_size: Size, recordings: Recordings, options: WorldOptions) -> WanFit:
        """Build a world of the recordings' picture size and actions."""
        side = fits.check_picture_size(recordings, SPATIAL)
        transformer: TransformerConfig = getattr(TransformerConfig, size)()
        transformer = replace(transformer, action_dim=recordings.actions.shape[1])
        vae: VaeConfig = getattr(VaeConfig, vae_size)()
        return cls(WanWorld(ActionWanTransformer(transformer), WanVae(vae), image_size=side))

    def clips(
        self, recordings: Recordings, batch: int, rng: np.random.Generator
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Draw clips of consecutive frames; a third begin like `stream_of` an episode."""
        rows = np.empty((batch, CLIP_FRAMES), np.int64)
        episodes = rng.integers(len(recordings), size=batch)
        for i, episode in enumerate(episodes):
            span = recordings.span(int(episode))
            if rng.random() < 0.33:
                steps = np.concatenate([np.zeros(5, np.int64), np.arange(1, CLIP_FRAMES - 4)])
            else:
                steps = int(rng.integers(span.stop - span.start)) + np.arange(CLIP_FRAMES)
            rows[i] = np.minimum(span.start + steps, span.stop - 1)
        return torch.from_numpy(rows), episodes

    def encode_clips(self, video_B3THW: Tensor) -> Tensor:
        """Encode clips to ``[B, Z, 5, h, w]``."""
        return encode_stream(self.autoencoder, video_B3THW)

    def decode_clips(self, latents_BZFhw: Tensor) -> Tensor:
        """Draw clips ``[B, 3, T, H, W]``, not clamped."""
        return decode_stream(self.autoencoder, latents_BZFhw, clamp=False)

    def set_statistics(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Store both with the autoencoder, as published."""
        self.autoencoder.set_statistics(list(mean), list(std))

    def fit_network(self, recordings: Recordings, schedule: Schedule, options: WorldOptions) -> float:
        """Train the transformer."""
        self.autoencoder.requires_grad_(False)
        self.network.requires_grad_(True)
        scale = measured_scale(recordings)
        cut = windows(recordings, self.encode(recordings), scale)
        self._scaled = scale is not None
        if scale is not None:
            take_scaled(self.network, scale)
        loss = fit_transformer(self.network, cut, schedule, options, self.world.schedule_steps)
        if scale is not None:
            take_raw(self.network, scale)
        return loss

    def encode(self, recordings: Recordings) -> Latents:
        """Encode all episodes as causal videos."""
        return encode_recordings(self.autoencoder, recordings)

    def redraw(self, recordings: Recordings) -> FrameFile:
        """Draw the recorded frames as the autoencoder draws them."""
        return redraw(self.autoencoder, self.encode(recordings), recordings)

    def save(self, folder: Path, version: int) -> None:
        """Write the world in bfloat16."""
        self.world.version = version
        # Layers that take actions of any unit stay float32: rounded, large offsets would not cancel.
        kept = entrances(self.network) if self._scaled else ()
        exact = [{n: p.detach().clone() for n, p in layer.named_parameters()} for layer in kept]
        for module in (self.network, self.autoencoder):
            nn.Module.to(module, torch.bfloat16)  # halves the files; imagination computes in float32
        for layer, numbers in zip(kept, exact, strict=True):
            for name, parameter in layer.named_parameters():
                parameter.data = numbers[name]
        save_world(folder, self.world)

    def types(self, source: Path) -> dict[str, torch.dtype]:
        """Return the types of the transformer's weights in a folder, by diffusers' names."""
        files = open_world(source).transformer
        return {name: files.spec(name).dtype for name in files.names()}

    def check_fine_tuning(self, recordings: Recordings, options: WorldOptions) -> None:
        """Refuse actions that the network cannot take unscaled."""
        self.check(recordings, options)
        if measured_scale(recordings) is not None:
            raise ConfigError(
                "--data has actions that are not 7 numbers between -1 and 1 (1st to 99th percentile). "
                "A world that is written as it was read takes actions as they are, and those of other units "
                "are far from what it knows. Record them scaled to -1..1, or refine a world of your own in "
                "one process and without flags of fine-tuning: their range is measured then."
            )

    def fine_tune(self, recordings: Recordings, schedule: Schedule, options: WorldOptions) -> float:
        """Train the trainable part of the transformer, sharded or not; the autoencoder is freed."""
        kept = torch.device("cpu")  # Moments and averages come later, and need the device's room.
        vae = self.autoencoder.requires_grad_(False)
        latents = encode_recordings(vae, recordings, kept=kept, ranks=schedule.ranks)
        nn.Module.to(vae, "meta")  # Its weights are not needed any more: its file stays as it is.
        cut = windows(recordings, latents)
        return fit_transformer(self.network, cut, schedule, options, self.world.schedule_steps)

    def rewrite(self, source: Path, folder: Path, tensors: Mapping[str, Tensor], version: int) -> None:
        """Write a copy of the folder with other weights by name, of any dtype, on the CPU."""
        rewrite_world(source, folder, tensors, version)


def stream_of(frames: Tensor) -> Tensor:
    """Turn an episode ``[T, H, W, 3]`` into the causal video of a rollout: the first frame five times."""
    return torch.cat([frames[:1].expand(5, -1, -1, -1), frames[1:]])


@torch.no_grad()
def encode_recordings(
    vae: WanVae, recordings: Recordings, *, kept: torch.device | None = None, ranks: FitRanks = ONE_RANK
) -> Latents:
    """Encode every episode as one stream, padded with its last frame; a collective over `ranks`."""
    device = next(vae.parameters()).device
    # The anchor, the first memory, and one latent per 4 frames begun.
    lengths = 2 + -(-(np.diff(recordings.offsets) - 1) // 4)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    _, height, width, _ = recordings.frames.shape
    shape = (int(offsets[-1]), vae.size.z_dim, height // SPATIAL, width // SPATIAL)
    latents = Latents(torch.zeros(shape, device=kept or device), offsets)
    batches: list[list[int]] = []
    for length in np.unique(lengths).tolist():
        alike = np.flatnonzero(lengths == length).tolist()
        most = 256 if device.type == "cuda" else 32
        batch = fits.rows_at_once(device, most, 1 + 4 * (length - 2), height * width * 3)
        batches += [alike[begin : begin + batch] for begin in range(0, len(alike), batch)]
    rounds = range(0, len(batches), ranks.size)
    for begin in progress(rounds, desc="encode", disable=ranks.rank > 0):
        together = batches[begin : begin + ranks.size]
        for episodes in together[ranks.rank : ranks.rank + 1]:
            steps = np.arange(1 + 4 * (int(lengths[episodes[0]]) - 2))
            rows = [np.minimum(span.start + steps, span.stop - 1) for span in map(recordings.span, episodes)]
            videos = [stream_of(torch.from_numpy(recordings.frames[of_one])) for of_one in rows]
            encoded = encode_stream(vae, fits.to_video(torch.stack(videos).to(device)))
            for episode, stream in zip(episodes, encoded.transpose(1, 2), strict=True):
                latents[episode].copy_(stream)
            process_status.progress()
        # After every round, so that no rank is ahead of another by more than a batch.
        for episode in chain.from_iterable(together) if ranks.size > 1 else ():
            latents[episode].copy_(ranks.sum(latents[episode]))
    return latents


@torch.no_grad()
def redraw(vae: WanVae, latents: Latents, recordings: Recordings) -> FrameFile:
    """Decode encoded episodes: ``[F, H, W, 3]`` uint8 in the recordings' order."""
    _, height, width, _ = shape = recordings.frames.shape
    frames = FrameFile((shape[0], height, width, 3))
    device, lengths = latents.all.device, np.diff(latents.offsets)
    most = DRAWN_AT_ONCE["cuda" if device.type == "cuda" else "cpu"]
    for length in progress(np.unique(lengths).tolist(), desc="redraw"):
        batch = fits.rows_at_once(device, most, 1 + 4 * (length - 1), height * width * 3)
        alike = np.flatnonzero(lengths == length)
        # As few batches as can be, of equal sizes: the last one is not smaller by far.
        for part in np.array_split(alike, -(-len(alike) // batch)):
            video = decode_stream(vae, torch.stack([latents[e] for e in part]).transpose(1, 2))
            require_finite("world's autoencoder", pictures=video)
            drawn = to_uint8(video).permute(0, 2, 3, 4, 1).cpu().numpy()
            for episode, stream in zip(part, drawn, strict=True):
                span = recordings.span(episode)
                seen = np.concatenate([stream[:1], stream[5:]])
                frames.write(span.start, seen[: span.stop - span.start])
            process_status.progress()
    return frames


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Latents and actions of each decision. Latents are shared by neighbours and kept once."""

    latents: Tensor  # [N, z, h, w] float32 of all episodes.
    rows: Tensor  # [W, 4] int64: the latents of each window.
    actions: Tensor  # [W, 13, A] float32, scaled where `windows` was given a scale.

    def take(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents ``[B, z, 4, h, w]`` and actions ``[B, 13, A]`` of windows ``[B]`` int64."""
        return self.latents[self.rows[chosen]].transpose(1, 2).contiguous(), self.actions[chosen]


def windows(recordings: Recordings, latents: Latents, scale: ActionScale | None = None) -> Windows:
    """Cut episodes into windows.

    Decision k of an episode has the anchor latent 0, the memory latent 2k + 1 and the new latents 2k + 2 and
    2k + 3; its actions are the dummy, the last 4 and the 8 new ones, raw without a scale.
    """
    dummy = dummy_action(recordings.actions.shape[1])
    rows_W, actions_W = list[np.ndarray](), list[np.ndarray]()
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


@dataclass(frozen=True, kw_only=True)
class ActionScale:
    """Maps actions of any unit to about [-1, 1]: ``gain * a + offset``.

    The published network takes actions as they are, between -1 and 1. Pixels, degrees or radians are scaled
    while it is fitted, and the scale is then folded into the two layers that actions enter, which is exact.
    """

    gain: NDArray[np.float64]  # [A].
    offset: NDArray[np.float64]  # [A].

    def apply(self, actions: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scale actions ``[..., A]``."""
        return (self.gain * actions + self.offset).astype(np.float32)


def measured_scale(recordings: Recordings) -> ActionScale | None:
    """Measure the scale of recorded actions; None for 7 numbers in [-1, 1], taken as they are."""
    low, high = action_range(recordings)
    if len(low) == ACTION_DIM and max(-low.min(), high.max()) <= 1.0 + LEAST_RANGE:
        return None
    gain = 2 / (high - low)
    return ActionScale(gain=gain, offset=-gain * (low + high) / 2)


@torch.no_grad()
def take_raw(transformer: ActionWanTransformer, scale: ActionScale) -> None:
    """Make a network that takes scaled actions take raw ones instead, with the same outputs."""
    for layer, gain, offset in _scaled_entrances(transformer, scale):
        layer.bias.add_((layer.weight.double() @ offset).to(layer.bias.dtype))
        layer.weight.mul_(gain.to(layer.weight.dtype))


@torch.no_grad()
def take_scaled(transformer: ActionWanTransformer, scale: ActionScale) -> None:
    """Do the opposite of `take_raw`."""
    for layer, gain, offset in _scaled_entrances(transformer, scale):
        layer.weight.div_(gain.to(layer.weight.dtype))
        layer.bias.sub_((layer.weight.double() @ offset).to(layer.bias.dtype))


def entrances(transformer: ActionWanTransformer) -> list[nn.Linear]:
    """Return the two layers that actions enter through: per action, and per latent's four actions."""
    layers: list[Any] = [transformer.action_mlp1[0], transformer.action_mlp2[0]]
    return layers


def _scaled_entrances(
    transformer: ActionWanTransformer, scale: ActionScale
) -> Iterator[tuple[nn.Linear, Tensor, Tensor]]:
    for layer in entrances(transformer):
        times, device = layer.in_features // len(scale.gain), layer.weight.device
        gain, offset = (torch.from_numpy(np.tile(p, times)).to(device) for p in (scale.gain, scale.offset))
        yield layer, gain, offset


class ImaginedMemories:
    """Memory latents that the network draws itself while it learns, against drift.

    Scheduled sampling (arXiv 1506.03099). A memory is drawn from the drawn one before it, so during a fit
    chains of them become as long as episodes. A resumed fit begins with recorded memories again.
    """

    def __init__(self, windows: Windows, share: float, steps: int) -> None:
        """Begin with recorded memories; a `share` of each batch gets drawn ones (`steps` network calls)."""
        self.windows, self.share, self.steps = windows, share, steps
        self.latents = windows.latents.clone()

    def fill(self, latents_BZ4hw: Tensor, chosen: Tensor) -> Tensor:
        """Replace the memories of a batch's first windows `chosen` ``[B]`` by drawn ones, in place."""
        first = chosen[: round(self.share * len(chosen))]
        memories = self.latents[self.windows.rows[first, 1]]
        latents_BZ4hw[: len(first), :, 1].copy_(memories)
        return latents_BZ4hw

    @torch.no_grad()
    def draw(self, velocity: Callable[..., Tensor], chosen: Tensor, noise_BZ2hw: Tensor) -> None:
        """Draw the windows `chosen` and store the next decision's memories."""
        anchors, memories, _, last = self.windows.rows[chosen].T
        given_BZ2hw = torch.stack([self.latents[anchors], self.latents[memories]], dim=2)
        actions_B = self.windows.actions[chosen]
        device = noise_BZ2hw.device
        drawn = denoise(velocity, given_BZ2hw.to(device), actions_B.to(device), noise_BZ2hw, self.steps)
        self.latents[last] = drawn[:, :, 1].to(self.latents.device)


def fit_transformer(
    transformer: ActionWanTransformer,
    windows: Windows,
    schedule: Schedule,
    options: WorldOptions,
    sampling_steps: int,
) -> float:
    """Train by flow matching on the two new latents; return the mean loss of the last tenth."""
    generator = torch.Generator().manual_seed(schedule.seed)
    losses = window_losses(transformer, windows, schedule, generator, options, sampling_steps)
    return minimise("world", transformer, losses, schedule, average=0.9995, rngs=[generator])


def window_losses(
    transformer: ActionWanTransformer,
    windows: Windows,
    schedule: Schedule,
    generator: torch.Generator,
    options: WorldOptions,
    sampling_steps: int,
) -> Callable[[int], Tensor]:
    """Return the losses for `minimise`."""
    # All ranks draw a whole step's windows and noise: a step is the same however it is shared out, but for
    # memories that a rank draws for itself.
    device = next(transformer.parameters()).device
    velocity = prepared(transformer, device, compiled=schedule.compiled)
    share = options.imagined_memory
    memories = ImaginedMemories(windows, share, sampling_steps) if share else None
    own: list[Tensor] = []

    def loss_at(count: int) -> Tensor:
        step, part = divmod(count, schedule.parts)
        if part == 0:
            chosen = torch.randint(len(windows.rows), (schedule.batch,), generator=generator)
            noise = WindowNoise.drawn(schedule.batch, windows.latents.shape[1:], generator)
            own[:] = map(schedule.own, (chosen, *noise))
        chosen, *drawn = (schedule.part(tensor, part) for tensor in own)
        noise = WindowNoise(*drawn)
        chosen = chosen.to(windows.rows.device)
        latents_B, actions_B = windows.take(chosen)
        if memories is not None:
            latents_B = memories.fill(latents_B, chosen)
            # The first fifth of the steps has recorded memories: the network draws nothing useful yet.
            if part == 0 and step % DRAWN_EVERY == 0 and step >= schedule.steps // 5:
                memories.draw(velocity, chosen, noise.new.to(device))
        latents_B, actions_B = latents_B.to(device), actions_B.to(device)
        return window_loss(velocity, latents_B, actions_B, noise, context_sigma=options.context_sigma)

    return loss_at

"""Train a Wan VAE on recorded frames, and turn recordings into the latents a world model learns from.

Letters: B batch, T frames, z latent channels, h w latent grid, E episodes, L latents of an episode.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from asyncrl.devices.tensors import to_signed
from asyncrl.fitting.loop import minimise, prepared
from asyncrl.fitting.recordings import Recordings
from asyncrl.worlds.wan.vae import SPATIAL, WanVae, decode_stream, encode_stream

CLIP_FRAMES = 17
"""1 + 16 frames: one single-frame latent and four 4-frame latents, twice what one decision needs."""
LATENT_NOISE = 0.1
"""Standard deviation of the encoder's posterior, fixed: makes the decoder forgive a world model's error."""
FOREGROUND_WEIGHT = 20.0
"""How much heavier a pixel weighs per unit of difference from the average picture; a cube is 40 of 4096."""
PRIOR_WEIGHT = 1e-4
"""Weight of the Kullback-Leibler divergence to a standard normal prior, as far as the mean matters."""


def stream_of(frames: Tensor) -> Tensor:
    """Turn an episode into the causal video that a rollout sees: the first frame five times, then the rest.

    Args:
        frames: ``[F, H, W, 3]`` uint8.

    Returns:
        ``[F + 4, H, W, 3]`` uint8.
    """
    return torch.cat([frames[:1].expand(5, -1, -1, -1), frames[1:]])


def _clips(recordings: Recordings, batch: int, rng: np.random.Generator) -> Tensor:
    """Draw the rows of clips, ``[batch, CLIP_FRAMES]`` int64; a third begin as an episode's stream does."""
    rows = np.empty((batch, CLIP_FRAMES), np.int64)
    for i, episode in enumerate(rng.integers(len(recordings), size=batch)):
        span = recordings.span(int(episode))
        if rng.random() < 0.33:
            steps = np.concatenate([np.zeros(5, np.int64), np.arange(1, CLIP_FRAMES - 4)])
        else:
            steps = int(rng.integers(span.stop - span.start)) + np.arange(CLIP_FRAMES)
        rows[i] = np.minimum(span.start + steps, span.stop - 1)
    return torch.from_numpy(rows)


def fit_vae(
    vae: WanVae,
    recordings: Recordings,
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    compiled: bool = False,
) -> float:
    """Train encoder and decoder in place; then set the latents' mean and standard deviation.

    A variational autoencoder whose posterior has a fixed width; see `reconstruction_loss`.

    Returns:
        Mean loss of the last tenth.
    """
    rng = np.random.default_rng(seed)
    device = next(vae.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    frames = torch.from_numpy(recordings.frames).to(device)
    background_3HW = to_signed(frames[:: max(1, len(frames) // 2000)]).mean(0).permute(2, 0, 1)

    def redraw(video: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        latents = encode_stream(vae, video)
        return latents.float(), decode_stream(vae, latents + LATENT_NOISE * noise, clamp=False).float()

    redraw = prepared(redraw, device, compiled=compiled)
    latents_of_clip = (
        batch,
        vae.size.z_dim,
        1 + (CLIP_FRAMES - 1) // 4,
        *(s // SPATIAL for s in frames.shape[1:3]),
    )

    def loss_at(step: int) -> Tensor:
        video = to_video(frames[_clips(recordings, batch, rng).to(device)])
        noise = torch.randn(latents_of_clip, generator=generator, device=device)
        latents, drawn = redraw(video, noise)
        return reconstruction_loss(drawn, video, background_3HW) + PRIOR_WEIGHT * latents.square().mean()

    loss = minimise("vae", vae, loss_at, steps=steps, learning_rate=learning_rate, average=0.999)
    with torch.no_grad():
        videos = (to_video(frames[_clips(recordings, 64, rng).to(device)]) for _ in range(8))
        raw_ZN = torch.cat([encode_stream(vae, video) for video in videos]).transpose(0, 1).flatten(1)
    vae.set_statistics(raw_ZN.mean(1).tolist(), raw_ZN.std(1).tolist())
    return loss


def to_video(frames_BTHW3: Tensor) -> Tensor:
    """Turn ``[B, T, H, W, 3]`` uint8 into ``[B, 3, T, H, W]`` float32 in [-1, 1]."""
    return to_signed(frames_BTHW3).permute(0, 4, 1, 2, 3)


def reconstruction_loss(drawn_B3THW: Tensor, wanted_B3THW: Tensor, background_3HW: Tensor) -> Tensor:
    """Compute absolute plus twice the squared error, heavier where a pixel differs from the average picture.

    What matters is small: without the weight a decoder learns the table and forgets the cubes.

    Args:
        drawn_B3THW: ``[B, 3, T, H, W]`` float32, not clamped.
        wanted_B3THW: ``[B, 3, T, H, W]`` float32 in [-1, 1].
        background_3HW: ``[3, H, W]`` float32, the average picture.

    Returns:
        ``[]`` float32, mean over all numbers.
    """
    away = (wanted_B3THW - background_3HW[:, None]).abs().mean(1, keepdim=True)
    error = drawn_B3THW - wanted_B3THW
    return ((1 + FOREGROUND_WEIGHT * away) * (error.abs() + 2 * error.square())).mean()


@torch.no_grad()
def encode_recordings(vae: WanVae, recordings: Recordings) -> list[Tensor]:
    """Encode every episode as one stream.

    Returns:
        E tensors ``[L, z, h, w]`` (float32, on the VAE's device), L = 2 + 2 * decisions.
    """
    device = next(vae.parameters()).device
    batch = 256 if device.type == "cuda" else 32
    latents: dict[int, Tensor] = {}
    for episodes in tqdm(list(_same_length(recordings, batch)), desc="encode", mininterval=2.0):
        video = torch.stack(
            [stream_of(torch.from_numpy(recordings.frames[recordings.span(e)])) for e in episodes]
        )
        encoded = encode_stream(vae, to_video(video.to(device)))
        latents |= dict(zip(episodes, encoded.transpose(1, 2), strict=True))
    return [latents[e] for e in range(len(recordings))]


def _same_length(recordings: Recordings, batch: int) -> Iterator[list[int]]:
    lengths = np.diff(recordings.offsets)
    for length in np.unique(lengths):
        episodes = np.flatnonzero(lengths == length).tolist()
        for start in range(0, len(episodes), batch):
            yield episodes[start : start + batch]

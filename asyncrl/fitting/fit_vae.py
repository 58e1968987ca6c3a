"""Train a Wan VAE on recorded frames, and turn recordings into the latents a world model learns from.

Letters: B batch, T frames, z latent channels, h w latent grid, E episodes, L latents of an episode,
N scenes, or the latents of all episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from asyncrl.devices.tensors import to_signed
from asyncrl.fitting.batch_source import BatchSource
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
MEASURED_CLIPS: Final = 64
MEASUREMENTS: Final = 8
"""Clips at a time, and how often, from which the latents' mean and deviation are measured."""
AT_ONCE_ON_CPU: Final = 48 * 2**20
AT_ONCE_ON_GPU: Final = 256 * 2**20
"""Bytes of pictures that are encoded or drawn side by side; on a CPU their features take a hundred times that
of the host's memory."""


def stream_of(frames: Tensor) -> Tensor:
    """Turn an episode into the causal video that a rollout sees: the first frame five times, then the rest.

    Args:
        frames: ``[F, H, W, 3]`` uint8.

    Returns:
        ``[F + 4, H, W, 3]`` uint8.
    """
    return torch.cat([frames[:1].expand(5, -1, -1, -1), frames[1:]])


def _clips(recordings: Recordings, batch: int, rng: np.random.Generator) -> tuple[Tensor, NDArray[np.int64]]:
    """Draw clips; a third begin as an episode's stream does.

    Returns:
        Rows ``[batch, CLIP_FRAMES]`` int64 of the pictures, and episodes ``[batch]`` int64.
    """
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


def average_pictures(recordings: Recordings) -> Tensor:
    """Compute the average picture of every scene from about 2,000 pictures of it, evenly spread.

    Returns:
        ``[N, 3, H, W]`` float32 in [-1, 1] on the CPU, by `Recordings.scenes`.
    """
    lengths, means = np.diff(recordings.offsets), []
    scenes_F = np.repeat(recordings.scenes(), lengths)
    for scene in range(int(scenes_F.max()) + 1):
        rows = np.flatnonzero(scenes_F == scene)
        some = torch.from_numpy(recordings.frames[rows[:: max(1, len(rows) // 2000)]])
        # A line of the pictures at a time: as floats all of them would take four times the memory.
        lines = [to_signed(some[:, line]).mean(0) for line in range(some.shape[1])]
        means.append(torch.stack(lines).permute(2, 0, 1))
    return torch.stack(means)


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
    frames = BatchSource(recordings.frames, device)
    backgrounds_N3HW, scenes_E = average_pictures(recordings).to(device), recordings.scenes()

    def redraw(video: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        latents = encode_stream(vae, video)
        return latents.float(), decode_stream(vae, latents + LATENT_NOISE * noise, clamp=False).float()

    redraw = prepared(redraw, device, compiled=compiled)
    latents_of_clip = (
        batch,
        vae.size.z_dim,
        1 + (CLIP_FRAMES - 1) // 4,
        *(s // SPATIAL for s in recordings.frames.shape[1:3]),
    )

    def loss_at(step: int) -> Tensor:
        rows, episodes = _clips(recordings, batch, rng)
        video = to_video(frames.take(rows))
        noise = torch.randn(latents_of_clip, generator=generator, device=device)
        latents, drawn = redraw(video, noise)
        background_B3HW = backgrounds_N3HW[torch.from_numpy(scenes_E[episodes]).to(device)]
        return reconstruction_loss(drawn, video, background_B3HW) + PRIOR_WEIGHT * latents.square().mean()

    loss = minimise("vae", vae, loss_at, steps=steps, learning_rate=learning_rate, average=0.999)
    with torch.no_grad():
        clips = (_clips(recordings, MEASURED_CLIPS, rng)[0] for _ in range(MEASUREMENTS))
        videos = (to_video(frames.take(rows)) for rows in clips)
        raw_ZN = torch.cat([encode_stream(vae, video) for video in videos]).transpose(0, 1).flatten(1)
    vae.set_statistics(raw_ZN.mean(1).tolist(), raw_ZN.std(1).tolist())
    return loss


def to_video(frames_BTHW3: Tensor) -> Tensor:
    """Turn ``[B, T, H, W, 3]`` uint8 into ``[B, 3, T, H, W]`` float32 in [-1, 1]."""
    return to_signed(frames_BTHW3).permute(0, 4, 1, 2, 3)


def reconstruction_loss(drawn_B3THW: Tensor, wanted_B3THW: Tensor, background: Tensor) -> Tensor:
    """Compute absolute plus twice the squared error, heavier where a pixel differs from the average picture.

    What matters is small: without the weight a decoder learns the table and forgets the cubes.

    Args:
        drawn_B3THW: ``[B, 3, T, H, W]`` float32, not clamped.
        wanted_B3THW: ``[B, 3, T, H, W]`` float32 in [-1, 1].
        background: ``[3, H, W]`` float32, the average picture, or ``[B, 3, H, W]``, that of each row's scene.

    Returns:
        ``[]`` float32, mean over all numbers.
    """
    away = (wanted_B3THW - background.unsqueeze(-3)).abs().mean(1, keepdim=True)
    error = drawn_B3THW - wanted_B3THW
    return ((1 + FOREGROUND_WEIGHT * away) * (error.abs() + 2 * error.square())).mean()


@dataclass(frozen=True)
class Latents(Sequence[Tensor]):
    """Encoded episodes, one after another; item e is ``[L, z, h, w]`` of episode e."""

    all: Tensor
    """``[N, z, h, w]`` float32."""
    offsets: NDArray[np.int64]
    """``[E + 1]``; episode e owns latents ``offsets[e] : offsets[e + 1]``."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, episode: Any) -> Any:
        return self.all[int(self.offsets[episode]) : int(self.offsets[episode + 1])]


def latents_of_frames(frames: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the latents of episodes of so many frames: the anchor, the first memory, one per 4 frames begun.

    Example:
        >>> latents_of_frames(np.array([1, 9, 10, 17])).tolist()
        [2, 4, 5, 6]
    """
    return 2 + -(-(frames - 1) // 4)


def rows_at_once(device: torch.device, most: int, frames: int, frame_bytes: int) -> int:
    """Say how many episodes of so many frames are encoded or drawn side by side, at most `most`."""
    room = AT_ONCE_ON_GPU if device.type == "cuda" else AT_ONCE_ON_CPU
    return max(1, min(most, room // max(1, frames * frame_bytes)))


@torch.no_grad()
def encode_recordings(vae: WanVae, recordings: Recordings) -> Latents:
    """Encode every episode as one stream; the last frame is repeated where the length asks for it.

    Returns:
        Latents of E episodes on the VAE's device, L = 2 + 2 * decisions of an episode of whole decisions.
    """
    device = next(vae.parameters()).device
    lengths = latents_of_frames(np.diff(recordings.offsets))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    _, height, width, _ = recordings.frames.shape
    shape = (int(offsets[-1]), vae.size.z_dim, height // SPATIAL, width // SPATIAL)
    latents = Latents(torch.empty(shape, device=device), offsets)
    most = 256 if device.type == "cuda" else 32
    for length in tqdm(np.unique(lengths).tolist(), desc="encode", mininterval=2.0):
        alike, frames = np.flatnonzero(lengths == length).tolist(), 1 + 4 * (length - 2)
        batch = rows_at_once(device, most, frames, height * width * 3)
        for begin in range(0, len(alike), batch):
            episodes = alike[begin : begin + batch]
            video = torch.stack([stream_of(_whole_groups(recordings, e, frames)) for e in episodes])
            encoded = encode_stream(vae, to_video(video.to(device)))
            for episode, stream in zip(episodes, encoded.transpose(1, 2), strict=True):
                latents[episode].copy_(stream)
    return latents


def _whole_groups(recordings: Recordings, episode: int, frames: int) -> Tensor:
    """Return an episode's frames ``[frames, H, W, 3]`` uint8, the last one repeated."""
    span = recordings.span(episode)
    rows = np.minimum(span.start + np.arange(frames), span.stop - 1)
    return torch.from_numpy(recordings.frames[rows])

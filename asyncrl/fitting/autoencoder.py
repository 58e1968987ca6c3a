"""Train an autoencoder on recorded frames: what is alike for all kinds of worlds.

Letters: B batch, T frames of a clip, Z latent channels, F' latent frames, h w latent grid, E episodes,
N scenes, or the latents of all episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.devices.tensors import to_signed
from asyncrl.fitting.frame_file import BatchSource
from asyncrl.fitting.loop import Schedule, minimise, prepared
from asyncrl.fitting.recordings import Recordings

CLIP_FRAMES = 17
"""Frames of a clip. For a causal autoencoder 1 + 16: one single-frame latent and four of 4 frames, twice what
one decision needs."""
LATENT_NOISE = 0.1
"""Standard deviation of the encoder's posterior, fixed: makes the decoder forgive a world model's error."""
FOREGROUND_WEIGHT = 20.0
"""How much heavier a pixel weighs per unit of difference from the average picture; a cube is 40 of 4096."""
PRIOR_WEIGHT = 1e-4
"""Weight of the Kullback-Leibler divergence to a standard normal prior, as far as the mean matters."""
MEASURED_CLIPS: Final = 64
MEASUREMENTS: Final = 8
"""Clips at a time, and how often, from which the latents' mean and deviation are measured."""
MEASURED_TOGETHER: Final = 8
"""Of those clips, so many are encoded together: they are of whatever size pictures have."""
AT_ONCE_ON_CPU: Final = 48 * 2**20
AT_ONCE_ON_GPU: Final = 256 * 2**20
"""Bytes of pictures that are encoded or drawn side by side; on a CPU their features take a hundred times that
of the host's memory."""


class Autoencoder(Protocol):
    """An autoencoder while it is fitted, of clips of `CLIP_FRAMES` frames."""

    @property
    def network(self) -> nn.Module:
        """Return what is trained."""
        ...

    def clips(
        self, recordings: Recordings, batch: int, rng: np.random.Generator
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Draw clips.

        Returns:
            Rows ``[batch, CLIP_FRAMES]`` int64 of the pictures, and episodes ``[batch]`` int64.
        """
        ...

    def latent_shape(self, batch: int, height: int, width: int) -> tuple[int, ...]:
        """Return the shape ``B, Z, F', h, w`` of the latents of clips of so many pixels."""
        ...

    def encode(self, video_B3THW: Tensor) -> Tensor:
        """Encode clips in [-1, 1] to the posterior's means ``[B, Z, F', h, w]``."""
        ...

    def decode(self, latents_BZFhw: Tensor) -> Tensor:
        """Draw clips ``[B, 3, T, H, W]``, not clamped."""
        ...

    def set_statistics(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Make latents of this mean and deviation ``[Z]`` standard normal from now on."""
        ...


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


def fit_autoencoder(autoencoder: Autoencoder, recordings: Recordings, schedule: Schedule) -> float:
    """Train encoder and decoder in place; then set the latents' mean and standard deviation.

    A variational autoencoder whose posterior has a fixed width; see `reconstruction_loss`.

    Args:
        autoencoder: On the device to train on, in float32.

    Returns:
        Mean loss of the last tenth.
    """
    rng = np.random.default_rng(schedule.seed)
    device = next(autoencoder.network.parameters()).device
    generator = torch.Generator(device).manual_seed(schedule.seed)
    frames = BatchSource(recordings.frames, device)
    backgrounds_N3HW, scenes_E = average_pictures(recordings).to(device), recordings.scenes()

    def redraw(video: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        latents = autoencoder.encode(video)
        return latents.float(), autoencoder.decode(latents + LATENT_NOISE * noise).float()

    redraw = prepared(redraw, device, compiled=schedule.compiled)
    shape = autoencoder.latent_shape(schedule.batch, *recordings.frames.shape[1:3])

    def loss_at(step: int) -> Tensor:
        rows, episodes = autoencoder.clips(recordings, schedule.batch, rng)
        video = to_video(frames.take(rows))
        noise = torch.randn(shape, generator=generator, device=device)
        latents, drawn = redraw(video, noise)
        background_B3HW = backgrounds_N3HW[torch.from_numpy(scenes_E[episodes]).to(device)]
        return reconstruction_loss(drawn, video, background_B3HW) + PRIOR_WEIGHT * latents.square().mean()

    loss = minimise(
        "vae",
        autoencoder.network,
        loss_at,
        steps=schedule.steps,
        learning_rate=schedule.learning_rate,
        average=0.999,
    )
    with torch.no_grad():
        clips = (autoencoder.clips(recordings, MEASURED_CLIPS, rng)[0] for _ in range(MEASUREMENTS))
        videos = (to_video(frames.take(rows)) for rows in clips)
        parts = (part for video in videos for part in video.split(MEASURED_TOGETHER))
        raw_ZN = torch.cat([autoencoder.encode(part) for part in parts]).transpose(0, 1).flatten(1)
    autoencoder.set_statistics(raw_ZN.mean(1).tolist(), raw_ZN.std(1).tolist())
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
    """Encoded episodes, one after another; item e is ``[L, Z, h, w]`` of episode e."""

    all: Tensor
    """``[N, Z, h, w]`` float32."""
    offsets: NDArray[np.int64]
    """``[E + 1]``; episode e owns latents ``offsets[e] : offsets[e + 1]``."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, episode: Any) -> Any:
        return self.all[int(self.offsets[episode]) : int(self.offsets[episode + 1])]


def rows_at_once(device: torch.device, most: int, frames: int, frame_bytes: int) -> int:
    """Say how many episodes of so many frames are encoded or drawn side by side, at most `most`."""
    room = AT_ONCE_ON_GPU if device.type == "cuda" else AT_ONCE_ON_CPU
    return max(1, min(most, room // max(1, frames * frame_bytes)))

"""Fit autoencoders that take each frame by itself, encode and redraw recordings with them, and cut windows.

What OpenSora and EVAC share: a latent stands for one frame, and a window is some frames before a decision and
the frames that it makes.

Letters: B batch, T frames of a clip, F frames of all episodes, Z latent channels, h w latent grid, W windows,
P frames given, C frames made (8).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from asyncrl.devices.tensors import to_device, to_signed, to_uint8
from asyncrl.errors import ConfigError
from asyncrl.fitting.autoencoder import CLIP_FRAMES, Latents, fit_autoencoder
from asyncrl.fitting.frame_file import FrameFile
from asyncrl.fitting.loop import Schedule
from asyncrl.fitting.recordings import Recordings
from asyncrl.records import CHUNK

REDUCTION: Final = 8
"""Pixels per latent pixel in height and width."""
PIXELS_ON_CPU: Final = 2**17
PIXELS_ON_GPU: Final = 2**22
"""Pixels that are encoded or drawn side by side."""


class FrameAutoencoder:
    """`autoencoder.Autoencoder` of clips whose frames have nothing to do with each other.

    The network is one of Stable Diffusion's (diffusers' ``AutoencoderKL``, or what has its four parts). Its
    published form knows one scale for all latents and no mean: here both are worked into the two convolutions
    of one pixel at the latents, which is exact, and the scale is 1.
    """

    def __init__(self, network: nn.Module, channels: int, scale: float) -> None:
        """Wrap a network.

        Args:
            network: With ``encoder``, ``quant_conv``, ``post_quant_conv`` and ``decoder``.
            channels: ``Z``.
        """
        self.network = network
        self.channels = channels
        self.scale = scale
        self._parts: Any = network

    def clips(
        self, recordings: Recordings, batch: int, rng: np.random.Generator
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Draw frames from anywhere in an episode: ``[batch, 17]`` rows, and the episodes ``[batch]``."""
        episodes = rng.integers(len(recordings), size=batch)
        begins, ends = recordings.offsets[episodes], recordings.offsets[episodes + 1]
        rows = rng.integers(begins[:, None], ends[:, None], size=(batch, CLIP_FRAMES))
        return torch.from_numpy(rows), episodes

    def latent_shape(self, batch: int, height: int, width: int) -> tuple[int, ...]:
        """Return ``B, Z, 17, h, w``."""
        return batch, self.channels, CLIP_FRAMES, height // REDUCTION, width // REDUCTION

    def encode(self, video_B3THW: Tensor) -> Tensor:
        """Encode clips to the posterior's means ``[B, Z, T, h, w]``, as the encoder returns them."""
        frames = video_B3THW.transpose(1, 2).flatten(0, 1)
        moments = self._parts.quant_conv(self._parts.encoder(frames))
        return moments[:, : self.channels].unflatten(0, (len(video_B3THW), -1)).transpose(1, 2)

    def decode(self, latents_BZFhw: Tensor) -> Tensor:
        """Draw clips ``[B, 3, T, H, W]``, not clamped."""
        latents = latents_BZFhw.transpose(1, 2).flatten(0, 1)
        drawn = self._parts.decoder(self._parts.post_quant_conv(latents))
        return drawn.unflatten(0, (len(latents_BZFhw), -1)).transpose(1, 2)

    @torch.no_grad()
    def set_statistics(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Work mean and deviation into the convolutions before and behind the latents."""
        into, out = self._parts.quant_conv, self._parts.post_quant_conv
        mean_Z, std_Z = (torch.tensor(numbers, device=into.weight.device) for numbers in (mean, std))
        # z' = (z - mean) / std, of which the next layer makes W z + b = (W std) z' + (b + W mean).
        into.weight[: self.channels] /= std_Z[:, None, None, None]
        into.bias[: self.channels] = (into.bias[: self.channels] - mean_Z) / std_Z
        out.bias += out.weight[:, :, 0, 0] @ mean_Z
        out.weight *= std_Z[:, None, None]

    def take(self, source: FrameAutoencoder) -> None:
        """Take over the weights of another one, so that both worlds' latents of a frame are the same."""
        own, given = self.network.state_dict(), source.network.state_dict()
        if {name: tensor.shape for name, tensor in own.items()} != {n: t.shape for n, t in given.items()}:
            count, other = (sum(tensor.numel() for tensor in tensors.values()) for tensors in (own, given))
            raise ConfigError(
                f"The autoencoder of --autoencoder has {other:,} parameters, the fresh world's {count:,} in "
                "other layers. Give a world that was fitted with the same --vae-size, or leave it out."
            )
        self.network.load_state_dict(given)
        self.set_statistics([0.0] * self.channels, [self.scale / source.scale] * self.channels)


class FrameByFrameFit(ABC):
    """The part of a `FittedWorld` that all worlds share whose autoencoder takes each frame by itself."""

    world: Any

    @property
    @abstractmethod
    def autoencoder(self) -> FrameAutoencoder:
        """Return the world's autoencoder."""

    @property
    def image_size(self) -> int:
        """Height and width of the frames in pixels."""
        return self.world.image_size

    def to(self, device: torch.device) -> None:
        """Move all networks."""
        self.world.to(device)

    def fit_autoencoder(self, recordings: Recordings, schedule: Schedule) -> float:
        """Train the autoencoder in place."""
        return fit_autoencoder(self.autoencoder, recordings, schedule)

    def take_autoencoder(self, source: object) -> None:
        """Take over another world's autoencoder. See `FittedWorld.take_autoencoder`."""
        if not isinstance(source, FrameByFrameFit):
            raise ConfigError(
                "The world of --autoencoder encodes videos, and this --kind encodes each frame by itself. "
                "Give a world of kind opensora or evac, or leave it out."
            )
        self.autoencoder.take(source.autoencoder)


def pieces(count: int, side: int, device: torch.device, name: str) -> Iterator[slice]:
    """Cut the rows of ``count`` square pictures into what is encoded or drawn side by side, with progress."""
    pixels = PIXELS_ON_GPU if device.type == "cuda" else PIXELS_ON_CPU
    size = max(1, pixels // side**2)
    for begin in tqdm(range(0, count, size), desc=name, mininterval=2.0):
        yield slice(begin, min(begin + size, count))


@torch.no_grad()
def encode_each(
    encode: Callable[[Tensor], Tensor], recordings: Recordings, shape: Sequence[int], device: torch.device
) -> Latents:
    """Encode every frame by itself.

    Args:
        encode: Turns ``[N, 3, H, W]`` in [-1, 1] into ``[N, Z, h, w]``.
        recordings: ``F`` frames.
        shape: ``Z, h, w``.

    Returns:
        A latent of every frame, so that row i of `Latents.all` is that of frame i.
    """
    latents = torch.empty((len(recordings.frames), *shape), device=device)
    for piece in pieces(len(recordings.frames), recordings.image_size, device, "encode"):
        frames = to_signed(to_device(recordings.frames[piece], device)).permute(0, 3, 1, 2)
        latents[piece] = encode(frames).float()
    return Latents(latents, recordings.offsets)


@torch.no_grad()
def redraw_each(
    encode: Callable[[Tensor], Tensor],
    decode: Callable[[Tensor], Tensor],
    recordings: Recordings,
    device: torch.device,
) -> FrameFile:
    """Encode every frame by itself and draw it again: ``[F, H, W, 3]`` uint8 in a temporary file.

    Args:
        encode: Turns ``[N, 3, H, W]`` in [-1, 1] into ``[N, Z, h, w]``.
        recordings: ``F`` frames.
    """
    count, height, width, _ = recordings.frames.shape
    drawn = FrameFile((count, height, width, 3))
    for piece in pieces(count, height, device, "redraw"):
        frames = to_signed(to_device(recordings.frames[piece], device)).permute(0, 3, 1, 2)
        drawn.write(piece.start, to_uint8(decode(encode(frames))).permute(0, 2, 3, 1).cpu().numpy())
    return drawn


def window_rows(
    offsets: NDArray[np.int64], given: Callable[[NDArray[np.int64]], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Cut a window behind every frame after which an episode has a whole decision.

    Args:
        offsets: ``[E + 1]`` of the episodes.
        given: Says which frames ``[n, P]`` of an episode a world sees that has had ``[n]`` of them, at least
            one; frames count from 0.

    Returns:
        ``[W, P + C]`` rows of the recordings.
    """
    windows = []
    for begin, end in pairwise(offsets.tolist()):
        seen = np.arange(1, end - begin - CHUNK + 1)
        windows.append(begin + np.concatenate([given(seen), seen[:, None] + np.arange(CHUNK)], axis=1))
    return np.concatenate(windows)

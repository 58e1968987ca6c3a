"""Turn recordings into the latents of Wan's causal autoencoder and back, and fit that autoencoder.

An episode is one causal video for it: a latent of the first frame, then one of every four frames.

Letters: B batch, T frames, Z latent channels, h w latent grid, E episodes, L latents of an episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from asyncrl.devices.tensors import to_uint8
from asyncrl.fitting.autoencoder import CLIP_FRAMES, Latents, rows_at_once, to_video
from asyncrl.fitting.frame_file import FrameFile
from asyncrl.fitting.loop import ONE_RANK, FitRanks
from asyncrl.fitting.recordings import Recordings
from asyncrl.observability import process_status
from asyncrl.worlds.wan.vae import SPATIAL, WanVae, decode_stream, encode_stream

DRAWN_AT_ONCE: Final = {"cuda": 64, "cpu": 4}
"""Episodes of one length that a device draws side by side at most. A CPU's cache holds the layers of no more:
each of 32 takes 1.4 times as long. One alone takes four times as long, by a slower kernel."""


def stream_of(frames: Tensor) -> Tensor:
    """Turn an episode into the causal video that a rollout sees: the first frame five times, then the rest.

    Args:
        frames: ``[F, H, W, 3]`` uint8.

    Returns:
        ``[F + 4, H, W, 3]`` uint8.
    """
    return torch.cat([frames[:1].expand(5, -1, -1, -1), frames[1:]])


class WanAutoencoder:
    """`autoencoder.Autoencoder` of clips that are causal videos."""

    def __init__(self, network: WanVae) -> None:
        self.network = network

    def clips(
        self, recordings: Recordings, batch: int, rng: np.random.Generator
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Draw clips of consecutive frames; a third begin as an episode's stream does."""
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

    def latent_shape(self, batch: int, height: int, width: int) -> tuple[int, ...]:
        """Return ``B, Z, 5, h, w``."""
        frames = 1 + (CLIP_FRAMES - 1) // 4
        return batch, self.network.size.z_dim, frames, height // SPATIAL, width // SPATIAL

    def encode(self, video_B3THW: Tensor) -> Tensor:
        """Encode clips to ``[B, Z, 5, h, w]``."""
        return encode_stream(self.network, video_B3THW)

    def decode(self, latents_BZFhw: Tensor) -> Tensor:
        """Draw clips ``[B, 3, T, H, W]``, not clamped."""
        return decode_stream(self.network, latents_BZFhw, clamp=False)

    def set_statistics(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Store them with the autoencoder, as published."""
        self.network.set_statistics(list(mean), list(std))


def latents_of_frames(frames: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the latents of episodes of so many frames: the anchor, the first memory, one per 4 frames begun.

    Example:
        >>> latents_of_frames(np.array([1, 9, 10, 17])).tolist()
        [2, 4, 5, 6]
    """
    return 2 + -(-(frames - 1) // 4)


@torch.no_grad()
def encode_recordings(
    vae: WanVae, recordings: Recordings, *, kept: torch.device | None = None, ranks: FitRanks = ONE_RANK
) -> Latents:
    """Encode every episode as one stream; the last frame is repeated where the length asks for it.

    Args:
        kept: Where the latents are put; None: on the VAE's device. With several ranks the CPU.
        ranks: Each encodes some batches of episodes, and all get all latents; a collective.

    Returns:
        Latents of E episodes, L = 2 + 2 * decisions of an episode of whole decisions.
    """
    device = next(vae.parameters()).device
    lengths = latents_of_frames(np.diff(recordings.offsets))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    _, height, width, _ = recordings.frames.shape
    shape = (int(offsets[-1]), vae.size.z_dim, height // SPATIAL, width // SPATIAL)
    latents = Latents(torch.zeros(shape, device=kept or device), offsets)
    batches = _batches(lengths, device, height * width * 3)
    rounds = range(0, len(batches), ranks.size)
    for begin in tqdm(rounds, desc="encode", mininterval=2.0, disable=ranks.rank > 0):
        together = batches[begin : begin + ranks.size]
        for episodes in together[ranks.rank : ranks.rank + 1]:
            frames = _frames_of(int(lengths[episodes[0]]))
            video = torch.stack([stream_of(_whole_groups(recordings, e, frames)) for e in episodes])
            encoded = encode_stream(vae, to_video(video.to(device)))
            for episode, stream in zip(episodes, encoded.transpose(1, 2), strict=True):
                latents[episode].copy_(stream)
            process_status.progress()
        # After every round, so that no rank is ahead of another by more than a batch.
        for episode in chain.from_iterable(together) if ranks.size > 1 else ():
            latents[episode].copy_(ranks.sum(latents[episode]))
    return latents


def _batches(lengths: NDArray[np.int64], device: torch.device, picture_bytes: int) -> list[list[int]]:
    """Group episodes with so many latents, ``[E]``, into those that are encoded side by side."""
    most = 256 if device.type == "cuda" else 32
    batches: list[list[int]] = []
    for length in np.unique(lengths).tolist():
        alike = np.flatnonzero(lengths == length).tolist()
        batch = rows_at_once(device, most, _frames_of(length), picture_bytes)
        batches += [alike[begin : begin + batch] for begin in range(0, len(alike), batch)]
    return batches


def _shared_out(episodes: list[int], most: int) -> list[list[int]]:
    """Part episodes into as few batches as can be, of equal sizes: the last one is not smaller by far."""
    return [part.tolist() for part in np.array_split(np.array(episodes), -(-len(episodes) // most))]


def _frames_of(latents: int) -> int:
    """Count the frames of an episode that fill so many latents."""
    return 1 + 4 * (latents - 2)


def _whole_groups(recordings: Recordings, episode: int, frames: int) -> Tensor:
    """Return an episode's frames ``[frames, H, W, 3]`` uint8, the last one repeated."""
    span = recordings.span(episode)
    rows = np.minimum(span.start + np.arange(frames), span.stop - 1)
    return torch.from_numpy(recordings.frames[rows])


@torch.no_grad()
def redraw(vae: WanVae, latents: Latents, recordings: Recordings) -> FrameFile:
    """Decode encoded episodes back to frames.

    Returns:
        ``[F, H, W, 3]`` uint8, in the recordings' order, in a temporary file.
    """
    _, height, width, _ = shape = recordings.frames.shape
    frames = FrameFile((shape[0], height, width, 3))
    by_length: dict[int, list[int]] = {}
    for episode in range(len(recordings)):
        by_length.setdefault(len(latents[episode]), []).append(episode)
    for length, alike in tqdm(by_length.items(), desc="redraw", mininterval=2.0):
        device = latents.all.device
        most = DRAWN_AT_ONCE["cuda" if device.type == "cuda" else "cpu"]
        batch = rows_at_once(device, most, 1 + 4 * (length - 1), height * width * 3)
        for part in _shared_out(alike, batch):
            video = decode_stream(vae, torch.stack([latents[e] for e in part]).transpose(1, 2))
            drawn = to_uint8(video).permute(0, 2, 3, 4, 1).cpu().numpy()
            for episode, stream in zip(part, drawn, strict=True):
                span = recordings.span(episode)
                seen = np.concatenate([stream[:1], stream[5:]])
                frames.write(span.start, seen[: span.stop - span.start])
            process_status.progress()
    return frames

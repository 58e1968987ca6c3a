"""Windows of a Wan world whose context jumps, as where an episode begins at a key frame.

There the autoencoder sees the episode's first frame and then, at once, four frames from later on. A world
that was fitted on whole episodes alone has never seen such latents, and its first decision is worse for it.

Letters: W windows, B windows of a batch, N latents, z latent channels, h w latent grid.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import torch
from tqdm import tqdm

from asyncrl.fitting.autoencoder import rows_at_once, to_video
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.worlds.wan_windows import MEMORY, Windows
from asyncrl.records import CHUNK
from asyncrl.worlds.wan.vae import WanVae, encode_stream

LATENTS: Final = 4
"""Of a window: anchor, memory and two new ones."""
AT_ONCE: Final = 64
"""Windows that are encoded side by side at most."""


@torch.no_grad()
def with_jumps(vae: WanVae, windows: Windows, recordings: Recordings, share: float, seed: int) -> Windows:
    """Encode some windows anew, each as a video of its own: first frame, four of context, eight new ones.

    Args:
        vae: Encoded the others.
        windows: Of whole episodes, one after the other, each from its first decision on.
        recordings: From which they were cut.
        share: Of the windows behind an episode's first decision, in [0, 1].
        seed: Of the choice.

    Returns:
        As many windows, in the same order.
    """
    chosen, clips = _chosen(recordings, share, np.random.default_rng(seed))
    if not chosen.size:
        return windows
    device = windows.latents.device
    _, height, width, _ = recordings.frames.shape
    batch = rows_at_once(device, AT_ONCE, clips.shape[1], height * width * 3)
    parts = [windows.latents]
    for begin in tqdm(range(0, len(clips), batch), desc="jumps", mininterval=2.0, delay=2):
        video = torch.from_numpy(recordings.frames[clips[begin : begin + batch]])
        encoded = encode_stream(vae, to_video(video.to(device)))
        parts.append(encoded.transpose(1, 2).flatten(0, 1).to(windows.latents))
    rows = windows.rows.clone()
    first = len(windows.latents) + LATENTS * torch.arange(len(chosen), device=device)
    rows[torch.from_numpy(chosen).to(device)] = first[:, None] + torch.arange(LATENTS, device=device)
    return replace(windows, latents=torch.cat(parts), rows=rows)


def _chosen(recordings: Recordings, share: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Choose windows, ``[J]`` int64, and list the frames of each, ``[J, 13]`` int64."""
    chosen: list[int] = []
    clips: list[np.ndarray] = []
    window = 0
    for episode in range(len(recordings)):
        span = recordings.span(episode)
        for decision in range((span.stop - span.start - 1) // CHUNK):
            if decision and rng.random() < share:
                now = CHUNK * decision
                steps = [0, *range(now - MEMORY + 1, now + CHUNK + 1)]
                chosen.append(window)
                clips.append(span.start + np.array(steps))
            window += 1
    return np.array(chosen, np.int64), np.array(clips, np.int64)

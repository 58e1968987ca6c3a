"""Cut recorded episodes into what each decision of a Wan world sees and makes.

Letters: W windows, B windows of a batch, N latents of all episodes, z latent channels, h w latent grid,
A numbers per action.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.fitting.autoencoder import Latents
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.worlds.interface import check_recordings
from asyncrl.fitting.worlds.wan_actions import ActionScale
from asyncrl.records import CHUNK, dummy_action

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

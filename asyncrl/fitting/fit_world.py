"""Train the action-conditioned Wan transformer on encoded episodes.

Letters: W windows, N latents of all episodes, z latent channels, h w latent grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.fitting.fit_vae import Latents
from asyncrl.fitting.loop import minimise, prepared
from asyncrl.fitting.recordings import Recordings
from asyncrl.records import ACTION_DIM, CHUNK, DUMMY_ACTION
from asyncrl.worlds.wan.flow_matching import window_loss
from asyncrl.worlds.wan.transformer import ActionWanTransformer

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
    """``[W, 13, 7]`` float32."""

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents ``[B, z, 4, h, w]`` and actions ``[B, 13, 7]`` of windows ``[B]`` int64."""
        return self.latents[self.rows[chosen]].transpose(1, 2).contiguous(), self.actions[chosen]


def windows(recordings: Recordings, latents: Latents) -> Windows:
    """Cut episodes into windows.

    Decision k of an episode has the anchor latent 0, the memory latent 2k + 1 and the new latents 2k + 2 and
    2k + 3; its actions are the dummy, the last 4 and the 8 new ones.

    Raises:
        ConfigError: No episode has a decision, or actions are not 7 numbers wide.
    """
    if (width := recordings.actions.shape[1]) != ACTION_DIM:
        raise ConfigError(
            f"--data has actions of {width} numbers, but a world model takes {ACTION_DIM}. Record a "
            f"simulator with {ACTION_DIM} numbers per action."
        )
    rows_W: list[np.ndarray] = []
    actions_W: list[np.ndarray] = []
    for episode in range(len(recordings)):
        actions = recordings.actions[recordings.span(episode)]
        padded = np.concatenate([np.repeat(DUMMY_ACTION[None], MEMORY, 0), actions[1:]])
        for decision in range((len(actions) - 1) // CHUNK):
            start = CHUNK * decision
            new = 2 * decision + np.arange(1, 4)
            rows_W.append(latents.offsets[episode] + np.array([0, *new]))
            actions_W.append(np.concatenate([DUMMY_ACTION[None], padded[start : start + MEMORY + CHUNK]]))
    if not rows_W:
        raise ConfigError(f"No recorded episode is longer than {CHUNK} steps: there is nothing to imagine.")
    device = latents.all.device
    return Windows(
        latents=latents.all,
        rows=torch.from_numpy(np.stack(rows_W)).to(device),
        actions=torch.from_numpy(np.stack(actions_W)).to(device),
    )


def fit_world(
    transformer: ActionWanTransformer,
    windows: Windows,
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    context_sigma: float,
    seed: int,
    compiled: bool = False,
) -> float:
    """Train by flow matching on the two new latents; the memory latent is noised (see `window_loss`).

    Args:
        transformer: Trained in place, on the device of the latents.
        windows: See `windows`.
        steps: Optimizer steps.
        batch: Windows per step.
        learning_rate: Peak learning rate.
        context_sigma: Noise level of the memory latent, in [0, 1].
        seed: Of the choice of windows and of all noise.
        compiled: Use `torch.compile`.

    Returns:
        Mean loss of the last tenth.
    """
    generator = torch.Generator().manual_seed(seed)
    device = windows.latents.device
    velocity = prepared(transformer, device, compiled=compiled)

    def loss_at(step: int) -> Tensor:
        chosen = torch.randint(len(windows), (batch,), generator=generator).to(device)
        latents_B, actions_B = windows.take(chosen)
        return window_loss(velocity, latents_B, actions_B, generator=generator, context_sigma=context_sigma)[
            0
        ]

    return minimise("world", transformer, loss_at, steps=steps, learning_rate=learning_rate, average=0.9995)

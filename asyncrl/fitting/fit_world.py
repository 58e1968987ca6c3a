"""Train the action-conditioned Wan transformer on encoded episodes.

Letters: W windows, z latent channels, h w latent grid.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncrl.fitting.loop import minimise, prepared
from asyncrl.fitting.recordings import Recordings
from asyncrl.records import ACTION_DIM, CHUNK, DUMMY_ACTION
from asyncrl.worlds.wan.flow_matching import window_loss
from asyncrl.worlds.wan.transformer import ActionWanTransformer

MEMORY = 4
"""Frames that the memory latent stands for."""


def windows(recordings: Recordings, latents: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Cut episodes into what one decision sees and makes; `latents` are ``[L, z, h, w]`` float32 each.

    Decision k of an episode has the anchor latent 0, the memory latent 2k + 1 and the new latents 2k + 2 and
    2k + 3; its actions are the dummy, the last 4 and the 8 new ones.

    Returns:
        Latents ``[W, z, 4, h, w]`` and actions ``[W, 13, 7]``, both float32 on the latents' device.
    """
    latents_W: list[Tensor] = []
    actions_W: list[np.ndarray] = []
    for episode, encoded in enumerate(latents):
        actions = recordings.actions[recordings.span(episode)]
        padded = np.concatenate([np.repeat(DUMMY_ACTION[None], MEMORY, 0), actions[1:]])
        for decision in range((len(actions) - 1) // CHUNK):
            start = CHUNK * decision
            latents_W.append(encoded[[0, 2 * decision + 1, 2 * decision + 2, 2 * decision + 3]])
            actions_W.append(np.concatenate([DUMMY_ACTION[None], padded[start : start + MEMORY + CHUNK]]))
    stacked = torch.stack(latents_W).transpose(1, 2).contiguous()
    assert actions_W[0].shape == (1 + MEMORY + CHUNK, ACTION_DIM)
    return stacked, torch.from_numpy(np.stack(actions_W)).to(stacked.device)


def fit_world(
    transformer: ActionWanTransformer,
    latents_W: Tensor,
    actions_W: Tensor,
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
        latents_W: ``[W, z, 4, h, w]`` float32, see `windows`.
        actions_W: ``[W, 13, 7]`` float32.
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
    velocity = prepared(transformer, latents_W.device, compiled=compiled)

    def loss_at(step: int) -> Tensor:
        rows = torch.randint(len(latents_W), (batch,), generator=generator).to(latents_W.device)
        return window_loss(
            velocity, latents_W[rows], actions_W[rows], generator=generator, context_sigma=context_sigma
        )[0]

    return minimise("world", transformer, loss_at, steps=steps, learning_rate=learning_rate, average=0.9995)

"""Fit an OpenSora world as published: rectified flow, a loss on the new frames only.

Letters: W windows, B windows of a batch, F frames of all episodes, Z latent channels, h w latent grid,
A numbers of an action, P = 4 condition frames, C = 8 new frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from asyncrl.devices.tensors import to_device
from asyncrl.fitting.fit_models import action_statistics
from asyncrl.fitting.loop import Schedule, minimise, prepared
from asyncrl.fitting.recording_files import Recordings
from asyncrl.fitting.settings import Size
from asyncrl.fitting.world import FrameByFrameFit, Latents, WorldOptions, check_picture_size, window_rows
from asyncrl.records import Bounds
from asyncrl.worlds.layers import FrameVae, FrameVaeConfig
from asyncrl.worlds.opensora.files import ends_on
from asyncrl.worlds.opensora.stdit3 import CONDITION, STDiT3, STDiT3Config
from asyncrl.worlds.opensora.world import OpenSoraWorld, normalise, save_world, window_loss

AVERAGE: Final = 0.99  # Decay of the moving average of the weights, as published.


class OpenSoraFit(FrameByFrameFit):
    """`FittedWorld` of OpenSora. A world that is refined keeps its range of actions."""

    kind: ClassVar = "opensora"
    world: OpenSoraWorld

    @classmethod
    def fresh(cls, size: Size, vae_size: Size, recordings: Recordings, options: WorldOptions) -> OpenSoraFit:
        """Build a world of the recordings' picture size and actions."""
        transformer: STDiT3Config = getattr(STDiT3Config, size)()
        transformer = replace(transformer, action_dim=recordings.actions.shape[1])
        vae: FrameVaeConfig = getattr(FrameVaeConfig, vae_size)()
        side = check_picture_size(recordings, transformer.patch * vae.spatial)
        ends = action_statistics(recordings)
        return cls(OpenSoraWorld(STDiT3(transformer), FrameVae(vae), ends, image_size=side))

    def fit_network(self, recordings: Recordings, schedule: Schedule, options: WorldOptions) -> float:
        """Train the transformer, except the frequencies of its rotary positions."""
        self.autoencoder.requires_grad_(False)
        network = self.world.transformer.requires_grad_(True)
        network.rope.freqs.requires_grad_(False)
        cut = windows(recordings, self.encode(recordings), self.world.action_range)
        return fit_transformer(network, cut, schedule)

    def save(self, folder: Path, version: int) -> None:
        """Write the world in bfloat16."""
        self.world.version = version
        rates = self.world.transformer.rope.freqs.detach().clone()
        for module in self.world.modules().values():
            module.to(torch.bfloat16)  # halves the files; imagination computes in float32
        self.world.transformer.rope.freqs.data = rates  # rounded, positions would turn by other angles
        save_world(folder, self.world)


@dataclass(frozen=True, kw_only=True)
class FrameWindows:
    """Condition and new frames of each decision; each frame's latent and action are stored once."""

    latents: Tensor  # [F, Z, h, w] float32.
    actions: Tensor  # [F, A] float32, scaled to the world's range; row i produced frame i.
    rows: Tensor  # [W, P + C] int64: the frames of each window.

    def take(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents ``[B, Z, P + C, h, w]`` and actions ``[B, C, A]`` of windows ``[B]`` int64."""
        rows = self.rows[chosen]
        return self.latents[rows].transpose(1, 2).contiguous(), self.actions[rows[:, CONDITION:]]


def windows(recordings: Recordings, latents: Latents, action_range: Bounds) -> FrameWindows:
    """Cut episodes into windows, one for each frame with eight frames after it."""
    device = latents.all.device
    actions = to_device(recordings.actions, device)
    past = np.arange(CONDITION) - CONDITION  # The first stands in for earlier ones.
    return FrameWindows(
        latents=latents.all,
        actions=normalise(actions, *ends_on(action_range, device)),
        rows=to_device(
            window_rows(recordings.offsets, lambda seen: np.maximum(seen[:, None] + past, 0)), device
        ),
    )


def fit_transformer(transformer: STDiT3, windows: FrameWindows, schedule: Schedule) -> float:
    """Train by rectified flow on the new frames; return the mean loss of the last tenth."""
    generator = torch.Generator().manual_seed(schedule.seed)
    device = windows.latents.device
    velocity: Callable[..., Tensor] = prepared(transformer, device, compiled=schedule.compiled)

    def loss_at(step: int) -> Tensor:
        chosen = torch.randint(len(windows.rows), (schedule.batch,), generator=generator).to(device)
        return window_loss(velocity, *windows.take(chosen), generator=generator)

    return minimise("world", transformer, loss_at, schedule, average=AVERAGE, rngs=[generator])

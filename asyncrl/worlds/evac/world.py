"""Imagine frames from start states and actions with the EVAC (EnerVerse-AC) world model.

The network sees a window of twelve frames, one latent each: four of the episode so far, which stay clean
(`memory_index`), and the eight of the decision, which begin as noise. So a slot keeps every frame of
its episode. The poses that the actions lead to are predicted first, drawn into maps and made into tokens.

Dimension letters: B slots, C steps, P frames remembered, F = P + C, N frames there is room for, Z latent
channels, h/w latent size, I image tokens, T tokens of an action, K their width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.devices.tensors import CudaGraphed, to_device, to_signed, to_uint8
from asyncrl.errors import ConfigError
from asyncrl.records import CHUNK, ActionSpec, StartState
from asyncrl.storage.tensor_files import write_tensors
from asyncrl.worlds.evac import ddim
from asyncrl.worlds.evac import files as evac_files
from asyncrl.worlds.evac.conditions import (
    CONTEXT,
    EvacConfig,
    EvacNetworks,
    Geometry,
    action_tokens,
    condition_channels,
)
from asyncrl.worlds.evac.ddim import normal_noise, normal_words
from asyncrl.worlds.evac.files import EvacFiles
from asyncrl.worlds.files import FolderWorld, write_about
from asyncrl.worlds.slots import TensorState, finite_rows, open_each_once
from asyncrl.worlds.start_states import check_beginnings


def memory_index(count_B: Tensor, remembered: int) -> Tensor:
    """Choose the frames that the network sees of an episode so far: three spread over it, and the last one.

    The first frame counts `P` times (EnerVerse-AC's sampler): of ``n = count + P - 1`` frames the network
    sees ``n * i // (P - 1)`` for i from 0 to P - 2, and the last one.
    """
    copies = remembered - 1  # of the first frame, besides itself
    spread = torch.arange(copies, device=count_B.device) * (count_B[:, None] + copies) // copies - copies
    return torch.cat([spread.clamp(min=0), count_B[:, None] - 1], dim=1)


@dataclass(frozen=True, kw_only=True)
class EvacState(TensorState):
    """Memory of `B` slots; `finite` covers latents, pixels and poses."""

    history: Tensor  # [B, N, Z, h, w] float32 latents of all frames so far; behind them zeros.
    poses: Tensor  # [B, N, 8] float32 pose of the hand at each of them.
    count: Tensor  # [B] int64 frames so far.
    first: Tensor  # [B, H, W, 3] uint8: the first frame.
    left: Tensor  # [B] int64 decisions that there is still room for, on the CPU, so that reading never waits.

    def write_rows(self, indices: Sequence[int], other: Self) -> Self:  # pyright: ignore
        """See `TensorState.write_rows`; both need room for equally many frames."""
        if other.history.shape[1] != self.history.shape[1]:
            raise ConfigError(
                f"a state with room for {other.history.shape[1]} frames cannot go into one with room for "
                f"{self.history.shape[1]}. Start both with the same number of decisions."
            )
        return super().write_rows(indices, other)

    def to(self, device: torch.device | str) -> EvacState:
        """Return this state on `device`."""
        return replace(super().to(device), left=self.left.clone())

    def remembered(self, frames: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return latents ``[B, P, Z, h, w]``, their poses ``[B, P, 8]``, and the poses one frame earlier."""
        rows = torch.arange(len(self), device=self.count.device)[:, None]
        index = memory_index(self.count, frames)
        before = (index - 1).clamp(min=0)
        return self.history[rows, index], self.poses[rows, index], self.poses[rows, before]

    def check_room(self) -> None:
        """Check that another decision fits."""
        left = self.left.tolist()
        if 0 in left:
            raise ConfigError(
                f"slot {left.index(0)} has imagined as many decisions as its memory was made for, and "
                "another one does not fit. Start with more decisions (--actor.max-decisions)."
            )

    def extended(self, latents: Tensor, poses: Tensor, finite: Tensor) -> EvacState:
        """Append the latents ``[B, C, Z, h, w]`` and poses ``[B, C, 8]`` of a decision."""
        rows = torch.arange(len(self), device=self.count.device)[:, None]
        places = self.count[:, None] + torch.arange(latents.shape[1], device=self.count.device)
        return EvacState(
            history=self.history.index_put((rows, places), latents),
            poses=self.poses.index_put((rows, places), poses),
            count=self.count + latents.shape[1],
            first=self.first.clone(),
            finite=self.finite & finite,
            left=self.left - 1,
        )


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Inputs of the network in a decision, the same at every step of the sampler."""

    history: Tensor  # ``[B, Z, P, h, w]`` float32 clean latents of earlier frames, in front of the new ones
    channels: Tensor  # ``[B, 2 Z + 7, F, h, w]`` float32, see `condition_channels`
    image: Tensor  # ``[B, I, K]`` tokens of the episode's first picture, which is the window's first too
    actions: Tensor  # ``[B, F, T, K]`` tokens of the action that made each frame
    poses: Tensor  # ``[B, C, 8]`` float32 poses of the hand at the new frames


class EvacWorld(FolderWorld):
    """Imagines frames with EVAC's video diffusion network and a frame-wise autoencoder."""

    needs_pose = True
    files = staticmethod(evac_files.open_evac)

    def __init__(
        self,
        networks: EvacNetworks,
        config: EvacConfig,
        *,
        steps: int = 0,
        version: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.networks = networks
        self.config = config
        self.version = version
        self.image_size = config.image_size
        self.steps = ddim.sampling_steps(steps or config.schedule_steps)
        self._geometry = Geometry(config)
        self._velocity: Callable[..., Tensor] = networks.unet
        self._noise: Callable[..., Tensor] = normal_noise
        self.to(device)

    @property
    def action_spec(self) -> ActionSpec:
        """8 steps of 7 numbers."""
        return ActionSpec()

    @classmethod
    def from_files(cls, files: EvacFiles, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """See `FolderWorld.from_files`."""
        networks, steps = files.load(device, dtype), files.settings.steps
        return cls(networks, files.config, steps=steps, version=files.version, device=device)

    def modules(self) -> dict[str, nn.Module]:
        """Return the six networks by name."""
        return self.networks.by_name()

    def to(self, device: torch.device | str) -> Self:
        """Move the weights to `device` and return this world."""
        super().to(device)
        self._geometry.to(device)
        self._constants = (
            torch.cat([torch.zeros(self.config.history), torch.ones(CHUNK)]).to(self.device),
            torch.tensor([float(self.config.fps)]).to(self.device),
            torch.tensor([self.config.domain]).to(self.device),
            torch.arange(len(self.steps) + 1).to(self.device),
        )
        return self

    def compile(self, rows: int) -> EvacWorld:
        """Compile the slow parts; the first decision takes minutes longer at full size."""
        self.rows = rows
        unet = self.networks.unet
        unet.compile(fullgraph=True, dynamic=False)
        if self.device.type == "cuda":
            self._velocity = CudaGraphed(unet)
        self.networks.autoencoder.compile_pieces(encoder=True)
        self._noise = partial(normal_noise, words=torch.compile(normal_words, fullgraph=True, dynamic=False))
        return self

    @torch.no_grad()
    def start(self, states: Sequence[StartState], *, decisions: int) -> EvacState:
        """See `World.start`; equal start states are opened once. Each needs a pose of the hand."""
        if decisions < 1:
            raise ConfigError(f"a world cannot start for {decisions} decisions. Use 1 or more.")
        return open_each_once(states, lambda some: self._open(some, decisions))

    def _open(self, states: Sequence[StartState], decisions: int) -> EvacState:
        check_beginnings(states, image_size=self.image_size, context=CONTEXT, needs_pose=self.needs_pose)
        batch, room = len(states), 1 + CONTEXT + CHUNK * decisions
        latent, size = self.config.autoencoder.channels, self.config.latent_size
        counts = np.array([1 + len(state.context_frames) for state in states], np.int64)
        frames = np.concatenate([f for s in states for f in (s.frame[None], s.context_frames)])
        # Not compiled: the numbers of frames that slots start with differ.
        pictures = to_signed(to_device(frames, self.device)).permute(0, 3, 1, 2)
        latents = self.networks.autoencoder.encode(pictures)
        history = torch.zeros(batch, room, latent, size, size, device=self.device)
        rows, places = np.repeat(np.arange(batch), counts), np.concatenate([np.arange(n) for n in counts])
        index = (to_device(rows, self.device), to_device(places, self.device))
        history = history.index_put(index, latents)
        # Of the frames of a context no poses are known: the hand counts as resting where the episode begins.
        poses = np.stack([np.asarray(state.ee_pose, np.float32) for state in states])
        return EvacState(
            history=history,
            poses=to_device(poses, self.device)[:, None].repeat(1, room, 1),
            count=to_device(counts, self.device),
            first=to_device(np.stack([state.frame for state in states]), self.device),
            finite=finite_rows(history),
            left=torch.full((batch,), decisions),
        )

    def _imagine(
        self, state: EvacState, actions_BC7: Tensor, noise_seeds: Sequence[int]
    ) -> tuple[Tensor, EvacState]:
        state.check_room()
        conditions = self.conditions(state, actions_BC7)
        new_BZChw = self.denoise(conditions, noise_seeds)
        latents_BCZhw = new_BZChw.transpose(1, 2)
        pictures = self.networks.autoencoder.decode(latents_BCZhw.flatten(0, 1)).unflatten(
            0, latents_BCZhw.shape[:2]
        )
        frames = to_uint8(pictures).permute(0, 1, 3, 4, 2).contiguous()
        parts = (new_BZChw, conditions.poses, pictures)
        finite = torch.stack([finite_rows(part) for part in parts]).all(dim=0)
        return frames, state.extended(latents_BCZhw, conditions.poses, finite)

    def conditions(self, state: EvacState, actions_BC7: Tensor) -> Conditions:
        """Compute the conditions of a decision."""
        networks, drawer = self.networks, self._geometry.drawer
        history_BPZhw, poses_BP8, before_BP8 = state.remembered(self.config.history)
        last_B8 = poses_BP8[:, -1]  # the last frame is always remembered
        poses_BC8 = networks.pose_model.follow(actions_BC7, last_B8)
        before_BC8 = torch.cat([last_B8[:, None], poses_BC8[:, :-1]], dim=1)
        motions_BF14 = self._geometry.motions(
            torch.cat([poses_BP8, poses_BC8], dim=1), torch.cat([before_BP8, before_BC8], dim=1)
        )
        pictures_B3HW = to_signed(state.first).permute(0, 3, 1, 2)
        maps = networks.autoencoder.encode(drawer(poses_BC8).flatten(0, 1), compiled=True)
        maps_BCZhw = maps.unflatten(0, poses_BC8.shape[:2])
        return Conditions(
            history=history_BPZhw.transpose(1, 2),
            channels=condition_channels(history_BPZhw, maps_BCZhw, drawer.rays),
            image=networks.image_resampler(networks.image_encoder(pictures_B3HW)),
            actions=action_tokens(networks.action_resampler, motions_BF14),
            poses=poses_BC8,
        )

    @torch.no_grad()
    def denoise(self, conditions: Conditions, noise_seeds: Sequence[int]) -> Tensor:
        """Draw the latents of the new frames: ``[B, Z, C, h, w]`` float32."""
        seeds_B2 = to_device(ddim.seed_words(noise_seeds), self.device)
        _, channels, _, height, width = conditions.history.shape
        shape = (channels, CHUNK, height, width)
        draws = self._constants[3]
        x_BZChw = self._noise(seeds_B2, draws[0], shape)
        for number, step in enumerate(self.steps):
            velocity = self._predict(conditions, x_BZChw, step.time)
            x_BZChw = step.x_factor * x_BZChw + step.v_factor * velocity
            if step.fresh > 0:
                x_BZChw = x_BZChw + step.fresh * self._noise(seeds_B2, draws[number + 1], shape)
        return x_BZChw

    def _predict(self, conditions: Conditions, x_BZChw: Tensor, time: int) -> Tensor:
        # The history is put in front at every step, so it stays clean; its time is 0.
        is_new, fps, domain, _ = self._constants
        window = torch.cat([torch.cat([conditions.history, x_BZChw], dim=2), conditions.channels], dim=1)
        rows, tokens = len(window), (conditions.image, conditions.actions)
        times = (is_new * time).expand(rows, -1)
        velocity = self._velocity(window, times, *tokens, fps.expand(rows), domain.expand(rows))
        return velocity[:, :, self.config.history :].float()


def save_world(folder: Path, world: EvacWorld) -> None:
    """Write one safetensors file per network, and world.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, tensors in evac_files.published_tensors(world.networks).items():
        write_tensors(folder / evac_files.file_name(part), tensors)
    facts = evac_files.facts_of(asdict(world.config))
    write_about(folder, evac_files.KIND, version=world.version, **facts)

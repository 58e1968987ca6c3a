"""Imagine frames from start states and actions with the OpenSora world model.

The transformer sees a window of twelve frame latents: the last four as they were drawn, and the eight that a
decision makes. Keys and values of the four are computed once per decision and are no part of the state.

Rectified flow: data and noise mix as ``x(t) = (1 - t / 1000) clean + (t / 1000) noise`` (arXiv 2209.03003).
The network predicts ``clean - noise``, the opposite sign of Wan's. The published shift of the times is the
identity at 256 pixels. diffusers' flow schedulers have float32 tables, so that a step of 0.1 becomes
0.10000002 and frames differ.

Dimension letters: B slots, Z latent channels, C new frames (8), h/w latent size, H/W pixels, U frames that
differ, A numbers of an action.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.devices.tensors import CudaGraphed, to_device, to_signed, to_uint8
from asyncrl.records import CHUNK, ActionSpec, Bounds, StartState
from asyncrl.storage.tensor_files import write_tensors
from asyncrl.worlds.files import FolderWorld, write_about
from asyncrl.worlds.layers import FrameVae
from asyncrl.worlds.opensora import files as opensora_files
from asyncrl.worlds.opensora.stdit3 import CONDITION, CONDITION_TIME, STDiT3
from asyncrl.worlds.slots import TensorState, draw_noise, finite_rows, open_each_once
from asyncrl.worlds.start_states import check_beginnings

NOISE_TIME: Final = 1000.0  # Time of pure noise.


@dataclass(frozen=True, kw_only=True)
class OpenSoraState(TensorState):
    """The latents of the last four frames of `B` slots, as they were drawn."""

    latents: Tensor  # [B, Z, 4, h, w] float32, scaled; the oldest first.


class OpenSoraWorld(FolderWorld):
    """Imagines frames with an action-conditioned STDiT3 and a frame autoencoder."""

    files = staticmethod(opensora_files.open_world)

    def __init__(
        self,
        transformer: STDiT3,
        vae: FrameVae,
        action_range: Bounds,
        *,
        image_size: int,
        schedule_steps: int = opensora_files.STEPS,
        version: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.transformer = transformer
        self.vae = vae
        self.action_range = action_range
        self.schedule_steps = schedule_steps
        self.version = version
        self.image_size = image_size
        self._sampler: Callable[..., Tensor] = self._sample
        self.to(device)
        sampling_times(schedule_steps)  # refuses 0 steps here and not at the first decision

    @classmethod
    def from_files(
        cls, files: opensora_files.OpenSoraFiles, device: torch.device, dtype: torch.dtype | None = None
    ) -> Self:
        """See `FolderWorld.from_files`."""
        transformer, vae = files.load(device, dtype)
        vae.use_channels_last()
        return cls(
            transformer,
            vae,
            files.action_range,
            image_size=files.image_size,
            schedule_steps=files.settings.steps or files.schedule_steps,
            version=files.version,
            device=device,
        )

    @property
    def action_spec(self) -> ActionSpec:
        """8 steps of 7 numbers as published; of a fitted world, as many numbers as in its recordings."""
        return ActionSpec(dim=self.transformer.size.action_dim)

    def modules(self) -> dict[str, nn.Module]:
        """Transformer and autoencoder."""
        return {"transformer": self.transformer, "vae": self.vae}

    def to(self, device: torch.device | str) -> Self:
        """Move the weights to `device` and return this world."""
        super().to(device)
        self._low_A, self._high_A = opensora_files.ends_on(self.action_range, self.device)
        return self

    def compile(self, rows: int) -> OpenSoraWorld:
        """Compile for decisions of `rows` slots; see `World.compile`. The first takes a minute longer."""
        self.rows = rows
        self.transformer.compile_blocks()
        self.vae.compile_pieces()
        if self.device.type == "cuda":
            # All steps in one graph: the keys and values of the condition frames stay inside.
            self._sampler = CudaGraphed(self._sample)
        return self

    @torch.no_grad()
    def start(self, states: Sequence[StartState], *, decisions: int = 0) -> OpenSoraState:
        """See `World.start`; equal start states are opened once. The state's size is fixed."""
        return open_each_once(states, self._open)

    def _open(self, states: Sequence[StartState]) -> OpenSoraState:
        """Encode each slot's context, or without one its first frame, repeated four times."""
        numbers = self.action_spec.dim
        check_beginnings(states, image_size=self.image_size, context=CONDITION, action_dim=numbers)
        clips = [s.context_frames if len(s.context_frames) else s.frame[None] for s in states]
        firsts = np.cumsum([0, *map(len, clips)])
        places = [np.linspace(first, last - 1, CONDITION) for first, last in pairwise(firsts)]
        frames_U3HW = to_signed(to_device(np.concatenate(clips), self.device)).permute(0, 3, 1, 2)
        rows = to_device(np.concatenate(places).astype(np.int64), self.device)
        picked = self.vae.encode(frames_U3HW).index_select(0, rows)
        latents_BZ4hw = picked.unflatten(0, (len(states), CONDITION)).transpose(1, 2).contiguous()
        return OpenSoraState(latents=latents_BZ4hw, finite=finite_rows(latents_BZ4hw))

    def _imagine(
        self, state: OpenSoraState, actions_BCA: Tensor, noise_seeds: Sequence[int]
    ) -> tuple[Tensor, OpenSoraState]:
        new_BZChw = self.denoise(state, actions_BCA, noise_seeds)
        pixels = self.vae.decode(new_BZChw.transpose(1, 2).flatten(0, 1)).unflatten(0, (-1, CHUNK))
        after = OpenSoraState(
            latents=new_BZChw[:, :, -CONDITION:].clone(),
            finite=state.finite & finite_rows(new_BZChw) & finite_rows(pixels),
        )
        return to_uint8(pixels).permute(0, 1, 3, 4, 2).contiguous(), after

    @torch.no_grad()
    def denoise(self, state: OpenSoraState, actions_BCA: Tensor, noise_seeds: Sequence[int]) -> Tensor:
        """Draw the eight new latents ``[B, Z, 8, h, w]`` float32, scaled; arguments as in `imagine`."""
        _, channels, _, height, width = state.latents.shape
        noise = draw_noise(noise_seeds, (channels, CHUNK, height, width))
        scaled = normalise(actions_BCA, self._low_A, self._high_A)
        drawn = self._sampler(state.latents, to_device(noise.numpy(), self.device), scaled)
        return drawn.clone()  # A graph writes its next result over this one.

    def _sample(self, condition_BZ4hw: Tensor, noise_BZChw: Tensor, scaled_BCA: Tensor) -> Tensor:
        prefix = self.transformer.prefix(condition_BZ4hw)

        def velocity(new_BZChw: Tensor, times_B: Tensor) -> Tensor:
            return self.transformer.step(new_BZChw, times_B, scaled_BCA, prefix)

        return sample(velocity, noise_BZChw, steps=self.schedule_steps)


@lru_cache(maxsize=32)
def sampling_times(steps: int) -> tuple[float, ...]:
    """Return the times of `steps` network calls, from pure noise downwards, and the final 0."""
    if steps < 1:
        raise ValueError(f"a schedule needs at least one step, got {steps}")
    return tuple(NOISE_TIME * (steps - k) / steps for k in range(steps + 1))


def mix(clean: Tensor, noise: Tensor, times_B: Tensor) -> Tensor:
    """Mix ``[B, ...]`` data and noise at times ``[B]``, 0 (data) to 1000 (noise)."""
    share = (times_B / NOISE_TIME).reshape(-1, *[1] * (clean.ndim - 1))
    return (1 - share) * clean + share * noise


def sample(velocity: Callable[[Tensor, Tensor], Tensor], noise: Tensor, *, steps: int) -> Tensor:
    """Follow the velocity from noise ``[B, ...]`` to data with Euler steps of equal length; float32."""
    x = noise
    for time, following in pairwise(sampling_times(steps)):
        times_B = torch.full(x.shape[:1], time, device=x.device)
        x = x + velocity(x, times_B).float() * ((time - following) / NOISE_TIME)
    return x


def window_loss(
    transformer: Callable[[Tensor, Tensor, Tensor], Tensor],
    latents_BZFhw: Tensor,
    actions_BCA: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Compute the mean squared error ``[]`` of ``clean - noise`` of the new frames from clean windows."""
    clean = latents_BZFhw.float()
    device = clean.device
    # The logit of a time is standard normal.
    times_B = (NOISE_TIME * torch.randn(clean.shape[0], generator=generator).sigmoid()).to(device)
    noise = torch.randn(clean.shape, generator=generator).to(device)
    given, new = clean[:, :, :CONDITION], clean[:, :, CONDITION:]
    given = mix(given, noise[:, :, :CONDITION], torch.full_like(times_B, CONDITION_TIME))
    window = torch.cat([given, mix(new, noise[:, :, CONDITION:], times_B)], dim=2)
    velocity = transformer(window, times_B, actions_BCA).float()
    error_B = (velocity - (new - noise[:, :, CONDITION:])).square().flatten(1).mean(1)
    return error_B.mean()


def normalise(actions_BCA: Tensor, low_A: Tensor, high_A: Tensor) -> Tensor:
    """Return ``2 (a - low) / (high - low) - 1`` of actions in the policy's units; float32."""
    return 2 * (actions_BCA - low_A) / (high_A - low_A) - 1


def save_world(folder: Path, world: OpenSoraWorld) -> None:
    """Write `world` so that `load_world` reads it; world.json comes last."""
    (folder / opensora_files.VAE).mkdir(parents=True, exist_ok=True)
    write_tensors(folder / opensora_files.TRANSFORMER, world.transformer.state_dict())
    write_tensors(folder / opensora_files.VAE / opensora_files.VAE_FILE, world.vae.state_dict())
    opensora_files.write_vae_config(folder, world.vae.size)
    opensora_files.write_action_range(folder, world.action_range)
    facts = {"image_size": world.image_size, "schedule_steps": world.schedule_steps}
    write_about(folder, opensora_files.KIND, version=world.version, **facts)

"""Imagine frames from start states and actions with the EVAC (EnerVerse-AC) world model.

The network sees a window of twelve frames, one latent each: four of the episode so far, which stay clean
(`state.memory_index`), and the eight of the decision, which begin as noise. So a slot keeps every frame of
its episode, and its memory is made for as many decisions as will come. The poses that the actions lead to are
predicted first, drawn into maps and made into tokens. Latents are kept as drawn, never encoded again.

Dimension letters: B slots, C steps, P frames remembered, F = P + C, N frames there is room for, Z latent
channels, h/w latent size, I image tokens, T tokens of an action, K their width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.config.sections import ImaginationSettings, WorldDefaults
from asyncrl.devices.cuda_graph import CudaGraphed
from asyncrl.devices.tensors import to_device, to_signed, to_uint8
from asyncrl.errors import ConfigError
from asyncrl.records import CHUNK, POSE_DIM, ActionSpec, ModelSummary, SlotBytes, StartState
from asyncrl.worlds.evac.conditions import EvacConfig, EvacNetworks, Geometry, decode_frames, encode_frames
from asyncrl.worlds.evac.ddim import guided, normal_noise, normal_words, sampling_steps, seed_words
from asyncrl.worlds.evac.files import EvacFiles, open_evac, write_evac
from asyncrl.worlds.evac.state import Conditions, EvacOptions, EvacState, conditions_of
from asyncrl.worlds.slots import finite_rows, imagine_full, open_each_once
from asyncrl.worlds.start_states import check_beginnings

CONTEXT: Final = 4
"""Frames of a start state's context, if it has one."""
FRAMES_AT_ONCE: Final = 32
"""Frames that the autoencoder takes at a time: its memory grows with them."""
# Chosen so that the published sizes take as much memory as measured (docs/measurements/world_speed.md): 236
# MiB a slot, 4 GiB.
_WORKING: Final = 6  # copies of the skip connections that the network takes
_DRAWING: Final = 8  # largest tensors of the decoder, alive at the same time


class EvacWorld:
    """Imagines frames with EVAC's video diffusion network and a frame-wise autoencoder."""

    needs_pose = True

    def __init__(
        self,
        networks: EvacNetworks,
        config: EvacConfig,
        *,
        options: EvacOptions | None = None,
        version: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Join the networks.

        Args:
            options: Of the sampler; None: as published, with the folder's number of steps.
        """
        self.networks = networks
        self.config = config
        self.options = options or EvacOptions()
        self.version = version
        self.steps = sampling_steps(self.options.steps or config.schedule_steps, self.options.eta)
        self._geometry = Geometry(config)
        self._rows = 0
        self._velocity: Callable[..., Tensor] = networks.unet
        self._noise: Callable[..., Tensor] = normal_noise
        self._encode_frames: Callable[..., Tensor] = encode_frames
        self._decode_frames: Callable[..., Tensor] = decode_frames
        self.to(device)

    @property
    def image_size(self) -> int:
        """Height and width of the frames in pixels."""
        return self.config.image_size

    @property
    def action_spec(self) -> ActionSpec:
        """8 steps of 7 numbers."""
        return ActionSpec()

    @classmethod
    def check(cls, folder: Path, settings: ImaginationSettings, **own: Any) -> ModelSummary:
        """Check the files of a folder without loading weights."""
        EvacOptions.from_settings(settings, own)
        files = open_evac(folder)
        nbytes = files.check(settings)
        return ModelSummary(image_size=files.config.image_size, nbytes=nbytes, version=files.version)

    @classmethod
    def load(cls, folder: Path, device: torch.device, settings: ImaginationSettings, **own: Any) -> EvacWorld:
        """Read the world of a folder."""
        options, files = EvacOptions.from_settings(settings, own), open_evac(folder)
        return _opened(files, device, files.types(settings).dtype, options)

    @classmethod
    def defaults(cls, folder: Path, settings: ImaginationSettings, **own: Any) -> WorldDefaults:
        """Return the settings that a folder brings."""
        EvacOptions.from_settings(settings, own)
        return open_evac(folder).defaults()

    @classmethod
    def slot_bytes(
        cls, folder: Path, settings: ImaginationSettings, *, decisions: int, **own: Any
    ) -> SlotBytes:
        """Estimate the bytes of a slot, which remembers its whole episode."""
        options = EvacOptions.from_settings(settings, own)
        files = open_evac(folder)
        return estimate_slot(
            files.config, decisions, files.types(settings).dtype, guided=options.guidance != 1
        )

    def modules(self) -> dict[str, nn.Module]:
        """Return the six networks by name."""
        return self.networks.by_name()

    def to(self, device: torch.device | str) -> EvacWorld:
        """Move the weights to `device` (host memory while they are not needed) and return this world."""
        for module in (*self.modules().values(), self._geometry):
            nn.Module.to(module, device)  # diffusers' own `to` is untyped
        self.device = torch.device(device)
        self._constants = (
            torch.cat([torch.zeros(self.config.history), torch.ones(CHUNK)]).to(self.device),
            torch.tensor([float(self.config.fps)]).to(self.device),
            torch.tensor([self.config.domain]).to(self.device),
            torch.arange(len(self.steps) + 1).to(self.device),
        )
        return self

    def compile(self, rows: int) -> EvacWorld:
        """Compile the slow parts; the first decision takes minutes longer at full size."""
        self._rows = rows
        unet = self.networks.unet
        unet.compile(fullgraph=True, dynamic=False)
        if self.device.type == "cuda":
            self._velocity = CudaGraphed(unet)
        # Of the encoder only what decisions use: the numbers of frames that slots start with differ.
        self._encode_frames = torch.compile(encode_frames, fullgraph=True, dynamic=False)
        self._decode_frames = torch.compile(decode_frames, fullgraph=True, dynamic=False)
        self._noise = partial(normal_noise, words=torch.compile(normal_words, fullgraph=True, dynamic=False))
        return self

    def weights_moved(self) -> None:
        """Forget where the weights were; they return to other addresses."""
        if isinstance(self._velocity, CudaGraphed):
            self._velocity.forget()

    @torch.no_grad()
    def start(self, states: Sequence[StartState], *, decisions: int) -> EvacState:
        """Open one slot per start state, with memory for `decisions` decisions; siblings are opened once.

        Args:
            states: ``B`` start states; each needs a pose of the hand.
            decisions: How many times `imagine` will be called on each, at most.

        Raises:
            ConfigError: A frame has another size than the world's, a pose is missing, or there are not 0 or 4
                context frames; or `decisions` is not positive.
        """
        if decisions < 1:
            raise ConfigError(f"a world cannot start for {decisions} decisions. Use 1 or more.")
        return open_each_once(states, lambda some: self._open(some, decisions))

    def _open(self, states: Sequence[StartState], decisions: int) -> EvacState:
        check_beginnings(states, image_size=self.image_size, context=CONTEXT, needs_pose=self.needs_pose)
        batch, room = len(states), 1 + CONTEXT + CHUNK * decisions
        latent, size = self.config.autoencoder.latent, self.config.latent_size
        counts = np.array([1 + len(state.context_frames) for state in states], np.int64)
        frames = np.concatenate([f for s in states for f in (s.frame[None], s.context_frames)])
        latents = self._encode(to_signed(to_device(frames, self.device)).permute(0, 3, 1, 2), encode_frames)
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

    @torch.no_grad()
    def imagine(
        self, state: EvacState, actions: Tensor | NDArray[np.float32], noise_seeds: Sequence[int]
    ) -> tuple[Tensor, EvacState]:
        """Imagine the 8 frames that 8 actions lead to. Never waits for the device.

        Args:
            actions: ``[B, 8, 7]`` float32; action i produced frame i.
            noise_seeds: ``B`` seeds; row i depends on ``noise_seeds[i]`` only.

        Returns:
            Frames ``[B, 8, H, W, 3]`` uint8, and the state after them.

        Raises:
            ConfigError: A slot has had as many decisions as `start` was told.
        """
        state.check_room()
        return imagine_full(self._imagine, state, actions, noise_seeds, rows=self._rows, device=self.device)

    def _imagine(
        self, state: EvacState, actions_BC7: Tensor, noise_seeds: Sequence[int]
    ) -> tuple[Tensor, EvacState]:
        conditions = conditions_of(
            self.networks,
            self._geometry,
            state,
            actions_BC7,
            remembered=self.config.history,
            encode=lambda maps: self._encode(maps, self._encode_frames),
        )
        new_BZChw = self.denoise(conditions, noise_seeds)
        latents_BCZhw = new_BZChw.transpose(1, 2)
        pictures = self._decode(latents_BCZhw.flatten(0, 1)).unflatten(0, latents_BCZhw.shape[:2])
        frames = to_uint8(pictures).permute(0, 1, 3, 4, 2).contiguous()
        parts = (new_BZChw, conditions.poses, pictures)
        finite = torch.stack([finite_rows(part) for part in parts]).all(dim=0)
        return frames, state.extended(latents_BCZhw, conditions.poses, finite)

    @torch.no_grad()
    def denoise(self, conditions: Conditions, noise_seeds: Sequence[int]) -> Tensor:
        """Draw the latents of the new frames.

        Args:
            conditions: Of ``B`` slots.
            noise_seeds: ``B`` seeds.

        Returns:
            ``[B, Z, C, h, w]`` float32.
        """
        seeds_B2 = to_device(seed_words(noise_seeds), self.device)
        _, channels, _, height, width = conditions.history.shape
        shape = (channels, CHUNK, height, width)
        draws = self._constants[3]
        x_BZChw = self._noise(seeds_B2, draws[0], shape)
        for number, step in enumerate(self.steps):
            velocity = self._guided_velocity(conditions, x_BZChw, step.time)
            x_BZChw = step.x_factor * x_BZChw + step.v_factor * velocity
            if step.fresh > 0:
                x_BZChw = x_BZChw + step.fresh * self._noise(seeds_B2, draws[number + 1], shape)
        return x_BZChw

    def _guided_velocity(self, conditions: Conditions, x_BZChw: Tensor, time: int) -> Tensor:
        """Predict the velocity ``[B, Z, C, h, w]`` float32 of the new frames, with guidance if it is on."""
        # The history is put in front at every step, so it stays clean; its time is 0.
        is_new, fps, domain, _ = self._constants
        window = torch.cat([torch.cat([conditions.history, x_BZChw], dim=2), conditions.channels], dim=1)
        image, actions, options = conditions.image, conditions.actions, self.options
        if options.guidance != 1:
            # Without conditions: all tokens are zero, as where training leaves them out.
            window = torch.cat([window, window])
            image = torch.cat([image, torch.zeros_like(image)])
            actions = torch.cat([actions, torch.zeros_like(actions)])
        rows = len(window)
        velocity = self._velocity(
            window, (is_new * time).expand(rows, -1), image, actions, fps.expand(rows), domain.expand(rows)
        )[:, :, self.config.history :].float()
        if options.guidance != 1:
            conditional, unconditional = velocity.chunk(2)
            return guided(conditional, unconditional, options.guidance, options.guidance_rescale)
        return velocity

    def _encode(self, pictures_N3HW: Tensor, encode: Callable[..., Tensor]) -> Tensor:
        """Encode frames, some at a time: ``[N, Z, h, w]`` float32."""
        scale = self.config.autoencoder.scale
        parts = pictures_N3HW.split(FRAMES_AT_ONCE)
        return torch.cat([encode(self.networks.autoencoder, part, scale) for part in parts])

    def _decode(self, latents_NZhw: Tensor) -> Tensor:
        """Decode frames, some at a time: ``[N, 3, H, W]`` in the dtype of the weights."""
        scale = self.config.autoencoder.scale
        parts = latents_NZhw.split(FRAMES_AT_ONCE)
        return torch.cat([self._decode_frames(self.networks.autoencoder, part, scale) for part in parts])


def _opened(
    files: EvacFiles, device: torch.device | str, dtype: torch.dtype | None, options: EvacOptions | None
) -> EvacWorld:
    networks = files.load(device, dtype)
    return EvacWorld(networks, files.config, options=options, version=files.version, device=device)


def load_world(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    options: EvacOptions | None = None,
) -> EvacWorld:
    """Load a world for inference; None of `dtype` and `options`: as saved or published.

    Raises:
        CheckpointError: A file is missing or does not fit.
    """
    return _opened(open_evac(folder), device, dtype, options)


def save_world(folder: Path, world: EvacWorld) -> None:
    """Write a world's files; see `write_evac`."""
    write_evac(folder, world.networks, world.config, world.version)


def estimate_slot(
    config: EvacConfig, decisions: int, dtype: torch.dtype, *, guided: bool = False
) -> SlotBytes:
    """Estimate the device memory beside the weights, in episodes of so many decisions.

    Args:
        dtype: Of the weights.
    """
    size, frames = config.latent_size, 1 + CONTEXT + CHUNK * decisions
    remembered = frames * (config.autoencoder.latent * size**2 + POSE_DIM) * 4
    kept = 2 * (remembered + 3 * config.image_size**2)  # the state before a decision and the one after it
    # Of the network: what the way down leaves for the way up. Of the decoder: its largest tensors, of as
    # many frames as it takes at once.
    levels = sum(
        (config.unet.res_blocks + 1) * m * config.unet.channels * (size >> i) ** 2
        for i, m in enumerate(config.unet.multipliers)
    )
    largest = config.autoencoder.channels * config.image_size**2
    scratch = dtype.itemsize * _WORKING * (config.history + CHUNK) * levels * (2 if guided else 1)
    return SlotBytes(kept=kept, scratch=scratch, shared=dtype.itemsize * _DRAWING * FRAMES_AT_ONCE * largest)

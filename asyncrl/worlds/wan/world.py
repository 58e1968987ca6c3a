"""Imagine frames from start states and actions with the Wan world model.

The transformer sees a window of four latents: [anchor, memory, new, new]. The anchor is the first frame, the
memory stands for the last four frames, and every decision makes two latents (8 frames). Two ways to continue:

    latents   the memory is the last latent, and the decoder continues where it stopped
    frames    as published: the last four frames become uint8 pixels and are encoded again behind the first
              one, and the decoder draws [memory, new, new] again behind the first frame

Data and noise mix as ``x = (1 - sigma) * data + sigma * noise``; the network gets the time ``1000 * sigma``.
Levels are those of rectified flow with shift 5 (arXiv 2503.20314), in float64: diffusers'
FlowMatchEulerDiscreteScheduler has float32 tables, whose last digits give other frames. Losses have
the bell-shaped weight that DiffSynth trains Wan with.

Dimension letters: B slots, Z latent channels, h/w latent size, H/W pixels, T = 13 actions of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.devices.tensors import CudaGraphed, to_device, to_signed, to_uint8
from asyncrl.records import ActionSpec, StartState, dummy_action
from asyncrl.storage.tensor_files import write_tensors
from asyncrl.worlds.files import FolderWorld, write_about
from asyncrl.worlds.slots import TensorState, draw_noise, finite_rows, open_each_once
from asyncrl.worlds.start_states import check_beginnings
from asyncrl.worlds.wan.files import KIND, TRANSFORMER, VAE, WanFiles, open_world
from asyncrl.worlds.wan.tiny_decoder import TinyDecoder
from asyncrl.worlds.wan.transformer import ActionWanTransformer
from asyncrl.worlds.wan.vae import Cache, FullDecoder, Layers, WanVae, encode_layers, encode_step

CONTEXT: Final = 4  # Frames that the memory latent stands for.
WINDOW: Final = 4  # Latent frames the transformer sees: anchor, memory and two new ones.
TRAIN_LEVELS: Final = 1000  # Number of noise levels that training draws from.
SHIFT: Final = 5.0  # Pushes the levels towards noise: 5 s / (1 + 4 s).
CONTEXT_SIGMA: Final = 5 * 0.05 / 1.2
"""Noise level (0.208, id 950) put on the memory latent in training: it makes imagined memories tolerable."""


@dataclass(frozen=True, kw_only=True)
class WanState(TensorState):
    """Memory of `B` slots; `finite` covers latents and pixels."""

    anchor: Tensor  # ``[B, Z, 1, h, w]`` float32 latent of the first frame
    memory: Tensor  # ``[B, Z, 1, h, w]`` float32 latent of the last four frames
    last_actions: Tensor  # ``[B, 4, A]`` float32 actions that produced the last four frames
    cache: Cache  # Decoder cache: of the frames so far, or (memory in frames) of the first frame
    encoder_cache: Cache = field(default_factory=list)  # Of the first frame; empty with memory in latents


class WanWorld(FolderWorld):
    """Imagines frames with an action-conditioned Wan transformer and the Wan autoencoder."""

    files = staticmethod(open_world)

    def __init__(
        self,
        transformer: ActionWanTransformer,
        vae: WanVae,
        *,
        image_size: int,
        schedule_steps: int = 5,
        version: int = 0,
        device: torch.device | str = "cpu",
        memory: Literal["frames", "latents"] = "latents",
        decoder: TinyDecoder | None = None,
    ) -> None:
        """Join the networks and move them to `device`; the decoder is the autoencoder's own if None."""
        self.transformer = transformer
        self.vae = vae
        self.schedule_steps = schedule_steps
        self.version = version
        self.memory = memory
        self.decoder: Any = decoder or FullDecoder(vae)
        self.image_size = image_size
        self._encoder_layers: Layers = encode_layers
        self._velocity: Callable[..., Tensor] = transformer
        self.to(device)
        sampling_sigmas(schedule_steps)  # refuses 0 steps here and not at the first decision

    @classmethod
    def from_files(cls, files: WanFiles, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """See `FolderWorld.from_files`."""
        transformer, vae = files.load(device, dtype)
        return cls(
            transformer,
            vae,
            image_size=files.image_size,
            schedule_steps=files.settings.steps or files.schedule_steps,
            version=files.version,
            device=device,
            memory=files.context,
            decoder=files.tiny_decoder(device, dtype or files.dtype),
        )

    @property
    def action_spec(self) -> ActionSpec:
        """8 steps of 7 numbers as published; of a fitted world, as many numbers as in its recordings."""
        return ActionSpec(dim=self.transformer.size.action_dim)

    def modules(self) -> dict[str, nn.Module]:
        """Transformer, autoencoder and, if it is a separate one, the decoder."""
        own = {"transformer": self.transformer, "vae": self.vae, "decoder": self.decoder}
        return {name: module for name, module in own.items() if isinstance(module, nn.Module)}

    def compile(self, rows: int) -> WanWorld:
        """Compile for decisions of `rows` slots; see `World.compile`. The first takes a minute longer."""
        self.rows = rows
        for block in self.transformer.blocks:
            block.compile(fullgraph=True, dynamic=False)
        if self.device.type == "cuda":
            self._velocity = CudaGraphed(self.transformer)
        self.decoder.compile()
        self._encoder_layers = torch.compile(encode_layers, fullgraph=True, dynamic=False)
        return self

    @torch.no_grad()
    def start(self, states: Sequence[StartState], *, decisions: int = 0) -> WanState:
        """See `World.start`; equal start states are opened once. The state's size is fixed."""
        return open_each_once(states, self.open_slots)

    @torch.no_grad()
    def open_slots(self, states: Sequence[StartState]) -> WanState:
        """Open every slot by itself: `start` without sharing between equal start states."""
        numbers = self.transformer.size.action_dim
        check_beginnings(states, image_size=self.image_size, context=CONTEXT, action_dim=numbers)
        clips = np.stack([_opening_frames(state) for state in states])
        actions = np.stack([_opening_actions(state, numbers) for state in states])
        video = to_signed(to_device(clips, self.device)).permute(0, 4, 1, 2, 3)
        anchor, seen = encode_step(self.vae, video[:, :, :1], None)
        memory, _ = encode_step(self.vae, video[:, :, 1:], seen)
        anchor, memory = anchor.float(), memory.float()
        _, cache = self.decoder.decode(anchor, None)
        if self.memory == "latents":
            _, cache = self.decoder.decode(memory, cache)
        return WanState(
            anchor=anchor,
            memory=memory,
            last_actions=to_device(actions, self.device),
            finite=finite_rows(anchor) & finite_rows(memory),
            cache=cache,
            encoder_cache=seen if self.memory == "frames" else [],
        )

    def _imagine(
        self, state: WanState, actions_B8A: Tensor, noise_seeds: Sequence[int]
    ) -> tuple[Tensor, WanState]:
        new_BZ2hw = self.denoise(state, actions_B8A, noise_seeds)
        if self.memory == "latents":
            frames, cache = self.decoder.decode(new_BZ2hw, state.cache)
            memory = new_BZ2hw[:, :, -1:].clone()
        else:
            window = torch.cat([state.memory, new_BZ2hw], dim=2)
            frames, _ = self.decoder.decode(window, state.cache)
            frames, cache = frames[:, :, CONTEXT:], [tensor.clone() for tensor in state.cache]
            pixels = to_signed(to_uint8(frames[:, :, -CONTEXT:]))
            memory, _ = encode_step(self.vae, pixels, state.encoder_cache, layers=self._encoder_layers)
        after = WanState(
            anchor=state.anchor.clone(),
            memory=memory.float(),
            last_actions=actions_B8A[:, -CONTEXT:].clone(),
            finite=state.finite & finite_rows(new_BZ2hw) & finite_rows(frames),
            cache=cache,
            encoder_cache=[tensor.clone() for tensor in state.encoder_cache],
        )
        return to_uint8(frames).permute(0, 2, 3, 4, 1).contiguous(), after

    @torch.no_grad()
    def denoise(self, state: WanState, actions_B8A: Tensor, noise_seeds: Sequence[int]) -> Tensor:
        """Draw the two new latents ``[B, Z, 2, h, w]`` float32, normalised; arguments as in `imagine`."""
        batch, channels, _, height, width = state.anchor.shape
        noise = draw_noise(noise_seeds, (channels, WINDOW, height, width))[:, :, 2:]
        dummy, _ = _constants(self.device, actions_B8A.shape[-1])
        actions_BTA = torch.cat([dummy.expand(batch, 1, -1), state.last_actions, actions_B8A], dim=1)
        given = torch.cat([state.anchor, state.memory], dim=2)
        new_BZ2hw = to_device(noise.numpy(), self.device)
        return denoise(self._velocity, given, actions_BTA, new_BZ2hw, self.schedule_steps)


def denoise(
    velocity: Callable[..., Tensor], given_BZ2hw: Tensor, actions_BTA: Tensor, noise_BZ2hw: Tensor, steps: int
) -> Tensor:
    """Draw two new latents from noise after the given ones, anchor and memory: float32, normalised."""
    _, is_new = _constants(given_BZ2hw.device, actions_BTA.shape[-1])
    new_BZ2hw = noise_BZ2hw
    for sigma, following in pairwise(sampling_sigmas(steps)):
        # The conditions stay clean: only the two new latents are stepped.
        window = torch.cat([given_BZ2hw, new_BZ2hw], dim=2)
        times_BF = (1000 * sigma * is_new).expand(len(window), -1)
        new_BZ2hw = new_BZ2hw + velocity(window, times_BF, actions_BTA)[:, :, 2:].float() * (
            following - sigma
        )
    return new_BZ2hw


@lru_cache(maxsize=8)
def _constants(device: torch.device, numbers: int) -> tuple[Tensor, Tensor]:
    """Return the dummy action ``[A]`` and 1 for new latents ``[4]``; cached, as a copy would wait."""
    with torch.inference_mode(False):
        dummy = torch.tensor(dummy_action(numbers), device=device)
        return dummy, torch.tensor([0.0, 0.0, 1.0, 1.0], device=device)


def _opening_frames(state: StartState) -> NDArray[np.uint8]:
    context = state.context_frames if len(state.context_frames) else np.stack([state.frame] * CONTEXT)
    return np.concatenate([state.frame[None], context])


def _opening_actions(state: StartState, numbers: int) -> NDArray[np.float32]:
    if len(state.context_actions):
        return state.context_actions.astype(np.float32)
    return np.tile(dummy_action(numbers), (CONTEXT, 1))


# ---- noise levels and training loss ----


def _shift(sigma: Tensor) -> Tensor:
    return SHIFT * sigma / (1 + (SHIFT - 1) * sigma)


@lru_cache(maxsize=32)
def sampling_sigmas(steps: int) -> tuple[float, ...]:
    """Compute the noise levels of an Euler sampler with `steps` network calls, and the final 0."""
    if steps < 1:
        raise ValueError(f"a schedule needs at least one step, got {steps}")
    sigmas = _shift(torch.linspace(1, 0, steps + 1, dtype=torch.float64)[:-1])
    return (*sigmas.tolist(), 0.0)


@lru_cache(maxsize=1)
def training_tables() -> tuple[Tensor, Tensor]:
    """Return noise levels, 1 (pure noise) first, and loss weights (a bell, mean 1): ``[1000]`` float32."""
    sigmas = _shift(torch.linspace(1, 0, TRAIN_LEVELS + 1, dtype=torch.float64)[:-1])
    bell = torch.exp(-2 * ((TRAIN_LEVELS * sigmas - TRAIN_LEVELS / 2) / TRAIN_LEVELS) ** 2)
    bell = bell - bell.min()
    return sigmas.float(), (bell * (TRAIN_LEVELS / bell.sum())).float()


class WindowNoise(NamedTuple):
    """Random numbers of a batch of windows, on the CPU."""

    ids: Tensor  # [B] int64, rows of `training_tables`.
    new: Tensor  # [B, Z, 2, h, w] float32.
    memory: Tensor  # [B, Z, 1, h, w] float32.

    @classmethod
    def drawn(cls, batch: int, latent: Sequence[int], generator: torch.Generator) -> WindowNoise:
        """Draw for `batch` windows of latents ``[Z, h, w]``; the generator is on the CPU."""
        channels, *grid = latent
        return cls(
            ids=torch.randint(0, TRAIN_LEVELS, (batch,), generator=generator),
            new=torch.randn((batch, channels, 2, *grid), generator=generator),
            memory=torch.randn((batch, channels, 1, *grid), generator=generator),
        )


def window_loss(
    transformer: Callable[[Tensor, Tensor, Tensor], Tensor],
    latents_BZ4hw: Tensor,
    actions_BTA: Tensor,
    noise: WindowNoise | torch.Generator,
    *,
    context_noise: bool = True,
    context_sigma: float = CONTEXT_SIGMA,
) -> Tensor:
    """Compute the weighted mean squared error ``[]`` of ``noise - clean`` of the two new latents.

    The anchor is clean. The memory is noised a little, at time 0, so that the imperfect memories of a long
    imagined episode do not make it drift (WoVR, arXiv 2602.13977).
    Latents are clean and normalised: anchor, memory, two new. The first action is the dummy.
    """
    clean = latents_BZ4hw.float()
    device = clean.device
    if isinstance(noise, torch.Generator):
        batch, channels, _, *grid = clean.shape
        noise = WindowNoise.drawn(batch, (channels, *grid), noise)
    sigmas, weights = training_tables()
    new_noise = noise.new.to(device)
    sigma_B = sigmas[noise.ids].to(device)
    blend = sigma_B[:, None, None, None, None]
    new = (1 - blend) * clean[:, :, 2:] + blend * new_noise
    memory = clean[:, :, 1:2]
    if context_noise:
        memory = (1 - context_sigma) * memory + context_sigma * noise.memory.to(device)
    window = torch.cat([clean[:, :, :1], memory, new], dim=2)
    times_B4 = 1000 * sigma_B[:, None] * torch.tensor([0.0, 0.0, 1.0, 1.0], device=device)
    velocity = transformer(window, times_B4, actions_BTA)[:, :, 2:].float()
    error_B = (velocity - (new_noise - clean[:, :, 2:])).square().flatten(1).mean(1)
    weighted_B = error_B * weights[noise.ids].to(device)
    return weighted_B.mean()


def save_world(folder: Path, world: WanWorld) -> None:
    """Write `world` as ``transformer.safetensors``, ``vae.safetensors`` and ``world.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / TRANSFORMER, world.transformer.state_dict())
    write_tensors(folder / VAE, world.vae.state_dict())
    size, vae = world.transformer.size, world.vae.size
    write_about(
        folder,
        KIND,
        version=world.version,
        image_size=world.image_size,
        schedule_steps=world.schedule_steps,
        head_dim=size.head_dim,
        round_timestep=size.round_timestep,
        latents_mean=vae.latents_mean,
        latents_std=vae.latents_std,
    )

"""Start states and actions in, imagined frames out: the Wan world model, with latents as its memory.

For the autoencoder an episode is one continuous causal video: the first frame is latent 0 (the anchor, kept
for ever), the four context frames are latent 1, and every decision appends two latents (8 frames). The
transformer sees a window of four latents: [anchor, memory, new, new], where the memory is the last latent and
stands for the last four frames. Frames never return to the transformer through pixels, and the decoder goes
on from where it stopped; the published pipeline encodes and decodes the whole window anew for every decision.

Dimension letters: B slots, Z latent channels, h/w latent size, H/W pixels, T = 13 actions of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.pixels import to_signed, to_uint8
from asyncrl.records import ACTION_DIM, CHUNK, DUMMY_ACTION, StartState
from asyncrl.worlds import wan_transformer, wan_vae
from asyncrl.worlds.decoders import Decoder, FullDecoder
from asyncrl.worlds.flow_schedule import sampling_sigmas
from asyncrl.worlds.wan_transformer import ActionWanTransformer, TransformerConfig, load_transformer
from asyncrl.worlds.wan_vae import Cache, VaeConfig, WanVae, encode_stream, load_vae
from asyncrl.worlds.weight_files import read_json, write_json, write_tensors

CONTEXT: Final = 4
"""Frames that the memory latent stands for."""
WINDOW: Final = 4
"""Latent frames the transformer sees: anchor, memory and two new ones."""
FORMAT: Final = "asyncrl-world-1"


@dataclass(kw_only=True)
class WanState:
    """Memory of `B` slots. Every tensor has the slots first and belongs to this state alone."""

    anchor: Tensor
    """``[B, Z, 1, h, w]`` float32 latent of the first frame."""
    memory: Tensor
    """``[B, Z, 1, h, w]`` float32 latent of the last four frames."""
    last_actions: Tensor
    """``[B, 4, 7]`` float32 actions that produced the last four frames."""
    cache: Cache
    """What the decoder remembers of the frames so far."""
    finite: Tensor
    """``[B]`` bool: all latents and pixels so far were finite."""

    def __len__(self) -> int:
        """Return the number of slots."""
        return self.anchor.shape[0]

    def _tensors(self) -> list[Tensor]:
        return [self.anchor, self.memory, self.last_actions, self.finite, *self.cache]

    @staticmethod
    def _from(tensors: list[Tensor]) -> WanState:
        anchor, memory, last_actions, finite, *cache = tensors
        return WanState(anchor=anchor, memory=memory, last_actions=last_actions, finite=finite, cache=cache)

    def select(self, indices: Sequence[int]) -> WanState:
        """Return a state of its own that holds copies of the rows `indices`, in that order."""
        rows = torch.tensor(list(indices), dtype=torch.long, device=self.anchor.device)
        return self._from([tensor.index_select(0, rows) for tensor in self._tensors()])

    @torch.inference_mode()  # in place on tensors that may or may not have been made in inference mode
    def put(self, indices: Sequence[int], other: WanState) -> WanState:
        """Write row k of `other` over row ``indices[k]``, in place, and return this state."""
        rows = torch.tensor(list(indices), dtype=torch.long, device=self.anchor.device)
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine.index_copy_(0, rows, theirs.to(mine))
        return self

    def to(self, device: torch.device | str) -> WanState:
        """Return this state on `device`."""
        return self._from([tensor.to(device) for tensor in self._tensors()])


class WanWorld:
    """Imagines frames with an action-conditioned Wan transformer and the Wan autoencoder."""

    def __init__(
        self,
        transformer: ActionWanTransformer,
        vae: WanVae,
        *,
        image_size: int,
        schedule_steps: int = 5,
        version: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.transformer = transformer
        self.vae = vae
        self.decoder: Decoder = FullDecoder(vae)
        self.schedule_steps = schedule_steps
        self.version = version
        self._image_size = image_size
        self.to(device)
        sampling_sigmas(schedule_steps)  # refuses 0 steps here and not at the first decision

    @property
    def image_size(self) -> int:
        """Height and width of the frames in pixels."""
        return self._image_size

    def to(self, device: torch.device | str) -> WanWorld:
        """Move the weights to `device` (host memory while they are not needed) and return this world."""
        for module in (self.transformer, self.vae):
            nn.Module.to(module, device)  # diffusers' own `to` is untyped
        self.device = torch.device(device)
        return self

    @torch.no_grad()
    def start(self, states: Sequence[StartState]) -> WanState:
        """Open one slot per start state: encode what was seen and let the decoder see it too.

        Raises:
            ConfigError: A frame has another size than the world's, or there are not 0 or 4 context frames.
        """
        clips = np.stack([_opening_frames(state, self.image_size) for state in states])
        actions = np.stack([_opening_actions(state) for state in states])
        video = to_signed(torch.from_numpy(clips).to(self.device)).permute(0, 4, 1, 2, 3)
        latents = encode_stream(self.vae, video).float()
        anchor, memory = latents[:, :, :1].clone(), latents[:, :, 1:].clone()
        _, cache = self.decoder.decode(anchor, None)
        _, cache = self.decoder.decode(memory, cache)
        return WanState(
            anchor=anchor,
            memory=memory,
            last_actions=torch.from_numpy(actions).to(self.device),
            finite=_finite_rows(latents),
            cache=cache,
        )

    @torch.no_grad()
    def imagine(
        self, state: WanState, actions: Tensor | NDArray[np.float32], noise_seeds: Sequence[int]
    ) -> tuple[Tensor, WanState]:
        """Draw the 8 frames that 8 actions lead to; see `asyncrl.worlds.protocol.World.imagine`."""
        if not isinstance(actions, Tensor):
            actions = torch.from_numpy(np.array(actions, dtype=np.float32))  # a copy, for it may be read-only
        actions_B8A = actions.to(self.device, torch.float32)
        if actions_B8A.shape != (len(state), CHUNK, ACTION_DIM) or len(noise_seeds) != len(state):
            raise ValueError(
                f"{len(state)} slots need actions [{len(state)}, {CHUNK}, {ACTION_DIM}] and as many seeds, "
                f"got {list(actions_B8A.shape)} and {len(noise_seeds)}"
            )
        new_BZ2hw = self.denoise(state, actions_B8A, noise_seeds)
        frames, cache = self.decoder.decode(new_BZ2hw, state.cache)
        after = WanState(
            anchor=state.anchor.clone(),
            memory=new_BZ2hw[:, :, -1:].clone(),
            last_actions=actions_B8A[:, -CONTEXT:].clone(),
            finite=state.finite & _finite_rows(new_BZ2hw) & _finite_rows(frames),
            cache=cache,
        )
        return to_uint8(frames).permute(0, 2, 3, 4, 1).contiguous(), after

    @torch.no_grad()
    def denoise(self, state: WanState, actions_B8A: Tensor, noise_seeds: Sequence[int]) -> Tensor:
        """Return the two new latents ``[B, Z, 2, h, w]`` float32 that `actions_B8A` lead to."""
        batch, channels, _, height, width = state.anchor.shape
        new_BZ2hw = draw_noise(noise_seeds, (channels, WINDOW, height, width))[:, :, 2:].to(self.device)
        dummy = torch.tensor(DUMMY_ACTION, device=self.device).expand(batch, 1, ACTION_DIM)
        actions_BTA = torch.cat([dummy, state.last_actions, actions_B8A], dim=1)
        is_new = torch.tensor([0.0, 0.0, 1.0, 1.0], device=self.device).expand(batch, WINDOW)
        sigmas = sampling_sigmas(self.schedule_steps)
        for sigma, following in pairwise(sigmas):
            # The conditions stay clean: only the two new latents are stepped.
            window = torch.cat([state.anchor, state.memory, new_BZ2hw], dim=2)
            velocity = self.transformer(window, 1000 * sigma * is_new, actions_BTA)[:, :, 2:]
            new_BZ2hw = new_BZ2hw + velocity.float() * (following - sigma)
        return new_BZ2hw


def _finite_rows(values: Tensor) -> Tensor:
    """``[B]`` bool: all numbers of ``values[b]`` are finite."""
    return values.isfinite().flatten(1).all(dim=1)


def draw_noise(seeds: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """Draw ``[B, *shape]`` float32 standard normal noise on the CPU, row i from ``seeds[i]`` alone."""
    rows = [torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
    return torch.stack(rows)


def _opening_frames(state: StartState, size: int) -> NDArray[np.uint8]:
    """Return ``[5, H, W, 3]``: the first frame, then the context (else the first frame four times)."""
    if state.frame.shape != (size, size, 3):
        raise ConfigError(
            f"start state {state.name} has a frame of shape {list(state.frame.shape)}, but the world draws "
            f"{size}x{size} pixels. Use start states recorded at that size (--start-states)."
        )
    if len(state.context_frames) not in (0, CONTEXT):
        raise ConfigError(
            f"start state {state.name} has {len(state.context_frames)} context frames; the world needs 0 or "
            f"{CONTEXT}. Record start states with {CONTEXT} (--start-states)."
        )
    context = state.context_frames if len(state.context_frames) else np.stack([state.frame] * CONTEXT)
    return np.concatenate([state.frame[None], context])


def _opening_actions(state: StartState) -> NDArray[np.float32]:
    if len(state.context_actions):
        return state.context_actions.astype(np.float32)
    return np.tile(DUMMY_ACTION, (CONTEXT, 1))


def save_world(folder: Path, world: WanWorld) -> None:
    """Write `world` as ``transformer.safetensors``, ``vae.safetensors`` and ``world.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "transformer.safetensors", world.transformer.state_dict())
    write_tensors(folder / "vae.safetensors", world.vae.state_dict())
    content = {
        "format": FORMAT,
        "kind": "wan",
        "version": world.version,
        "image_size": world.image_size,
        "schedule_steps": world.schedule_steps,
        "transformer": asdict(world.transformer.size),
        "vae": asdict(world.vae.size),
    }
    write_json(folder / "world.json", content)


def load_world(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    schedule_steps: int | None = None,
) -> WanWorld:
    """Load a world from a folder of ours (``world.json``) or one with the published files.

    Args:
        folder: Holds the weights.
        device: Where they go.
        dtype: Of the weights once loaded.
        schedule_steps: Network calls per decision; None takes what the folder says (published: 5).

    Raises:
        CheckpointError: A file is missing or does not fit.
    """
    if not (folder / "world.json").is_file() and (folder / wan_transformer.PUBLISHED_FILE).is_file():
        return _load_published(folder, device, dtype, schedule_steps or 5)
    content = read_json(folder / "world.json")
    if content.get("format") != FORMAT or content.get("kind") != "wan":
        raise CheckpointError(
            f"{folder / 'world.json'} describes {content.get('kind')!r} in format {content.get('format')!r}; "
            f"this version reads 'wan' in format {FORMAT!r}."
        )
    try:
        transformer_size = TransformerConfig(**content["transformer"])
        vae_size = VaeConfig.from_json(content["vae"])
        image_size, steps, version = (int(content[k]) for k in ("image_size", "schedule_steps", "version"))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'world.json'} is incomplete ({error}). Save the world again."
        ) from error
    kept = {"dtype": dtype, "device": device}
    return WanWorld(
        load_transformer(folder / "transformer.safetensors", transformer_size, **kept),
        load_vae(folder / "vae.safetensors", vae_size, **kept),
        image_size=image_size,
        schedule_steps=schedule_steps or steps,
        version=version,
        device=device,
    )


def _load_published(folder: Path, device: torch.device | str, dtype: torch.dtype, steps: int) -> WanWorld:
    kept = {"published": True, "dtype": dtype, "device": device}
    return WanWorld(
        load_transformer(folder / wan_transformer.PUBLISHED_FILE, TransformerConfig.full(), **kept),
        load_vae(folder / wan_vae.PUBLISHED_FILE, VaeConfig.full(), **kept),
        image_size=256,
        schedule_steps=steps,
        device=device,
    )

"""Predict flow velocities of noisy frame latents: OpenSora's STDiT3 steered by robot actions.

Spatial blocks mix the tokens of a frame, temporal blocks the frames of a token, in turns. A window has four
condition frames and the new ones. Actions are added to the time embedding of the new frames, in spatial
blocks only (WMPO, arXiv 2511.09515). There is no text.

Temporal attention is causal, and the condition frames have a time of their own and no action: what the
network makes of them depends neither on the new frames nor on their time. `STDiT3.prefix` computes it once,
and `STDiT3.step` continues from there; `STDiT3.forward` computes the whole window.

Dimension letters:
    B  samples            Z  latent channels      F  frames      C  new frames, one per action
    h, w  latent size     S  tokens of a frame    D  model width
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from asyncrl.records import ACTION_DIM
from asyncrl.worlds.opensora.layers import (
    KeysValues,
    Mlp,
    Rotary,
    SpatialBlock,
    TemporalBlock,
    modulate,
)

CONDITION: Final = 4
"""Frames that are given; the embedding of no action stands for the actions that made them."""
CONDITION_TIME: Final = 15.0
"""Time of the condition frames, of 1000: so little noise is on them in training."""
UNUSED: Final = ("cross_attn.", "y_embedder.", "fps_embedder.")
"""Parts of names of tensors that are in the published files and in no computation."""


@dataclass(frozen=True, kw_only=True)
class STDiT3Config:
    """Size of an action-conditioned STDiT3."""

    depth: int
    """Spatial blocks, and as many temporal ones."""
    width: int
    """Model width, a multiple of 4 and of `heads`."""
    heads: int
    """Attention heads; width / heads is even."""
    channels: int = 4
    """Latent channels. The network returns twice as many; the second half means nothing."""
    patch: int = 2
    """Latent pixels per token in height and width."""
    mlp_ratio: int = 4
    """Inner width of the MLPs, in model widths."""
    freq_dim: int = 256
    """Channels of the sinusoid of the time."""
    unused_branches: bool = False
    """Keep the text and frame-rate branches, which no computation reads: to write published files."""
    action_dim: int = ACTION_DIM
    """Numbers per action; published: 7."""
    text_channels: int = 4096
    """Of the text embedding; only with `unused_branches`, like `text_tokens`."""
    text_tokens: int = 300

    def __post_init__(self) -> None:
        counts = (
            self.depth,
            self.width,
            self.heads,
            self.channels,
            self.patch,
            self.mlp_ratio,
            self.action_dim,
        )
        if min(counts) < 1 or self.freq_dim < 2 or self.freq_dim % 2:
            raise ValueError(f"{self} has a size that is no size")
        if self.width % 4 or self.width % (2 * self.heads):
            raise ValueError(
                f"a width of {self.width} with {self.heads} heads: it must be a multiple of 4, and each head "
                "must get an even number of channels"
            )

    @classmethod
    def tiny(cls) -> STDiT3Config:
        """A size of 4.0 million parameters, for small frames."""
        return cls(depth=4, width=192, heads=4, freq_dim=64)

    @classmethod
    def small(cls) -> STDiT3Config:
        """A size of 10 million parameters, for small frames."""
        return cls(depth=6, width=256, heads=4, freq_dim=64)

    @classmethod
    def xl2(cls) -> STDiT3Config:
        """The published size: 978 tensors, 1,212,991,556 parameters, of which 907,789,892 are used."""
        return cls(depth=28, width=1152, heads=16, unused_branches=True)


class STDiT3(nn.Module):
    """OpenSora's transformer with published names of tensors."""

    def __init__(self, size: STDiT3Config) -> None:
        super().__init__()
        width = size.width
        self.size = size
        self.gradient_checkpointing = False
        patch = (1, size.patch, size.patch)
        self.x_embedder = _branch(proj=nn.Conv3d(size.channels, width, patch, stride=patch))
        self.t_embedder = _branch(mlp=_time_mlp(size))
        self.action_embedder = _branch(
            fc=nn.Sequential(nn.Linear(size.action_dim, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)),
            none_action=nn.Embedding(1, width),
        )
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.rope = _branch()
        self.rope.freqs = nn.Parameter(_rotary_rates(width // size.heads), requires_grad=False)
        shape, text = (width, size.heads, size.mlp_ratio * width), size.unused_branches
        self.spatial_blocks = nn.ModuleList(SpatialBlock(*shape, text=text) for _ in range(size.depth))
        self.temporal_blocks = nn.ModuleList(TemporalBlock(*shape, text=text) for _ in range(size.depth))
        self.final_layer = _branch(linear=nn.Linear(width, 2 * size.channels * size.patch**2))
        self.final_layer.scale_shift_table = nn.Parameter(torch.randn(2, width) / width**0.5)
        if text:
            self.fps_embedder = _branch(mlp=_time_mlp(size))
            self.y_embedder = _branch(y_proj=Mlp(size.text_channels, width, width))
            table = torch.randn(size.text_tokens, size.text_channels) / size.text_channels**0.5
            self.y_embedder.register_buffer("y_embedding", table)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.x_embedder.proj.weight.dtype

    def forward(self, latents_BZFhw: Tensor, times_B: Tensor, actions_BCA: Tensor) -> Tensor:
        """Predict the velocity ``clean - noise`` of the new frames from a whole window.

        Args:
            latents_BZFhw: ``[B, Z, 4 + C, h, w]`` of any float dtype: condition frames, noisy new ones; h and
                w are multiples of the patch.
            times_B: ``[B]`` float32, time of the new frames, 0..1000.
            actions_BCA: ``[B, C, A]`` float32, normalised; action i produced new frame i.

        Returns:
            ``[B, Z, C, h, w]`` in the dtype of the weights.
        """
        frames, rows = latents_BZFhw.shape[2], latents_BZFhw.shape[0]
        time_B1D, actions_BCD = self.embed_times(times_B), self._embed_actions(actions_BCA)
        none = self.action_embedder.none_action.weight.expand(rows, CONDITION, -1)
        is_new = (torch.arange(frames, device=latents_BZFhw.device) >= CONDITION)[:, None, None]
        given = self._share(self._condition_time(latents_BZFhw))
        spatial = self._share(time_B1D + torch.cat([none, actions_BCD], dim=1))
        # What an action would do to a condition frame is never used: its time is another one.
        spatial, temporal = (torch.where(is_new, own, given) for own in (spatial, self._share(time_B1D)))
        rotary, visible = self.angles(0, frames), _visible(frames, frames, latents_BZFhw.device)
        x_BFSD = self._tokens(latents_BZFhw)
        for of_frame, of_time in self._blocks():
            x_BFSD = self._run(of_frame, x_BFSD, spatial)
            x_BFSD, _ = self._run(of_time, x_BFSD, temporal, rotary, visible)
        return self._velocity(x_BFSD[:, CONDITION:], time_B1D, latents_BZFhw)

    def prefix(self, condition_BZFhw: Tensor) -> list[KeysValues]:
        """Compute what the new frames see of the condition frames: it is the same in every step.

        Args:
            condition_BZFhw: ``[B, Z, 4, h, w]`` of any float dtype.

        Returns:
            Keys and values of each temporal block.
        """
        shared = self._share(self._condition_time(condition_BZFhw))
        rotary, visible = self.angles(0, CONDITION), _visible(CONDITION, CONDITION, condition_BZFhw.device)
        x_BFSD, kept = self._tokens(condition_BZFhw), list[KeysValues]()
        for of_frame, of_time in self._blocks():
            x_BFSD = of_frame(x_BFSD, shared)
            x_BFSD, (keys, values) = of_time(x_BFSD, shared, rotary, visible)
            kept.append((keys, values.clone()))  # A view would keep the projection's queries and keys too.
        return kept

    def step(
        self, new_BZChw: Tensor, times_B: Tensor, actions_BCA: Tensor, prefix: list[KeysValues]
    ) -> Tensor:
        """Predict the velocity of the new frames behind condition frames that `prefix` has seen.

        Args:
            new_BZChw: ``[B, Z, C, h, w]`` of any float dtype: the noisy new frames.
            times_B: As in `forward`.
            actions_BCA: As in `forward`.
            prefix: What `prefix` returned.

        Returns:
            ``[B, Z, C, h, w]`` in the dtype of the weights; `forward` returns the same.
        """
        frames = new_BZChw.shape[2]
        time_B1D = self.embed_times(times_B)
        spatial = self._share(time_B1D + self._embed_actions(actions_BCA))
        temporal = self._share(time_B1D)
        rotary = self.angles(CONDITION, frames)
        visible = _visible(frames, CONDITION + frames, new_BZChw.device)
        x_BFSD = self._tokens(new_BZChw)
        for (of_frame, of_time), before in zip(self._blocks(), prefix, strict=True):
            x_BFSD = of_frame(x_BFSD, spatial)
            x_BFSD, _ = of_time(x_BFSD, temporal, rotary, visible, before)
        return self._velocity(x_BFSD, time_B1D, new_BZChw)

    def compile_blocks(self) -> None:
        """Compile the blocks, each kind once for all; the first decision takes longer."""
        for block in (*self.spatial_blocks, *self.temporal_blocks):
            # Not `block.compile`: what it compiles is the code of all modules, which has a limited number of
            # variants.
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)

    def _blocks(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        return zip(self.spatial_blocks, self.temporal_blocks, strict=True)

    def _run(self, block: nn.Module, *inputs: Any) -> Any:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    def _tokens(self, latents_BZFhw: Tensor) -> Tensor:
        """Cut frames into patches and say where each one is: ``[B, F, S, D]``."""
        patches: Tensor = self.x_embedder.proj(latents_BZFhw.to(self.dtype))
        rows, columns = patches.shape[-2:]
        table = positions(rows, columns, self.size.width, latents_BZFhw.device).to(self.dtype)
        return patches.flatten(3).permute(0, 2, 3, 1) + table

    def embed_times(self, times_B: Tensor) -> Tensor:
        """Embed times ``[B]``, rounded to the dtype of the weights as in training: ``[B, 1, D]``."""
        waves = sinusoid(times_B.to(self.dtype), self.size.freq_dim).to(self.dtype)
        return self.t_embedder.mlp(waves).unsqueeze(1)

    def _condition_time(self, like: Tensor) -> Tensor:
        return self.embed_times(torch.full((1,), CONDITION_TIME, device=like.device))

    def _embed_actions(self, actions_BCA: Tensor) -> Tensor:
        return self.action_embedder.fc(actions_BCA.to(self.dtype))

    def _share(self, embedding_BFD: Tensor) -> Tensor:
        """Return the modulation that all blocks share: ``[B, F, 6, D]``."""
        return self.t_block(embedding_BFD).unflatten(2, (6, -1))

    def angles(self, first: int, frames: int) -> Rotary:
        """Return cosines and sines of `frames` frames from the frame `first` on."""
        rates: Tensor = self.rope.freqs
        times = torch.arange(first, first + frames, device=rates.device, dtype=torch.float32)
        angles = times[:, None] * rates.float()
        return angles.cos(), angles.sin()

    def _velocity(self, x_BCSD: Tensor, time_B1D: Tensor, like_BZFhw: Tensor) -> Tensor:
        """Read the velocity from tokens and put the patches back: ``[B, Z, C, h, w]``."""
        size, final = self.size, self.final_layer
        shift, scale = (final.scale_shift_table + time_B1D.unsqueeze(2)).unsqueeze(3).unbind(2)
        out: Tensor = final.linear(modulate(x_BCSD, shift, scale))
        rows, columns = (length // size.patch for length in like_BZFhw.shape[-2:])
        grid = out.unflatten(3, (size.patch, size.patch, -1)).unflatten(2, (rows, columns))
        # [B, C, h/p, w/p, p, p, 2 Z] -> [B, 2 Z, C, h/p, p, w/p, p]
        frames = grid.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)
        return frames[:, : size.channels]


def sinusoid(times: Tensor, channels: int) -> Tensor:
    """Encode times as ``[cos, sin]`` waves, in float64 because sin(1000) needs the digits.

    Args:
        times: ``[...]`` of any float dtype, in 0..1000.
        channels: Even number of output channels.

    Returns:
        ``[..., channels]`` float64.
    """
    half = channels // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=times.device) / half)
    angles = times.double().unsqueeze(-1) * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


@cache  # never dropped: a CUDA graph reads it where it is
def positions(rows: int, columns: int, width: int, device: torch.device) -> Tensor:
    """Encode where the patches of a frame are: waves of the column, then of the row.

    Positions are stretched as if every frame had the published one's size: with 8 pixels per latent pixel and
    patches of 2, a token is 32 / sqrt(S) units wide, where ``S = rows * columns`` (256 pixels: 2).

    Args:
        rows: Tokens from top to bottom.
        columns: Tokens from left to right.
        width: ``D``, a multiple of 4.
        device: Of the result.

    Returns:
        ``[S, D]`` float32.
    """
    with torch.inference_mode(False):
        rates = 10000.0 ** (
            -torch.arange(0, width // 2, 2, dtype=torch.float64, device=device) / (width // 2)
        )
        scale = 16 * (rows * columns) ** 0.5 / 512
        base = round((rows * columns) ** 0.5)
        across = torch.arange(columns, dtype=torch.float64, device=device) / scale * (base / columns)
        down = torch.arange(rows, dtype=torch.float64, device=device) / scale * (base / rows)
        waves = [
            torch.cat([(place[:, None] * rates).sin(), (place[:, None] * rates).cos()], dim=1)
            for place in (across.repeat(rows), down.repeat_interleave(columns))
        ]
        return torch.cat(waves, dim=1).float()


@cache
def _visible(frames: int, seen: int, device: torch.device) -> Tensor:
    """Tell which of `seen` frames the last `frames` of them see, ``[F, K]`` bool: none that comes later."""
    with torch.inference_mode(False):
        return torch.ones(frames, seen, dtype=torch.bool, device=device).tril(seen - frames)


def _rotary_rates(channels: int) -> Tensor:
    return 10000.0 ** (-torch.arange(0, channels, 2).float() / channels)


def _time_mlp(size: STDiT3Config) -> nn.Sequential:
    width = size.width
    return nn.Sequential(nn.Linear(size.freq_dim, width), nn.SiLU(), nn.Linear(width, width))


def _branch(**modules: nn.Module) -> Any:
    """Return a module that holds others under the published names."""
    branch = nn.Module()
    for name, module in modules.items():
        branch.add_module(name, module)
    return branch

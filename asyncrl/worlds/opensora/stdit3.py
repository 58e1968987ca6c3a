"""Predict flow velocities of noisy frame latents: OpenSora's STDiT3 steered by robot actions.

Spatial blocks mix the tokens of a frame, temporal blocks the frames of a token, in turns. A window has four
condition frames and the new ones. Actions are added to the time embedding of the new frames, in spatial
blocks only (WMPO, arXiv 2511.09515). There is no text. Temporal attention is causal, and the condition frames
have a time of their own and no action, so `STDiT3.prefix` computes their part once and `STDiT3.step`
continues from there; `STDiT3.forward` computes the whole window. Attributes have the published names.

Dimension letters:
    B  samples            Z  latent channels      F  frames      C  new frames, one per action
    h, w  latent size     S  tokens of a frame    D  model width    E  channels of a head
    N  sequences          L  tokens of a sequence                   K  frames that are attended to
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from asyncrl.records import ACTION_DIM
from asyncrl.storage.untrusted import Typed
from asyncrl.worlds.layers import attend_few, sinusoid

CONDITION: Final = 4  # Given frames; the embedding of no action stands for the actions that made them
CONDITION_TIME: Final = 15.0  # Time of the condition frames, of 1000: so little noise is on them in training.
UNUSED: Final = ("cross_attn.", "y_embedder.", "fps_embedder.")
"""Parts of names of tensors of text and frame rate: in the published files, and in no computation."""


@dataclass(frozen=True, kw_only=True)
class STDiT3Config(Typed):
    """Size of an action-conditioned STDiT3."""

    depth: int  # Spatial blocks, and as many temporal ones
    width: int  # Model width, a multiple of 4 and of 2 `heads`
    heads: int
    channels: int = 4  # Latent channels. The network returns twice as many; the second half means nothing.
    patch: int = 2  # Latent pixels per token in height and width
    mlp_ratio: int = 4  # Inner width of the MLPs, in model widths
    freq_dim: int = 256  # Channels of the sinusoid of the time
    action_dim: int = ACTION_DIM

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (self.depth, self.width, self.heads, self.channels, self.patch, self.mlp_ratio)
        if min(*sizes, self.action_dim) < 1 or self.freq_dim < 2 or self.freq_dim % 2:
            raise ValueError(f"{self} has a size that is no size")
        if self.width % 4 or self.width % (2 * self.heads):
            raise ValueError(
                f"a width of {self.width} with {self.heads} heads: it must be a multiple of 4, and each head "
                "must get an even number of channels"
            )

    @classmethod
    def tiny(cls) -> STDiT3Config:
        """Return a size of 4.0 million parameters, for small frames."""
        return cls(depth=4, width=192, heads=4, freq_dim=64)

    @classmethod
    def small(cls) -> STDiT3Config:
        """Return a size of 10 million parameters, for small frames."""
        return cls(depth=6, width=256, heads=4, freq_dim=64)

    @classmethod
    def xl2(cls) -> STDiT3Config:
        """Return the published size: 907,789,892 parameters, and 305,201,664 of `UNUSED` in the files."""
        return cls(depth=28, width=1152, heads=16)


EPS: Final = 1e-6  # Epsilon of all norms.
Rotary = tuple[Tensor, Tensor]  # Cosines and sines of the angles of each frame, [F, E / 2] float32.
KeysValues = tuple[Tensor, Tensor]
"""Keys (turned) and values of some frames, ``[B * S, heads, F, E]`` in the dtype of the weights."""


class NormedAttention(nn.Module):
    """Multi-head attention whose queries and keys are normalised per head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm = nn.RMSNorm(width // heads, eps=EPS)
        self.k_norm = nn.RMSNorm(width // heads, eps=EPS)
        self.proj = nn.Linear(width, width)

    def project(self, x_NLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised queries, normalised keys, and values: ``[N, heads, L, E]`` each."""
        parts = self.qkv(x_NLD).unflatten(2, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(query), self.k_norm(key), value

    def join(self, mixed_NHLE: Tensor) -> Tensor:
        """Join the heads: ``[N, heads, L, E]`` to ``[N, L, D]``."""
        return self.proj(mixed_NHLE.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers with GELU (tanh) between them."""

    def __init__(self, width_in: int, hidden: int, width_out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width_in, hidden)
        self.fc2 = nn.Linear(hidden, width_out)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width_in]`` to ``[..., width_out]``."""
        return self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))


class Block(nn.Module):
    """Common part of spatial and temporal blocks: attention and MLP between modulated norms."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.randn(6, width) / width**0.5)
        self.attn = NormedAttention(width, heads)
        self.mlp = Mlp(width, hidden, width)

    def modulation(self, shared_BF6D: Tensor) -> tuple[Tensor, ...]:
        """Return shift, scale, gate of the attention, then of the MLP: ``[B, F, 1, D]`` each."""
        return (self.scale_shift_table + shared_BF6D).unsqueeze(3).unbind(2)

    def add_mlp(self, x_BFSD: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        """Return ``x + gate * mlp(norm(x) * (1 + scale) + shift)``, ``[B, F, S, D]``."""
        return x_BFSD + gate * self.mlp(modulate(x_BFSD, shift, scale))


class SpatialBlock(Block):
    """Mixes the tokens of each frame by full attention."""

    def forward(self, x_BFSD: Tensor, shared_BF6D: Tensor) -> Tensor:
        """Mix the tokens of each frame; the shared modulation may have 1 for B and F."""
        shift, scale, gate, *of_mlp = self.modulation(shared_BF6D)
        query, key, value = self.attn.project(modulate(x_BFSD, shift, scale).flatten(0, 1))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x_BFSD = x_BFSD + gate * self.attn.join(mixed).view_as(x_BFSD)
        return self.add_mlp(x_BFSD, *of_mlp)


class TemporalBlock(Block):
    """Mixes the frames of each token by causal attention: a frame sees itself and those before it."""

    def forward(
        self,
        x_BFSD: Tensor,
        shared_BF6D: Tensor,
        rotary: Rotary,
        visible_FK: Tensor,
        before: KeysValues | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Mix each frame with the ones visible to it (`visible_FK` bool); return them, keys and values."""
        shift, scale, gate, *of_mlp = self.modulation(shared_BF6D)
        by_token = modulate(x_BFSD, shift, scale).transpose(1, 2)
        query, key, value = self.attn.project(by_token.flatten(0, 1))
        query, own = rotate(query, rotary), (rotate(key, rotary), value)
        keys, values = own
        if before is not None:
            keys, values = torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)
        mixed = attend_few(query, keys, values, visible_FK)
        x_BFSD = x_BFSD + gate * self.attn.join(mixed).view_as(by_token).transpose(1, 2)
        return self.add_mlp(x_BFSD, *of_mlp), own


def modulate(x_BFSD: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return ``norm(x) * (1 + scale) + shift``: adaptive layer norm (DiT, arXiv 2212.09748)."""
    return functional.layer_norm(x_BFSD, x_BFSD.shape[-1:], eps=EPS) * (1 + scale) + shift


def rotate(x_NHFE: Tensor, rotary: Rotary) -> Tensor:
    """Rotate neighbouring channels by the angles of their frame (arXiv 2104.09864), in float32 or more."""
    cos, sin = rotary
    exact = x_NHFE.to(torch.promote_types(x_NHFE.dtype, torch.float32))
    # Of channels a, b: a * cos - b * sin and b * cos + a * sin.
    signed = torch.stack([-sin, sin], dim=-1).flatten(-2)
    across = exact.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (exact * cos.repeat_interleave(2, dim=-1) + across * signed).type_as(x_NHFE)


class STDiT3(nn.Module):
    """OpenSora's transformer with published names of tensors."""

    def __init__(self, size: STDiT3Config) -> None:
        super().__init__()
        width = size.width
        self.size = size
        self.gradient_checkpointing = False
        patch = (1, size.patch, size.patch)
        self.x_embedder = _branch(proj=nn.Conv3d(size.channels, width, patch, stride=patch))
        time = (nn.Linear(size.freq_dim, width), nn.SiLU(), nn.Linear(width, width))
        self.t_embedder = _branch(mlp=nn.Sequential(*time))
        self.action_embedder = _branch(
            fc=nn.Sequential(nn.Linear(size.action_dim, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)),
            none_action=nn.Embedding(1, width),
        )
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.rope = _branch()
        channels = width // size.heads
        rates = 10000.0 ** (-torch.arange(0, channels, 2).float() / channels)
        self.rope.freqs = nn.Parameter(rates, requires_grad=False)
        shape = (width, size.heads, size.mlp_ratio * width)
        self.spatial_blocks = nn.ModuleList(SpatialBlock(*shape) for _ in range(size.depth))
        self.temporal_blocks = nn.ModuleList(TemporalBlock(*shape) for _ in range(size.depth))
        self.final_layer = _branch(linear=nn.Linear(width, 2 * size.channels * size.patch**2))
        self.final_layer.scale_shift_table = nn.Parameter(torch.randn(2, width) / width**0.5)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.x_embedder.proj.weight.dtype

    def forward(self, latents_BZFhw: Tensor, times_B: Tensor, actions_BCA: Tensor) -> Tensor:
        """Predict the velocity ``clean - noise`` ``[B, Z, C, h, w]`` of the new frames from a whole window.

        Args:
            latents_BZFhw: Condition frames, then noisy new ones; h and w are multiples of the patch.
            times_B: Time of the new frames, 0..1000.
            actions_BCA: Normalised; action i produced new frame i.
        """
        frames, rows = latents_BZFhw.shape[2], latents_BZFhw.shape[0]
        time_B1D, actions_BCD = self.embed_times(times_B), self.action_embedder.fc(actions_BCA.to(self.dtype))
        none = self.action_embedder.none_action.weight.expand(rows, CONDITION, -1)
        is_new = (torch.arange(frames, device=latents_BZFhw.device) >= CONDITION)[:, None, None]
        given = self._share_condition(latents_BZFhw.device)
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
        """Compute keys and values of the condition frames ``[B, Z, 4, h, w]``, the same in every step."""
        shared = self._share_condition(condition_BZFhw.device)
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
        """Return the same as `forward`, from the noisy new frames ``[B, Z, C, h, w]`` and a `prefix`."""
        frames = new_BZChw.shape[2]
        time_B1D = self.embed_times(times_B)
        spatial = self._share(time_B1D + self.action_embedder.fc(actions_BCA.to(self.dtype)))
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
        patches: Tensor = self.x_embedder.proj(latents_BZFhw.to(self.dtype))
        rows, columns = patches.shape[-2:]
        table = positions(rows, columns, self.size.width, latents_BZFhw.device).to(self.dtype)
        return patches.flatten(3).permute(0, 2, 3, 1) + table

    def embed_times(self, times_B: Tensor) -> Tensor:
        """Embed times ``[B]``, rounded to the dtype of the weights as in training: ``[B, 1, D]``."""
        waves = sinusoid(times_B.to(self.dtype), self.size.freq_dim).to(self.dtype)
        return self.t_embedder.mlp(waves).unsqueeze(1)

    def _share(self, embedding_BFD: Tensor) -> Tensor:
        return self.t_block(embedding_BFD).unflatten(2, (6, -1))

    def _share_condition(self, device: torch.device) -> Tensor:
        return self._share(self.embed_times(torch.full((1,), CONDITION_TIME, device=device)))

    def angles(self, first: int, frames: int) -> Rotary:
        """Return cosines and sines of `frames` frames from the frame `first` on."""
        rates: Tensor = self.rope.freqs
        times = torch.arange(first, first + frames, device=rates.device, dtype=torch.float32)
        angles = times[:, None] * rates.float()
        return angles.cos(), angles.sin()

    def _velocity(self, x_BCSD: Tensor, time_B1D: Tensor, like_BZFhw: Tensor) -> Tensor:
        size, final = self.size, self.final_layer
        shift, scale = (final.scale_shift_table + time_B1D.unsqueeze(2)).unsqueeze(3).unbind(2)
        out: Tensor = final.linear(modulate(x_BCSD, shift, scale))
        rows, columns = (length // size.patch for length in like_BZFhw.shape[-2:])
        grid = out.unflatten(3, (size.patch, size.patch, -1)).unflatten(2, (rows, columns))
        # [B, C, h/p, w/p, p, p, 2 Z] -> [B, 2 Z, C, h/p, p, w/p, p]
        frames = grid.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)
        return frames[:, : size.channels]


@cache  # never dropped: a CUDA graph reads it where it is
def positions(rows: int, columns: int, width: int, device: torch.device) -> Tensor:
    """Encode positions of a frame's patches, ``[S, D]`` float32, stretched to the published frame's size."""
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
    with torch.inference_mode(False):
        return torch.ones(frames, seen, dtype=torch.bool, device=device).tril(seen - frames)


def _branch(**modules: nn.Module) -> Any:
    branch = nn.Module()
    for name, module in modules.items():
        branch.add_module(name, module)
    return branch

"""Draw frames from latents at a small part of the autoencoder's cost, with a distilled decoder.

Every level works on whole latent frames with two-dimensional convolutions; only the last layer turns channels
into time. Memory blocks also see half of the previous latent frame's input channels, so a stream's memory is
one tensor per block. The idea is TAEHV's; this architecture is our own. `asyncrl fit decoder` trains it.

Dimension letters:
    B  videos    F  latent frames    N = B F    Z  latent channels    h, w  latent size    H, W  pixels
    C  channels of a level    K  channels that are remembered    T = 1 + 4 (F - 1) or 4 F frames
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.errors import CheckpointError
from asyncrl.storage.atomic import read_json, write_json
from asyncrl.storage.tensor_files import TensorFiles, fill, write_tensors
from asyncrl.storage.untrusted import Typed
from asyncrl.worlds.wan.vae import FRAMES_PER_LATENT, use_channels_last

FORMAT: Final = "asyncrl-tiny-decoder-1"
WEIGHTS: Final = "decoder.safetensors"
ABOUT: Final = "decoder.json"
PATCH: Final = 2  # Pixels a side drawn by the last layer, behind three doublings: 16 per latent pixel

Memory = list[Tensor]  # One [B, ., ., K] tensor per memory block, in the order of the blocks.


@dataclass(frozen=True, kw_only=True)
class TinyDecoderConfig(Typed):
    """Size of a tiny decoder. It has no fixed image size: it draws 16 pixels per latent pixel."""

    z_dim: int
    widths: tuple[int, int, int, int]  # Channels at 1, 2, 4 and 8 times the latent size; even.
    blocks: tuple[int, int, int, int]  # Memory blocks at each of these levels.

    @classmethod
    def tiny(cls) -> TinyDecoderConfig:
        """Return the shipped size: 64-pixel frames of ``[32, 4, 4]`` latents, an eighth of the full cost."""
        return cls(z_dim=32, widths=(48, 64, 48, 32), blocks=(1, 1, 1, 1))

    @classmethod
    def full(cls) -> TinyDecoderConfig:
        """Return the published size: 256-pixel frames of ``[48, 16, 16]`` latents, a fiftieth of the cost."""
        return cls(z_dim=48, widths=(512, 384, 256, 128), blocks=(2, 2, 3, 3))


class MemoryBlock(nn.Module):
    """A residual block that also sees half of the previous latent frame's input channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kept = width // 2
        self.mix = nn.Conv2d(width + self.kept, width, 3, padding=1)
        self.add = nn.Conv2d(width, width, 3, padding=1)
        with torch.no_grad():
            self.add.weight.mul_(0.2)  # a deep stack of fresh blocks begins near the identity

    def forward(self, x_NChw: Tensor, frames: int, memory_BhwK: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return new features ``[N, C, h, w]``, and the memory after them as a tensor of its own."""
        # Channels last throughout: these permutations are views, and the convolutions are faster.
        x_BFhwC = x_NChw.permute(0, 2, 3, 1).unflatten(0, (-1, frames))
        kept_BFhwK = x_BFhwC[..., : self.kept]
        first_B1hwK = torch.zeros_like(kept_BFhwK[:, :1]) if memory_BhwK is None else memory_BhwK[:, None]
        before_BFhwK = torch.cat([first_B1hwK, kept_BFhwK[:, :-1]], dim=1)
        seen = torch.cat([x_BFhwC, before_BFhwK], dim=-1).flatten(0, 1).permute(0, 3, 1, 2)
        y_NChw = self.add(functional.relu(self.mix(seen)))
        return x_NChw + y_NChw, kept_BFhwK[:, -1].clone(memory_format=torch.contiguous_format)


class TinyDecoder(nn.Module):
    """Draws frames from latents. Keeps the contract of `asyncrl.worlds.wan.vae.decode_step`."""

    def __init__(self, config: TinyDecoderConfig) -> None:
        super().__init__()
        self.config = config
        widths = config.widths
        self.enter = nn.Conv2d(config.z_dim, widths[0], 3, padding=1)
        self.levels = nn.ModuleList(
            nn.ModuleList(MemoryBlock(width) for _ in range(count))
            for width, count in zip(widths, config.blocks, strict=True)
        )
        self.widen = nn.ModuleList(nn.Conv2d(before, width, 1) for before, width in pairwise(widths))
        self.draw = nn.Conv2d(widths[-1], FRAMES_PER_LATENT * 3 * PATCH * PATCH, 3, padding=1)
        self._stream: Callable[[Tensor, Memory | None], tuple[Tensor, Memory]] = self._run
        use_channels_last(self)

    def decode(
        self, latents_BZFhw: Tensor, cache: Memory | None, *, clamp: bool = True
    ) -> tuple[Tensor, Memory]:
        """See `vae.FullDecoder.decode`; `clamp` as in `decode_step`."""
        if cache is None and latents_BZFhw.shape[2] != 1:
            raise ValueError(f"a video starts with a single latent frame, got {latents_BZFhw.shape[2]}")
        opens = latents_BZFhw.shape[2] == 1  # not compiled, as in `vae.FullDecoder`
        frames, after = (self._run if opens else self._stream)(latents_BZFhw, cache)
        # The first latent stands for one frame: the last of the four that the network draws.
        frames = frames[:, :, -1:] if cache is None else frames
        return (frames.clamp(-1, 1) if clamp else frames), after

    def compile(self) -> None:
        """Compile for one fixed batch size; `decode` is not `forward`, so `Module.compile` misses it."""
        self._stream = torch.compile(self._run, fullgraph=True, dynamic=False)

    def forward(self, latents_BZFhw: Tensor) -> Tensor:
        """Draw whole videos ``[B, 3, 1 + 4 (F - 1), 16 h, 16 w]`` in the weights' dtype, not clamped."""
        frames, _ = self._run(latents_BZFhw, None)
        return frames[:, :, FRAMES_PER_LATENT - 1 :]

    def _run(self, latents_BZFhw: Tensor, cache: Memory | None) -> tuple[Tensor, Memory]:
        frames, after = latents_BZFhw.shape[2], []
        x = latents_BZFhw.to(self.enter.weight.dtype).permute(0, 2, 3, 4, 1).flatten(0, 1)
        x = functional.relu(self.enter(x.permute(0, 3, 1, 2)))
        for index, blocks in enumerate(self.levels):
            if index:
                x = functional.interpolate(self.widen[index - 1](x), scale_factor=2.0, mode="nearest")
            assert isinstance(blocks, nn.ModuleList)
            for block in blocks:
                x, memory = block(x, frames, None if cache is None else cache[len(after)])
                after.append(memory)
        return _to_video(self.draw(functional.relu(x)), frames), after


def _to_video(drawn_NChw: Tensor, frames: int) -> Tensor:
    height, width = drawn_NChw.shape[2:]
    parts = drawn_NChw.view(-1, frames, FRAMES_PER_LATENT, 3, PATCH, PATCH, height, width)
    return parts.permute(0, 3, 1, 2, 6, 4, 7, 5).reshape(
        -1, 3, FRAMES_PER_LATENT * frames, PATCH * height, PATCH * width
    )


def save_decoder(
    folder: Path,
    decoder: TinyDecoder,
    *,
    latents_mean: Sequence[float],
    latents_std: Sequence[float],
    fit: Mapping[str, float | int | None],
) -> None:
    """Write ``decoder.safetensors`` and ``decoder.json``, with the latents' statistics."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, decoder.state_dict())
    content = {
        "format": FORMAT,
        "config": asdict(decoder.config),
        "latents_mean": list(latents_mean),
        "latents_std": list(latents_std),
        "fit": dict(fit),
    }
    write_json(folder / ABOUT, content)


def load_decoder(
    folder: Path,
    *,
    latents_mean: Sequence[float],
    latents_std: Sequence[float],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> TinyDecoder:
    """Load a decoder for inference, for an autoencoder whose latents have these statistics."""
    file = folder / ABOUT
    if not file.is_file():
        raise CheckpointError(
            f"{folder} holds no tiny decoder ({ABOUT}). Make one: asyncrl fit decoder --world {folder}, or "
            "use the full decoder."
        )
    content = read_json(file)
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} has format {content.get('format')!r}; this version reads {FORMAT!r}. Fit it again: "
            f"asyncrl fit decoder --world {folder}."
        )
    try:
        lists = {name: tuple(content["config"][name]) for name in ("widths", "blocks")}
        config = TinyDecoderConfig(**content["config"] | lists)
        statistics = [content[name] for name in ("latents_mean", "latents_std")]
        with torch.device("meta"):
            decoder = TinyDecoder(config)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file} is incomplete ({error!r}). Fit the decoder again.") from error
    if statistics != [list(latents_mean), list(latents_std)]:
        raise CheckpointError(
            f"{file} belongs to another autoencoder: the mean and deviation of its latents differ from the "
            f"world's. Fit it again: asyncrl fit decoder --world {folder}."
        )
    fill(decoder, TensorFiles(folder / WEIGHTS), dtype=dtype, device=device)
    use_channels_last(decoder)
    return decoder.eval().requires_grad_(False)

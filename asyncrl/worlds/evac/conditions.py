"""The networks of an EVAC world besides its U-Net, its sizes, and the conditions that they make.

The first picture is encoded by OpenCLIP's vision transformer (the last layer, without its norm;
DynamiCrafter, arXiv 2310.12190). Two resamplers turn that picture,
and the motion of each frame, into tokens (Flamingo, arXiv 2204.14198).

Dimension letters: B slots, C steps, P frames remembered, F = P + C frames of the window, N frames, M rows, S
vectors of a row, A their numbers, Q queries, D inner width, Z latent channels, h/w latent size, H, W pixels,
T tokens of an action, K their width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.records import CHUNK, POSE_DIM, SlotBytes
from asyncrl.storage.untrusted import Typed
from asyncrl.worlds.evac.poses import Camera, MapDrawer, Motions, MotionStatistics, PoseModel
from asyncrl.worlds.evac.unet import EvacUNet, UNetConfig
from asyncrl.worlds.layers import FrameVae, FrameVaeConfig

CONTEXT: Final = 4  # Frames of a start state's context, if it has one.
FRAMES_AT_ONCE: Final = 32  # Frames that the autoencoder takes at a time: its memory grows with them.
# Chosen so that the published sizes take as much memory as measured (docs/measurements/world_speed.md): 236
# MiB a slot, 4 GiB.
_WORKING: Final = 6  # copies of the skip connections that the network takes
_DRAWING: Final = 8  # largest tensors of the decoder, alive at the same time

# fmt: off
_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_STD: Final = (0.26862954, 0.26130258, 0.27577711)
# fmt: on


# ---- tokens --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ImageEncoderConfig(Typed):
    """Size of a vision transformer."""

    width: int
    layers: int
    heads: int
    mlp: int  # Inner width of its MLPs.
    patch: int  # Pixels of a patch in height and width.
    size: int  # Height and width to which pictures are resized.

    @property
    def tokens(self) -> int:
        """Number of tokens: one for the picture, and one per patch."""
        return 1 + (self.size // self.patch) ** 2

    @classmethod
    def published(cls) -> ImageEncoderConfig:
        """Return the size of OpenCLIP's ViT-H/14: 257 tokens of 1280 numbers."""
        return cls(width=1280, layers=32, heads=16, mlp=5120, patch=14, size=224)


class ImageEncoder(nn.Module):
    """OpenCLIP's vision transformer, with resizing and normalising of its pictures."""

    def __init__(self, size: ImageEncoderConfig) -> None:
        super().__init__()
        from transformers import CLIPVisionConfig, CLIPVisionModel

        self.size = size
        vision: Any = CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=size.width,
                intermediate_size=size.mlp,
                num_hidden_layers=size.layers,
                num_attention_heads=size.heads,
                image_size=size.size,
                patch_size=size.patch,
                hidden_act="gelu",
            )
        )
        # Some versions of transformers keep the network one level deeper.
        self.vision: Any = getattr(vision, "vision_model", vision)
        self.set_constants("cpu")

    def set_constants(self, device: torch.device | str) -> None:
        """Make the buffers that are in no file; call it again after building on the meta device."""
        both = (torch.tensor(values, device=device).view(3, 1, 1) for values in (_MEAN, _STD))
        self.mean, self.std = (nn.Buffer(constant, persistent=False) for constant in both)
        places = torch.arange(self.size.tokens, device=device).unsqueeze(0)
        for module in self.vision.modules():
            if "position_ids" in dict(module.named_buffers(recurse=False)):
                module.register_buffer("position_ids", places, persistent=False)

    def forward(self, pictures_B3HW: Tensor) -> Tensor:
        """Map ``[B, 3, H, W]`` float32 in [-1, 1] to tokens ``[B, S, D]`` in the dtype of the weights."""
        size = (self.size.size, self.size.size)
        resized = functional.interpolate(pictures_B3HW, size, mode="bicubic", align_corners=True)
        normalised = ((resized + 1) / 2 - self.mean) / self.std
        dtype = next(self.vision.parameters()).dtype
        return self.vision(pixel_values=normalised.to(dtype)).last_hidden_state


@dataclass(frozen=True, kw_only=True)
class ResamplerConfig(Typed):
    """Size of a resampler."""

    inputs: int
    queries: int  # Tokens that come out.
    width: int  # Width of the tokens, and within.
    depth: int
    heads: int
    head_dim: int


class QueryAttention(nn.Module):
    """Attention of the queries over the inputs and over the queries themselves."""

    def __init__(self, size: ResamplerConfig) -> None:
        super().__init__()
        inner = size.heads * size.head_dim
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.to_q = nn.Linear(size.width, inner, bias=False)
        self.to_kv = nn.Linear(size.width, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, size.width, bias=False)

    def forward(self, x_MSD: Tensor, queries_MQD: Tensor) -> Tensor:
        """Return ``[M, Q, D]``, to be added to the queries."""
        queries_MQD = self.norm2(queries_MQD)
        query = self.to_q(queries_MQD)
        key, value = self.to_kv(torch.cat([self.norm1(x_MSD), queries_MQD], dim=1)).chunk(2, dim=2)
        heads = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in (query, key, value))
        return self.to_out(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Resampler(nn.Module):
    """A resampler with the parameters' published names."""

    def __init__(self, size: ResamplerConfig) -> None:
        super().__init__()
        self.size = size
        width = size.width
        self.latents = nn.Parameter(torch.randn(1, size.queries, width) / width**0.5)
        self.proj_in = nn.Linear(size.inputs, width)
        self.proj_out = nn.Linear(width, width)
        self.norm_out = nn.LayerNorm(width)

        def feed_forward() -> nn.Sequential:
            wide, narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
            return nn.Sequential(nn.LayerNorm(width), wide, nn.GELU(), narrow)

        self.layers = nn.ModuleList(
            nn.ModuleList([QueryAttention(size), feed_forward()]) for _ in range(size.depth)
        )

    def forward(self, x_MSA: Tensor) -> Tensor:
        """Map ``[M, S, A]`` of any float dtype to tokens ``[M, Q, D]`` in the dtype of the weights."""
        x_MSD = self.proj_in(x_MSA.to(self.latents.dtype))
        queries = self.latents.expand(len(x_MSD), -1, -1)
        for attention, feed_forward in self.layers:  # type: ignore[misc]
            queries = queries + attention(x_MSD, queries)
            queries = queries + feed_forward(queries)
        return self.norm_out(self.proj_out(queries))


# ---- all networks --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EvacConfig(Typed):
    """Sizes and conventions of an EVAC world."""

    image_size: int  # Height and width of the frames in pixels.
    unet: UNetConfig
    autoencoder: FrameVaeConfig
    image_encoder: ImageEncoderConfig
    image_resampler: ResamplerConfig
    action_resampler: ResamplerConfig
    camera: Camera = field(default_factory=Camera)
    motions: MotionStatistics = field(default_factory=MotionStatistics)
    pose_hidden: int = 64  # Inner width of the model of the hand's poses.
    history: int = 4  # Earlier frames in the network's window.
    fps: int = 2  # Frames per second, as in training.
    domain: int = 11  # Kind of robot; 11: AgiBot World.
    schedule_steps: int = 50  # Network calls per decision.

    def __post_init__(self) -> None:
        super().__post_init__()
        unet, encoder = self.unet, self.image_encoder
        whole = {
            "channels of the network": (unet.channels, unet.groups),
            "channels of the network, in heads,": (unet.channels, unet.head_dim),
            "initial_inner": (unet.initial_inner, unet.head_dim),
            "width of the image encoder": (encoder.width, encoder.heads),
            "size of the image encoder": (encoder.size, encoder.patch),
        }
        for what, (size, unit) in whole.items():
            if unit < 1 or size < unit or size % unit:
                raise ValueError(f"{what} is {size}, expected a multiple of {unit}")
        smallest = self.autoencoder.spatial * 2 ** (len(unet.multipliers) - 1)
        if self.image_size < smallest or self.image_size % smallest:
            raise ValueError(f"image_size is {self.image_size}, expected a multiple of {smallest}")
        if self.history < 2 or not 1 <= self.schedule_steps <= 1000 or not 0 <= self.domain < unet.domains:
            raise ValueError(
                "history must be at least 2, schedule_steps 1 to 1000, and domain one of the network's"
            )

    @property
    def latent_size(self) -> int:
        """Height and width of the latents."""
        return self.image_size // self.autoencoder.spatial


def estimate_slot(config: EvacConfig, decisions: int, dtype: torch.dtype) -> SlotBytes:
    """Estimate the device memory of slots, excluding the weights, from sizes alone."""
    size, frames = config.latent_size, 1 + CONTEXT + CHUNK * decisions
    remembered = frames * (config.autoencoder.channels * size**2 + POSE_DIM) * 4
    kept = 2 * (remembered + 3 * config.image_size**2)  # the state before a decision and the one after it
    # Of the network: what the way down leaves for the way up. Of the decoder: its largest tensors, of as
    # many frames as it takes at once.
    levels = sum(
        (config.unet.res_blocks + 1) * m * config.unet.channels * (size >> i) ** 2
        for i, m in enumerate(config.unet.multipliers)
    )
    largest = config.autoencoder.widths[0] * config.image_size**2
    scratch = dtype.itemsize * _WORKING * (config.history + CHUNK) * levels
    return SlotBytes(kept=kept, scratch=scratch, shared=dtype.itemsize * _DRAWING * FRAMES_AT_ONCE * largest)


class EvacNetworks(nn.Module):
    """The networks of a world, with the weights of its files; random ones at first."""

    def __init__(self, config: EvacConfig) -> None:
        super().__init__()
        self.unet = EvacUNet(config.unet)
        self.autoencoder = FrameVae(config.autoencoder, at_once=FRAMES_AT_ONCE, channels_last=False)
        self.image_encoder = ImageEncoder(config.image_encoder)
        self.image_resampler = Resampler(config.image_resampler)
        self.action_resampler = Resampler(config.action_resampler)
        self.pose_model = PoseModel(config.pose_hidden)

    def by_name(self) -> dict[str, nn.Module]:
        """Return the networks by name."""
        return dict(self.named_children())


class Geometry(nn.Module):
    """Conditions that need no weights: motions of the hand, and maps."""

    def __init__(self, config: EvacConfig) -> None:
        super().__init__()
        self.motions = Motions(config.motions)
        self.drawer = MapDrawer(config.camera, config.image_size, config.latent_size)


def action_tokens(resampler: Resampler, motions_BF14: Tensor) -> Tensor:
    """Make the tokens ``[B, F, T, K]`` of each frame's motion ``[B, F, 14]``."""
    tokens = resampler(motions_BF14.flatten(0, 1).unsqueeze(1))
    return tokens.unflatten(0, motions_BF14.shape[:2])


def condition_channels(history_BPZhw: Tensor, maps_BCZhw: Tensor, rays_6hw: Tensor) -> Tensor:
    """Join the channels next to the noisy latents: ``[B, 2 Z + 7, F, h, w]`` float32.

    They are condition image, mask, trajectory map and rays. A remembered frame's condition image is itself
    (mask 1); a new frame's is the last remembered frame (mask 0). Maps of remembered frames are zero.
    """
    batch, known, _, height, width = history_BPZhw.shape
    new = maps_BCZhw.shape[1]
    image = torch.cat([history_BPZhw, history_BPZhw[:, -1:].expand(-1, new, -1, -1, -1)], dim=1)
    mask = torch.cat([torch.ones_like(image[:, :known, :1]), torch.zeros_like(image[:, known:, :1])], dim=1)
    maps = torch.cat([torch.zeros_like(history_BPZhw), maps_BCZhw], dim=1)
    rays = rays_6hw.expand(batch, known + new, 6, height, width)
    return torch.cat([image, mask, maps, rays], dim=2).transpose(1, 2)

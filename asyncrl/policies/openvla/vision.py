"""Turn pictures into patch features: those of a DINOv2 and a SigLIP tower, joined.

OpenVLA reads both towers after their second-to-last block, without the final norm. So the last block, the
final norm and SigLIP's pooling head are not built at all.

Dimension letters:
    B  rows      H, W  frame size in pixels      P  patches      D  features (of both towers together)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from transformers import (
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from asyncrl.errors import ConfigError

DINO_MEAN: Final = (0.484375, 0.455078125, 0.40625)
DINO_STD: Final = (0.228515625, 0.2236328125, 0.224609375)
"""ImageNet's statistics rounded to bfloat16: what the published policies were trained with."""
REGISTERS: Final = 4
"""Extra tokens of the DINOv2 tower; they and its class token are dropped from the features."""

_RENAMED = (
    # transformers renamed its DINOv2 attention; files and broadcasts use the new names everywhere
    (".attention.attention.query.", ".attention.q_proj."),
    (".attention.attention.key.", ".attention.k_proj."),
    (".attention.attention.value.", ".attention.v_proj."),
    (".attention.output.dense.", ".attention.o_proj."),
    (".base_layer.", "."),  # what peft puts into the names of a layer with an adapter
    (".lora_A.default.", ".lora_A."),
    (".lora_B.default.", ".lora_B."),
)


def stable_name(name: str) -> str:
    """Name a parameter in files and broadcasts, whatever the version of transformers and the adapters."""
    for old, new in _RENAMED:
        name = name.replace(old, new)
    return name


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """Size of one vision transformer."""

    width: int
    """Features per patch."""
    depth: int
    """Blocks of the published tower; ``depth - 1`` are built."""
    heads: int
    """Attention heads; divides `width`."""
    mlp: int
    """Hidden features of a block's MLP; in DINOv2 a multiple of `width`."""

    def __post_init__(self) -> None:
        if self.depth < 2 or self.width % self.heads:
            raise ConfigError(
                f"A vision tower of width {self.width} with {self.heads} heads and {self.depth} blocks "
                "cannot be built: heads must divide the width, and the features are those of the "
                "second-to-last block. Correct config.json."
            )


def build_dino(size: TowerConfig, image_size: int, patch_size: int) -> Dinov2WithRegistersModel:
    """Build DINOv2 with registers, all blocks but the last, no final norm."""
    if size.mlp % size.width:
        raise ConfigError(
            f"The DINOv2 MLP has {size.mlp} features, not a multiple of its width {size.width}. "
            "Correct config.json."
        )
    config = Dinov2WithRegistersConfig(
        hidden_size=size.width,
        num_hidden_layers=size.depth - 1,
        num_attention_heads=size.heads,
        mlp_ratio=size.mlp // size.width,
        image_size=image_size,
        patch_size=patch_size,
        num_register_tokens=REGISTERS,
        hidden_act="gelu",
        layer_norm_eps=1e-6,
        initializer_range=size.width**-0.5,  # See `build_llm`.
    )
    tower = Dinov2WithRegistersModel(config)
    tower.layernorm = nn.Identity()  # type: ignore[assignment]
    tower.embeddings.register_parameter("mask_token", None)  # only used in pre-training
    return tower


def build_siglip(size: TowerConfig, image_size: int, patch_size: int) -> SiglipVisionModel:
    """Build SigLIP's vision tower, all blocks but the last, no final norm, no pooling head."""
    config = SiglipVisionConfig(
        hidden_size=size.width,
        num_hidden_layers=size.depth - 1,
        num_attention_heads=size.heads,
        intermediate_size=size.mlp,
        image_size=image_size,
        patch_size=patch_size,
        hidden_act="gelu",  # the published weights use exact GELU, not the tanh form that is the default
        layer_norm_eps=1e-6,
        vision_use_head=False,
    )
    tower = SiglipVisionModel(config)
    tower.post_layernorm = nn.Identity()  # type: ignore[assignment]
    return tower


def resize(frames_BHW3: Tensor, image_size: int) -> Tensor:
    """Resize frames to whole grey levels of the right size.

    Args:
        frames_BHW3: ``[B, H, W, 3]`` uint8.
        image_size: Side wanted, in pixels. Frames of another size are resized (bicubic with antialiasing) and
            rounded, as image libraries do.

    Returns:
        ``[B, 3, image_size, image_size]`` float32, whole numbers in [0, 255].
    """
    pixels = frames_BHW3.permute(0, 3, 1, 2).float()
    if pixels.shape[-2:] == (image_size, image_size):
        return pixels
    size = (image_size, image_size)
    pixels = nn.functional.interpolate(pixels, size, mode="bicubic", align_corners=False, antialias=True)
    return pixels.clamp(0, 255).round()


def normalise(pixels_B3HW: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Map grey levels ``[B, 3, H, W]`` float32 in [0, 255] to ``(x / 255 - mean) / std`` per channel."""
    return torch.stack([(pixels_B3HW[:, c] / 255 - mean[c]) / std[c] for c in range(3)], dim=1)


class FusedVision(nn.Module):
    """Both towers side by side."""

    def __init__(self, dino: TowerConfig, siglip: TowerConfig, *, image_size: int, patch_size: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.dino = build_dino(dino, image_size, patch_size)
        self.siglip = build_siglip(siglip, image_size, patch_size)

    def forward(self, frames_BHW3: Tensor) -> Tensor:
        """Turn ``[B, H, W, 3]`` uint8 into ``[B, P, D]`` float: DINOv2's features first, patches by rows."""
        pixels = resize(frames_BHW3, self.image_size)
        dino = self.dino(pixel_values=normalise(pixels, DINO_MEAN, DINO_STD)).last_hidden_state
        siglip = self.siglip(pixel_values=normalise(pixels, (0.5,) * 3, (0.5,) * 3)).last_hidden_state
        return torch.cat([dino[:, 1 + REGISTERS :], siglip], dim=-1)


class Projector(nn.Module):
    """Patch features to the width of the language model: three layers with exact GELU between them."""

    def __init__(self, vision_width: int, llm_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_width, 4 * vision_width)
        self.fc2 = nn.Linear(4 * vision_width, llm_width)
        self.fc3 = nn.Linear(llm_width, llm_width)

    def forward(self, features_BPD: Tensor) -> Tensor:
        """Map ``[B, P, D]`` to ``[B, P, llm_width]``, both in the weights' dtype."""
        gelu = nn.functional.gelu
        return self.fc3(gelu(self.fc2(gelu(self.fc1(features_BPD)))))

"""Turn a picture into tokens with OpenCLIP's vision transformer, as EVAC looks at its first frame.

The network is transformers' CLIP vision model; published files have the names of OpenCLIP, whose attention
keeps the projections of queries, keys and values in one tensor. The tokens are those of the last layer,
without the norm behind it (DynamiCrafter, arXiv 2310.12190).

Dimension letters: B pictures, H, W pixels, S tokens (one for the picture, one per patch), D their width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

# fmt: off
_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_STD: Final = (0.26862954, 0.26130258, 0.27577711)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class ImageEncoderConfig:
    """Size of a vision transformer."""

    width: int
    """``D``."""
    layers: int
    heads: int
    mlp: int
    """Inner width of its MLPs."""
    patch: int
    """Pixels of a patch in height and width."""
    size: int
    """Height and width to which pictures are resized."""

    @property
    def tokens(self) -> int:
        """``S``."""
        return 1 + (self.size // self.patch) ** 2

    @classmethod
    def tiny(cls) -> ImageEncoderConfig:
        """A size for tests and small pictures."""
        return cls(width=16, layers=2, heads=2, mlp=32, patch=8, size=32)

    @classmethod
    def published(cls) -> ImageEncoderConfig:
        """OpenCLIP's ViT-H/14: 257 tokens of 1280 numbers."""
        return cls(width=1280, layers=32, heads=16, mlp=5120, patch=14, size=224)


class ImageEncoder(nn.Module):
    """OpenCLIP's vision transformer behind the resizing and normalising of pictures."""

    mean: Tensor
    std: Tensor

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
        """Make what is in no file, on `device`: a module that was built on the meta device lacks it."""
        for name, values in (("mean", _MEAN), ("std", _STD)):
            constant = torch.tensor(values, device=device).view(3, 1, 1)
            self.register_buffer(name, constant, persistent=False)
        places = torch.arange(self.size.tokens, device=device).unsqueeze(0)
        for module in self.vision.modules():
            if "position_ids" in dict(module.named_buffers(recurse=False)):
                module.register_buffer("position_ids", places, persistent=False)

    def forward(self, pictures_B3HW: Tensor) -> Tensor:
        """Look at pictures.

        Args:
            pictures_B3HW: ``[B, 3, H, W]`` float32 in [-1, 1].

        Returns:
            ``[B, S, D]`` in the dtype of the weights.
        """
        size = (self.size.size, self.size.size)
        resized = functional.interpolate(pictures_B3HW, size, mode="bicubic", align_corners=True)
        normalised = ((resized + 1) / 2 - self.mean) / self.std
        dtype = next(self.vision.parameters()).dtype
        return self.vision(pixel_values=normalised.to(dtype)).last_hidden_state


_OUTSIDE: Final = {
    "class_embedding": "embeddings.class_embedding",
    "positional_embedding": "embeddings.position_embedding.weight",
    "conv1.weight": "embeddings.patch_embedding.weight",
    "ln_pre.weight": "pre_layrnorm.weight",
    "ln_pre.bias": "pre_layrnorm.bias",
    "ln_post.weight": "post_layernorm.weight",
    "ln_post.bias": "post_layernorm.bias",
}
_IN_LAYER: Final = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_LAYER: Final = re.compile(r"transformer\.resblocks\.(\d+)\.(.+)")


def image_tensor_from_published(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Turn a tensor of OpenCLIP's visual tower, also one on the meta device, into those of `ImageEncoder`.

    Args:
        name: Without the prefix ``visual.``.
        tensor: Of any float dtype.

    Returns:
        By name; three for a fused projection, none for the projection behind the tower, which EVAC does not
        use. An unknown name is returned as it is.
    """
    if name == "proj":
        return {}
    if name in _OUTSIDE:
        return {f"vision.{_OUTSIDE[name]}": tensor}
    if not (match := _LAYER.fullmatch(name)):
        return {name: tensor}
    layer, rest = f"vision.encoder.layers.{match[1]}", match[2]
    if rest in ("attn.in_proj_weight", "attn.in_proj_bias"):
        kind = rest.removeprefix("attn.in_proj_")
        parts = tensor.chunk(3)
        return {f"{layer}.self_attn.{x}_proj.{kind}": part for x, part in zip("qkv", parts, strict=False)}
    part, _, kind = rest.rpartition(".")
    return {f"{layer}.{_IN_LAYER[part]}.{kind}" if part in _IN_LAYER else name: tensor}


def published_image_encoder(encoder: ImageEncoder) -> dict[str, Tensor]:
    """Return the tensors of an encoder by OpenCLIP's names, without the prefix ``visual.``."""
    state: Mapping[str, Tensor] = encoder.state_dict()
    found = {name: state[f"vision.{ours}"] for name, ours in _OUTSIDE.items()}
    for number in range(encoder.size.layers):
        layer, ours = f"transformer.resblocks.{number}", f"vision.encoder.layers.{number}"
        for kind in ("weight", "bias"):
            fused = [state[f"{ours}.self_attn.{x}_proj.{kind}"] for x in "qkv"]
            found[f"{layer}.attn.in_proj_{kind}"] = torch.cat(fused)
            found |= {f"{layer}.{a}.{kind}": state[f"{ours}.{b}.{kind}"] for a, b in _IN_LAYER.items()}
    return found

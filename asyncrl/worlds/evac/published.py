"""Names of tensors in published EVAC checkpoints, and the sizes that their shapes tell.

The autoencoder's published names are those of latent diffusion (arXiv 2112.10752). diffusers' are others,
count the decoder's levels in the other direction, and have no convolutions of one pixel in the attention.
OpenCLIP's attention keeps the projections of queries, keys and values in one tensor. The other networks have
the published names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from asyncrl.worlds.evac.conditions import (
    AutoencoderConfig,
    EvacConfig,
    EvacNetworks,
    ImageEncoderConfig,
    ResamplerConfig,
)
from asyncrl.worlds.evac.poses import Camera, MotionStatistics
from asyncrl.worlds.evac.unet import UNetConfig

PREFIXES: Final = {
    "unet": "model.diffusion_model.",
    "autoencoder": "first_stage_model.",
    "action_resampler": "cond_stage_model.",
    "image_resampler": "image_proj_model.",
    "image_encoder": "embedder.model.visual.",
}
"""By network; the model of poses is published in a file of its own."""
_HEAD_DIM: Final = 64
_IMAGE_HEAD_DIM: Final = 80

_ATTENTION: Final = {
    "norm": "group_norm",
    "q": "to_q",
    "k": "to_k",
    "v": "to_v",
    "proj_out": "to_out.0",
}
_MIDDLE: Final = {"block_1": "resnets.0", "attn_1": "attentions.0", "block_2": "resnets.1"}
_PROJECTION: Final = re.compile(r"\.attentions\.0\.to_(q|k|v|out\.0)\.weight$")


def autoencoder_from_published(name: str, levels: int) -> str:
    """Map a tensor's published name, without prefix, to diffusers'.

    Example:
        >>> autoencoder_from_published("decoder.up.3.block.0.nin_shortcut.weight", 4)
        'decoder.up_blocks.0.resnets.0.conv_shortcut.weight'
    """
    name = name.replace(".nin_shortcut.", ".conv_shortcut.").replace(".norm_out.", ".conv_norm_out.")
    if match := re.fullmatch(r"(encoder|decoder)\.mid\.(block_1|attn_1|block_2)\.(.+)\.(weight|bias)", name):
        side, part, layer, kind = match.groups()
        layer = _ATTENTION.get(layer, layer) if part == "attn_1" else layer
        return f"{side}.mid_block.{_MIDDLE[part]}.{layer}.{kind}"
    if match := re.fullmatch(r"encoder\.down\.(\d+)\.(block\.(\d+)|downsample)\.(.+)", name):
        level, _, number, rest = match.groups()
        part = "downsamplers.0" if number is None else f"resnets.{number}"
        return f"encoder.down_blocks.{level}.{part}.{rest}"
    if match := re.fullmatch(r"decoder\.up\.(\d+)\.(block\.(\d+)|upsample)\.(.+)", name):
        level, _, number, rest = match.groups()
        part = "upsamplers.0" if number is None else f"resnets.{number}"
        return f"decoder.up_blocks.{levels - 1 - int(level)}.{part}.{rest}"
    return name


def autoencoder_to_published(name: str, levels: int) -> str:
    """Map one of diffusers' names to the published one; the inverse of `autoencoder_from_published`."""
    name = name.replace(".conv_shortcut.", ".nin_shortcut.").replace(".conv_norm_out.", ".norm_out.")
    if match := re.fullmatch(r"(encoder|decoder)\.mid_block\.(\w+\.\d)\.(.+)\.(weight|bias)", name):
        side, part, layer, kind = match.groups()
        published = {new: old for old, new in _MIDDLE.items()}[part]
        if published == "attn_1":
            layer = {new: old for old, new in _ATTENTION.items()}[layer]
        return f"{side}.mid.{published}.{layer}.{kind}"
    if match := re.fullmatch(r"encoder\.down_blocks\.(\d+)\.(resnets|downsamplers)\.(\d+)\.(.+)", name):
        level, part, number, rest = match.groups()
        return f"encoder.down.{level}.{f'block.{number}' if part == 'resnets' else 'downsample'}.{rest}"
    if match := re.fullmatch(r"decoder\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)\.(.+)", name):
        level, part, number, rest = match.groups()
        part = f"block.{number}" if part == "resnets" else "upsample"
        return f"decoder.up.{levels - 1 - int(level)}.{part}.{rest}"
    return name


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


def from_published(part: str, name: str, tensor: Tensor, levels: int) -> dict[str, Tensor]:
    """Turn a published tensor, also one on the meta device, into those of a network here.

    Args:
        tensor: Of any dtype.

    Returns:
        By name; three for a fused projection.
    """
    if part == "autoencoder":
        ours = autoencoder_from_published(name, levels)
        square = _PROJECTION.search(ours) and tensor.ndim == 4 and tensor.shape[2:] == (1, 1)
        return {ours: tensor.flatten(1) if square else tensor}
    return image_tensor_from_published(name, tensor) if part == "image_encoder" else {name: tensor}


def image_tensor_from_published(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Turn a tensor of OpenCLIP's visual tower, by its name without ``visual.``; see `from_published`."""
    if name == "proj":  # behind the tower, not used by EVAC
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


def published_autoencoder(state: Mapping[str, Tensor], levels: int) -> dict[str, Tensor]:
    """Return diffusers' tensors of an autoencoder by their published names, in their published shapes."""
    return {
        autoencoder_to_published(name, levels): tensor[:, :, None, None]
        if _PROJECTION.search(name)
        else tensor
        for name, tensor in state.items()
    }


def published_image_encoder(state: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return the tensors of an `ImageEncoder` by OpenCLIP's names, without the prefix ``visual.``."""
    tensors = {name: state[f"vision.{ours}"] for name, ours in _OUTSIDE.items()}
    for number in range(layers):
        layer, ours = f"transformer.resblocks.{number}", f"vision.encoder.layers.{number}"
        for kind in ("weight", "bias"):
            fused = [state[f"{ours}.self_attn.{x}_proj.{kind}"] for x in "qkv"]
            tensors[f"{layer}.attn.in_proj_{kind}"] = torch.cat(fused)
            tensors |= {f"{layer}.{a}.{kind}": state[f"{ours}.{b}.{kind}"] for a, b in _IN_LAYER.items()}
    return tensors


def published_tensors(networks: EvacNetworks) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each network, on any device, by their published names without prefixes."""
    autoencoder: Any = networks.autoencoder
    levels = len(autoencoder.config.block_out_channels)
    tensors = {name: dict(module.state_dict()) for name, module in networks.by_name().items()}
    tensors["autoencoder"] = published_autoencoder(tensors["autoencoder"], levels)
    layers = networks.image_encoder.size.layers
    tensors["image_encoder"] = published_image_encoder(tensors["image_encoder"], layers)
    return tensors


# ---- sizes ---------------------------------------------------------------------------------------


def config_of(
    shapes: Mapping[str, Mapping[str, torch.Size]],
    facts: Mapping[str, Mapping[str, Any]],
    others: Mapping[str, Any],
) -> EvacConfig:
    """Read the sizes of a world from the shapes of its tensors.

    Args:
        others: Further fields of `EvacConfig`; `image_size` at least.
    """
    of = {part: _Shapes(PREFIXES.get(part, ""), own) for part, own in shapes.items()}
    return EvacConfig(
        unet=_unet_size(of["unet"], facts.get("unet", {})),
        autoencoder=_autoencoder_size(of["autoencoder"], facts.get("autoencoder", {})),
        image_encoder=_image_encoder_size(of["image_encoder"], facts.get("image_encoder", {})),
        image_resampler=_resampler_size(of["image_resampler"], facts.get("image_resampler", {})),
        action_resampler=_resampler_size(of["action_resampler"], facts.get("action_resampler", {})),
        camera=Camera(**facts.get("camera", {})),
        motions=MotionStatistics(**facts.get("motions", {})),
        pose_hidden=of["pose_model"]["net.0.weight"][0],
        **others,
    )


class _Shapes(dict[str, torch.Size]):
    """Shapes by name without prefix; the error of a missing one has the prefix."""

    def __init__(self, prefix: str, shapes: Mapping[str, torch.Size]) -> None:
        super().__init__(shapes)
        self.prefix = prefix

    def __missing__(self, name: str) -> torch.Size:
        raise KeyError(self.prefix + name)


def _highest(pattern: str, shapes: _Shapes) -> int:
    """Return the largest number that a pattern matches in the names, or -1."""
    return max((int(match[1]) for name in shapes if (match := re.match(pattern, name))), default=-1)


def _unet_size(shapes: _Shapes, facts: Mapping[str, Any]) -> UNetConfig:
    channels, inputs = shapes["input_blocks.0.0.weight"][:2]
    level, blocks, multipliers, attention = 0, [0], [1], set[int]()
    for number in range(1, 1 + _highest(r"input_blocks\.(\d+)\.", shapes)):
        if f"input_blocks.{number}.0.op.weight" in shapes:
            level, blocks, multipliers = level + 1, [*blocks, 0], [*multipliers, 1]
            continue
        blocks[level] += 1
        multipliers[level] = shapes[f"input_blocks.{number}.0.in_layers.2.weight"][0] // channels
        if f"input_blocks.{number}.1.norm.weight" in shapes:
            attention.add(level)
    inner, _, _ = shapes["init_attn.0.proj_in.weight"]
    return replace(
        UNetConfig.published(),
        channels=channels,
        multipliers=tuple(multipliers),
        res_blocks=blocks[0],
        attention_levels=tuple(sorted(attention)),
        context_dim=shapes["middle_block.1.transformer_blocks.0.attn2.to_k_ip.weight"][1],
        initial_inner=inner,
        in_channels=inputs,
        out_channels=shapes["out.2.weight"][0],
        domains=shapes["domain_embedding.weight"][0],
        **facts,
    )


def _autoencoder_size(shapes: _Shapes, facts: Mapping[str, Any]) -> AutoencoderConfig:
    channels = shapes["encoder.conv_in.weight"][0]
    levels = 1 + _highest(r"encoder\.down\.(\d+)\.", shapes)
    widths = [shapes[f"encoder.down.{i}.block.0.conv1.weight"][0] for i in range(levels)]
    return AutoencoderConfig(
        channels=channels,
        multipliers=tuple(width // channels for width in widths),
        res_blocks=1 + _highest(r"encoder\.down\.0\.block\.(\d+)\.", shapes),
        latent=shapes["post_quant_conv.weight"][0],
        **facts,
    )


def _image_encoder_size(shapes: _Shapes, facts: Mapping[str, Any]) -> ImageEncoderConfig:
    width, _, patch, _ = shapes["conv1.weight"]
    return ImageEncoderConfig(
        width=width,
        layers=1 + _highest(r"transformer\.resblocks\.(\d+)\.", shapes),
        heads=facts.get("heads", width // _IMAGE_HEAD_DIM),
        mlp=shapes["transformer.resblocks.0.mlp.c_fc.weight"][0],
        patch=patch,
        size=patch * round((shapes["positional_embedding"][0] - 1) ** 0.5),
    )


def _resampler_size(shapes: _Shapes, facts: Mapping[str, Any]) -> ResamplerConfig:
    _, queries, width = shapes["latents"]
    head_dim = facts.get("head_dim", _HEAD_DIM)
    return ResamplerConfig(
        inputs=shapes["proj_in.weight"][1],
        queries=queries,
        width=width,
        depth=1 + _highest(r"layers\.(\d+)\.", shapes),
        heads=shapes["layers.0.0.to_q.weight"][0] // head_dim,
        head_dim=head_dim,
    )

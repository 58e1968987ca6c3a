"""Published checkpoints of EVAC: their tensors, the names of these, and the sizes that their shapes tell.

The autoencoder has the names of latent diffusion (arXiv 2112.10752), which count the decoder's levels in the
other direction than diffusers. OpenCLIP keeps queries, keys and values in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from asyncrl.worlds.evac.conditions import EvacConfig, EvacNetworks, ImageEncoderConfig, ResamplerConfig
from asyncrl.worlds.evac.poses import Camera, MotionStatistics
from asyncrl.worlds.evac.unet import UNetConfig
from asyncrl.worlds.files import renamed
from asyncrl.worlds.layers import FrameVaeConfig

# By network. The model of poses is published in a file of its own, without a prefix.
PREFIXES: Final = {
    "unet": "model.diffusion_model.",
    "autoencoder": "first_stage_model.",
    "action_resampler": "cond_stage_model.",
    "image_resampler": "image_proj_model.",
    "image_encoder": "embedder.model.visual.",
    "pose_model": "pose_model.",
}
_HEAD_DIM, _IMAGE_HEAD_DIM = 64, 80
_SCALE: Final = 0.18215  # Factor of the autoencoder's latents, which makes their variance about 1.

# Patterns in the names of diffusers and transformers, and the published text; applied in order.
_AUTOENCODER_NAMES: Final = (
    (r"\.conv_shortcut\.", ".nin_shortcut."),
    (r"\.conv_norm_out\.", ".norm_out."),
    (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
    (r"\.mid_block\.attentions\.0\.", ".mid.attn_1."),
    (r"\.attn_1\.group_norm\.", ".attn_1.norm."),
    (r"\.attn_1\.to_([qkv])\.", r".attn_1.\1."),
    (r"\.attn_1\.to_out\.0\.", ".attn_1.proj_out."),
    (r"\.(down|up)_blocks\.(\d+)\.resnets\.", r".\1.\2.block."),
    (r"\.(down|up)_blocks\.(\d+)\.\1samplers\.0\.", r".\1.\2.\1sample."),
)
_IMAGE_ENCODER_NAMES: Final = (
    (r"^vision\.embeddings\.patch_embedding\.", "conv1."),
    (r"^vision\.embeddings\.position_embedding\.weight$", "positional_embedding"),
    (r"^vision\.embeddings\.", ""),
    (r"^vision\.(pre|post)_lay(er|r)norm\.", r"ln_\1."),
    (r"^vision\.encoder\.layers\.", "transformer.resblocks."),
    (r"\.layer_norm([12])\.", r".ln_\1."),
    (r"\.self_attn\.out_proj\.", ".attn.out_proj."),
    (r"\.self_attn\.[qkv]_proj\.", ".attn.in_proj_"),  # one tensor of three
    (r"\.mlp\.fc1\.", ".mlp.c_fc."),
    (r"\.mlp\.fc2\.", ".mlp.c_proj."),
)
_SQUARE: Final = re.compile(r"\.mid\.attn_1\.(q|k|v|proj_out)\.weight$")
"""Matrices of the autoencoder that are published as convolutions of one pixel."""


def published_name(part: str, name: str, levels: int) -> str:
    """Map the name of a network's tensor to the published one, without prefix.

    Example:
        >>> published_name("autoencoder", "decoder.up_blocks.0.resnets.0.conv_shortcut.weight", 4)
        'decoder.up.3.block.0.nin_shortcut.weight'
    """
    if part == "autoencoder":
        turned = renamed(name, _AUTOENCODER_NAMES)
        return re.sub(r"\.up\.(\d+)\.", lambda match: f".up.{levels - 1 - int(match[1])}.", turned)
    return renamed(name, _IMAGE_ENCODER_NAMES) if part == "image_encoder" else name


def grouped(part: str, state: Mapping[str, Tensor], levels: int) -> dict[str, list[tuple[str, Tensor]]]:
    """Group tensors by the published one that they are in: queries, keys, values, or one alone."""
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in state.items():
        groups.setdefault(published_name(part, name, levels), []).append((name, tensor))
    return {
        name: sorted(group, key=lambda own: (".q_proj." not in own[0], own[0]))
        for name, group in groups.items()
    }


def published_state(part: str, state: Mapping[str, Tensor], levels: int) -> dict[str, Tensor]:
    """Return a network's tensors, on any device, by published names and in published shapes."""
    tensors = {}
    for name, group in grouped(part, state, levels).items():
        tensor = torch.cat([own for _, own in group]) if len(group) > 1 else group[0][1]
        square = part == "autoencoder" and _SQUARE.search(name)
        tensors[name] = tensor[:, :, None, None] if square else tensor
    return tensors


def published_tensors(networks: EvacNetworks) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each network, on any device, by their published names without prefixes."""
    levels = len(networks.autoencoder.size.widths)
    return {part: published_state(part, m.state_dict(), levels) for part, m in networks.by_name().items()}


# ---- sizes ---------------------------------------------------------------------------------------


class _Shapes:
    """Shapes of a network's tensors by name without prefix; the KeyError of a missing one has the prefix."""

    def __init__(self, prefix: str, shapes: Mapping[str, torch.Size]) -> None:
        self.prefix, self.shapes = prefix, shapes

    def __getitem__(self, name: str) -> torch.Size:
        return self.shapes[self.prefix + name]

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.shapes

    def count(self, pattern: str) -> int:
        matches = (re.match(re.escape(self.prefix) + pattern, name) for name in self.shapes)
        return 1 + max((int(match[1]) for match in matches if match), default=-1)


def config_of(
    shapes: Mapping[str, torch.Size], facts: Mapping[str, Mapping[str, Any]], others: Mapping[str, Any]
) -> EvacConfig:
    """Read the sizes of a world from the shapes of its tensors; facts that are missing are as published."""
    of = {part: _Shapes(prefix, shapes) for part, prefix in PREFIXES.items()}
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


def _unet_size(shapes: _Shapes, facts: Mapping[str, Any]) -> UNetConfig:
    channels, inputs = shapes["input_blocks.0.0.weight"][:2]
    level, blocks, multipliers, attention = 0, [0], [1], set[int]()
    for number in range(1, shapes.count(r"input_blocks\.(\d+)\.")):
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


def _autoencoder_size(shapes: _Shapes, facts: Mapping[str, Any]) -> FrameVaeConfig:
    levels = range(shapes.count(r"encoder\.down\.(\d+)\."))
    return FrameVaeConfig(
        widths=tuple(shapes[f"encoder.down.{i}.block.0.conv1.weight"][0] for i in levels),
        layers_per_block=shapes.count(r"encoder\.down\.0\.block\.(\d+)\."),
        channels=shapes["post_quant_conv.weight"][0],
        **{"scale": _SCALE, **facts},
    )


def _image_encoder_size(shapes: _Shapes, facts: Mapping[str, Any]) -> ImageEncoderConfig:
    width, _, patch, _ = shapes["conv1.weight"]
    return ImageEncoderConfig(
        width=width,
        layers=shapes.count(r"transformer\.resblocks\.(\d+)\."),
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
        depth=shapes.count(r"layers\.(\d+)\."),
        heads=shapes["layers.0.0.to_q.weight"][0] // head_dim,
        head_dim=head_dim,
    )

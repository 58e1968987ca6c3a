"""Recognise and write the published Wan files: which variant they hold, and how large it is.

A folder like RLinf-Wan-LIBERO-Spatial holds the transformer (``model-00001.safetensors``, or shards), the
autoencoder ``Wan2.2_VAE.pth``, a reward model and ``dataset/``. It says nothing about sizes: they are read
from the shapes. What the shapes do not tell is the same in all Wan models: heads of 128 channels, and the
statistics of the 48 latent channels.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.records import ACTION_DIM
from asyncrl.storage.tensor_reader import TensorFiles
from asyncrl.worlds.wan.recognition import bare
from asyncrl.worlds.wan.transformer import FRAMES_PER_LATENT, TransformerConfig
from asyncrl.worlds.wan.vae import VaeConfig


def fingerprint(shapes: Mapping[str, Sequence[int]]) -> str:
    """Hash names and shapes as DiffSynth does: MD5 of all "name:d0_d1" and "name", sorted, joined by commas.

    Example:
        >>> fingerprint({"a": (2, 3)}) == hashlib.md5(b"a,a:2_3", usedforsecurity=False).hexdigest()
        True
    """
    words = [f"{name}:{'_'.join(map(str, shape))}" for name, shape in shapes.items()] + list(shapes)
    return hashlib.md5(",".join(sorted(words)).encode(), usedforsecurity=False).hexdigest()


_OUTSIDE: Final = {
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
_IN_BLOCK: Final = {
    **{f"self_attn.{letter}": f"attn1.to_{letter}" for letter in "qkv"},
    **{f"cross_attn.{letter}": f"attn2.to_{letter}" for letter in "qkv"},
    "self_attn.o": "attn1.to_out.0",
    "cross_attn.o": "attn2.to_out.0",
    "self_attn": "attn1",
    "cross_attn": "attn2",
    "modulation": "scale_shift_table",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}


def _inverse(table: dict[str, str]) -> dict[str, str]:
    return {new: old for old, new in table.items()}


def _replace_start(name: str, table: dict[str, str]) -> str:
    for old, new in table.items():
        if name == old or name.startswith(old + "."):
            return new + name[len(old) :]
    return name


def _rename(name: str, outside: dict[str, str], in_block: dict[str, str]) -> str:
    if not name.startswith("blocks."):
        return _replace_start(name, outside)
    blocks, number, rest = name.split(".", 2)
    return f"{blocks}.{number}.{_replace_start(rest, in_block)}"


def transformer_from_published(name: str) -> str:
    """Map a tensor name of a published checkpoint to ours.

    Example:
        >>> transformer_from_published("blocks.3.self_attn.o.bias")
        'blocks.3.attn1.to_out.0.bias'
    """
    return _rename(bare(name), _OUTSIDE, _IN_BLOCK)


def transformer_to_published(name: str) -> str:
    """Map one of our tensor names to the published one; the inverse of `transformer_from_published`."""
    return _rename(name, _inverse(_OUTSIDE), _inverse(_IN_BLOCK))


_RESIDUAL: Final = {
    "residual.0": "norm1",
    "residual.2": "conv1",
    "residual.3": "norm2",
    "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}
_ENDS: Final = {"conv1": "conv_in", "head.0": "norm_out", "head.2": "conv_out"}
_MIDDLE: Final = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}


def vae_from_published(name: str) -> str:
    """Map a tensor name of ``Wan2.2_VAE.pth`` to ours.

    Example:
        >>> vae_from_published("decoder.upsamples.0.upsamples.3.time_conv.bias")
        'decoder.up_blocks.0.upsampler.time_conv.bias'
    """
    if not name.startswith(("encoder.", "decoder.")):
        return _replace_start(name, {"conv1": "quant_conv", "conv2": "post_quant_conv"})
    side, rest = name.split(".", 1)
    if match := re.fullmatch(r"middle\.(\d)\.(.+)", rest):
        return f"{side}.mid_block.{_MIDDLE[match[1]]}.{_replace_start(match[2], _RESIDUAL)}"
    if match := re.fullmatch(r"(down|up)samples\.(\d)\.(?:down|up)samples\.(\d)\.(.+)", rest):
        way, level, number, inner = match.groups()
        resamples = inner.startswith(("resample.", "time_conv."))
        module = f"{way}sampler" if resamples else f"resnets.{number}"
        return f"{side}.{way}_blocks.{level}.{module}.{_replace_start(inner, _RESIDUAL)}"
    return f"{side}.{_replace_start(rest, _ENDS)}"


def vae_to_published(name: str, *, res_blocks: int = 2) -> str:
    """Map one of our tensor names to the published one; the inverse of `vae_from_published`."""
    if not name.startswith(("encoder.", "decoder.")):
        return _replace_start(name, {"quant_conv": "conv1", "post_quant_conv": "conv2"})
    side, rest = name.split(".", 1)
    if rest.startswith("mid_block."):
        name, inner = _replace_start(rest.removeprefix("mid_block."), _inverse(_MIDDLE)).split(".", 1)
        return f"{side}.middle.{name}.{_replace_start(inner, _inverse(_RESIDUAL))}"
    if match := re.fullmatch(r"(down|up)_blocks\.(\d)\.(?:resnets\.(\d)|(?:down|up)sampler)\.(.+)", rest):
        way, level, number, inner = match.groups()
        last = res_blocks if way == "down" else res_blocks + 1
        stages = f"{way}samples.{level}.{way}samples.{number or last}"
        return f"{side}.{stages}.{_replace_start(inner, _inverse(_RESIDUAL))}"
    return f"{side}.{_replace_start(rest, _inverse(_ENDS))}"


_log = logging.getLogger(__name__)

HEAD_DIM: Final = 128
"""Channels of one head in every published Wan model."""
IMAGE_SIZE: Final = 256
SCHEDULE_STEPS: Final = 5
MAX_DECISIONS: Final = 32
"""256 steps, the length of episodes in RLinf's files for these worlds."""
TEMPERATURE: Final = 1.6
"""At which RLinf's GRPO samples the policy in these worlds."""
ACTION_MODEL: Final = "bc4824aef7c3f23d3378cec6e2b1316c"
"""Fingerprint of the action-conditioned transformer (829 tensors), which is the one that is read."""
AUTOENCODER: Final = "e1de6c02cdac79f8b739f4d3698cd216"
"""Fingerprint of ``Wan2.2_VAE.pth`` (196 tensors)."""
OPENSORA: Final = "x_embedder.proj.weight"
"""A tensor of OpenSora's transformer, which is published in a file of the same name, and not of Wan's."""


def recognise_transformer(files: TensorFiles) -> TransformerConfig:
    """Tell which variant of the transformer `files` hold, and return its size.

    The log says whether it is the very one that was published, or one with the same tensors.

    Raises:
        CheckpointError: It is a variant that takes actions in another way, or none that is known.
    """
    shapes = {bare(name): shape for name, shape in files.shapes.items()}
    if why := _unsupported(shapes):
        raise CheckpointError(
            f"{files.label} {why}. The variant that can be read takes 7-D actions in cross-attention and in "
            "the modulation (TI2V2): the model-00001.safetensors of RLinf-Wan-LIBERO-Spatial, -Object or "
            "-Goal."
        )
    size = _transformer_size(files, shapes)
    found = fingerprint(shapes)
    if found == ACTION_MODEL:
        _log.info("%s is the published action-conditioned Wan2.2-TI2V-5B (%s)", files.label, found)
    else:
        _log.warning("%s has the unknown fingerprint %s; its tensors decide", files.label, found)
    return size


def _unsupported(shapes: dict[str, torch.Size]) -> str | None:
    """Say what speaks against a transformer with these tensors."""
    token, vector = (shapes.get(f"action_mlp{n}.0.weight") for n in (1, 2))
    scales = sorted(name for name in shapes if name.startswith("action_scale"))
    if OPENSORA in shapes:
        return "is OpenSora's (STDiT3), and not Wan's"
    if "patch_embedding.weight" not in shapes or "blocks.0.self_attn.q.weight" not in shapes:
        return "is no Wan transformer (it lacks patch_embedding.weight or blocks.0.self_attn.q.weight)"
    if token is None and vector is None:
        return (
            "takes no actions (no action_mlp1, no action_mlp2): a Wan2.2-TI2V-5B as its makers published it"
        )
    scaled = f", scaled by {scales[0]}" if scales else ""
    if token is None:
        return f"takes actions in the modulation only (TI2V3: no action_mlp1{scaled})"
    if vector is None:
        return f"takes actions in cross-attention only (TI2V1: no action_mlp2{scaled})"
    if scales:
        return f"scales its actions by {scales[0]}, and how is not published"
    if (token[-1], vector[-1]) != (ACTION_DIM, FRAMES_PER_LATENT * ACTION_DIM):
        return f"takes actions of {token[-1]} numbers"
    return None


def _transformer_size(files: TensorFiles, shapes: dict[str, torch.Size]) -> TransformerConfig:
    width, channels, _, patch, _ = _shape(files, shapes, "patch_embedding.weight", 5)
    if width % HEAD_DIM:
        raise CheckpointError(
            f"{files.label} is {width} channels wide; Wan models have heads of {HEAD_DIM}. Save it with "
            "save_world instead, whose folders say how many heads there are."
        )
    return TransformerConfig(
        heads=width // HEAD_DIM,
        head_dim=HEAD_DIM,
        layers=1 + _highest(r"blocks\.(\d+)\.", shapes),
        ffn_dim=_shape(files, shapes, "blocks.0.ffn.0.weight", 2)[0],
        channels=channels,
        patch=patch,
        freq_dim=_shape(files, shapes, "time_embedding.0.weight", 2)[1],
        round_timestep=True,
    )


def recognise_vae(files: TensorFiles) -> VaeConfig:
    """Return the size of the autoencoder in `files`.

    Raises:
        CheckpointError: It is none of Wan 2.2 with 48 latent channels.
    """
    shapes, full = files.shapes, VaeConfig.full()
    z_dim = _shape(files, shapes, "conv2.weight", 5)[0]
    if z_dim != full.z_dim:
        raise CheckpointError(
            f"{files.label} has {z_dim} latent channels; Wan 2.2 has {full.z_dim}, and the statistics of "
            "others are not known here. Use Wan2.2_VAE.pth."
        )
    found = fingerprint(shapes)
    if found == AUTOENCODER:
        _log.info("%s is the published autoencoder of Wan 2.2 (%s)", files.label, found)
    else:
        _log.warning("%s has the unknown fingerprint %s; its tensors decide", files.label, found)
    return replace(
        full,
        base_dim=_shape(files, shapes, "encoder.conv1.weight", 5)[0],
        decoder_base_dim=_shape(files, shapes, "decoder.head.0.gamma", 4)[0],
        res_blocks=_highest(r"encoder\.downsamples\.0\.downsamples\.(\d+)\.", shapes),
    )


def _shape(files: TensorFiles, shapes: dict[str, torch.Size], name: str, axes: int) -> torch.Size:
    if name not in shapes or len(shapes[name]) != axes:
        seen = f"has {name} of shape {list(shapes[name])}" if name in shapes else f"lacks tensor {name}"
        raise CheckpointError(f"{files.label} {seen}, so it is not the Wan model it should be.")
    return shapes[name]


def _highest(pattern: str, names: Iterable[str]) -> int:
    return max((int(match[1]) for name in names if (match := re.match(pattern, name))), default=0)


def published_transformer(world: Any) -> dict[str, Tensor]:
    """Return the tensors of a `WanWorld`'s transformer by their published names: same shape, bfloat16."""
    state = world.transformer.state_dict()
    return {transformer_to_published(name): tensor.to(torch.bfloat16) for name, tensor in state.items()}


def published_vae(world: Any) -> dict[str, Tensor]:
    """Return the tensors of a `WanWorld`'s autoencoder by their published names: same shape, float32."""
    blocks = world.vae.size.res_blocks
    state = world.vae.state_dict()
    return {vae_to_published(name, res_blocks=blocks): tensor.float() for name, tensor in state.items()}

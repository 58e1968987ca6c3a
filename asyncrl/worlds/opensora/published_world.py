"""Recognise the published OpenSora files, and how large their networks are, by the names of their tensors.

A folder like RLinf-OpenSora-LIBERO-Spatial holds the transformer (one safetensors file, or shards with an
index), the autoencoder in ``vae/``, ``dataset_statistics.json``, a reward model and ``dataset/``. Sizes are
read from shapes. What shapes do not tell is the same in all of them: the image size and the latents' scale.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import torch

from asyncrl.errors import CheckpointError
from asyncrl.records import ACTION_DIM
from asyncrl.storage.atomic import read_json
from asyncrl.storage.bounded_json import check_sizes
from asyncrl.storage.tensor_names import header_names, indexed_names
from asyncrl.storage.tensor_reader import TensorFiles
from asyncrl.worlds.opensora.autoencoder import VaeConfig
from asyncrl.worlds.opensora.recognition import MARKS
from asyncrl.worlds.opensora.stdit3 import STDiT3Config

_log = logging.getLogger(__name__)

IMAGE_SIZE: Final = 256
MAX_DECISIONS: Final = 32
"""256 steps, the length of episodes in RLinf's files for these worlds."""
TEMPERATURE: Final = 1.6
"""At which RLinf's GRPO samples the policy in these worlds."""
VAE: Final = "vae"
_OWN: Final = (
    "spatial_blocks.",
    "temporal_blocks.",
    "x_embedder.",
    "final_layer.",
    "t_embedder.",
    "t_block.",
)
_VAE_MARK: Final = "decoder.conv_in.weight"
_OLD_ATTENTION: Final = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
"""Of autoencoders that an old version of diffusers wrote."""
_Shapes = Mapping[str, torch.Size]


def transformer_files(folder: Path) -> TensorFiles:
    """Open the files of the transformer: those of the index, else all that hold tensors of an STDiT3.

    Raises:
        CheckpointError: None does, one is missing or truncated, or index and files do not agree.
    """
    if indexed_names(folder):
        return TensorFiles(folder)
    files = sorted(
        path
        for path in folder.glob("*.safetensors")
        if any(name.startswith(_OWN) for name in header_names(path))
    )
    if not files:
        raise CheckpointError(
            f"{folder} holds no transformer of an OpenSora world: no safetensors file in it has tensors "
            f"{', '.join(MARKS)}. Download the folder again (RLinf-OpenSora-LIBERO-*)."
        )
    return TensorFiles(files)


def recognise_transformer(files: TensorFiles) -> STDiT3Config:
    """Return the size of the transformer in `files`.

    Raises:
        CheckpointError: It is no STDiT3, or one that takes no actions of 7 numbers.
    """
    shapes = files.shapes
    if "action_embedder.fc.0.weight" not in shapes:
        raise CheckpointError(
            f"{files.label} lacks tensor action_embedder.fc.0.weight: it takes no actions, like the "
            "OpenSora-STDiT-v3 that videos are made with. Use a world (RLinf-OpenSora-LIBERO-*)."
        )
    numbers = _shape(files, shapes, "action_embedder.fc.0.weight", 2)[1]
    if numbers != ACTION_DIM:
        raise CheckpointError(
            f"{files.label} takes actions of {numbers} numbers; policies here give {ACTION_DIM}."
        )
    width, channels, _, patch, _ = _shape(files, shapes, "x_embedder.proj.weight", 5)
    head_dim = _shape(files, shapes, "spatial_blocks.0.attn.q_norm.weight", 1)[0]
    text_tokens, text_channels = _shape(files, shapes, "y_embedder.y_embedding", 2)
    inner = _shape(files, shapes, "spatial_blocks.0.mlp.fc1.weight", 2)[0]
    try:
        size = STDiT3Config(
            depth=_depth(shapes),
            width=width,
            heads=width // head_dim if head_dim else 0,
            channels=channels,
            patch=patch,
            mlp_ratio=inner // width if width else 0,
            freq_dim=_shape(files, shapes, "t_embedder.mlp.0.weight", 2)[1],
            unused_branches=True,
            text_channels=text_channels,
            text_tokens=text_tokens,
        )
    except ValueError as error:
        raise CheckpointError(f"{files.label} is no STDiT3: {error}. Download it again.") from error
    if size == STDiT3Config.xl2():
        _log.info("%s is an STDiT3-XL/2 with actions, as published", files.label)
    else:
        _log.warning("%s has another size than the published STDiT3-XL/2: %s", files.label, size)
    return size


def recognise_vae(folder: Path) -> tuple[TensorFiles, VaeConfig]:
    """Open the autoencoder of a published folder, by diffusers' names of today, and return its size.

    Raises:
        CheckpointError: ``vae/`` or its ``config.json`` is missing or wrong, or it holds not one autoencoder.
    """
    inside = folder / VAE
    if not inside.is_dir():
        raise CheckpointError(
            f"{folder} holds a transformer of an OpenSora world and no autoencoder: {inside} is missing. "
            "Download it beside the transformer."
        )
    files = TensorFiles(_vae_file(inside)).renamed(_today)
    content = read_json(inside / "config.json", "Download it again.")
    try:
        check_sizes(content)
        size = VaeConfig(
            widths=tuple(content["block_out_channels"]),
            layers_per_block=content["layers_per_block"],
            channels=content["latent_channels"],
            norm_groups=content.get("norm_num_groups", 32),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{inside / 'config.json'} does not describe an AutoencoderKL ({error!r}). Download it again."
        ) from error
    if (scale := content.get("scaling_factor", size.scale)) != size.scale:
        _log.warning(
            "%s says scaling_factor %s; worlds of this kind are trained with %s, which is used",
            inside / "config.json",
            scale,
            size.scale,
        )
    return files, size


def _vae_file(folder: Path) -> Path:
    found = sorted(path for path in folder.glob("*.safetensors") if _VAE_MARK in header_names(path))
    plain = [path for path in found if path.name.count(".") == 1]  # not *.fp16.safetensors
    for files in (plain, found, sorted(folder.glob("*.bin"))):
        if len(files) == 1:
            return files[0]
    seen = f"{len(found)} of them" if found else "none"
    raise CheckpointError(
        f"{folder} should hold one file with an AutoencoderKL (tensor {_VAE_MARK}), and holds {seen}. "
        "Download diffusion_pytorch_model.safetensors there again."
    )


def _today(name: str) -> str:
    """Map a name of diffusers' old attention to today's.

    Example:
        >>> _today("encoder.mid_block.attentions.0.proj_attn.bias")
        'encoder.mid_block.attentions.0.to_out.0.bias'
    """
    match = re.fullmatch(r"(.+\.attentions\.\d+)\.(query|key|value|proj_attn)\.(weight|bias)", name)
    return f"{match[1]}.{_OLD_ATTENTION[match[2]]}.{match[3]}" if match else name


def _shape(files: TensorFiles, shapes: _Shapes, name: str, axes: int) -> torch.Size:
    if name not in shapes or len(shapes[name]) != axes:
        seen = f"has {name} of shape {list(shapes[name])}" if name in shapes else f"lacks tensor {name}"
        raise CheckpointError(
            f"{files.label} {seen}, so it is not the STDiT3 it should be. Download it again."
        )
    return shapes[name]


def _depth(names: Iterable[str]) -> int:
    """Count the blocks, spatial or temporal, of which there is a tensor."""
    matches = (re.match(r"(?:spatial|temporal)_blocks\.(\d+)\.", name) for name in names)
    return len({match[1] for match in matches if match})

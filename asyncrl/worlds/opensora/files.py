"""Read and write folders of OpenSora worlds.

A folder like RLinf-OpenSora-LIBERO-Spatial holds the transformer (one safetensors file, or shards with an
index), the autoencoder in ``vae/`` and ``dataset_statistics.json``. Sizes are read from shapes and from
``vae/config.json``; world.json has the image size and the steps; without it, the published ones apply.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.sections import ImaginationSettings
from asyncrl.devices.tensors import constant_to_device
from asyncrl.errors import CheckpointError
from asyncrl.records import ACTION_DIM, CHUNK, Bounds, SlotBytes
from asyncrl.storage.atomic import read_json, write_json
from asyncrl.storage.tensor_files import TensorFiles, header_names
from asyncrl.worlds import files as world_files
from asyncrl.worlds.layers import FrameVae, FrameVaeConfig
from asyncrl.worlds.opensora.stdit3 import CONDITION, UNUSED, STDiT3, STDiT3Config

KIND: Final = "opensora"
TRANSFORMER: Final = "transformer.safetensors"
VAE: Final = "vae"
VAE_FILE: Final = "diffusion_pytorch_model.safetensors"
IMAGE_SIZE: Final = 256
STEPS: Final = 10  # Network calls per decision, as published.
STATISTICS: Final = "dataset_statistics.json"
_PUBLISHED: Final = "Copy the one that was published with the weights."
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
"""Names in autoencoders of an old version of diffusers."""
_BLOCK: Final = 8
"""Tensors of the model's width alive in a block; with `_INNER` it gives the measured 117 MiB a slot."""
_INNER: Final = 4  # Tensors of the MLP's width alive in a block.
FRAMES_AT_ONCE: Final = 16  # Frames that the autoencoder takes at a time.
_DRAWING: Final = 4  # Largest tensors of the decoder alive at the same time.


def ends_on(bounds: Bounds, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the numbers of an action that become -1 and 1, ``[A]`` float32 each; nothing is clipped."""
    low, high = (constant_to_device(np.array(ends, np.float32), device) for ends in (bounds.q01, bounds.q99))
    return low, high


@dataclass(frozen=True, kw_only=True)
class OpenSoraFiles(world_files.LatentWorldFolder):
    """An OpenSora world on disk without its weights; only the transformer tensors that it uses."""

    NETWORKS = (STDiT3, FrameVae)
    # Rounded, positions would turn by other angles than those of the fit.
    EXACT_WEIGHTS = frozenset({"rope.freqs"})
    FLOAT8 = ("spatial_blocks", "temporal_blocks")

    action_range: Bounds

    def slot_bytes(self, decisions: int = 0) -> SlotBytes:
        """See `WorldFolder.slot_bytes`."""
        return slot_bytes(self.transformer_size, self.vae_size, self.image_size, self.dtype)


def slot_bytes(size: STDiT3Config, vae: FrameVaeConfig, image_size: int, dtype: torch.dtype) -> SlotBytes:
    """Estimate the bytes of slots, excluding the weights, from sizes; the state and cached keys are exact."""
    side = image_size // vae.spatial
    state = 4 * vae.channels * CONDITION * side**2 + 1  # latents in float32, and `finite`
    frame = (side // size.patch) ** 2 * size.width * dtype.itemsize  # one tensor of the model's width
    prefix = 2 * size.depth * CONDITION * frame
    block = CHUNK * frame * (_BLOCK + _INNER * size.mlp_ratio)
    pixels = CHUNK * 3 * image_size**2 * (2 * dtype.itemsize + torch.float32.itemsize)
    # The decoder's finest level begins with the channels of the next coarser one.
    drawing = _DRAWING * FRAMES_AT_ONCE * max(vae.widths[:2]) * image_size**2 * dtype.itemsize
    # Two states: the one before a decision and the one after it.
    return SlotBytes(kept=2 * state, scratch=prefix + block + pixels, shared=drawing)


def open_world(folder: Path, settings: ImaginationSettings = world_files.AS_SAVED) -> OpenSoraFiles:
    """See `FolderWorld.files`."""
    world_files.refuse(
        {
            "context is frames, but an OpenSora world remembers its last four frames as latents, as "
            "published: it has no other way. Use --imagination.context latents, or auto.": (
                settings.context == "frames"
            ),
            "decoder is tiny, but there is no distilled decoder for an OpenSora world. Use "
            "--imagination.decoder full.": settings.decoder == "tiny",
        }
    )
    about = world_files.read_about(folder, KIND, published=not world_files.lacks_opensora(folder))
    transformer = world_files.transformer_files(folder, _OWN)
    if transformer is None:
        raise CheckpointError(
            f"{folder} holds no transformer of an OpenSora world: no safetensors file in it has tensors "
            f"{', '.join(world_files.OPENSORA_MARKS)}. Download the folder again (RLinf-OpenSora-LIBERO-*)."
        )
    size = recognise_transformer(transformer, about)
    vae, vae_size = recognise_vae(folder, about)
    if size.channels != vae_size.channels:
        raise CheckpointError(
            f"{folder}: the transformer has {size.channels} latent channels, the autoencoder "
            f"{vae_size.channels}. Download transformer and vae/ of one world."
        )
    image_size = about.get("image_size", IMAGE_SIZE)
    if image_size % (size.patch * vae_size.spatial):
        raise CheckpointError(
            f"{folder}: image_size {image_size} is no multiple of {size.patch * vae_size.spatial}, a token's "
            "side. Save the world again."
        )
    return OpenSoraFiles(
        folder=folder,
        settings=settings,
        transformer=transformer.renamed(lambda name: None if any(part in name for part in UNUSED) else name),
        transformer_size=size,
        vae=vae,
        vae_size=vae_size,
        action_range=read_action_range(folder, size.action_dim),
        image_size=image_size,
        schedule_steps=about.get("schedule_steps", STEPS),
        version=about.get("version", 0),
        published=not about,
        action_dim=size.action_dim,
    )


def recognise_transformer(files: TensorFiles, about: Mapping[str, Any]) -> STDiT3Config:
    """Return the size of the transformer in `files`."""
    shapes = files.shapes
    if "action_embedder.fc.0.weight" not in shapes:
        raise CheckpointError(
            f"{files.label} lacks tensor action_embedder.fc.0.weight: it takes no actions, like the "
            "OpenSora-STDiT-v3 that videos are made with. Use a world (RLinf-OpenSora-LIBERO-*)."
        )

    shape = partial(world_files.shape_of, files, "STDiT3")
    numbers = shape("action_embedder.fc.0.weight", 2)[1]
    if numbers != ACTION_DIM and not about:
        raise CheckpointError(
            f"{files.label} takes actions of {numbers} numbers; policies here give {ACTION_DIM}."
        )
    width, channels, _, patch, _ = shape("x_embedder.proj.weight", 5)
    head_dim = shape("spatial_blocks.0.attn.q_norm.weight", 1)[0]
    inner = shape("spatial_blocks.0.mlp.fc1.weight", 2)[0]
    try:
        return STDiT3Config(
            depth=world_files.count_blocks(r"(?:spatial|temporal)_blocks\.(\d+)\.", shapes),
            width=width,
            heads=width // head_dim if head_dim else 0,
            channels=channels,
            patch=patch,
            mlp_ratio=inner // width if width else 0,
            freq_dim=shape("t_embedder.mlp.0.weight", 2)[1],
            action_dim=numbers,
        )
    except ValueError as error:
        raise CheckpointError(f"{files.label} is no STDiT3: {error}. Download it again.") from error


def recognise_vae(folder: Path, about: Mapping[str, Any]) -> tuple[TensorFiles, FrameVaeConfig]:
    """Open the autoencoder of a folder, by diffusers' current names, and return its size."""
    inside = folder / VAE
    if not inside.is_dir():
        raise CheckpointError(
            f"{folder} holds a transformer of an OpenSora world and no autoencoder: {inside} is missing. "
            "Download it next to the transformer."
        )
    files = TensorFiles(_vae_file(inside)).renamed(_today)
    content = read_json(inside / "config.json", "Download it again.")
    try:
        size = FrameVaeConfig(
            widths=tuple(content["block_out_channels"]),
            layers_per_block=content["layers_per_block"],
            channels=content["latent_channels"],
            groups=content.get("norm_num_groups", 32),
        )
        # Published worlds are trained with the scale of `FrameVaeConfig`, whatever their file has.
        size = replace(size, scale=content.get("scaling_factor", size.scale)) if about else size
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{inside / 'config.json'} does not describe an AutoencoderKL ({error!r}). Download it again."
        ) from error
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
        f"Download {VAE_FILE} there again."
    )


def _today(name: str) -> str:
    match = re.fullmatch(r"(.+\.attentions\.\d+)\.(query|key|value|proj_attn)\.(weight|bias)", name)
    return f"{match[1]}.{_OLD_ATTENTION[match[2]]}.{match[3]}" if match else name


def read_action_range(folder: Path, numbers: int = ACTION_DIM) -> Bounds:
    """Read ``dataset_statistics.json``: ``action`` at its top, or in its only data set."""
    path = folder / STATISTICS
    content = read_json(path, _PUBLISHED)
    data_sets = [content] if "action" in content else list(content.values())
    try:
        (entry,) = (entry for entry in data_sets if "action" in entry)
        bounds = Bounds.from_json(entry["action"])
        bounds = replace(bounds, mask=(True,) * len(bounds.mask))  # A world scales the gripper too.
        if problem := bounds.problem(numbers):
            raise ValueError(f"they {problem}")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} should hold one data set with q01 and q99 of an action, {numbers} finite numbers each, "
            f"q01 below q99; it does not ({error}). {_PUBLISHED}"
        ) from error
    return bounds


def write_action_range(folder: Path, bounds: Bounds) -> None:
    """Write ``dataset_statistics.json`` into an existing folder."""
    write_json(folder / STATISTICS, {"action": {"q01": list(bounds.q01), "q99": list(bounds.q99)}})


def write_vae_config(folder: Path, size: FrameVaeConfig) -> None:
    """Write ``vae/config.json`` with the fields that diffusers and `recognise_vae` read."""
    content = {"_class_name": "AutoencoderKL", **size.options(), "scaling_factor": size.scale}
    write_json(folder / VAE / "config.json", content)


def convert_old(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Move the autoencoder of a copied folder of format 1 to ``vae/``; return the facts for world.json."""
    (folder / VAE).mkdir()
    (folder / "vae.safetensors").rename(folder / VAE / VAE_FILE)
    vae = {name: content["vae"][name] for name in ("layers_per_block", "channels", "scale")}
    widths, groups = tuple(content["vae"]["widths"]), content["vae"]["norm_groups"]
    write_vae_config(folder, FrameVaeConfig(widths=widths, groups=groups, **vae))
    return {}

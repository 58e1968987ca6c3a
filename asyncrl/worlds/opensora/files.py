"""Read and write folders of OpenSora worlds: our own layout (``world.json``), and the published one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from asyncrl.config.imagination import ImaginationSettings, WorldDefaults
from asyncrl.devices.float8 import saved_bytes
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.records import SlotBytes
from asyncrl.storage.atomic import read_json, write_json
from asyncrl.storage.bounded_json import check_sizes
from asyncrl.storage.tensor_reader import TensorFiles, check_fit, fill
from asyncrl.storage.tensor_writer import write_tensors
from asyncrl.worlds.files import AS_SAVED, WeightTypes, WorldFolder
from asyncrl.worlds.opensora import published_world
from asyncrl.worlds.opensora.action_range import ActionRange, read_action_range
from asyncrl.worlds.opensora.autoencoder import FrameVae, VaeConfig
from asyncrl.worlds.opensora.memory import slot_bytes
from asyncrl.worlds.opensora.recognition import lacks
from asyncrl.worlds.opensora.rectified_flow import STEPS
from asyncrl.worlds.opensora.stdit3 import STDiT3, STDiT3Config

FORMAT: Final = "asyncrl-world-1"
KIND: Final = "opensora"
TRANSFORMER: Final = "transformer.safetensors"
VAE: Final = "vae.safetensors"


@dataclass(frozen=True, kw_only=True)
class WorldFiles(WorldFolder):
    """A world on disk: everything about it but the numbers."""

    EXACT_WEIGHTS = frozenset({"rope.freqs"})

    transformer: TensorFiles
    transformer_size: STDiT3Config
    """As in the files, with or without the branches that nothing reads."""
    vae: TensorFiles
    vae_size: VaeConfig
    action_range: ActionRange

    def defaults(self, settings: ImaginationSettings = AS_SAVED) -> WorldDefaults:
        """See `WorldFolder.defaults`."""
        check_settings(settings)
        return super().defaults(settings)

    def slot_bytes(self, settings: ImaginationSettings = AS_SAVED) -> SlotBytes:
        """Estimate the device memory of a slot beside the weights."""
        check_settings(settings)
        return slot_bytes(self.transformer_size, self.vae_size, self.image_size, self.types(settings).dtype)

    def build(self, *, unused_branches: bool) -> tuple[STDiT3, FrameVae]:
        """Build the modules without memory for their weights (on the meta device)."""
        with torch.device("meta"):
            size = replace(self.transformer_size, unused_branches=unused_branches)
            return STDiT3(size), FrameVae(self.vae_size)

    def check(self, settings: ImaginationSettings = AS_SAVED) -> int:
        """Check that all tensors are there, fit, and are all; return the bytes that the loaded world takes.

        Raises:
            CheckpointError: A tensor is missing, has the wrong shape, or is not of these networks.
            ConfigError: A setting that this kind of world cannot follow.
        """
        check_settings(settings)
        in_files, vae = self.build(unused_branches=self.transformer_size.unused_branches)
        check_fit(in_files, self.transformer, unused=False)
        check_fit(vae, self.vae, unused=False)
        used, _ = self.build(unused_branches=False)
        types, blocks = self.types(settings), (used.spatial_blocks, used.temporal_blocks)
        saved = sum(saved_bytes(block, types.dtype) for block in blocks)
        return types.nbytes(used) + types.nbytes(vae) - saved * (settings.precision == "float8")

    def load(
        self,
        device: torch.device | str,
        dtype: torch.dtype | None,
        settings: ImaginationSettings,
        *,
        unused_branches: bool = False,
    ) -> tuple[STDiT3, FrameVae]:
        """Load the networks for inference, one tensor at a time, straight to `device`.

        Args:
            device: Where the weights go.
            dtype: What all of them become; None takes `types`.
            settings: Of the run. Layers of 8-bit numbers are made by `load_world`.
            unused_branches: Load the branches that nothing reads too, where the files have them: to write
                published files again.

        Raises:
            CheckpointError: See `check`.
        """
        self.check()
        types = self.types(settings) if dtype is None else WeightTypes(dtype=dtype)
        transformer, vae = self.build(
            unused_branches=unused_branches and self.transformer_size.unused_branches
        )
        wanted = self.transformer.only(transformer.state_dict().keys())
        fill(transformer, wanted, dtype=types.dtype, device=device, exact=types.exact)
        fill(vae, self.vae, dtype=types.dtype, device=device)
        vae.use_channels_last()
        return transformer.eval().requires_grad_(False), vae.eval().requires_grad_(False)


def check_settings(settings: ImaginationSettings) -> None:
    """Refuse what this kind of world cannot do.

    Raises:
        ConfigError: Names the flag, and what it can be instead.
    """
    if settings.context == "frames":
        raise ConfigError(
            "--imagination.context is frames, but an OpenSora world remembers its last four frames as "
            "latents, as published: it has no other way. Use --imagination.context latents, or auto."
        )
    if settings.decoder == "tiny":
        raise ConfigError(
            "--imagination.decoder is tiny, but there is no distilled decoder for an OpenSora world. Use "
            "--imagination.decoder full."
        )


def open_world(folder: Path) -> WorldFiles:
    """Read what a folder says about its world, without its numbers.

    Args:
        folder: One of ours (``world.json``), or one with the published files.

    Raises:
        CheckpointError: A file is missing, cannot be read, or is of a kind that is not known.
    """
    if not (folder / "world.json").is_file() and not lacks(folder):
        return _open_published(folder)
    content = read_json(folder / "world.json")
    if content.get("format") != FORMAT or content.get("kind") != KIND:
        raise CheckpointError(
            f"{folder / 'world.json'} describes {content.get('kind')!r} in format {content.get('format')!r}; "
            f"this class reads {KIND!r} in format {FORMAT!r}."
        )
    try:
        size, vae = _sizes(content)
        image_size, steps, version = (int(content[k]) for k in ("image_size", "schedule_steps", "version"))
        if not 1 <= steps <= 10_000:
            raise ValueError(f"schedule_steps is {steps}")
        _check_image_size(image_size, size, vae)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{folder / 'world.json'} is incomplete ({error}). Save the world again."
        ) from error
    return WorldFiles(
        folder=folder,
        transformer=TensorFiles(folder / TRANSFORMER),
        transformer_size=size,
        vae=TensorFiles(folder / VAE),
        vae_size=vae,
        action_range=read_action_range(folder, size.action_dim),
        image_size=image_size,
        schedule_steps=steps,
        version=version,
        published=False,
    )


def _sizes(content: Mapping[str, Any]) -> tuple[STDiT3Config, VaeConfig]:
    for part in ("transformer", "vae"):
        check_sizes(content[part])
    size, vae = STDiT3Config(**content["transformer"]), VaeConfig.from_json(content["vae"])
    _check_channels(size, vae)
    return size, vae


def _check_channels(size: STDiT3Config, vae: VaeConfig) -> None:
    if size.channels != vae.channels:
        raise ValueError(
            f"the transformer has {size.channels} latent channels, the autoencoder {vae.channels}"
        )


def _check_image_size(image_size: int, size: STDiT3Config, vae: VaeConfig) -> None:
    if image_size < 1 or image_size % (size.patch * vae.spatial):
        raise ValueError(
            f"image_size {image_size} is no multiple of {size.patch * vae.spatial}, a token's side"
        )


def _open_published(folder: Path) -> WorldFiles:
    transformer = published_world.transformer_files(folder)
    size = published_world.recognise_transformer(transformer)
    vae, vae_size = published_world.recognise_vae(folder)
    try:
        _check_channels(size, vae_size)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}. Download transformer and vae/ of one world.") from error
    return WorldFiles(
        folder=folder,
        transformer=transformer,
        transformer_size=size,
        vae=vae,
        vae_size=vae_size,
        action_range=read_action_range(folder),
        image_size=published_world.IMAGE_SIZE,
        schedule_steps=STEPS,
        version=0,
        published=True,
    )


def write_world(
    folder: Path,
    transformer: STDiT3,
    vae: FrameVae,
    action_range: ActionRange,
    *,
    image_size: int,
    schedule_steps: int,
    version: int,
) -> None:
    """Write ``transformer.safetensors``, ``vae.safetensors``, ``dataset_statistics.json``, ``world.json``.

    The last one is written when all others are there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / TRANSFORMER, transformer.state_dict())
    write_tensors(folder / VAE, vae.state_dict())
    action_range.write(folder)
    content = {
        "format": FORMAT,
        "kind": KIND,
        "version": version,
        "image_size": image_size,
        "schedule_steps": schedule_steps,
        "transformer": asdict(transformer.size),
        "vae": asdict(vae.size),
    }
    write_json(folder / "world.json", content)

"""Read and write folders of Wan worlds: our own layout (``world.json``), and the published one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor, nn

from asyncrl.config.imagination import ImaginationSettings, WorldDefaults
from asyncrl.devices.float8 import check_device, saved_bytes, use_float8
from asyncrl.errors import CheckpointError
from asyncrl.records import SlotBytes
from asyncrl.storage.atomic import read_json, replacing, write_json
from asyncrl.storage.bounded_json import check_sizes
from asyncrl.storage.rewriting import copy_others, rewrite_file
from asyncrl.storage.tensor_reader import TensorFiles, check_fit, fill
from asyncrl.worlds.files import AS_SAVED, WeightTypes, WorldFolder
from asyncrl.worlds.wan import published_world
from asyncrl.worlds.wan.memory import slot_bytes
from asyncrl.worlds.wan.published_world import transformer_from_published, vae_from_published
from asyncrl.worlds.wan.recognition import WAN_TRANSFORMER, WAN_VAE, transformer_files
from asyncrl.worlds.wan.tiny_decoder import TinyDecoder, load_decoder
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig
from asyncrl.worlds.wan.vae import VaeConfig, WanVae, use_channels_last

FORMAT: Final = "asyncrl-world-1"
TRANSFORMER: Final = "transformer.safetensors"
VAE: Final = "vae.safetensors"
ADAPTER_FOLDER: Final = "adapter"
"""Where a fit puts adapters alone; those of an earlier one belong to other weights."""


@dataclass(frozen=True, kw_only=True)
class WorldFiles(WorldFolder):
    """A world on disk: everything about it but the numbers."""

    EXACT_WEIGHTS = frozenset(
        f"{layer}.{part}" for layer in ("action_mlp1.0", "action_mlp2.0") for part in ("weight", "bias")
    )

    transformer: TensorFiles
    """By our names, like `vae`."""
    transformer_size: TransformerConfig
    vae: TensorFiles
    vae_size: VaeConfig

    def defaults(self, settings: ImaginationSettings = AS_SAVED) -> WorldDefaults:
        """See `WorldFolder.defaults`."""
        # A distilled decoder goes on from where it stopped, so with it the memory is in latents.
        context = "frames" if self.published and settings.decoder != "tiny" else "latents"
        return replace(super().defaults(settings), context=context)

    def context(self, settings: ImaginationSettings) -> Literal["frames", "latents"]:
        """Say what the next decision begins with."""
        return self.defaults(settings).context if settings.context == "auto" else settings.context

    def slot_bytes(self, settings: ImaginationSettings) -> SlotBytes:
        """Estimate the device memory of a slot beside the weights."""
        _, vae = self.build()
        nn.Module.to(vae, self.types(settings).dtype)  # diffusers' own `to` warns
        return slot_bytes(vae, self.image_size, self.context(settings))

    def build(self) -> tuple[ActionWanTransformer, WanVae]:
        """Build the modules without memory for their weights (on the meta device)."""
        with torch.device("meta"):
            return ActionWanTransformer(self.transformer_size), WanVae(self.vae_size)

    def check(self, settings: ImaginationSettings = AS_SAVED) -> int:
        """Check that all tensors are there and fit; return the bytes that the loaded world takes.

        Raises:
            CheckpointError: A tensor is missing or has the wrong shape.
        """
        transformer, vae = self.build()
        check_fit(transformer, self.transformer)
        check_fit(vae, self.vae)
        if settings.decoder == "tiny":
            self._tiny_decoder("cpu", torch.float32)
        types = self.types(settings)
        nbytes = types.nbytes(transformer) + types.nbytes(vae)
        return nbytes - saved_bytes(transformer.blocks, types.dtype) * (settings.precision == "float8")

    def load(
        self, device: torch.device | str, dtype: torch.dtype | None, settings: ImaginationSettings
    ) -> tuple[ActionWanTransformer, WanVae, TinyDecoder | None]:
        """Load the networks for inference, one tensor at a time, straight to `device`; see `load_world`.

        Raises:
            ConfigError: See `float8.check_device`.
        """
        types = self.types(settings) if dtype is None else WeightTypes(dtype=dtype)
        if settings.precision == "float8":
            check_device(torch.device(device))
        transformer, vae = self.build()
        fill(transformer, self.transformer, dtype=types.dtype, device=device, exact=types.exact)
        if settings.precision == "float8":
            use_float8(transformer.blocks)
        size = self.transformer_size
        # Not in the file: computed from the size.
        transformer.rope = WanRotaryPosEmbed(size.head_dim, (1, size.patch, size.patch), 1024).to(device)
        fill(vae, self.vae, dtype=types.dtype, device=device)
        use_channels_last(vae)
        decoder = self._tiny_decoder(device, types.dtype) if settings.decoder == "tiny" else None
        return transformer.eval().requires_grad_(False), vae.eval().requires_grad_(False), decoder

    def _tiny_decoder(self, device: torch.device | str, dtype: torch.dtype) -> TinyDecoder:
        size = self.vae_size
        return load_decoder(
            self.folder,
            latents_mean=size.latents_mean,
            latents_std=size.latents_std,
            device=device,
            dtype=dtype,
        )


def open_world(folder: Path) -> WorldFiles:
    """Read what a folder says about its world, without its numbers.

    Args:
        folder: One of ours (``world.json``), or one with the published files.

    Raises:
        CheckpointError: A file is missing, cannot be read, or is of a kind that is not known.
    """
    if not (folder / "world.json").is_file() and (files := transformer_files(folder)):
        return _open_published(folder, files)
    content = read_json(folder / "world.json")
    if content.get("format") != FORMAT or content.get("kind") != "wan":
        raise CheckpointError(
            f"{folder / 'world.json'} describes {content.get('kind')!r} in format {content.get('format')!r}; "
            f"this version reads 'wan' in format {FORMAT!r}."
        )
    try:
        for part in ("transformer", "vae"):
            check_sizes(content[part])
        transformer_size = TransformerConfig(**content["transformer"])
        vae_size = VaeConfig.from_json(content["vae"])
        image_size, steps, version = (int(content[k]) for k in ("image_size", "schedule_steps", "version"))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{folder / 'world.json'} is incomplete ({error}). Save the world again."
        ) from error
    return WorldFiles(
        folder=folder,
        transformer=TensorFiles(folder / TRANSFORMER),
        transformer_size=transformer_size,
        vae=TensorFiles(folder / VAE),
        vae_size=vae_size,
        image_size=image_size,
        schedule_steps=steps,
        version=version,
        published=False,
    )


def _open_published(folder: Path, transformer_files: list[Path]) -> WorldFiles:
    if not (folder / WAN_VAE).is_file():
        raise CheckpointError(
            f"{folder} holds a transformer ({transformer_files[0].name}) and no autoencoder: "
            f"{folder / WAN_VAE} does not exist. Download it beside {WAN_TRANSFORMER}."
        )
    transformer, vae = TensorFiles(transformer_files), TensorFiles(folder / WAN_VAE)
    return WorldFiles(
        folder=folder,
        transformer=transformer.renamed(transformer_from_published),
        transformer_size=published_world.recognise_transformer(transformer),
        vae=vae.renamed(vae_from_published),
        vae_size=published_world.recognise_vae(vae),
        image_size=published_world.IMAGE_SIZE,
        schedule_steps=published_world.SCHEDULE_STEPS,
        version=0,
        published=True,
    )


def rewrite_world(source: Path, folder: Path, tensors: Mapping[str, Tensor], version: int) -> None:
    """Write a world's folder again with other weights of its transformer; all else in it is copied.

    Args:
        source: As `open_world` takes it.
        folder: New, or empty; it appears when it is complete.
        tensors: Weights of the transformer by our names, of any dtype: they get the file's.
        version: Of the world; a published folder cannot say another than 0.

    Raises:
        CheckpointError: The source cannot be read any more.
    """
    published = not (source / "world.json").is_file()
    files = transformer_files(source) if published else [source / TRANSFORMER]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as part:
        part.mkdir()
        copy_others(source, part, {ADAPTER_FOLDER, *(file.name for file in files)})
        rewrite_transformer(files, part, tensors, published=published)
        if not published:
            write_json(part / "world.json", read_json(part / "world.json") | {"version": version})


def rewrite_transformer(
    files: Sequence[Path], folder: Path, tensors: Mapping[str, Tensor], *, published: bool
) -> None:
    """Write the files of a transformer again with other weights; arguments as of `rewrite_world`.

    Args:
        files: That hold it.
        folder: Exists; its files of these names are replaced.
        tensors: Weights by our names, of any dtype: they get the file's.
        published: Whether the files have the published names of tensors.
    """
    for file in files:
        rewrite_file(file, folder / file.name, tensors, transformer_from_published if published else str)

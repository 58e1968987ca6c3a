"""Read and write folders of Wan worlds.

A folder like RLinf-Wan-LIBERO-Spatial holds the transformer (``model-00001.safetensors``, or shards) and the
autoencoder ``Wan2.2_VAE.pth``; asyncrl writes ``transformer.safetensors`` and ``vae.safetensors``. Names of
Wan's authors and of diffusers are both read. Sizes are read from shapes; world.json has the other facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor, nn

from asyncrl.config.sections import ImaginationSettings, WorldDefaults
from asyncrl.errors import CheckpointError
from asyncrl.records import ACTION_DIM, CHUNK, SlotBytes
from asyncrl.storage.atomic import copy_others, read_json, replacing, write_json
from asyncrl.storage.tensor_files import TensorFiles, write_file
from asyncrl.worlds import files as world_files
from asyncrl.worlds.wan.tiny_decoder import TinyDecoder, load_decoder
from asyncrl.worlds.wan.transformer import (
    FRAMES_PER_LATENT,
    ActionWanTransformer,
    TransformerConfig,
    transformer_name,
)
from asyncrl.worlds.wan.vae import VaeConfig, WanVae, decode_step, encode_step, use_channels_last

KIND: Final = "wan"
TRANSFORMER: Final = "transformer.safetensors"
VAE: Final = "vae.safetensors"
WAN_TRANSFORMER: Final = "model-00001.safetensors"
WAN_VAE: Final = "Wan2.2_VAE.pth"
ADAPTER_FOLDER: Final = "adapter"  # Of a fit's adapters; an earlier fit's belong to other weights
HEAD_DIM: Final = 128
IMAGE_SIZE: Final = 256
SCHEDULE_STEPS: Final = 5
TENSORS_AT_ONCE: Final = 10  # Largest tensors of the decoder alive at once (docs/measurements/run_speed.md)
_OWN: Final = ("patch_embedding.", "blocks.", "time_embedding.", "time_projection.", "action_mlp", "head.")

# As in `transformer`: patterns in names of Wan's authors, and the text of diffusers.
_VAE_NAMES: Final = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"^(encoder|decoder)\.head\.0\.", r"\1.norm_out."),
    (r"^(encoder|decoder)\.head\.2\.", r"\1.conv_out."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (r"\.(down|up)samples\.(\d)\.\1samples\.\d\.(resample|time_conv)\.", r".\1_blocks.\2.\1sampler.\3."),
    (r"\.(down|up)samples\.(\d)\.\1samples\.(\d)\.", r".\1_blocks.\2.resnets.\3."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)


def vae_name(name: str) -> str:
    """Translate a tensor name of ``Wan2.2_VAE.pth`` to diffusers'; diffusers' names stay."""
    return world_files.renamed(name, _VAE_NAMES)


@dataclass(frozen=True, kw_only=True)
class WanFiles(world_files.LatentWorldFolder):
    """A Wan world on disk without its weights; tensors have diffusers' names."""

    NETWORKS = (ActionWanTransformer, WanVae)
    # Actions enter through these: rounded, they would not cancel what is far from zero, as in pixels.
    EXACT_WEIGHTS = frozenset(
        f"{layer}.{part}" for layer in ("action_mlp1.0", "action_mlp2.0") for part in ("weight", "bias")
    )
    FLOAT8 = ("blocks",)
    SPARE_TENSORS = True

    def defaults(self) -> WorldDefaults:
        """See `WorldFolder.defaults`."""
        # A distilled decoder goes on from where it stopped, so with it the memory is in latents.
        context = "frames" if self.published and self.settings.decoder != "tiny" else "latents"
        return replace(super().defaults(), context=context)

    @property
    def context(self) -> Literal["frames", "latents"]:
        """Form of the memory, see `ImaginationSettings.context`."""
        return self.defaults().context if self.settings.context == "auto" else self.settings.context

    def slot_bytes(self, decisions: int = 0) -> SlotBytes:
        """See `WorldFolder.slot_bytes`."""
        _, vae = self.build()
        nn.Module.to(vae, self.dtype)  # diffusers' own `to` warns
        return slot_bytes(vae, self.image_size, self.context)

    def check(self) -> int:
        """See `WorldFolder.check`."""
        self.tiny_decoder(torch.device("cpu"), torch.float32)
        return super().check()

    def load(
        self, device: torch.device, dtype: torch.dtype | None = None
    ) -> tuple[ActionWanTransformer, WanVae]:
        """See `LatentWorldFolder.load`."""
        transformer, vae = super().load(device, dtype)
        size = self.transformer_size
        # Not in the file: computed from the size.
        transformer.rope = WanRotaryPosEmbed(size.head_dim, (1, size.patch, size.patch), 1024).to(device)
        use_channels_last(vae)
        return transformer, vae

    def tiny_decoder(self, device: torch.device, dtype: torch.dtype) -> TinyDecoder | None:
        """Load the distilled decoder; None if the settings ask for the full one."""
        if self.settings.decoder != "tiny":
            return None
        mean, std = self.vae_size.latents_mean, self.vae_size.latents_std
        return load_decoder(self.folder, latents_mean=mean, latents_std=std, device=device, dtype=dtype)


@torch.no_grad()
def slot_bytes(vae: WanVae, image_size: int, context: Literal["frames", "latents"]) -> SlotBytes:
    """Estimate a slot's bytes, excluding weights, from a VAE on the meta device; caches are exact."""

    def pixels(frames: int) -> Tensor:
        return torch.empty(1, 3, frames, image_size, image_size, device="meta", dtype=vae.dtype)

    anchor, seen = encode_step(vae, pixels(1), None)
    memory, _ = encode_step(vae, pixels(FRAMES_PER_LATENT), seen)
    _, cache = decode_step(vae, anchor, None)
    if context == "latents":
        _, cache = decode_step(vae, memory, cache)
        seen = []
    state = [anchor.float(), memory.float(), *cache, *seen]
    frames = CHUNK + (FRAMES_PER_LATENT if context == "frames" else 0)
    # The decoder's last level has half the picture's height and width.
    largest = vae.size.decoder_base_dim * frames * (image_size // 2) ** 2 * vae.dtype.itemsize
    kept = 2 * sum(tensor.nbytes for tensor in state)  # before and after a decision
    return SlotBytes(kept=kept, scratch=TENSORS_AT_ONCE * largest)


def open_world(folder: Path, settings: ImaginationSettings = world_files.AS_SAVED) -> WanFiles:
    """See `FolderWorld.files`."""
    begins = [f"{prefix}{name}" for prefix in ("", world_files.WAN_PREFIX) for name in _OWN]
    transformer = world_files.transformer_files(folder, begins, (WAN_TRANSFORMER, TRANSFORMER))
    about = world_files.read_about(folder, KIND, published=transformer is not None)
    if transformer is None:
        raise CheckpointError(f"{folder / TRANSFORMER} is missing. Save the world again.")
    vae_file = next((path for name in (WAN_VAE, VAE) if (path := folder / name).is_file()), None)
    if vae_file is None:
        raise CheckpointError(
            f"{folder} holds a transformer ({transformer.paths[0].name}) and no autoencoder: "
            f"{folder / (VAE if about else WAN_VAE)} does not exist. Download it into the same folder."
        )
    transformer, vae = transformer.renamed(transformer_name), TensorFiles(vae_file, rename=vae_name)
    try:
        size = recognise_transformer(transformer, about)
        return WanFiles(
            folder=folder,
            settings=settings,
            transformer=transformer,
            transformer_size=size,
            vae=vae,
            vae_size=recognise_vae(vae, about),
            image_size=about.get("image_size", IMAGE_SIZE),
            schedule_steps=about.get("schedule_steps", SCHEDULE_STEPS),
            version=about.get("version", 0),
            published=not about,
            action_dim=size.action_dim,
        )
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{folder / world_files.ABOUT} is incomplete ({error}). Save the world again."
        ) from error


def recognise_transformer(files: TensorFiles, about: Mapping[str, Any]) -> TransformerConfig:
    """Return the size of the transformer in `files`, by diffusers' names."""
    shapes = files.shapes
    inputs = [shapes.get(f"action_mlp{n}.0.weight", (0,))[-1] for n in (1, 2)]
    numbers = inputs[0] if about else ACTION_DIM
    marks = [transformer_name(mark) for mark in world_files.WAN_MARKS]
    refused = {
        "is OpenSora's (STDiT3), and not Wan's": world_files.OPENSORA_MARKS[0] in shapes,
        f"is no Wan transformer (it lacks {' or '.join(world_files.WAN_MARKS)})": not shapes.keys()
        >= {*marks},
        "takes no actions (no action_mlp1, no action_mlp2): a Wan2.2-TI2V-5B as its makers published it": (
            not any(inputs)
        ),
        "takes actions in the modulation only (TI2V3: no action_mlp1)": not inputs[0],
        "takes actions in cross-attention only (TI2V1: no action_mlp2)": not inputs[1],
        "scales its actions by action_scale, and how is not published": (
            any(name.startswith("action_scale") for name in shapes)
        ),
        f"takes actions of {inputs[0]} numbers": inputs != [numbers, FRAMES_PER_LATENT * numbers],
    }
    if why := next((why for why, wrong in refused.items() if wrong), ""):
        raise CheckpointError(
            f"{files.label} {why}. The variant that can be read takes 7-D actions in cross-attention and in "
            "the modulation (TI2V2): the model-00001.safetensors of RLinf-Wan-LIBERO-Spatial, -Object or "
            "-Goal."
        )
    shape = partial(world_files.shape_of, files, "Wan model")
    width, channels, _, patch, _ = shape("patch_embedding.weight", 5)
    head_dim = about["head_dim"] if about else HEAD_DIM
    if head_dim < 1 or width % head_dim:
        raise CheckpointError(f"{files.label} is {width} channels wide, with heads of {head_dim}.")
    return TransformerConfig(
        heads=width // head_dim,
        head_dim=head_dim,
        layers=world_files.count_blocks(r"blocks\.(\d+)\.", shapes),
        ffn_dim=shape("blocks.0.ffn.net.0.proj.weight", 2)[0],
        channels=channels,
        patch=patch,
        freq_dim=shape("condition_embedder.time_embedder.linear_1.weight", 2)[1],
        round_timestep=about["round_timestep"] if about else True,
        action_dim=numbers,
    )


def recognise_vae(files: TensorFiles, about: Mapping[str, Any]) -> VaeConfig:
    """Return the size of the autoencoder in `files`, by diffusers' names."""
    shape, published = partial(world_files.shape_of, files, "Wan model"), VaeConfig.full()
    z_dim = shape("post_quant_conv.weight", 5)[0]
    mean, std = published.latents_mean, published.latents_std
    if about:
        mean, std = (tuple(about[name]) for name in ("latents_mean", "latents_std"))
        if not len(mean) == len(std) == z_dim or min(std) <= 0:
            raise ValueError(f"latents_mean and latents_std need {z_dim} numbers each, the latter above 0")
    elif z_dim != published.z_dim:
        raise CheckpointError(
            f"{files.label} has {z_dim} latent channels; Wan 2.2 has {published.z_dim}, and the statistics "
            "of others are not known here. Use Wan2.2_VAE.pth."
        )
    return VaeConfig(
        z_dim=z_dim,
        base_dim=shape("encoder.conv_in.weight", 5)[0],
        decoder_base_dim=shape("decoder.norm_out.gamma", 4)[0],
        res_blocks=world_files.count_blocks(r"encoder\.down_blocks\.0\.resnets\.(\d+)\.", files.shapes),
        latents_mean=mean,
        latents_std=std,
    )


def rewrite_world(source: Path, folder: Path, tensors: Mapping[str, Tensor], version: int) -> None:
    """Rewrite a world's folder with other transformer weights, by diffusers' names."""
    files = open_world(source).transformer.paths
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as part:
        part.mkdir()
        copy_others(source, part, {ADAPTER_FOLDER, *(file.name for file in files)})
        for file in files:
            shard = TensorFiles(file)
            specs = {name: shard.spec(name) for name in shard.names()}
            new = ((name, tensors.get(transformer_name(name))) for name in specs)
            write_file(part / file.name, specs, ((n, shard.read(n) if t is None else t) for n, t in new))
        if (part / world_files.ABOUT).is_file():
            write_json(part / world_files.ABOUT, read_json(part / world_files.ABOUT) | {"version": version})


def convert_old(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the facts for world.json from that of a folder in format 1, whose weight files stay."""
    vae = {name: content["vae"][name] for name in ("latents_mean", "latents_std")}
    return {name: content["transformer"][name] for name in ("head_dim", "round_timestep")} | vae

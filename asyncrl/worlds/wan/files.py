"""Read and write folders of Wan worlds.

A folder like RLinf-Wan-LIBERO-Spatial holds the transformer (``model-00001.safetensors``, or shards) and the
autoencoder ``Wan2.2_VAE.pth``; asyncrl writes ``transformer.safetensors`` and ``vae.safetensors``. Names of
Wan's authors and of diffusers are both read. Sizes are read from shapes; world.json has the other facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor, nn

from asyncrl.config.sections import ImaginationSettings, WorldDefaults
from asyncrl.devices.float8 import check_device, saved_bytes, use_float8
from asyncrl.errors import CheckpointError
from asyncrl.records import ACTION_DIM, CHUNK, SlotBytes
from asyncrl.storage.atomic import copy_others, read_json, replacing, write_json
from asyncrl.storage.tensor_files import TensorFiles, check_fit, fill, write_file
from asyncrl.worlds.files import (
    ABOUT,
    AS_SAVED,
    WAN_MARKS,
    WAN_PREFIX,
    WeightTypes,
    WorldFolder,
    read_about,
    renamed,
    shape_of,
    transformer_files,
)
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
ADAPTER_FOLDER: Final = "adapter"
"""Where a fit puts adapters alone; those of an earlier one belong to other weights."""
HEAD_DIM: Final = 128
IMAGE_SIZE: Final = 256
SCHEDULE_STEPS: Final = 5
OPENSORA: Final = "x_embedder.proj.weight"
"""A tensor of OpenSora's transformer, which is published in a file of the same name, and not of Wan's."""
TENSORS_AT_ONCE: Final = 10
"""The decoder's largest tensors alive at the peak, measured: docs/measurements/run_speed.md."""
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
    """Map a tensor name of ``Wan2.2_VAE.pth``, or of diffusers, to that of diffusers.

    Example:
        >>> vae_name("decoder.upsamples.0.upsamples.3.time_conv.bias")
        'decoder.up_blocks.0.upsampler.time_conv.bias'
    """
    return renamed(name, _VAE_NAMES)


def open_transformer(folder: Path) -> TensorFiles | None:
    """Open the files of a folder's transformer, by any of its names; None without one."""
    own = [f"{prefix}{name}" for prefix in ("", WAN_PREFIX) for name in _OWN]
    return transformer_files(folder, own, (WAN_TRANSFORMER, TRANSFORMER))


@dataclass(frozen=True, kw_only=True)
class WanFiles(WorldFolder):
    """A Wan world on disk without its weights; tensors have diffusers' names."""

    # Actions enter through these: rounded, they would not cancel what is far from zero, as in pixels.
    EXACT_WEIGHTS = frozenset(
        f"{layer}.{part}" for layer in ("action_mlp1.0", "action_mlp2.0") for part in ("weight", "bias")
    )

    transformer: TensorFiles
    transformer_size: TransformerConfig
    vae: TensorFiles
    vae_size: VaeConfig

    def defaults(self, settings: ImaginationSettings = AS_SAVED) -> WorldDefaults:
        """See `WorldFolder.defaults`."""
        # A distilled decoder goes on from where it stopped, so with it the memory is in latents.
        context = "frames" if self.published and settings.decoder != "tiny" else "latents"
        return replace(super().defaults(settings), context=context)

    def context(self, settings: ImaginationSettings) -> Literal["frames", "latents"]:
        """Return the form of the memory, see `ImaginationSettings.context`."""
        return self.defaults(settings).context if settings.context == "auto" else settings.context

    @property
    def action_dim(self) -> int:
        """Numbers per action."""
        return self.transformer_size.action_dim

    def slot_bytes(self, settings: ImaginationSettings = AS_SAVED, decisions: int = 0) -> SlotBytes:
        """See `WorldFolder.slot_bytes`."""
        _, vae = self.build()
        nn.Module.to(vae, self.types(settings).dtype)  # diffusers' own `to` warns
        return slot_bytes(vae, self.image_size, self.context(settings))

    def build(self) -> tuple[ActionWanTransformer, WanVae]:
        """Build the modules without memory for their weights (on the meta device)."""
        with torch.device("meta"):
            return ActionWanTransformer(self.transformer_size), WanVae(self.vae_size)

    def check(self, settings: ImaginationSettings = AS_SAVED) -> int:
        """See `WorldFolder.check`."""
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
        """Load the networks for inference, one tensor at a time, straight to `device`; see `load_world`."""
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


def open_world(folder: Path) -> WanFiles:
    """Read sizes and facts of a world, without its weights."""
    transformer = open_transformer(folder)
    about = read_about(folder, KIND, published=transformer is not None)
    if transformer is None:
        raise CheckpointError(f"{folder / TRANSFORMER} is missing. Save the world again.")
    vae_file = next((path for name in (WAN_VAE, VAE) if (path := folder / name).is_file()), None)
    if vae_file is None:
        wanted = VAE if about else WAN_VAE
        raise CheckpointError(
            f"{folder} holds a transformer ({transformer.paths[0].name}) and no autoencoder: "
            f"{folder / wanted} does not exist. Download it into the same folder."
        )
    vae = TensorFiles(vae_file)
    try:
        return WanFiles(
            folder=folder,
            transformer=transformer.renamed(transformer_name),
            transformer_size=recognise_transformer(transformer, about),
            vae=vae.renamed(vae_name),
            vae_size=recognise_vae(vae, about),
            image_size=about.get("image_size", IMAGE_SIZE),
            schedule_steps=about.get("schedule_steps", SCHEDULE_STEPS),
            version=about.get("version", 0),
            published=not about,
        )
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{folder / ABOUT} is incomplete ({error}). Save the world again.") from error


def recognise_transformer(files: TensorFiles, about: Mapping[str, Any]) -> TransformerConfig:
    """Return the size of the transformer in `files`."""
    shapes = {transformer_name(name): shape for name, shape in files.shapes.items()}
    numbers = shapes.get("action_mlp1.0.weight", (0,))[-1] if about else ACTION_DIM
    if why := _unsupported(shapes, numbers):
        raise CheckpointError(
            f"{files.label} {why}. The variant that can be read takes 7-D actions in cross-attention and in "
            "the modulation (TI2V2): the model-00001.safetensors of RLinf-Wan-LIBERO-Spatial, -Object or "
            "-Goal."
        )

    def shape(name: str, axes: int) -> torch.Size:
        return shape_of(files, shapes, name, axes, "Wan model")

    width, channels, _, patch, _ = shape("patch_embedding.weight", 5)
    head_dim = int(about["head_dim"]) if about else HEAD_DIM
    if head_dim < 1 or width % head_dim:
        raise CheckpointError(f"{files.label} is {width} channels wide, with heads of {head_dim}.")
    return TransformerConfig(
        heads=width // head_dim,
        head_dim=head_dim,
        layers=_count(r"blocks\.(\d+)\.", shapes),
        ffn_dim=shape("blocks.0.ffn.net.0.proj.weight", 2)[0],
        channels=channels,
        patch=patch,
        freq_dim=shape("condition_embedder.time_embedder.linear_1.weight", 2)[1],
        round_timestep=bool(about["round_timestep"]) if about else True,
        action_dim=numbers,
    )


def _unsupported(shapes: Mapping[str, torch.Size], numbers: int) -> str | None:
    token, vector = (shapes.get(f"action_mlp{n}.0.weight") for n in (1, 2))
    scales = sorted(name for name in shapes if name.startswith("action_scale"))
    if OPENSORA in shapes:
        return "is OpenSora's (STDiT3), and not Wan's"
    if any(transformer_name(mark) not in shapes for mark in WAN_MARKS):
        return f"is no Wan transformer (it lacks {' or '.join(WAN_MARKS)})"
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
    if (token[-1], vector[-1]) != (numbers, FRAMES_PER_LATENT * numbers):
        return f"takes actions of {token[-1]} numbers"
    return None


def recognise_vae(files: TensorFiles, about: Mapping[str, Any]) -> VaeConfig:
    """Return the size of the autoencoder in `files`; arguments as of `recognise_transformer`."""
    shapes = {vae_name(name): shape for name, shape in files.shapes.items()}
    z_dim = shape_of(files, shapes, "post_quant_conv.weight", 5, "Wan model")[0]
    if about:
        mean, std = (tuple(map(float, about[name])) for name in ("latents_mean", "latents_std"))
        if not len(mean) == len(std) == z_dim:
            raise ValueError(f"latents_mean and latents_std need {z_dim} numbers each")
    else:
        full = VaeConfig.full()
        if z_dim != full.z_dim:
            raise CheckpointError(
                f"{files.label} has {z_dim} latent channels; Wan 2.2 has {full.z_dim}, and the statistics of "
                "others are not known here. Use Wan2.2_VAE.pth."
            )
        mean, std = full.latents_mean, full.latents_std
    return VaeConfig(
        z_dim=z_dim,
        base_dim=shape_of(files, shapes, "encoder.conv_in.weight", 5, "Wan model")[0],
        decoder_base_dim=shape_of(files, shapes, "decoder.norm_out.gamma", 4, "Wan model")[0],
        res_blocks=_count(r"encoder\.down_blocks\.0\.resnets\.(\d+)\.", shapes),
        latents_mean=mean,
        latents_std=std,
    )


def _count(pattern: str, names: Iterable[str]) -> int:
    matches = (re.match(pattern, name) for name in names)
    return len({match[1] for match in matches if match})


def rewrite_world(source: Path, folder: Path, tensors: Mapping[str, Tensor], version: int) -> None:
    """Write a world's folder again with other weights of its transformer, by diffusers' names."""
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
        if (part / ABOUT).is_file():
            write_json(part / ABOUT, read_json(part / ABOUT) | {"version": version})


def convert_old(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the facts for world.json from that of a folder in format 1, whose weight files stay."""
    vae = {name: content["vae"][name] for name in ("latents_mean", "latents_std")}
    return {name: content["transformer"][name] for name in ("head_dim", "round_timestep")} | vae

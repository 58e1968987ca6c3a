"""Recognise the published EVAC checkpoints by their tensors, and turn those into ours.

One file holds all networks under prefixes: a Lightning checkpoint (``*.ckpt``) or one of DeepSpeed (``*.pt``,
whose names begin with ``_forward_module.``). OpenCLIP's tower may lie in a file of its own, and the model of
the hand's poses does. Files say nothing about sizes: they are read from the shapes. What the shapes do not
tell is the same in all of them: heads of 64 channels (80 in the image encoder), groups of norms, conventions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from asyncrl.errors import CheckpointError
from asyncrl.records import ACTION_DIM, CHUNK, POSE_DIM
from asyncrl.storage.tensor_reader import TensorFiles
from asyncrl.worlds.evac.autoencoder import (
    AutoencoderConfig,
    autoencoder_tensor_from_published,
    published_autoencoder,
)
from asyncrl.worlds.evac.conditions import EvacNetworks
from asyncrl.worlds.evac.config import EvacConfig
from asyncrl.worlds.evac.image_tokens import (
    ImageEncoderConfig,
    image_tensor_from_published,
    published_image_encoder,
)
from asyncrl.worlds.evac.recognition import MARK, PICKLED, WRAPPED
from asyncrl.worlds.evac.resampler import ResamplerConfig
from asyncrl.worlds.evac.unet import UNetConfig
from asyncrl.worlds.safe_pickle import CkptFile

PREFIXES: Final = {
    "unet": "model.diffusion_model.",
    "autoencoder": "first_stage_model.",
    "action_resampler": "cond_stage_model.",
    "image_resampler": "image_proj_model.",
    "image_encoder": "embedder.model.visual.",
}
TOWER: Final = "visual.transformer.resblocks.0.attn.in_proj_weight"
"""A tensor of OpenCLIP's own file."""
HEAD_DIM: Final = 64
IMAGE_HEAD_DIM: Final = 80
TOKENS_PER_FRAME: Final = 16
IMAGE_SIZE: Final = 256
MAX_DECISIONS: Final = 32
"""256 steps, the length of episodes in RLinf's configuration of this world."""
TEMPERATURE: Final = 1.6
"""At which RLinf's GRPO samples the policy in it."""

# Of the noise schedule, which is known without a file; of OpenCLIP's text tower, and statistics of pictures.
_IGNORED: Final = re.compile(
    r"(alphas|sqrt|log|posterior)_\w+|betas|lvlb_weights|logvar|scale_arr|scale_factor|global_step|"
    r"embedder\.(mean|std)|embedder\.model\.(positional_embedding|text_projection|logit_scale|attn_mask|"
    r"visual\.proj|token_embedding\..+|ln_final\..+|transformer\..+)"
)


Source = CkptFile | TensorFiles
"""A file of tensors."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor is."""

    source: Source
    stored: str
    """Its name there."""
    shape: torch.Size


@dataclass(frozen=True, kw_only=True)
class PublishedFiles:
    """The tensors of a published world: network -> name without prefix -> where it is."""

    label: str
    """What errors call them."""
    parts: Mapping[str, Mapping[str, Entry]]

    def config(self) -> EvacConfig:
        """Read the sizes from the shapes.

        Raises:
            CheckpointError: A tensor is missing or misshapen, or the parts do not fit together.
        """
        shapes = {
            part: _Shapes(PREFIXES.get(part, ""), {name: entry.shape for name, entry in entries.items()})
            for part, entries in self.parts.items()
        }
        try:
            config = EvacConfig(
                image_size=IMAGE_SIZE,
                unet=_unet_size(shapes["unet"]),
                autoencoder=_autoencoder_size(shapes["autoencoder"]),
                image_encoder=_image_encoder_size(shapes["image_encoder"]),
                image_resampler=_resampler_size(shapes["image_resampler"]),
                action_resampler=_resampler_size(shapes["action_resampler"]),
                pose_hidden=shapes["pose_model"]["net.0.weight"][0],
            )
        except KeyError as error:
            raise CheckpointError(f"{self.label} lacks tensor {error.args[0]}. Download it again.") from error
        except (ValueError, IndexError) as error:
            raise CheckpointError(f"{self.label} holds no EVAC world that can be read: {error}.") from error
        if config.image_resampler.queries != TOKENS_PER_FRAME * CHUNK:
            raise CheckpointError(
                f"{self.label}: tensor image_proj_model.latents has {config.image_resampler.queries} tokens, "
                f"those of chunks of {config.image_resampler.queries // TOKENS_PER_FRAME}; a decision has "
                f"{CHUNK} steps. Use a checkpoint for chunks of {CHUNK} (RLinf's for LIBERO)."
            )
        return config

    def check(self, networks: EvacNetworks) -> None:
        """Compare names and shapes with those of `networks`, which may be on the meta device.

        Raises:
            CheckpointError: One is missing, misshapen or unknown; says which, by its published name.
        """
        for part, wanted in expected(networks).items():
            found, prefix = self.parts[part], PREFIXES.get(part, "")
            for name, shape in wanted.items():
                if name not in found:
                    raise CheckpointError(
                        f"{self.label} lacks tensor {prefix}{name} of shape {list(shape)}. Download it again."
                    )
                if found[name].shape != shape:
                    raise CheckpointError(
                        f"{self.label}: tensor {prefix}{name} has shape {list(found[name].shape)}, the model "
                        f"needs {list(shape)}. Download it again."
                    )
            if unknown := sorted(found.keys() - wanted.keys()):
                raise CheckpointError(
                    f"{self.label} holds tensor {prefix}{unknown[0]}, which the model has no use for. It "
                    "belongs to another variant."
                )

    def tensors(self, part: str, config: EvacConfig) -> dict[str, Callable[[], dict[str, Tensor]]]:
        """Return for each tensor of a network how to read it: as ours, by our names."""
        return {
            name: lambda n=name, e=entry: converted(part, n, e.source.read(e.stored), config)
            for name, entry in self.parts[part].items()
        }


def converted(part: str, name: str, tensor: Tensor, config: EvacConfig) -> dict[str, Tensor]:
    """Turn a published tensor of a network, by its name without prefix, into ours."""
    if part == "autoencoder":
        return autoencoder_tensor_from_published(name, tensor, len(config.autoencoder.multipliers))
    if part == "image_encoder":
        return image_tensor_from_published(name, tensor)
    return {name: tensor}


def published_tensors(networks: EvacNetworks) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each network by their published names without prefixes."""
    autoencoder: Any = networks.autoencoder
    found = {name: dict(module.state_dict()) for name, module in networks.by_name().items()}
    levels = len(autoencoder.config.block_out_channels)
    found["autoencoder"] = published_autoencoder(autoencoder, levels)
    found["image_encoder"] = published_image_encoder(networks.image_encoder)
    return found


def expected(networks: EvacNetworks) -> dict[str, dict[str, torch.Size]]:
    """Return names without prefixes and shapes that the files of `networks` have."""
    return {
        part: {name: tensor.shape for name, tensor in tensors.items()}
        for part, tensors in published_tensors(networks).items()
    }


def find_published(folder: Path) -> PublishedFiles | None:
    """Look for a published world in a folder, by the tensors of its files; None: there is none.

    Raises:
        CheckpointError: A file cannot be read, or a part of the world is missing.
    """
    sources, errors = _sources(folder)
    main = [path for path, source in sources.items() if MARK in _bare(source)]
    if not main:
        if errors:  # Perhaps it is the one that cannot be read.
            raise errors[0]
        return None
    if len(main) > 1:
        raise CheckpointError(
            f"{folder} holds several EVAC checkpoints ({main[0].name}, {main[1].name}). Keep one."
        )
    label, entries = str(main[0]), _bare(sources[main[0]])
    parts: dict[str, dict[str, Entry]] = {part: {} for part in PREFIXES}
    for name, entry in entries.items():
        part = next((part for part, prefix in PREFIXES.items() if name.startswith(prefix)), None)
        if part is not None and not _IGNORED.fullmatch(name):
            parts[part][name.removeprefix(PREFIXES[part])] = entry
        elif part is None and not _IGNORED.fullmatch(name):
            raise CheckpointError(
                f"{label} holds tensor {name}, which the model has no use for. It belongs to another variant."
            )
    tower = parts["image_encoder"] or _tower(sources)
    poses = _pose_model(sources)
    if errors and not (tower and poses):
        raise errors[0]
    if not tower:
        raise CheckpointError(
            f"{folder} holds an EVAC checkpoint without the image encoder (no tensor "
            f"{PREFIXES['image_encoder']}conv1.weight), and no file with {TOWER}. Put "
            "open_clip_pytorch_model.bin of OpenCLIP's ViT-H-14 beside it."
        )
    if not poses:
        raise CheckpointError(
            f"{folder} holds an EVAC checkpoint and no model of the hand's poses (no file with a linear "
            f"layer of {ACTION_DIM + POSE_DIM} inputs, abs_action_mean and abs_action_std). Put it beside "
            "the checkpoint."
        )
    parts |= {"image_encoder": tower, "pose_model": poses}
    return PublishedFiles(label=label, parts=parts)


def _sources(folder: Path) -> tuple[dict[Path, Source], list[CheckpointError]]:
    """Open the weight files of a folder, and say what is wrong with those that cannot be read."""
    found: dict[Path, Source] = {}
    errors = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        try:
            if path.suffix in PICKLED:
                found[path] = CkptFile(path)
            elif path.suffix == ".safetensors":
                found[path] = TensorFiles(path)
        except CheckpointError as error:
            errors.append(error)
    return found, errors


def _bare(source: Source) -> dict[str, Entry]:
    """Return where the tensors of a file are, by their names without DeepSpeed's prefix."""
    return {n.removeprefix(WRAPPED): Entry(source, n, shape) for n, shape in source.shapes.items()}


def _tower(sources: Mapping[Path, Source]) -> dict[str, Entry]:
    """Find OpenCLIP's visual tower in a file of its own; else nothing."""
    for source in sources.values():
        if TOWER in source.shapes:
            named = (
                (n.removeprefix("visual."), e) for n, e in _bare(source).items() if n.startswith("visual.")
            )
            return {name: entry for name, entry in named if name != "proj"}
    return {}


def _pose_model(sources: Mapping[Path, Source]) -> dict[str, Entry]:
    """Find the model of the hand's poses by its shapes: what its layers are called is not agreed upon.

    Raises:
        CheckpointError: A file has only a part of it.
    """
    inputs = ACTION_DIM + POSE_DIM
    for path, source in sources.items():
        entries = _bare(source)
        weights = {n: e.shape for n, e in entries.items() if n.endswith("weight") and len(e.shape) == 2}
        first = [name for name, shape in weights.items() if shape[1] == inputs]
        statistics = {n.rpartition(".")[2]: n for n in entries if re.search(r"abs_action_(mean|std)$", n)}
        if len(first) != 1 or len(statistics) != 2:
            continue
        hidden = weights[first[0]][0]
        sizes = ((hidden, inputs), (hidden, hidden), (POSE_DIM, hidden))
        layers = [name for size in sizes for name, shape in weights.items() if shape == size]
        biases = [name.removesuffix("weight") + "bias" for name in layers]
        if len(layers) != 3 or not all(name in entries for name in biases):
            raise CheckpointError(
                f"{path} holds tensor {first[0]} and not the three linear layers of a model of the hand's "
                "poses. Download it again."
            )
        named = {f"net.{2 * i}.weight": entries[name] for i, name in enumerate(layers)}
        named |= {f"net.{2 * i}.bias": entries[name] for i, name in enumerate(biases)}
        return named | {short: entries[name] for short, name in statistics.items()}
    return {}


class _Shapes(dict[str, torch.Size]):
    """Shapes by name without prefix; a name that is missing is said with it."""

    def __init__(self, prefix: str, shapes: Mapping[str, torch.Size]) -> None:
        super().__init__(shapes)
        self.prefix = prefix

    def __missing__(self, name: str) -> torch.Size:
        raise KeyError(self.prefix + name)


Shapes = Mapping[str, torch.Size]


def _highest(pattern: str, shapes: Shapes) -> int:
    """Return the largest number that a pattern finds in the names, or -1."""
    return max((int(match[1]) for name in shapes if (match := re.match(pattern, name))), default=-1)


def _unet_size(shapes: Shapes) -> UNetConfig:
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
        head_dim=HEAD_DIM,
        context_dim=shapes["middle_block.1.transformer_blocks.0.attn2.to_k_ip.weight"][1],
        initial_inner=inner,
        in_channels=inputs,
        out_channels=shapes["out.2.weight"][0],
        domains=shapes["domain_embedding.weight"][0],
    )


def _autoencoder_size(shapes: Shapes) -> AutoencoderConfig:
    channels = shapes["encoder.conv_in.weight"][0]
    levels = 1 + _highest(r"encoder\.down\.(\d+)\.", shapes)
    widths = [shapes[f"encoder.down.{i}.block.0.conv1.weight"][0] for i in range(levels)]
    return AutoencoderConfig(
        channels=channels,
        multipliers=tuple(width // channels for width in widths),
        res_blocks=1 + _highest(r"encoder\.down\.0\.block\.(\d+)\.", shapes),
        latent=shapes["post_quant_conv.weight"][0],
    )


def _image_encoder_size(shapes: Shapes) -> ImageEncoderConfig:
    width, _, patch, _ = shapes["conv1.weight"]
    return ImageEncoderConfig(
        width=width,
        layers=1 + _highest(r"transformer\.resblocks\.(\d+)\.", shapes),
        heads=width // IMAGE_HEAD_DIM,
        mlp=shapes["transformer.resblocks.0.mlp.c_fc.weight"][0],
        patch=patch,
        size=patch * round((shapes["positional_embedding"][0] - 1) ** 0.5),
    )


def _resampler_size(shapes: Shapes) -> ResamplerConfig:
    _, queries, width = shapes["latents"]
    return ResamplerConfig(
        inputs=shapes["proj_in.weight"][1],
        queries=queries,
        width=width,
        depth=1 + _highest(r"layers\.(\d+)\.", shapes),
        heads=shapes["layers.0.0.to_q.weight"][0] // HEAD_DIM,
        head_dim=HEAD_DIM,
    )


def fill_published(
    networks: EvacNetworks,
    files: PublishedFiles,
    config: EvacConfig,
    *,
    dtypes: Mapping[str, torch.dtype],
    device: torch.device | str,
) -> None:
    """Give `networks` (which may live on the meta device) the published weights, one tensor at a time."""
    files.check(networks)
    for part, module in networks.by_name().items():
        ready: dict[str, Tensor] = {}
        for read in files.tensors(part, config).values():
            ready |= {name: t.to(device, dtypes[part], copy=True) for name, t in read().items()}
        nn.Module.load_state_dict(module, ready, assign=True)

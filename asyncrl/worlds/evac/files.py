"""Read and write folders of EVAC worlds.

EVAC is published as one training checkpoint of Lightning (``*.ckpt``) or DeepSpeed (``*.pt``) with all
networks under prefixes; OpenCLIP's tower may lie in a file of its own, the model of the hand's poses does.
asyncrl writes a safetensors file per network, named by its prefix, and facts that shapes do not determine.
The autoencoder has the names of latent diffusion (arXiv 2112.10752), which count the decoder's levels in the
opposite direction to diffusers. OpenCLIP keeps queries, keys and values in one tensor.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from asyncrl.config.sections import ImaginationSettings
from asyncrl.errors import CheckpointError
from asyncrl.records import ACTION_DIM, CHUNK, POSE_DIM, SlotBytes
from asyncrl.storage.tensor_files import TensorFiles, check_shapes, write_tensors
from asyncrl.storage.untrusted import files_in
from asyncrl.worlds import files as world_files
from asyncrl.worlds.evac import conditions
from asyncrl.worlds.evac.conditions import EvacConfig, EvacNetworks
from asyncrl.worlds.evac.ddim import LEVELS
from asyncrl.worlds.evac.poses import Camera, MotionStatistics
from asyncrl.worlds.evac.unet import UNetConfig
from asyncrl.worlds.layers import FrameVaeConfig

KIND: Final = "evac"
_WRAPPED: Final = "_forward_module."  # in front of all names in DeepSpeed's files
_TOWER: Final = "visual.transformer.resblocks.0.attn.in_proj_weight"  # in OpenCLIP's own file
# Of the noise schedule, which is known without a file; of OpenCLIP's text tower, and statistics of pictures.
_IGNORED: Final = re.compile(
    r"(alphas|sqrt|log|posterior)_\w+|betas|lvlb_weights|logvar|scale_arr|scale_factor|global_step|"
    r"embedder\.(mean|std)|embedder\.model\.(positional_embedding|text_projection|logit_scale|attn_mask|"
    r"visual\.proj|token_embedding\..+|ln_final\..+|transformer\..+)"
)
_ADVICE: Final = {
    "image_encoder": f"without the image encoder (no tensor embedder.model.visual.conv1.weight), and no file "
    f"with {_TOWER}. Put open_clip_pytorch_model.bin of OpenCLIP's ViT-H-14 next to it.",
    "pose_model": "and no model of the hand's poses (no file with three linear layers, the first of "
    f"{ACTION_DIM + POSE_DIM} inputs, abs_action_mean and abs_action_std). Put it next to the checkpoint.",
}
_IMAGE_SIZE, _TOKENS_PER_FRAME = 256, 16  # as published
# Facts in world.json, by object.
_FACTS: Final = {
    "unet": ("head_dim", "groups"),
    "autoencoder": ("groups", "scale"),
    "image_encoder": ("heads",),
    "image_resampler": ("head_dim",),
    "action_resampler": ("head_dim",),
    "camera": tuple(fact.name for fact in fields(Camera)),
    "motions": tuple(fact.name for fact in fields(MotionStatistics)),
}
_OTHER_FACTS: Final = ("image_size", "schedule_steps", "history", "fps", "domain")
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
_NAMES: Final = {
    "autoencoder": (
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
    ),
    "image_encoder": (
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
    ),
}
_SQUARE: Final = re.compile(r"\.mid\.attn_1\.(q|k|v|proj_out)\.weight$")
"""Matrices of the autoencoder that are published as convolutions of one pixel."""


def grouped(part: str, state: Mapping[str, Tensor], levels: int) -> dict[str, list[tuple[str, Tensor]]]:
    """Group tensors by the published tensor that holds them: one each, or queries, keys and values."""
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for own, tensor in state.items():
        name = world_files.renamed(own, _NAMES.get(part, ()))
        if part == "autoencoder":
            name = re.sub(r"\.up\.(\d+)\.", lambda match: f".up.{levels - 1 - int(match[1])}.", name)
        groups.setdefault(name, []).append((own, tensor))
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


# ---- folders ----


@dataclass(frozen=True, kw_only=True)
class EvacFiles(world_files.WorldFolder):
    """An EVAC world on disk without its weights."""

    label: str  # Name of the files in errors.
    config: EvacConfig
    tensors: Mapping[str, TensorFiles]  # By published name; all but those that nothing reads.

    def slot_bytes(self, decisions: int = 0) -> SlotBytes:
        """See `WorldFolder.slot_bytes`; a slot remembers its whole episode."""
        return conditions.estimate_slot(self.config, decisions, self.dtype)

    def _build(self) -> EvacNetworks:
        with torch.device("meta"):
            return EvacNetworks(self.config)

    def check(self) -> int:
        """See `WorldFolder.check`."""
        networks = self._build()
        wanted = {
            PREFIXES[part] + name: tensor.shape
            for part, tensors in published_tensors(networks).items()
            for name, tensor in tensors.items()
        }
        check_shapes(self.label, wanted, _shapes(self.tensors), unused=False)
        modules = networks.by_name().items()
        return sum(p.numel() * self._dtype(n).itemsize for n, m in modules for p in m.parameters())

    def load(self, device: torch.device, dtype: torch.dtype | None = None) -> EvacNetworks:
        """Load the networks for inference, one tensor at a time."""
        self.check()
        networks, levels = self._build(), len(self.config.autoencoder.widths)
        for part, module in networks.by_name().items():
            ready: dict[str, Tensor] = {}
            for name, group in grouped(part, module.state_dict(), levels).items():
                tensor = self.tensors[PREFIXES[part] + name].read(PREFIXES[part] + name)
                for (own, like), piece in zip(group, tensor.chunk(len(group)), strict=True):
                    ready[own] = piece.reshape(like.shape).to(device, self._dtype(part, dtype), copy=True)
            nn.Module.load_state_dict(module, ready, assign=True)
            module.eval().requires_grad_(False)
        networks.image_encoder.set_constants(device)
        return networks

    def _dtype(self, part: str, dtype: torch.dtype | None = None) -> torch.dtype:
        # Poses add up over an episode.
        return torch.float32 if part == "pose_model" else dtype or self.dtype


def _shapes(tensors: Mapping[str, TensorFiles]) -> dict[str, torch.Size]:
    return {name: torch.Size(files.spec(name).shape) for name, files in tensors.items()}


def open_evac(folder: Path, settings: ImaginationSettings = world_files.AS_SAVED) -> EvacFiles:
    """See `FolderWorld.files`."""
    world_files.refuse(
        {
            "context is frames, but an EVAC world remembers the latents that it drew. Use auto or latents.": (
                settings.context == "frames"
            ),
            "decoder is tiny, but EVAC's autoencoder has no distilled decoder. Use full.": (
                settings.decoder == "tiny"
            ),
            "precision is float8, but of an EVAC world's denoiser most are convolutions, which have no 8-bit "
            "products. Use stored or bf16.": settings.precision == "float8",
            f"steps is {settings.steps}, but EVAC has {LEVELS} noise levels. Use 1 to {LEVELS}, or 0 for the "
            "folder's number.": settings.steps > LEVELS,
        }
    )
    label, tensors = _find_tensors(folder)
    if not tensors and not (folder / world_files.ABOUT).is_file():
        raise CheckpointError(
            f"{folder} holds no EVAC world: neither a world.json of kind {KIND!r} nor a checkpoint (*.ckpt, "
            f"*.pt) with tensor {world_files.EVAC_MARK}."
        )
    about = world_files.read_about(folder, KIND, published=bool(tensors))
    if not tensors:
        raise CheckpointError(f"{folder / file_name('unet')} is missing. Save the world again.")
    if about and (absent := [name for name in (*_FACTS, *_OTHER_FACTS) if name not in about]):
        raise CheckpointError(
            f"{folder / world_files.ABOUT} is incomplete (no {absent[0]}). Save the world again."
        )
    try:
        config = read_config(_shapes(tensors), about)
    except KeyError as error:
        raise CheckpointError(f"{label} lacks tensor {error.args[0]}. Download it again.") from error
    except (ValueError, TypeError, AttributeError, IndexError, ZeroDivisionError) as error:
        place = (
            f"{folder / world_files.ABOUT} is incomplete or impossible"
            if about
            else f"{label} holds no EVAC world"
        )
        raise CheckpointError(f"{place} ({error}). Save or download it again.") from error
    queries = config.image_resampler.queries
    if not about and queries != _TOKENS_PER_FRAME * CHUNK:
        raise CheckpointError(
            f"{label}: tensor image_proj_model.latents has {queries} tokens, those of chunks of "
            f"{queries // _TOKENS_PER_FRAME}; a decision has {CHUNK} steps. Use a checkpoint for chunks of "
            f"{CHUNK} (RLinf's for LIBERO)."
        )
    return EvacFiles(
        folder=folder,
        settings=settings,
        image_size=config.image_size,
        schedule_steps=config.schedule_steps,
        version=about.get("version", 0),
        published=not about,
        label=label,
        config=config,
        tensors=tensors,
    )


def convert_old(about: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Turn the files of format 1 in `folder` into those of this version; return the facts of world.json."""
    config = about["config"]
    for part in PREFIXES:
        old = folder / f"{part}.safetensors"
        files = TensorFiles(old)
        state = {name: files.read(name) for name in files.names()}
        old.unlink()
        levels = len(config["autoencoder"]["multipliers"])
        write_tensors(folder / file_name(part), published_state(part, state, levels))
    return facts_of(config)


def file_name(part: str) -> str:
    """Return the name of the file that asyncrl writes for a network."""
    return f"{PREFIXES[part]}safetensors"


def facts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of world.json: those of a config that shapes do not determine."""
    parts = {name: {key: config[name][key] for key in keys} for name, keys in _FACTS.items()}
    return parts | {name: config[name] for name in _OTHER_FACTS}


def _find_tensors(folder: Path) -> tuple[str, dict[str, TensorFiles]]:
    """Return a world's main file and its tensors' files by published name; both empty without a main file."""
    files, errors = _open_files(folder)
    main = [path for path, held in files.items() if world_files.EVAC_MARK in held.names()]
    if not main:
        if errors:  # Perhaps it is the one that cannot be read.
            raise errors[0]
        return "", {}
    if len(main) > 1:
        raise CheckpointError(
            f"{folder} holds several EVAC checkpoints ({main[0].name}, {main[1].name}). Keep one."
        )
    own = {main[0].name, *map(file_name, PREFIXES)}
    tensors = {
        name: held
        for path, held in files.items()
        if path.name in own
        for name in held.names()
        if not _IGNORED.fullmatch(name)
    }
    for part, names_of in (("image_encoder", _tower_names), ("pose_model", _pose_names)):
        if any(name.startswith(PREFIXES[part]) for name in tensors):
            continue
        found = ((held, names_of(held.shapes)) for held in files.values())
        named = next((held.renamed(names.get) for held, names in found if names), None)
        if named is None:
            raise errors[0] if errors else CheckpointError(f"{main[0]} is an EVAC checkpoint {_ADVICE[part]}")
        tensors |= dict.fromkeys(named.names(), named)
    for error in errors:
        logging.getLogger(__name__).warning("A file besides the world's cannot be read: %s", error)
    return str(main[0]), tensors


def _open_files(folder: Path) -> tuple[dict[Path, TensorFiles], list[CheckpointError]]:
    files, errors = dict[Path, TensorFiles](), list[CheckpointError]()
    own = {file_name(part): prefix for part, prefix in PREFIXES.items()}
    for path in files_in(folder, *world_files.EVAC_SUFFIXES):
        prefix = own.get(path.name, "")
        try:
            files[path] = TensorFiles(path, rename=lambda n, prefix=prefix: prefix + n.removeprefix(_WRAPPED))
        except CheckpointError as error:
            errors.append(error)
    return files, errors


# These two map stored names to published ones; an empty result stands for another file.


def _tower_names(shapes: Mapping[str, torch.Size]) -> dict[str, str]:
    visual = {name: name.removeprefix("visual.") for name in shapes if name.startswith("visual.")}
    found = {name: PREFIXES["image_encoder"] + own for name, own in visual.items() if own != "proj"}
    return found if _TOWER in shapes else {}


def _pose_names(shapes: Mapping[str, torch.Size]) -> dict[str, str]:
    """Map the file's names to published ones by the layers' shapes, because the names vary."""
    weights = {name: s for name, s in shapes.items() if name.endswith("weight") and len(s) == 2}
    hidden = [out for out, inputs in weights.values() if inputs == ACTION_DIM + POSE_DIM][:1]
    sizes = [(n, m) for h in hidden for n, m in ((h, ACTION_DIM + POSE_DIM), (h, h), (POSE_DIM, h))]
    layers = [name.removesuffix("weight") for size in sizes for name, s in weights.items() if s == size]
    names = {
        f"{layer}{kind}": f"net.{2 * i}.{kind}"
        for i, layer in enumerate(layers)
        for kind in ("weight", "bias")
    }
    names |= {n: n.rpartition(".")[2] for n in shapes if re.search(r"abs_action_(mean|std)$", n)}
    found = {name: PREFIXES["pose_model"] + own for name, own in names.items() if name in shapes}
    return found if len(layers) == 3 and len(found) == 8 else {}


# ---- sizes ----


class _Sizes(dict[str, torch.Size]):
    """Shapes of a network's tensors by name without prefix; the KeyError of a missing one has the prefix."""

    def __init__(self, prefix: str, shapes: Mapping[str, torch.Size]) -> None:
        self.prefix = prefix
        super().__init__({n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)})

    def __missing__(self, name: str) -> torch.Size:
        raise KeyError(self.prefix + name)


def read_config(shapes: Mapping[str, torch.Size], about: Mapping[str, Any]) -> EvacConfig:
    """Read the sizes of a world from shapes and world.json; without the latter, facts are as published."""
    sizes = {part: _Sizes(prefix, shapes) for part, prefix in PREFIXES.items()}
    facts: dict[str, dict[str, Any]] = {
        name: {key: tuple(x) if isinstance(x, list) else x for key, x in about.get(name, {}).items()}
        for name in _FACTS
    }
    others = {name: about[name] for name in _OTHER_FACTS} if about else {"image_size": _IMAGE_SIZE}
    return EvacConfig(
        unet=_unet_size(sizes["unet"], facts["unet"]),
        autoencoder=_autoencoder_size(sizes["autoencoder"], facts["autoencoder"]),
        image_encoder=_image_encoder_size(sizes["image_encoder"], facts["image_encoder"]),
        image_resampler=_resampler_size(sizes["image_resampler"], facts["image_resampler"]),
        action_resampler=_resampler_size(sizes["action_resampler"], facts["action_resampler"]),
        camera=Camera(**facts["camera"]),
        motions=MotionStatistics(**facts["motions"]),
        pose_hidden=sizes["pose_model"]["net.0.weight"][0],
        **others,
    )


def _unet_size(shapes: _Sizes, facts: Mapping[str, Any]) -> UNetConfig:
    channels, inputs = shapes["input_blocks.0.0.weight"][:2]
    level, blocks, multipliers, attention = 0, [0], [1], set[int]()
    for number in range(1, world_files.count_blocks(r"input_blocks\.(\d+)\.", shapes)):
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


def _autoencoder_size(shapes: _Sizes, facts: Mapping[str, Any]) -> FrameVaeConfig:
    levels = range(world_files.count_blocks(r"encoder\.down\.(\d+)\.", shapes))
    return FrameVaeConfig(
        widths=tuple(shapes[f"encoder.down.{i}.block.0.conv1.weight"][0] for i in levels),
        layers_per_block=world_files.count_blocks(r"encoder\.down\.0\.block\.(\d+)\.", shapes),
        channels=shapes["post_quant_conv.weight"][0],
        **{"scale": _SCALE, **facts},
    )


def _image_encoder_size(shapes: _Sizes, facts: Mapping[str, Any]) -> conditions.ImageEncoderConfig:
    width, _, patch, _ = shapes["conv1.weight"]
    return conditions.ImageEncoderConfig(
        width=width,
        layers=world_files.count_blocks(r"transformer\.resblocks\.(\d+)\.", shapes),
        heads=facts.get("heads", width // _IMAGE_HEAD_DIM),
        mlp=shapes["transformer.resblocks.0.mlp.c_fc.weight"][0],
        patch=patch,
        size=patch * round((shapes["positional_embedding"][0] - 1) ** 0.5),
    )


def _resampler_size(shapes: _Sizes, facts: Mapping[str, Any]) -> conditions.ResamplerConfig:
    _, queries, width = shapes["latents"]
    head_dim = facts.get("head_dim", _HEAD_DIM)
    return conditions.ResamplerConfig(
        inputs=shapes["proj_in.weight"][1],
        queries=queries,
        width=width,
        depth=world_files.count_blocks(r"layers\.(\d+)\.", shapes),
        heads=shapes["layers.0.0.to_q.weight"][0] // head_dim,
        head_dim=head_dim,
    )

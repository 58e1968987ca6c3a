"""Read and write folders of EVAC worlds.

EVAC is published as one training checkpoint of Lightning (``*.ckpt``) or DeepSpeed (``*.pt``) with all
networks under prefixes; OpenCLIP's tower may lie in a file of its own, the model of the hand's poses does.
asyncrl writes a safetensors file per network, named by its prefix, and facts that shapes do not tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from asyncrl.config.sections import ImaginationSettings
from asyncrl.errors import CheckpointError
from asyncrl.records import ACTION_DIM, CHUNK, POSE_DIM, SlotBytes
from asyncrl.storage.tensor_files import TensorFiles
from asyncrl.storage.untrusted import check_sizes, shortened
from asyncrl.storage.weight_files import write_tensors
from asyncrl.worlds.evac.conditions import (
    FRAMES_AT_ONCE,
    EvacConfig,
    EvacNetworks,
    ImageEncoderConfig,
    ResamplerConfig,
)
from asyncrl.worlds.evac.poses import Camera, MotionStatistics
from asyncrl.worlds.evac.published import (
    PREFIXES,
    config_of,
    grouped,
    published_state,
    published_tensors,
)
from asyncrl.worlds.evac.unet import UNetConfig
from asyncrl.worlds.files import ABOUT, AS_SAVED, WorldFolder, read_about
from asyncrl.worlds.layers import FrameVaeConfig

KIND: Final = "evac"
CONTEXT: Final = 4  # Frames of a start state's context, if it has one.
# Chosen so that the published sizes take as much memory as measured (docs/measurements/world_speed.md): 236
# MiB a slot, 4 GiB.
_WORKING: Final = 6  # copies of the skip connections that the network takes
_DRAWING: Final = 8  # largest tensors of the decoder, alive at the same time
MARK: Final = "model.diffusion_model.input_blocks.0.0.weight"  # A tensor that every published checkpoint has.
_POSE_MODEL: Final = "pose_model.safetensors"
_WRAPPED: Final = "_forward_module."  # in front of all names in DeepSpeed's files
_TOWER: Final = "visual.transformer.resblocks.0.attn.in_proj_weight"  # in OpenCLIP's own file
# Of the noise schedule, which is known without a file; of OpenCLIP's text tower, and statistics of pictures.
_IGNORED: Final = re.compile(
    r"(alphas|sqrt|log|posterior)_\w+|betas|lvlb_weights|logvar|scale_arr|scale_factor|global_step|"
    r"embedder\.(mean|std)|embedder\.model\.(positional_embedding|text_projection|logit_scale|attn_mask|"
    r"visual\.proj|token_embedding\..+|ln_final\..+|transformer\..+)"
)
_IMAGE_SIZE, _TOKENS_PER_FRAME = 256, 16  # as published
# Facts in world.json, by object.
_FACTS: Final[dict[str, tuple[type[Any], tuple[str, ...]]]] = {
    "unet": (UNetConfig, ("head_dim", "groups")),
    "autoencoder": (FrameVaeConfig, ("groups", "scale")),
    "image_encoder": (ImageEncoderConfig, ("heads",)),
    "image_resampler": (ResamplerConfig, ("head_dim",)),
    "action_resampler": (ResamplerConfig, ("head_dim",)),
    "camera": (Camera, tuple(fact.name for fact in fields(Camera))),
    "motions": (MotionStatistics, tuple(fact.name for fact in fields(MotionStatistics))),
}
_OTHER_FACTS: Final = ("image_size", "schedule_steps", "history", "fps", "domain")


# ---- folders -------------------------------------------------------------------------------------


class TensorPlace(NamedTuple):
    """Place of a tensor."""

    shape: torch.Size
    read: Callable[[], Tensor]  # Reads it, on the CPU.


Parts = Mapping[str, Mapping[str, TensorPlace]]  # Network -> published name without prefix -> place.
Files = Mapping[Path, Mapping[str, TensorPlace]]  # File -> published name with prefix -> place.


@dataclass(frozen=True, kw_only=True)
class EvacFiles(WorldFolder):
    """An EVAC world on disk without its weights."""

    label: str  # Name of the files in errors.
    config: EvacConfig
    parts: Parts
    guided: bool  # True if a slot is drawn with and without conditions.

    def slot_bytes(self, settings: ImaginationSettings = AS_SAVED, decisions: int = 0) -> SlotBytes:
        """See `WorldFolder.slot_bytes`; a slot remembers its whole episode."""
        return estimate_slot(self.config, decisions, self.types(settings).dtype, guided=self.guided)

    def build(self) -> EvacNetworks:
        """Build the networks without memory for their weights (on the meta device)."""
        with torch.device("meta"):
            return EvacNetworks.build(self.config)

    def check(self, settings: ImaginationSettings = AS_SAVED) -> int:
        """See `WorldFolder.check`."""
        networks, dtype = self.build(), self.types(settings).dtype
        for part, wanted in published_tensors(networks).items():
            present, prefix = self.parts[part], PREFIXES.get(part, "")
            for name, tensor in wanted.items():
                shape = list(tensor.shape)
                if name not in present:
                    raise CheckpointError(
                        f"{self.label} lacks tensor {prefix}{name} of shape {shape}. Download it again."
                    )
                if present[name].shape != tensor.shape:
                    raise CheckpointError(
                        f"{self.label}: tensor {prefix}{name} has shape {list(present[name].shape)}, the "
                        f"model needs {shape}. Download it again."
                    )
            if unknown := sorted(present.keys() - wanted.keys()):
                raise CheckpointError(
                    f"{self.label} holds tensor {prefix}{unknown[0]}, which the model has no use for. It "
                    "belongs to another variant."
                )
        modules = networks.by_name().items()
        return sum(p.numel() * _dtype(n, dtype).itemsize for n, m in modules for p in m.parameters())

    def load(self, device: torch.device | str, dtype: torch.dtype) -> EvacNetworks:
        """Load the networks for inference, one tensor at a time."""
        self.check()
        networks = self.build()
        for part, module in networks.by_name().items():
            ready: dict[str, Tensor] = {}
            for name, group in grouped(
                part, module.state_dict(), len(self.config.autoencoder.widths)
            ).items():
                tensor = self.parts[part][name].read()
                for (own, like), piece in zip(group, tensor.chunk(len(group)), strict=True):
                    ready[own] = piece.reshape(like.shape).to(device, _dtype(part, dtype), copy=True)
            nn.Module.load_state_dict(module, ready, assign=True)
            module.eval().requires_grad_(False)
        networks.image_encoder.set_constants(device)
        return networks


def _dtype(part: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a network's weights: poses add up over an episode, so theirs stay float32."""
    return torch.float32 if part == "pose_model" else dtype


def estimate_slot(
    config: EvacConfig, decisions: int, dtype: torch.dtype, *, guided: bool = False
) -> SlotBytes:
    """Estimate the device memory of slots, excluding the weights, from sizes alone."""
    size, frames = config.latent_size, 1 + CONTEXT + CHUNK * decisions
    remembered = frames * (config.autoencoder.channels * size**2 + POSE_DIM) * 4
    kept = 2 * (remembered + 3 * config.image_size**2)  # the state before a decision and the one after it
    # Of the network: what the way down leaves for the way up. Of the decoder: its largest tensors, of as
    # many frames as it takes at once.
    levels = sum(
        (config.unet.res_blocks + 1) * m * config.unet.channels * (size >> i) ** 2
        for i, m in enumerate(config.unet.multipliers)
    )
    largest = config.autoencoder.widths[0] * config.image_size**2
    scratch = dtype.itemsize * _WORKING * (config.history + CHUNK) * levels * (2 if guided else 1)
    return SlotBytes(kept=kept, scratch=scratch, shared=dtype.itemsize * _DRAWING * FRAMES_AT_ONCE * largest)


def open_evac(folder: Path, *, guided: bool = False) -> EvacFiles:
    """Read sizes and facts of a world, without its weights."""
    label, parts = _find_parts(folder)
    about = read_about(folder, KIND, published=bool(parts)) if parts or (folder / ABOUT).is_file() else None
    if about is None:
        raise CheckpointError(
            f"{folder} holds no EVAC world: neither a world.json of kind {KIND!r} nor a checkpoint (*.ckpt, "
            f"*.pt) with tensor {MARK}."
        )
    if not parts:
        raise CheckpointError(f"{folder / file_name('unet')} is missing. Save the world again.")
    try:
        facts = _checked_facts(about) if about else {}
        others = {name: about[name] for name in _OTHER_FACTS} if about else {"image_size": _IMAGE_SIZE}
        shapes = {part: {n: entry.shape for n, entry in own.items()} for part, own in parts.items()}
        config = config_of(shapes, facts, others)
    except KeyError as error:
        raise CheckpointError(f"{label} lacks tensor {error.args[0]}. Download it again.") from error
    except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
        if about:
            raise CheckpointError(
                f"{folder / ABOUT} is incomplete or impossible ({error}). Save the world again."
            ) from error
        raise CheckpointError(f"{label} holds no EVAC world that can be read: {error}.") from error
    queries = config.image_resampler.queries
    if not about and queries != _TOKENS_PER_FRAME * CHUNK:
        raise CheckpointError(
            f"{label}: tensor image_proj_model.latents has {queries} tokens, those of chunks of "
            f"{queries // _TOKENS_PER_FRAME}; a decision has {CHUNK} steps. Use a checkpoint for chunks of "
            f"{CHUNK} (RLinf's for LIBERO)."
        )
    return EvacFiles(
        folder=folder,
        image_size=config.image_size,
        schedule_steps=config.schedule_steps,
        version=about.get("version", 0),
        published=not about,
        label=label,
        config=config,
        parts=parts,
        guided=guided,
    )


def convert_old(about: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Turn the files of format 1 in `folder` into those of this version; return the facts of world.json."""
    config = about["config"]
    for part in (*PREFIXES, "pose_model"):
        old = folder / f"{part}.safetensors"
        files = TensorFiles(old)
        state = {name: files.read(name) for name in files.names()}
        old.unlink()
        levels = len(config["autoencoder"]["multipliers"])
        write_tensors(folder / file_name(part), published_state(part, state, levels))
    return facts_of(config)


def file_name(part: str) -> str:
    """Return the name of the file that asyncrl writes for a network."""
    return f"{PREFIXES[part]}safetensors" if part in PREFIXES else _POSE_MODEL


def facts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of world.json: those of a config that shapes do not tell."""
    parts = {name: {key: config[name][key] for key in keys} for name, (_, keys) in _FACTS.items()}
    return parts | {name: config[name] for name in _OTHER_FACTS}


def _find_parts(folder: Path) -> tuple[str, Parts]:
    tensors, errors = _open_files(folder)
    main = [path for path, entries in tensors.items() if MARK in entries]
    if not main:
        if errors:  # Perhaps it is the one that cannot be read.
            raise errors[0]
        return "", {}
    if len(main) > 1:
        raise CheckpointError(
            f"{folder} holds several EVAC checkpoints ({main[0].name}, {main[1].name}). Keep one."
        )
    label, parts = str(main[0]), {part: dict[str, TensorPlace]() for part in PREFIXES}
    own = {file_name(part) for part in PREFIXES}
    files = [entries for path, entries in tensors.items() if path == main[0] or path.name in own]
    for name, entry in (item for entries in files for item in entries.items()):
        if _IGNORED.fullmatch(name):
            continue
        part = next((part for part, prefix in PREFIXES.items() if name.startswith(prefix)), None)
        if part is None:
            raise CheckpointError(
                f"{label} holds tensor {name}, which the model has no use for. It belongs to another variant."
            )
        parts[part][name.removeprefix(PREFIXES[part])] = entry
    parts["image_encoder"] = parts["image_encoder"] or _tower(tensors)
    parts["pose_model"] = _pose_model(tensors)
    if errors and not (parts["image_encoder"] and parts["pose_model"]):
        raise errors[0]
    if not parts["image_encoder"]:
        raise CheckpointError(
            f"{folder} holds an EVAC checkpoint without the image encoder (no tensor "
            f"{PREFIXES['image_encoder']}conv1.weight), and no file with {_TOWER}. Put "
            "open_clip_pytorch_model.bin of OpenCLIP's ViT-H-14 beside it."
        )
    if not parts["pose_model"]:
        raise CheckpointError(
            f"{folder} holds an EVAC checkpoint and no model of the hand's poses (no file with a linear "
            f"layer of {ACTION_DIM + POSE_DIM} inputs, abs_action_mean and abs_action_std). Put it beside "
            "the checkpoint."
        )
    return label, parts


def _open_files(folder: Path) -> tuple[Files, list[CheckpointError]]:
    files: dict[Path, dict[str, TensorPlace]] = {}
    errors = []
    own = {file_name(part): prefix for part, prefix in PREFIXES.items()}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.suffix not in (".ckpt", ".pt", ".pth", ".bin", ".safetensors"):
            continue
        try:
            source = TensorFiles(path)
        except CheckpointError as error:
            errors.append(error)
            continue
        prefix = own.get(path.name, "")
        files[path] = {
            prefix + name.removeprefix(_WRAPPED): TensorPlace(shape, partial(source.read, name))
            for name, shape in source.shapes.items()
        }
    return files, errors


def lacks(folder: Path) -> str:
    """Return the reason why a folder holds no EVAC checkpoint, or ""; see `worlds.files`."""
    files, errors = _open_files(folder)
    if any(MARK in entries for entries in files.values()):
        return ""
    looked = f"no tensor {MARK} in its *.ckpt, *.pt, *.pth, *.bin and *.safetensors"
    return "; ".join([looked, *map(str, errors)])


def _tower(files: Files) -> dict[str, TensorPlace]:
    for entries in files.values():
        if _TOWER in entries:
            visual = {n.removeprefix("visual."): e for n, e in entries.items() if n.startswith("visual.")}
            return {name: entry for name, entry in visual.items() if name != "proj"}
    return {}


def _pose_model(files: Files) -> dict[str, TensorPlace]:
    """Find the model of the hand's poses by its shapes: the names of its layers are not agreed upon."""
    inputs = ACTION_DIM + POSE_DIM
    for path, entries in files.items():
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


def _checked_facts(about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    facts = {}
    for name, (kind, keys) in _FACTS.items():
        part = about.get(name)
        if not isinstance(part, Mapping):
            raise ValueError(f"{name} is no object")
        if different := sorted(part.keys() ^ set(keys)):
            raise ValueError(f"{name} lacks {different[0]}, or does not know it")
        check_sizes(part)
        check_kinds(kind, part)
        facts[name] = {key: tuple(v) if isinstance(v, list) else v for key, v in part.items()}
    if missing := [name for name in _OTHER_FACTS if name not in about]:
        raise ValueError(f"{missing[0]} is missing")
    check_kinds(EvacConfig, {name: about[name] for name in _OTHER_FACTS})
    return facts


def check_kinds(kind: type[Any], values: Mapping[str, Any]) -> None:
    """Check that numbers have the types that a dataclass declares; the ValueError names one that has not."""
    for declared in fields(kind):
        match = re.fullmatch(r"(tuple\[)?(int|float|bool)\b.*", str(declared.type))
        if match is None or declared.name not in values:
            continue
        value, many = values[declared.name], match[1] is not None
        wanted = {"int": (int,), "float": (int, float), "bool": (bool,)}[match[2]]
        numbers = value if many and isinstance(value, list | tuple) else (value,)
        if not numbers or not all(type(number) in wanted for number in numbers):
            raise ValueError(f"{declared.name} is {shortened(value)}, expected {declared.type}")

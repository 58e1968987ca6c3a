"""Read and write folders of EVAC worlds.

EVAC is published as one training checkpoint of Lightning (``*.ckpt``) or DeepSpeed (``*.pt``) with all
networks under prefixes; OpenCLIP's tower may lie in a file of its own, the model of the hand's poses does.
asyncrl writes a safetensors file per network, named by its prefix, and facts that shapes do not tell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from asyncrl.config.sections import ImaginationSettings
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.records import ACTION_DIM, CHUNK, POSE_DIM, SlotBytes
from asyncrl.storage.tensor_files import TensorFiles, check_shapes, write_tensors
from asyncrl.storage.untrusted import check_sizes
from asyncrl.worlds.evac.conditions import FRAMES_AT_ONCE, EvacConfig, EvacNetworks
from asyncrl.worlds.evac.poses import Camera, MotionStatistics
from asyncrl.worlds.evac.published import PREFIXES, config_of, grouped, published_state, published_tensors
from asyncrl.worlds.files import ABOUT, AS_SAVED, WorldFolder, read_about

KIND: Final = "evac"
CONTEXT: Final = 4  # Frames of a start state's context, if it has one.
# Chosen so that the published sizes take as much memory as measured (docs/measurements/world_speed.md): 236
# MiB a slot, 4 GiB.
_WORKING: Final = 6  # copies of the skip connections that the network takes
_DRAWING: Final = 8  # largest tensors of the decoder, alive at the same time
MARK: Final = "model.diffusion_model.input_blocks.0.0.weight"  # A tensor that every published checkpoint has.
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


_OWN: Final = {"guidance": 100.0, "guidance_rescale": 1.0, "eta": 1.0}
"""Settings of ``[world.settings]``, and the largest value of each; none is below 0."""


@dataclass(frozen=True, kw_only=True)
class EvacOptions:
    """Settings of the sampler."""

    steps: int = 0
    """Network calls per decision; 0: the folder's number."""
    guidance: float = 1.0
    """Scale of classifier-free guidance; 1 disables it, as in RLinf, others cost twice as much."""
    guidance_rescale: float = 0.7
    """See `ddim.guided`."""
    eta: float = 1.0
    """Share of fresh noise in each step; 0: only the first noise counts."""

    @classmethod
    def from_settings(cls, settings: ImaginationSettings, own: Mapping[str, Any]) -> EvacOptions:
        """Read the settings of a run; raises ConfigError for those that EVAC cannot follow."""
        refused = {
            "context is frames, but an EVAC world remembers the latents that it drew. Use auto or latents.": (
                settings.context == "frames"
            ),
            "decoder is tiny, but EVAC's autoencoder has no distilled decoder. Use full.": (
                settings.decoder == "tiny"
            ),
            "precision is float8, but of an EVAC world's denoiser most are convolutions, which have no 8-bit "
            "products. Use stored or bf16.": settings.precision == "float8",
            f"steps is {settings.steps}, but EVAC has 1000 noise levels. Use 1 to 1000, or 0 for the "
            "folder's number.": settings.steps > 1000,
        }
        for problem in (problem for problem, wrong in refused.items() if wrong):
            raise ConfigError(f"--imagination.{problem}")
        for name, value in own.items():
            if name not in _OWN:
                raise ConfigError(
                    f"--world-settings has {name}, which an EVAC world does not know. It takes "
                    f"{', '.join(_OWN)}."
                )
            number = float(value) if type(value) in (int, float) else math.nan
            if not 0 <= number <= _OWN[name]:
                raise ConfigError(
                    f"--world-settings {name} is {value!r}, expected a number from 0 to {_OWN[name]:g}."
                )
        return cls(steps=settings.steps, **{name: float(value) for name, value in own.items()})


class TensorPlace(NamedTuple):
    """Place of a tensor."""

    shape: torch.Size
    read: Callable[[], Tensor]  # Reads it, on the CPU.


Files = Mapping[Path, Mapping[str, TensorPlace]]  # File -> published name -> place.


@dataclass(frozen=True, kw_only=True)
class EvacFiles(WorldFolder):
    """An EVAC world on disk without its weights."""

    label: str  # Name of the files in errors.
    config: EvacConfig
    tensors: Mapping[str, TensorPlace]  # By published name; all but those that nothing reads.
    options: EvacOptions

    def slot_bytes(self, settings: ImaginationSettings = AS_SAVED, decisions: int = 0) -> SlotBytes:
        """See `WorldFolder.slot_bytes`; a slot remembers its whole episode."""
        dtype = self.types(settings).dtype
        return estimate_slot(self.config, decisions, dtype, guided=self.options.guidance != 1)

    def build(self) -> EvacNetworks:
        """Build the networks without memory for their weights (on the meta device)."""
        with torch.device("meta"):
            return EvacNetworks.build(self.config)

    def check(self, settings: ImaginationSettings = AS_SAVED) -> int:
        """See `WorldFolder.check`."""
        networks, dtype = self.build(), self.types(settings).dtype
        wanted = {
            PREFIXES[part] + name: tensor.shape
            for part, tensors in published_tensors(networks).items()
            for name, tensor in tensors.items()
        }
        found = {name: place.shape for name, place in self.tensors.items()}
        check_shapes(self.label, wanted, found, unused=False)
        modules = networks.by_name().items()
        return sum(p.numel() * _dtype(n, dtype).itemsize for n, m in modules for p in m.parameters())

    def load(self, device: torch.device, dtype: torch.dtype) -> EvacNetworks:
        """Load the networks for inference, one tensor at a time."""
        self.check()
        networks, levels = self.build(), len(self.config.autoencoder.widths)
        for part, module in networks.by_name().items():
            ready: dict[str, Tensor] = {}
            for name, group in grouped(part, module.state_dict(), levels).items():
                tensor = self.tensors[PREFIXES[part] + name].read()
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


def open_evac(folder: Path, options: EvacOptions | None = None) -> EvacFiles:
    """Read sizes and facts of a world, without its weights."""
    label, tensors = _find_tensors(folder)
    if not tensors and not (folder / ABOUT).is_file():
        raise CheckpointError(
            f"{folder} holds no EVAC world: neither a world.json of kind {KIND!r} nor a checkpoint (*.ckpt, "
            f"*.pt) with tensor {MARK}."
        )
    about = read_about(folder, KIND, published=bool(tensors))
    if not tensors:
        raise CheckpointError(f"{folder / file_name('unet')} is missing. Save the world again.")
    if about and (absent := [name for name in (*_FACTS, *_OTHER_FACTS) if name not in about]):
        raise CheckpointError(f"{folder / ABOUT} is incomplete (no {absent[0]}). Save the world again.")
    others = {name: about[name] for name in _OTHER_FACTS} if about else {"image_size": _IMAGE_SIZE}
    try:
        facts = {name: _as_tuples(about[name]) for name in _FACTS if about}
        config = config_of({name: place.shape for name, place in tensors.items()}, facts, others)
    except KeyError as error:
        raise CheckpointError(f"{label} lacks tensor {error.args[0]}. Download it again.") from error
    except (ValueError, TypeError, AttributeError, IndexError, ZeroDivisionError) as error:
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
        tensors=tensors,
        options=options or EvacOptions(),
    )


def _as_tuples(facts: Mapping[str, Any]) -> dict[str, Any]:
    check_sizes(facts)
    return {key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()}


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
    """Return the facts of world.json: those of a config that shapes do not tell."""
    parts = {name: {key: config[name][key] for key in keys} for name, keys in _FACTS.items()}
    return parts | {name: config[name] for name in _OTHER_FACTS}


def _find_tensors(folder: Path) -> tuple[str, dict[str, TensorPlace]]:
    """Return the name of a world's main file, and its tensors by published name; none without a world."""
    files, errors = _open_files(folder)
    main = [path for path, places in files.items() if MARK in places]
    if not main:
        if errors:  # Perhaps it is the one that cannot be read.
            raise errors[0]
        return "", {}
    if len(main) > 1:
        raise CheckpointError(
            f"{folder} holds several EVAC checkpoints ({main[0].name}, {main[1].name}). Keep one."
        )
    own = {main[0].name, *map(file_name, PREFIXES)}
    places = (item for path, places in files.items() if path.name in own for item in places.items())
    tensors = {name: place for name, place in places if not _IGNORED.fullmatch(name)}
    for part, find, advice in (
        (
            "image_encoder",
            _tower,
            f"without the image encoder (no tensor {PREFIXES['image_encoder']}conv1.weight), and no file "
            f"with {_TOWER}. Put open_clip_pytorch_model.bin of OpenCLIP's ViT-H-14 beside it.",
        ),
        (
            "pose_model",
            _pose_model,
            f"and no model of the hand's poses (no file with a linear layer of {ACTION_DIM + POSE_DIM} "
            "inputs, abs_action_mean and abs_action_std). Put it beside the checkpoint.",
        ),
    ):
        if any(name.startswith(PREFIXES[part]) for name in tensors):
            continue
        if not (found := find(files)):
            raise errors[0] if errors else CheckpointError(f"{folder} holds an EVAC checkpoint {advice}")
        tensors |= {PREFIXES[part] + name: place for name, place in found.items()}
    return str(main[0]), tensors


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

"""Folders of worlds: their kind, and the parts that all kinds share.

A kind is recognised by names of tensors. Folders that asyncrl wrote have ``world.json`` too, with the kind
and the facts that shapes do not determine; without it, the facts of the published worlds apply.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl import registry
from asyncrl.config.sections import ImaginationSettings, WorldDefaults
from asyncrl.devices.tensors import CudaGraphed
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.records import ACTION_DIM, ActionSpec, ModelSummary, SlotBytes
from asyncrl.storage.atomic import copy_others, read_json, replacing, write_json
from asyncrl.storage.tensor_files import INDEX, TensorFiles, check_fit, fill, header_names
from asyncrl.storage.untrusted import check_types, files_in
from asyncrl.worlds.interface import State
from asyncrl.worlds.layers import check_float8, saved_by_float8, use_float8
from asyncrl.worlds.slots import imagine_full

ABOUT: Final = "world.json"  # In folders that asyncrl wrote, not in published ones.
FORMAT: Final = "asyncrl-world-2"
_OLD_FORMAT: Final = "asyncrl-world-1"  # All sizes in world.json, own layouts; read by `convert_world`
_USUAL: Final = (("guidance", 1.0), ("guidance_rescale", 0.7), ("eta", 1.0))
"""Settings of EVAC worlds in runs of earlier versions that mean what every world does now."""
AS_SAVED: Final = ImaginationSettings()  # Settings that change nothing of a folder.
MAX_DECISIONS: Final = 32  # 256 steps, the length of episodes in RLinf's files for its worlds.
_SHARD: Final = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")
TEMPERATURE: Final = 1.6  # At which RLinf's GRPO samples the policy in its worlds.
WAN_PREFIX: Final = "pipe.dit."  # May stand in front of all names of a Wan transformer.
# Tensors that every published transformer of the kind has, and no other world or policy.
WAN_MARKS: Final = ("patch_embedding.weight", "blocks.0.self_attn.q.weight")
OPENSORA_MARKS: Final = (
    "x_embedder.proj.weight",
    "spatial_blocks.0.attn.qkv.weight",
    "temporal_blocks.0.attn.qkv.weight",
)
EVAC_MARK: Final = "model.diffusion_model.input_blocks.0.0.weight"  # With DeepSpeed's prefix or without.
EVAC_SUFFIXES: Final = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")


class Kind(NamedTuple):
    """A kind of world models."""

    title: str  # Name for people
    world: str  # Its class, as `registry.resolve` takes it
    recogniser: Callable[[Path], str]  # Returns why a folder holds no published world of this kind, or ""


def lacks_wan(folder: Path) -> str:
    """Return why a folder holds no Wan transformer, or ""; truncated files count as complete."""
    return _absent({name.removeprefix(WAN_PREFIX) for name in names_in(folder)}, WAN_MARKS)


def lacks_opensora(folder: Path) -> str:
    """Return why a folder holds no STDiT3, or ""; truncated files count as complete."""
    return _absent(names_in(folder), OPENSORA_MARKS)


def lacks_evac(folder: Path) -> str:
    """Return the reason why a folder holds no EVAC checkpoint, or ""; reads all of its weight files."""
    names, errors = set[str](), list[str]()
    for path in files_in(folder, *EVAC_SUFFIXES):
        try:
            names |= TensorFiles(path).names()
        except CheckpointError as error:
            errors.append(str(error))
    looked = f"no tensor {EVAC_MARK} in its *{', *'.join(EVAC_SUFFIXES)}"
    return "" if any(name.endswith(EVAC_MARK) for name in names) else "; ".join([looked, *errors])


def names_in(folder: Path) -> set[str]:
    """Read the tensor names in the index and in all safetensors files of a folder."""
    index = folder / INDEX
    weight_map = read_json(index, "Download it again.").get("weight_map") if index.is_file() else None
    indexed = set(weight_map) if isinstance(weight_map, dict) else set[str]()
    return indexed.union(*map(header_names, files_in(folder, ".safetensors")))


def _absent(names: Set[str], marks: Sequence[str]) -> str:
    absent = next((name for name in marks if name not in names), "")
    return f"no tensor {absent} in its *.safetensors" if absent else ""


# A further kind needs an entry here and nothing else.
# By the name in world.json. Cheap recognisers come first: the first that fits is taken.
KINDS: Final = {
    "wan": Kind("Wan", "wan", lacks_wan),
    "opensora": Kind("OpenSora", "opensora", lacks_opensora),
    "evac": Kind("EVAC", "evac", lacks_evac),
}


def is_published(folder: Path) -> bool:
    """Return True if a world's folder is as published: without world.json."""
    return not (folder / ABOUT).is_file()


def world_kind(folder: Path) -> str:
    """Return the name of the kind of world in a folder, one of `KINDS`."""
    name, reasons = _recognised(folder)
    if name:
        return name
    looked = ", ".join(f"{title}'s ({reason})" for title, reason in reasons.items())
    held = sorted(path.name for path in folder.iterdir())
    seen = f"{', '.join(held[:8]) or 'nothing'}{' ...' if len(held) > 8 else ''}"
    raise CheckpointError(
        f"--world {folder} holds {seen}: no world model that is known here. It has no world.json, which "
        f"`asyncrl fit world` writes, and is none of the published ones: {looked}. Download it again. One of "
        "a class of your own is named package.module:Class@FOLDER."
    )


def world_class(folder: Path) -> type[Any]:
    """Return the class that reads the world in a folder; raises as `world_kind` does."""
    return registry.resolve("world", KINDS[world_kind(folder)].world)


def world_title(folder: Path) -> str:
    """Return the display name of a folder's kind of world; "" without a world."""
    name, _ = _recognised(folder)
    return KINDS[name].title if name else ""


def _recognised(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the name of a folder's kind; else "", and the reason against each kind by title."""
    described, reasons = folder / ABOUT, dict[str, str]()
    if described.is_file():
        name = read_json(described, "Save the world again.").get("kind")
        if not isinstance(name, str) or name not in KINDS:
            known = ", ".join(KINDS)
            raise CheckpointError(f"{described} describes a world of kind {name!r}; there are: {known}.")
        return name, {}
    for name, kind in KINDS.items():
        reasons[kind.title] = kind.recogniser(folder)
        if not reasons[kind.title]:
            return name, {}
    return "", reasons


# ---- description ----


@dataclass(frozen=True, kw_only=True)
class WorldFolder:
    """A world on disk without its weights, and the settings to load it with."""

    folder: Path
    settings: ImaginationSettings
    image_size: int
    schedule_steps: int  # Network calls per decision
    version: int
    published: bool  # True if the folder has no world.json
    action_dim: int = ACTION_DIM  # Numbers per action

    @property
    def dtype(self) -> torch.dtype:
        """Type of nearly all weights: published worlds compute in bfloat16, fitted ones in float32."""
        return torch.bfloat16 if self.published or self.settings.precision == "bf16" else torch.float32

    def defaults(self) -> WorldDefaults:
        """Return the default settings of episodes: for a published world, RLinf's."""
        if not self.published:
            return WorldDefaults(source="the world's folder", steps=self.schedule_steps)
        return WorldDefaults(
            source="published defaults",
            steps=self.schedule_steps,
            max_decisions=MAX_DECISIONS,
            temperature=TEMPERATURE,
        )

    def check(self) -> int:
        """Check that all tensors exist and fit; return the bytes that the loaded world takes."""
        raise NotImplementedError

    def slot_bytes(self, decisions: int = 0) -> SlotBytes:
        """Estimate the device memory of a slot, excluding the weights."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LatentWorldFolder(WorldFolder):
    """A world of a transformer and an autoencoder, each with its files."""

    NETWORKS: ClassVar[tuple[Any, Any]]  # Classes of transformer and autoencoder, built of their sizes
    EXACT_WEIGHTS: ClassVar[frozenset[str]]
    """Names of weights that are float32 in a fitted world: rounded, they would mean something else."""
    FLOAT8: ClassVar[tuple[str, ...]]
    """Attributes of the transformer with the blocks that --imagination.precision float8 rounds."""
    SPARE_TENSORS: ClassVar[bool] = False  # True if files may hold tensors that the networks lack

    transformer: TensorFiles
    transformer_size: Any
    vae: TensorFiles
    vae_size: Any

    def build(self) -> tuple[Any, Any]:
        """Build transformer and autoencoder without memory for their weights (on the meta device)."""
        transformer, vae = self.NETWORKS
        with torch.device("meta"):
            return transformer(self.transformer_size), vae(self.vae_size)

    def check(self) -> int:
        """See `WorldFolder.check`."""
        networks, nbytes = self.build(), 0
        exact = frozenset() if self.published else self.EXACT_WEIGHTS
        for network, files in zip(networks, (self.transformer, self.vae), strict=True):
            check_fit(network, files, unused=self.SPARE_TENSORS)
            for name, parameter in network.named_parameters():
                nbytes += parameter.numel() * (torch.float32 if name in exact else self.dtype).itemsize
        if self.settings.precision == "float8":
            nbytes -= sum(saved_by_float8(getattr(networks[0], name), self.dtype) for name in self.FLOAT8)
        return nbytes

    def load(self, device: torch.device, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
        """Load the networks for inference, one tensor at a time; see `FolderWorld.from_files`."""
        float8 = self.FLOAT8 if self.settings.precision == "float8" else ()
        if float8:
            check_float8(device)
        if not self.SPARE_TENSORS:
            self.check()
        transformer, vae = self.build()
        exact = frozenset() if dtype or self.published else self.EXACT_WEIGHTS
        fill(transformer, self.transformer, dtype=dtype or self.dtype, device=device, exact=exact)
        for name in float8:
            use_float8(getattr(transformer, name))
        fill(vae, self.vae, dtype=dtype or self.dtype, device=device)
        return transformer.eval().requires_grad_(False), vae.eval().requires_grad_(False)


class FolderWorld(ABC):
    """The part that all kinds of worlds in folders share; see `World`."""

    needs_pose = False
    image_size = 0  # Height and width of the frames in pixels
    version = 0
    device: torch.device
    rows = 0  # Slots that a compiled world draws at once: fewer are padded

    @staticmethod
    @abstractmethod
    def files(folder: Path, settings: ImaginationSettings = AS_SAVED) -> Any:
        """Read sizes and facts as a `WorldFolder`; refuse settings that the kind does not support."""

    @classmethod
    @abstractmethod
    def from_files(cls, files: Any, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """Load a world for inference from its `files`; `dtype` None takes `WorldFolder.dtype`."""

    @abstractmethod
    def modules(self) -> dict[str, nn.Module]:
        """Return the networks by name."""

    @property
    @abstractmethod
    def action_spec(self) -> ActionSpec:
        """Steps per decision and numbers per step."""

    @abstractmethod
    def _imagine(self, state: Any, actions_BCA: Tensor, noise_seeds: Sequence[int], /) -> tuple[Tensor, Any]:
        pass

    @classmethod
    def load(cls, folder: Path, device: torch.device, settings: ImaginationSettings, **own: Any) -> Self:
        """See `World.load`."""
        return cls.from_files(cls._without_own(folder, settings, own), device)

    @classmethod
    def _without_own(cls, folder: Path, settings: ImaginationSettings, own: Mapping[str, Any]) -> Any:
        own = {name: value for name, value in own.items() if (name, value) not in _USUAL}
        if own:
            unguided = " and draws without guidance" if "guidance" in own else ""
            raise ConfigError(
                f"--world-settings has {', '.join(own)}, but the world in {folder} takes none{unguided}. "
                "Leave it out; the choices are --imagination.steps, .context, .decoder and .precision."
            )
        return cls.files(folder, settings)

    def to(self, device: torch.device | str) -> Self:
        """Move the weights to `device` and return this world."""
        for module in self.modules().values():
            nn.Module.to(module, device)  # diffusers' own `to` is untyped
        self.device = torch.device(device)
        return self

    def weights_moved(self) -> None:
        """Drop CUDA graphs, which hold the old addresses of the weights."""
        for part in vars(self).values():
            if isinstance(part, CudaGraphed):
                part.forget()

    @torch.no_grad()
    def imagine(
        self, state: State, actions: Tensor | NDArray[np.float32], noise_seeds: Sequence[int]
    ) -> tuple[Tensor, State]:
        """Draw 8 frames ``[B, 8, H, W, 3]`` for 8 actions in the policy's units; see `World.imagine`."""
        full = {"rows": self.rows, "device": self.device, "spec": self.action_spec}
        return imagine_full(self._imagine, state, actions, noise_seeds, **full)

    @classmethod
    def check(cls, folder: Path, settings: ImaginationSettings, **own: Any) -> ModelSummary:
        """See `World.check`."""
        files = cls._without_own(folder, settings, own)
        spec, nbytes = ActionSpec(dim=files.action_dim), files.check()
        return ModelSummary(
            image_size=files.image_size, nbytes=nbytes, action_spec=spec, version=files.version
        )

    @classmethod
    def defaults(cls, folder: Path, settings: ImaginationSettings, **own: Any) -> WorldDefaults:
        """See `World.defaults`."""
        return cls._without_own(folder, settings, own).defaults()

    @classmethod
    def slot_bytes(
        cls, folder: Path, settings: ImaginationSettings, *, decisions: int = 0, **own: Any
    ) -> SlotBytes:
        """See `World.slot_bytes`."""
        return cls._without_own(folder, settings, own).slot_bytes(decisions)


def refuse(problems: Mapping[str, bool]) -> None:
    """Raise ConfigError for the first problem that is True: a text that follows ``--imagination.``."""
    for problem in (problem for problem, there in problems.items() if there):
        raise ConfigError(f"--imagination.{problem}")


def read_about(folder: Path, kind: str, *, published: bool) -> dict[str, Any]:
    """Read world.json."""
    path = folder / ABOUT
    if published and not path.is_file():
        return {}
    content = read_json(path)
    if content.get("format") == _OLD_FORMAT:
        raise CheckpointError(
            f"{path} has the format of an earlier version, {_OLD_FORMAT!r}. Write it again: "
            f"asyncrl convert {folder} NEW_FOLDER"
        )
    if content.get("format") != FORMAT or content.get("kind") != kind:
        raise CheckpointError(
            f"{path} describes {content.get('kind')!r} in format {content.get('format')!r}; this version "
            f"reads {kind!r} in format {FORMAT!r}."
        )
    try:
        check_types(content, {"version": int, "image_size": int, "schedule_steps": int})
        for name, most in (("image_size", 2**14), ("schedule_steps", 10_000)):
            if not 1 <= content[name] <= most:
                raise ValueError(f"{name} is {content[name]}, expected 1 to {most}")
    except ValueError as error:
        raise CheckpointError(f"{path} is incomplete ({error}). Save the world again.") from error
    return content


def write_about(folder: Path, kind: str, **facts: Any) -> None:
    """Write world.json: `version`, `image_size`, `schedule_steps`, and other facts of the kind."""
    write_json(folder / ABOUT, {"format": FORMAT, "kind": kind, **facts})


def transformer_files(folder: Path, own: Sequence[str], named: Sequence[str] = ()) -> TensorFiles | None:
    """Open a transformer's files: the index's, else one of `named`, else all with `own...` tensors."""
    if (folder / INDEX).is_file():
        return TensorFiles(folder)
    files = [folder / name for name in named if (folder / name).is_file()][:1]
    files = files or [
        path
        for path in files_in(folder, ".safetensors")
        if any(name.startswith(tuple(own)) for name in header_names(path))
    ]
    shards = [match for path in files if (match := _SHARD.fullmatch(path.name))]
    whole = {f"{m[1]}-{i + 1:05d}-of-{m[2]}.safetensors" for m in shards for i in range(int(m[2]))}
    if absent := sorted(whole - {path.name for path in files}):
        raise CheckpointError(f"{folder} lacks {absent[0]} of its shards. Download it again.")
    return TensorFiles(files) if files else None


def shape_of(files: TensorFiles, model: str, name: str, axes: int) -> torch.Size:
    """Return the shape of a tensor that determines a size of `model`."""
    shape = files.shapes.get(name)
    if shape is None or len(shape) != axes:
        seen = f"lacks tensor {name}" if shape is None else f"has {name} of shape {list(shape)}"
        raise CheckpointError(
            f"{files.label} {seen}, so it is not the {model} it should be. Download it again."
        )
    return shape


def count_blocks(pattern: str, names: Iterable[str]) -> int:
    """Count the distinct numbers that a pattern's group matches at the beginning of names."""
    matches = (re.match(pattern, name) for name in names)
    return len({match[1] for match in matches if match})


def renamed(name: str, table: Sequence[tuple[str, str]]) -> str:
    """Replace regular expressions in a name, in their order."""
    for pattern, text in table:
        name = re.sub(pattern, text, name)
    return name


def convert_world(source: Path, out: Path) -> None:
    """Convert a world of format 1 to the current one, by its kind's `convert_old`; tensors stay."""
    about = read_json(source / ABOUT)
    if (found := about.get("format")) != _OLD_FORMAT:
        raise CheckpointError(f"{source / ABOUT} has format {found!r}; {_OLD_FORMAT!r} can be converted.")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        kind = import_module(f"asyncrl.worlds.{about['kind']}.files")
        with replacing(out) as part:
            part.mkdir()
            copy_others(source, part, {ABOUT})
            common = {"version", "image_size", "schedule_steps"} & about.keys()
            facts = {name: about[name] for name in sorted(common)}
            write_about(part, kind.KIND, **facts, **kind.convert_old(about, part))
    except (KeyError, TypeError, ValueError, AttributeError, ImportError, OSError) as error:
        raise CheckpointError(f"{source / ABOUT} is incomplete ({error!r}).") from error

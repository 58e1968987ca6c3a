"""Kinds of world models, recognised by world.json, else by the names of a folder's tensors. Imports no torch.

A further kind needs an entry in `KINDS` and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, NamedTuple

from asyncrl import registry
from asyncrl.errors import CheckpointError
from asyncrl.storage.atomic import names_in, read_json

ABOUT: Final = "world.json"
"""In folders that asyncrl wrote, not in published ones."""
WAN_PREFIX: Final = "pipe.dit."
"""May stand in front of all names of a Wan transformer."""
# Tensors that every published transformer of the kind has, and no other world or policy.
WAN_MARKS: Final = ("patch_embedding.weight", "blocks.0.self_attn.q.weight")
OPENSORA_MARKS: Final = (
    "x_embedder.proj.weight",
    "spatial_blocks.0.attn.qkv.weight",
    "temporal_blocks.0.attn.qkv.weight",
)


class Kind(NamedTuple):
    """A kind of world models."""

    title: str
    """Name for people."""
    world: str
    """Its class, as `registry.resolve` takes it."""
    recogniser: str
    """'module:function': returns the reason why a folder holds no published world of this kind, or ""."""


def lacks_wan(folder: Path) -> str:
    """Return the tensor that a folder lacks to hold a Wan transformer, or ""; torn files count as whole."""
    return _absent({name.removeprefix(WAN_PREFIX) for name in names_in(folder)}, WAN_MARKS)


def lacks_opensora(folder: Path) -> str:
    """Return the tensor that a folder lacks to hold an STDiT3, or ""; torn files count as whole."""
    return _absent(names_in(folder), OPENSORA_MARKS)


def _absent(names: Set[str], marks: Sequence[str]) -> str:
    absent = next((name for name in marks if name not in names), "")
    return f"no tensor {absent} in its *.safetensors" if absent else ""


KINDS: Final = {
    "wan": Kind("Wan", "wan", "asyncrl.worlds.kinds:lacks_wan"),
    "opensora": Kind("OpenSora", "opensora", "asyncrl.worlds.kinds:lacks_opensora"),
    "evac": Kind("EVAC", "evac", "asyncrl.worlds.evac.files:lacks"),
}
"""By the name in world.json. Cheap recognisers come first: the first that fits is taken."""


def is_published(folder: Path) -> bool:
    """Return True if a world's folder is as published: without world.json."""
    return not (folder / ABOUT).is_file()


def world_kind(folder: Path) -> str:
    """Return the name of the kind of world in a folder, one of `KINDS`.

    Raises:
        CheckpointError: There is no world of a known kind; names the missing tensor of each kind.
    """
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
    """Return the name for people of a folder's kind of world; "" without a world."""
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
        reasons[kind.title] = resolve_name(kind.recogniser)(folder)
        if not reasons[kind.title]:
            return name, {}
    return "", reasons

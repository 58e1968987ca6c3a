"""The kinds of world models there are: world.json says a folder's, else the names of its tensors do.

A further kind needs an entry in `KINDS` and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from asyncrl import registry
from asyncrl.errors import CheckpointError
from asyncrl.storage.atomic import read_json

ABOUT: Final = "world.json"
"""A folder of ours has it, a published one has not."""
_SHOWN: Final = 8


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of world models."""

    title: str
    """What people call it."""
    world: str
    """Its class, as `registry.resolve` takes it."""
    recogniser: str
    """'module:function': says of a folder what it lacks to hold such a world as published, empty: nothing."""

    def lacks(self, folder: Path) -> str:
        """Say what `folder` lacks; see `recogniser`."""
        module, _, function = self.recogniser.partition(":")
        recogniser: Callable[[Path], str] = getattr(import_module(module), function)
        return recogniser(folder)


KINDS: Final = {
    "wan": Kind(title="Wan", world="wan", recogniser="asyncrl.worlds.wan.recognition:lacks"),
    "opensora": Kind(
        title="OpenSora", world="opensora", recogniser="asyncrl.worlds.opensora.recognition:lacks"
    ),
    "evac": Kind(title="EVAC", world="evac", recogniser="asyncrl.worlds.evac.recognition:lacks"),
}
"""By the name that world.json has. Cheap recognisers come first: the first that fits ends it."""


def is_published(folder: Path) -> bool:
    """Tell whether a world's folder has a published layout and not ours."""
    return not (folder / ABOUT).is_file()


def world_kind(folder: Path) -> str:
    """Return the name of the kind of world in a folder, one of `KINDS`.

    Raises:
        CheckpointError: There is no world of a known kind; says for each kind what was looked for.
    """
    name, reasons = _recognised(folder)
    if name:
        return name
    looked = ", ".join(f"{title}'s ({reason})" for title, reason in reasons.items())
    held = sorted(path.name for path in folder.iterdir())
    seen = f"{', '.join(held[:_SHOWN]) or 'nothing'}{' ...' if len(held) > _SHOWN else ''}"
    raise CheckpointError(
        f"--world {folder} holds {seen}: no world model that is known here. It has no world.json, which "
        f"`asyncrl fit world` writes, and is none of the published ones: {looked}. Download it again. One of "
        "a class of your own is named package.module:Class@FOLDER."
    )


def world_class(folder: Path) -> type[Any]:
    """Return the class that reads the world in a folder; raises as `world_kind` does."""
    return registry.resolve("world", KINDS[world_kind(folder)].world)


def world_title(folder: Path) -> str:
    """Return what people call the kind of world in a folder; empty: it holds none.

    Raises:
        CheckpointError: world.json names a kind that there is not.
    """
    name, _ = _recognised(folder)
    return KINDS[name].title if name else ""


def _recognised(folder: Path) -> tuple[str, dict[str, str]]:
    """Find the name of a folder's kind; else, with an empty name, what it lacks to be of each, by title."""
    described = folder / ABOUT
    if described.is_file():
        name = read_json(described, "Save the world again.").get("kind")
        if not isinstance(name, str) or name not in KINDS:
            known = ", ".join(KINDS)
            raise CheckpointError(f"{described} describes a world of kind {name!r}; there are: {known}.")
        return name, {}
    reasons = dict[str, str]()
    for name, kind in KINDS.items():
        reasons[kind.title] = kind.lacks(folder)
        if not reasons[kind.title]:
            return name, {}
    return "", reasons

"""Tell which kind of world model a folder holds: world.json says it, else the names of its tensors do."""

from __future__ import annotations

from pathlib import Path

from asyncrl import registry
from asyncrl.errors import CheckpointError
from asyncrl.storage import asset_paths
from asyncrl.storage.atomic import read_json


def world_kind(folder: Path) -> str:
    """Return the short name of a folder's world, one of `registry.BUILT_IN`.

    What nothing speaks for is taken for Wan's, which says what it looks for and misses.

    Raises:
        CheckpointError: world.json names a kind that there is not.
    """
    described = folder / "world.json"
    if described.is_file():
        kind = read_json(described, "Save the world again.").get("kind")
        if kind not in registry.BUILT_IN["world"]:
            known = ", ".join(registry.BUILT_IN["world"])
            raise CheckpointError(f"{described} describes a world of kind {kind!r}; there are: {known}.")
        return str(kind)
    if is_opensora(folder):
        return "opensora"
    return "evac" if is_evac(folder) else "wan"


def is_opensora(folder: Path) -> bool:
    """Tell whether a folder is one of OpenSora's as published, which looks like a policy's from outside."""
    from asyncrl.worlds.opensora.published_world import recognises  # It needs torch.

    return recognises(folder)


def is_evac(folder: Path) -> bool:
    """Tell whether a folder is one of EVAC's as published.

    Raises:
        CheckpointError: A checkpoint in it cannot be read, or lacks a part.
    """
    if not any(path.suffix in asset_paths.CHECKPOINTS for path in folder.iterdir()):
        return False
    from asyncrl.worlds.evac.published import find_published

    return find_published(folder) is not None

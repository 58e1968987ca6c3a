"""Find shipped files, and resolve names like 'tabletop'."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

from asyncrl import registry
from asyncrl.errors import CheckpointError, ConfigError

ASSETS = Path(__file__).parents[1] / "assets"
DEFAULT: Final = "tabletop"  # The shipped collection that settings name until they are set
SIMULATOR_ALIASES: Final = {"tabletop_true": "tabletop"}  # Name of --world -> simulator
START_STATES: Final = "start_states.h5"
_CHECKPOINT: Final = re.compile(r"update_(\d{6,})")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # A policy folder has one of these


def user_cache_folder() -> Path:
    """Return XDG_CACHE_HOME/asyncrl, or ~/.cache/asyncrl; it may be missing, or deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "asyncrl"


def policy_folder(name: str) -> Path:
    """Find the folder of a policy: a shipped name, a policy folder, a checkpoint, or a run folder."""
    path = Path(name)
    named = _named(name, "policy")
    for candidate in (*named, path, path / "policy", *reversed(kept(path).values())):
        if (candidate / "config.json").is_file() and any((candidate / name).is_file() for name in WEIGHTS):
            return candidate
    seen = "does not exist" if not path.exists() else "holds no config.json with model.safetensors"
    raise CheckpointError(
        f"The policy {name!r} {seen}. Give a policy folder, a checkpoint "
        f"(runs/NAME/checkpoints/update_000040), a run folder, or a shipped name: "
        f"{', '.join(shipped('policy'))}. One of a class of your own is named package.module:Class@FOLDER."
    )


def world_folder(name: str) -> Path:
    """Find the folder of a world model and its reward model: a shipped name, or any folder."""
    for candidate in (*_named(name, "world"), Path(name)):
        if candidate.is_dir():
            return candidate
    raise CheckpointError(
        f"--world {name} is neither a shipped world ({', '.join(shipped('world'))}) nor a folder: "
        f"{Path(name).absolute()} is none. One of a class of your own is named package.module:Class@FOLDER."
    )


def is_shipped_world(name: str) -> bool:
    """Return True if --world names a shipped world."""
    return any((folder / "world.json").is_file() for folder in _named(name, "world"))


def simulator_named(text: str) -> str:
    """Return the simulator that a value of --world names, empty for a world model; ./NAME is a folder."""
    if text in SIMULATOR_ALIASES:
        return SIMULATOR_ALIASES[text]
    if is_shipped_world(text):
        return ""
    if text in registry.BUILT_IN["simulator"] or text in registry.registered("simulator"):
        return text
    name, folder = registry.split(text)
    with contextlib.suppress(ConfigError):
        found = registry.resolve("simulator", name) if name and not folder else None
        if found and not all(hasattr(found, member) for member in registry.REQUIRED["world"]):
            return name
    return ""


def start_states_path(name: str, world: str) -> Path:
    """Find start states: a shipped name, a file or a folder; by default those in the world's ``dataset``."""
    own = Path(world) / "dataset"
    if name == DEFAULT and _named(world, "world"):
        name = world if _named(world, START_STATES) else name
    elif name == DEFAULT:
        if own.is_dir():
            return own
        if not (Path(world) / "world.json").is_file():
            raise CheckpointError(
                f"--world {world} brings no start states: {own.absolute()} is not a folder. Put the "
                "traj*.npy there, or say where episodes begin: --start-states FOLDER_OR_FILE."
            )
    for candidate in (*_named(name, START_STATES), Path(name)):
        if candidate.exists():
            return candidate
    raise CheckpointError(
        f"--start-states {name} is neither a shipped collection ({', '.join(shipped(START_STATES))}), nor an "
        f"HDF5 file, nor a folder of traj*.npy. Looked for {Path(name).absolute()}."
    )


def _named(name: str, part: str) -> list[Path]:
    return [ASSETS / name / part] if name in shipped(part) else []


def shipped(part: str) -> list[str]:
    """List the shipped collections that contain `part`: policy, world, or `START_STATES`."""
    return sorted(path.parent.name for path in ASSETS.glob(f"*/{part}"))


def kept(run_dir: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a run by version, oldest first; each is a policy folder too."""
    paths = (run_dir / "checkpoints").glob("update_*")
    found = [(match, path) for path in paths if (match := _CHECKPOINT.fullmatch(path.name))]
    return dict(sorted((int(match[1]), path) for match, path in found))


def latest(run_dir: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    return next(reversed(kept(run_dir).values()), None)

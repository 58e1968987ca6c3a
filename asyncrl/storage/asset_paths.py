"""Find the shipped files, and what a name like 'tabletop' on the command line stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from asyncrl.errors import CheckpointError

ASSETS = Path(__file__).parents[1] / "assets"
DEFAULT: Final = "tabletop"
"""The shipped collection that settings name until they are set."""
START_STATES: Final = "start_states.h5"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""What a policy folder has one of: its weights, or the index of their shards."""


def policy_folder(name: str) -> Path:
    """Folder of a policy: a shipped name, a policy folder, a checkpoint, a run folder (its newest one).

    Raises:
        CheckpointError: there is no policy under that name.
    """
    path = Path(name)
    named = _named(name, "policy")
    for candidate in (*named, path, path / "policy", *_newest_checkpoints(path)):
        if (candidate / "config.json").is_file() and any((candidate / name).is_file() for name in WEIGHTS):
            return candidate
    seen = "does not exist" if not path.exists() else "holds no config.json with model.safetensors"
    raise CheckpointError(
        f"The policy {name!r} {seen}. Give a policy folder, a checkpoint "
        f"(runs/NAME/checkpoints/update_000040), a run folder, or a shipped name: "
        f"{', '.join(shipped('policy'))}. One of a class of your own is named package.module:Class@FOLDER."
    )


def newest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint in a run's folder; any other folder itself."""
    return next(iter(_newest_checkpoints(folder)), folder)


def world_folder(name: str) -> Path:
    """Folder of a world model and its reward model: a shipped name, or a folder, whatever it holds.

    Raises:
        CheckpointError: there is no such folder.
    """
    for candidate in (*_named(name, "world"), Path(name)):
        if candidate.is_dir():
            return candidate
    raise CheckpointError(
        f"--world {name} is neither a shipped world ({', '.join(shipped('world'))}) nor a folder: "
        f"{Path(name).absolute()} is none. One of a class of your own is named package.module:Class@FOLDER."
    )


def is_shipped_world(name: str) -> bool:
    """Whether --world names a world that comes with asyncrl."""
    return any((folder / "world.json").is_file() for folder in _named(name, "world"))


def start_states_path(name: str, world: str) -> Path:
    """Where episodes begin: a shipped name, a file or a folder.

    Args:
        world: As set; the published layout has start states in its folder ``dataset``, a shipped world may
            have some beside its folder.

    Raises:
        CheckpointError: there are none.
    """
    beside = Path(world) / "dataset"
    if name == DEFAULT and _named(world, "world"):
        name = world if _named(world, START_STATES) else name
    elif name == DEFAULT:
        if beside.is_dir():
            return beside
        if not (Path(world) / "world.json").is_file():
            raise CheckpointError(
                f"--world {world} brings no start states: {beside.absolute()} is not a folder. Put the "
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
    """Return that part of the shipped collection of this name, if there is one: a path is no such name."""
    return [ASSETS / name / part] if name in shipped(part) else []


def shipped(part: str) -> list[str]:
    """Names of the shipped collections that have a part: policy, world, or `START_STATES`."""
    return sorted(path.parent.name for path in ASSETS.glob(f"*/{part}"))


def _newest_checkpoints(run_folder: Path) -> list[Path]:
    """Complete checkpoints of a run, newest first; each is a policy folder too."""
    folders = [p for p in (run_folder / "checkpoints").glob("update_*") if not p.name.endswith(".tmp")]
    # From a million updates on names grow longer than six digits: the longer name is the later one.
    return sorted(folders, key=lambda folder: (len(folder.name), folder.name), reverse=True)

"""Find the shipped files, and what a name like 'tabletop' on the command line stands for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from asyncrl.errors import CheckpointError
from asyncrl.storage.atomic import read_json

ASSETS = Path(__file__).parents[1] / "assets"
DEFAULT: Final = "tabletop"
"""The shipped collection that settings name until they are set."""
WAN_TRANSFORMER: Final = "model-00001.safetensors"
WAN_VAE: Final = "Wan2.2_VAE.pth"
CHECKPOINTS: Final = (".ckpt", ".pt")
"""Suffixes of files that hold the whole of a published world."""
_INDEX: Final = "model.safetensors.index.json"
_SHARD: Final = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""What a policy folder has one of: its weights, or the index of their shards."""


def policy_folder(name: str) -> Path:
    """Folder of a policy: a shipped name, a policy folder, a checkpoint, a run folder (its newest one).

    Raises:
        CheckpointError: there is no policy under that name.
    """
    path = Path(name)
    for candidate in (ASSETS / name / "policy", path, path / "policy", *_newest_checkpoints(path)):
        if (candidate / "config.json").is_file() and any((candidate / name).is_file() for name in WEIGHTS):
            return candidate
    seen = "does not exist" if not path.exists() else "holds no config.json with model.safetensors"
    raise CheckpointError(
        f"The policy {name!r} {seen}. Give a policy folder, a checkpoint "
        f"(runs/NAME/checkpoints/update_000040), a run folder, or a shipped name: {', '.join(shipped())}. "
        "One of a class of your own is named package.module:Class@FOLDER."
    )


def newest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint in a run's folder; any other folder itself."""
    return next(iter(_newest_checkpoints(folder)), folder)


def world_folder(name: str) -> Path:
    """Folder of a world model and its reward model: a shipped name, a folder of ours, or a published one.

    Raises:
        CheckpointError: there is no world model under that name.
    """
    path = Path(name)
    for candidate in (ASSETS / name / "world", path):
        if (candidate / "world.json").is_file() or wan_transformer_files(candidate):
            return candidate
        if candidate.is_dir() and any(file.suffix in CHECKPOINTS for file in candidate.iterdir()):
            return candidate
    raise CheckpointError(
        f"--world {name} is neither a shipped world ({', '.join(shipped())}) nor a folder with a world.json "
        f"(`asyncrl fit world` makes one) or with published files: {WAN_TRANSFORMER} and {WAN_VAE} "
        "(RLinf-Wan-LIBERO-*), shards with their index (RLinf-OpenSora-LIBERO-*), or a *.ckpt (EVAC). Looked "
        f"for these in {path.absolute()}{_seen(path)}. One of a class of your own is named "
        "package.module:Class@FOLDER."
    )


def is_shipped_world(name: str) -> bool:
    """Whether --world names a world that comes with asyncrl."""
    return (ASSETS / name / "world" / "world.json").is_file()


def wan_transformer_files(folder: Path) -> list[Path]:
    """The published transformer in `folder`: what its index names, one file, or all shards; else nothing."""
    index = folder / _INDEX
    if index.is_file():
        weight_map = read_json(index, "Download it again.").get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(x, str) for x in weight_map.values()):
            raise CheckpointError(
                f"{index} is not an index of weights: it has no weight_map. Download it again."
            )
        named = sorted(set(weight_map.values()))
        # A name like ../x or /x would lead out of the folder.
        files = [folder / name for name in named if Path(name).name == name]
        if len(files) == len(named) > 0 and all(file.is_file() for file in files):
            return files
    if (folder / WAN_TRANSFORMER).is_file():
        return [folder / WAN_TRANSFORMER]
    group_files = sorted(
        file for file in folder.glob("model-*-of-*.safetensors") if _SHARD.fullmatch(file.name)
    )
    if not group_files:
        return []
    counts = {int(match[2]) for file in group_files if (match := _SHARD.fullmatch(file.name))}
    missing = {f"model-{i + 1:05d}-of-{n:05d}.safetensors" for n in counts for i in range(n)}
    if absent := sorted(missing - {file.name for file in group_files}):
        raise CheckpointError(f"{folder} lacks {absent[0]} of its shards. Download it again.")
    return group_files


def start_states_path(name: str, world: str) -> Path:
    """Where episodes begin: a shipped name, a file or a folder.

    Args:
        name: As set; while it is the default, a world that is not shipped brings its own, if it has any.
        world: As set; the published layout has start states in its folder ``dataset``.

    Raises:
        CheckpointError: there are none.
    """
    beside = Path(world) / "dataset"
    if name == DEFAULT and not (ASSETS / world / "world").is_dir():
        if beside.is_dir():
            return beside
        if not (Path(world) / "world.json").is_file():
            raise CheckpointError(
                f"--world {world} brings no start states: {beside.absolute()} is not a folder. Put the "
                "traj*.npy there, or say where episodes begin: --start-states FOLDER_OR_FILE."
            )
    for candidate in (ASSETS / name / "start_states.h5", Path(name)):
        if candidate.is_file() or (candidate.is_dir() and candidate == Path(name)):
            return candidate
    raise CheckpointError(
        f"--start-states {name} is neither a shipped collection ({', '.join(shipped())}), nor an HDF5 file, "
        f"nor a folder of traj*.npy. Looked for {Path(name).absolute()}."
    )


def shipped() -> list[str]:
    """Names of the shipped collections."""
    return sorted(p.name for p in ASSETS.iterdir() if p.is_dir()) if ASSETS.is_dir() else []


def _seen(folder: Path) -> str:
    """What a folder holds, for people."""
    if not folder.is_dir():
        return ", which is no folder"
    names = sorted(path.name for path in folder.iterdir())
    return f", which holds {', '.join(names[:8]) or 'nothing'}{' ...' if len(names) > 8 else ''}"


def _newest_checkpoints(run_folder: Path) -> list[Path]:
    """Complete checkpoints of a run, newest first; each is a policy folder too."""
    folders = [p for p in (run_folder / "checkpoints").glob("update_*") if not p.name.endswith(".tmp")]
    # From a million updates on names grow longer than six digits: the longer name is the later one.
    return sorted(folders, key=lambda folder: (len(folder.name), folder.name), reverse=True)

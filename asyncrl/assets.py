"""Where the shipped files are, and what a name like 'tabletop' on the command line stands for."""

from __future__ import annotations

from pathlib import Path

from asyncrl.errors import CheckpointError

ASSETS = Path(__file__).parent / "assets"
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
        f"(runs/NAME/checkpoints/update_000040), a run folder, or a shipped name: {', '.join(shipped())}."
    )


def world_folder(name: str) -> Path:
    """Folder of a world model and its reward model: a shipped name or a path.

    Raises:
        CheckpointError: there is no world model under that name.
    """
    for candidate in (ASSETS / name / "world", Path(name)):
        if (candidate / "world.json").is_file():
            return candidate
    raise CheckpointError(
        f"--world {name} is neither a shipped world ({', '.join(shipped())}) nor a folder with a world.json. "
        "Make one with `asyncrl fit world`."
    )


def start_states_file(name: str) -> Path:
    """File of start states: a shipped name or a path.

    Raises:
        CheckpointError: there is no such file.
    """
    for candidate in (ASSETS / name / "start_states.h5", Path(name)):
        if candidate.is_file():
            return candidate
    raise CheckpointError(
        f"--start-states {name} is neither a shipped collection ({', '.join(shipped())}) nor an HDF5 file."
    )


def shipped() -> list[str]:
    """Names of the shipped collections."""
    return sorted(p.name for p in ASSETS.iterdir() if p.is_dir()) if ASSETS.is_dir() else []


def _newest_checkpoints(run_folder: Path) -> list[Path]:
    """Complete checkpoints of a run, newest first; each is a policy folder too."""
    folders = [p for p in (run_folder / "checkpoints").glob("update_*") if not p.name.endswith(".tmp")]
    # From a million updates on names grow longer than six digits: the longer name is the later one.
    return sorted(folders, key=lambda folder: (len(folder.name), folder.name), reverse=True)

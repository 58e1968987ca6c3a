"""Find the shipped files, and what a name like 'tabletop' on the command line stands for.

Send a folder to a model hub, by `huggingface_hub`: only what is named, only when it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from asyncrl import registry
from asyncrl.errors import AsyncRLError, CheckpointError, ConfigError, first_line

ASSETS = Path(__file__).parents[1] / "assets"
DEFAULT: Final = "tabletop"
"""The shipped collection that settings name until they are set."""
SIMULATOR_ALIASES: Final = {"tabletop_true": "tabletop"}
"""Names of --world for simulators whose own name is a world model's."""
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


def simulator_named(text: str) -> str:
    """Return the simulator that a name of --world stands for; empty: it is a world model's.

    A folder that is called like a simulator is written ./NAME.
    """
    if text in SIMULATOR_ALIASES:
        return SIMULATOR_ALIASES[text]
    if is_shipped_world(text):
        return ""
    if text in registry.BUILT_IN["simulator"] or text in registry.registered("simulator"):
        return text
    name, folder = registry.split(text)
    return name if name and not folder and _makes_simulators(name) else ""


def _makes_simulators(name: str) -> bool:
    """Whether the user's class or function is of simulators. One that lacks something is a world model's."""
    try:
        found = registry.resolve("simulator", name)
    except ConfigError:
        return False
    as_world = (hasattr(found, member) for member in registry.REQUIRED["world"])
    return not all(as_world)


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


class Hub(Protocol):
    """The two calls of `huggingface_hub.HfApi` that are used."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any:
        """Make a repository of models unless there is one."""
        ...

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], commit_message: str
    ) -> Any:
        """Send the files of a folder that are named, in one commit."""
        ...


def check_repo(repo: str) -> None:
    """Refuse a name that no repository can have, before anything is written.

    Raises:
        ConfigError: It is not OWNER/NAME.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    problem = "" if repo.count("/") == 1 else "it has no owner"
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        problem = first_line(error)
    if problem:
        raise ConfigError(f"--push {repo!r} names no repository ({problem}). Give OWNER/NAME.")


def files_of(folder: Path) -> list[Path]:
    """List all files of a folder, relative to it, in the order of their names; links are left out."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return [path.relative_to(folder) for path in found]


def push(
    folder: Path,
    repo: str,
    *,
    private: bool,
    tell: Callable[[str], None],
    hub: Hub | None = None,
) -> None:
    """Send a folder; what is sent is told first.

    Args:
        private: Whether a new one can be seen by its owner only; one that exists stays as it is.

    Raises:
        AsyncRLError: No token, no network, no right to write there. The folder stays.
    """
    files = files_of(folder)
    total = sum((folder / file).stat().st_size for file in files)
    tell(f"sending   {len(files)} files, {total / 1e9:.2f} GB, to {repo}{' (private if new)' * private}:")
    for file in files:
        tell(f"          {file}  {(folder / file).stat().st_size / 1e6:.3f} MB")
    try:
        api = _real() if hub is None else hub
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=[file.as_posix() for file in files],
            commit_message="Policy exported by asyncrl",
        )
    except Exception as error:  # Of the library beneath the hub's, which differs by version.
        raise AsyncRLError(
            f"--push {repo}: the hub was not reached or refused ({first_line(error)}). {folder} is complete "
            f"and stays. Log in (`hf auth login`, or HF_TOKEN) with the right to write to {repo}, look at "
            f"the network, then send it: hf upload {repo} {folder}"
        ) from error
    tell(f"sent      https://huggingface.co/{repo}")


def _real() -> Hub:
    from huggingface_hub import HfApi

    return HfApi(library_name="asyncrl")

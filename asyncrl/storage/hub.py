"""Send a folder to a model hub, by `huggingface_hub`: only what is named, only when it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from asyncrl.errors import AsyncRLError, ConfigError, first_line


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

"""Tell which class reads the reward model in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from asyncrl.errors import CheckpointError

GROUPS: Final = tuple(f"group_{number}" for number in range(1, 7))
"""Folders of the networks that judge LIBERO-Long together."""


def reward_kind(folder: Path) -> str:
    """Return the short name of a folder's reward model, one of `registry.BUILT_IN`.

    Raises:
        CheckpointError: It holds the reward models of LIBERO-Long twice.
    """
    if (folder / "reward.json").is_file() or group_folders(folder) is None:
        return "resnet"
    return "libero_long"


def group_folders(folder: Path) -> Path | None:
    """Find where ``group_1`` to ``group_6`` are: in `folder` or one below it; None: nowhere.

    Raises:
        CheckpointError: There are several such places.
    """
    below = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    found = [place for place in (folder, *below) if any((place / group).is_dir() for group in GROUPS)]
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} holds the reward models of LIBERO-Long twice, in {found[0]} and in {found[1]}. Keep "
            "one."
        )
    return found[0] if found else None

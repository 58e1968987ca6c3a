"""Worlds of any kind, loaded as a test asks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.sections import ImaginationSettings
from asyncrl.worlds.files import AS_SAVED, world_class


def load_world(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    settings: ImaginationSettings = AS_SAVED,
) -> Any:
    """Load the world in a folder, its weights in `dtype`."""
    kind = world_class(folder)
    return kind.from_files(kind.files(folder, settings), torch.device(device), dtype)


def change_json(path: Path, change: Callable[[Any], object]) -> None:
    """Change what a JSON file holds in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def cut(path: Path, end: int = -1000) -> None:
    """Leave the bytes of a file up to `end`."""
    path.write_bytes(path.read_bytes()[:end])

"""Worlds of any kind, loaded as a test asks."""

from __future__ import annotations

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
    **own: Any,
) -> Any:
    """Load the world in a folder, its weights in `dtype`."""
    kind = world_class(folder)
    return kind.from_files(kind.files(folder, settings, own), torch.device(device), settings, dtype)

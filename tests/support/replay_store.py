"""A store of small groups."""

from __future__ import annotations

from pathlib import Path

from asyncrl.replay.store import EpisodeStore
from support.episodes import make_episode


def group_of(number: int, image: int = 4) -> list:
    """Members with different lengths; one keeps its video."""
    return [
        make_episode(number, 0, versions=(number,), image=image),
        make_episode(number, 1, versions=(number, number + 1), image=image, video=True, success=True),
    ]


def open_store(folder: Path, warnings: list[str] | None = None, max_bytes: int = 10**9) -> EpisodeStore:
    lines = [] if warnings is None else warnings
    return EpisodeStore(folder, group_size=2, max_bytes=max_bytes, warn=lines.append)

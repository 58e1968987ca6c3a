"""What the folder of a world's version holds: the files of a world and of its reward model, in one place.

A world of a published layout stays in it: what it says about itself (types of weights, defaults of a run) is
said by its files alone, and actors, audits and other runs load every version as they load the first one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from asyncrl.rewards.files import reward_parts
from asyncrl.storage.atomic import read_json, write_json
from asyncrl.storage.regular_files import make_folder, remove
from asyncrl.worlds.kinds import ABOUT, is_published

_OURS: Final = frozenset({".json", ".safetensors"})
_PUBLISHED: Final = _OURS | {".pth", ".pt", ".ckpt", ".bin"}
"""Suffixes of what a world is read from. Start states, pictures and texts beside it stay behind."""
_PARTS: Final = ("vae",)
"""Folders of a published world (OpenSora) that it is read from."""


def copy_world(present: Path, reward: Path, out: Path, version: int) -> None:
    """Copy a world and its reward model to `out`, made anew, under another version.

    Args:
        present: The world's folder, of our layout or a published one.
        reward: Folder of its reward model, often the same; what else lies there is not copied.
        out: Deleted, if it is there.
        version: Written where there is a place for it, which published layouts have not.

    Raises:
        CheckpointError: A reward model cannot be read any more.
    """
    remove(out)
    make_folder(out)
    published = is_published(present)
    suffixes, judges = _PUBLISHED if published else _OURS, reward_parts(present)
    for path in present.iterdir():
        if path.is_file() and path.suffix in suffixes and path not in judges:
            shutil.copyfile(path, out / path.name)
    for name in _PARTS:
        if published and (present / name).is_dir():
            shutil.copytree(present / name, out / name)
    for path in reward_parts(reward):
        copy = shutil.copytree if path.is_dir() else shutil.copyfile
        copy(path, out / path.name)
    if not published:
        write_json(out / ABOUT, read_json(out / ABOUT) | {"version": version})

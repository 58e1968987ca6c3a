"""Names of the tensors in a folder, from the index and the headers of its files, which may be torn."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from asyncrl.storage.atomic import read_json
from asyncrl.storage.untrusted import parse_json

INDEX: Final = "model.safetensors.index.json"
_HEADER_BYTES: Final = 100_000_000


def header_names(path: Path) -> set[str]:
    """Return the names in the header of a safetensors file, which may be cut behind it; of others, none."""
    if not path.is_file():
        return set()
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = parse_json(file.read(length), dict) if length <= _HEADER_BYTES else {}
    except (OSError, struct.error, ValueError):
        return set()
    return entries.keys() - {"__metadata__"}


def indexed_names(folder: Path) -> set[str]:
    """Return the names in the index of a folder's shards; without an index, none.

    Raises:
        CheckpointError: The index is no JSON.
    """
    if not (folder / INDEX).is_file():
        return set()
    weight_map = read_json(folder / INDEX, "Download it again.").get("weight_map")
    return set(weight_map) if isinstance(weight_map, dict) else set()


def names_in(folder: Path) -> set[str]:
    """Return the names in the index and in the headers of all safetensors files of a folder.

    Raises:
        CheckpointError: The index is no JSON.
    """
    headers = (header_names(path) for path in folder.glob("*.safetensors"))
    return indexed_names(folder).union(*headers)

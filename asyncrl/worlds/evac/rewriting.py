"""Write the files of a published EVAC world again with other weights of some networks.

A checkpoint of a training framework becomes a safetensors file with the same names and types of tensors: what
else it holds (optimizers, classes of the framework) nobody here reads, or would write.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from asyncrl.errors import CheckpointError
from asyncrl.storage.tensor_reader import Spec
from asyncrl.storage.tensor_writer import write_file
from asyncrl.worlds.evac.published import Entry, find_published
from asyncrl.worlds.evac.recognition import WRAPPED
from asyncrl.worlds.safe_pickle import CkptFile

Held = dict[str, tuple[Entry, Tensor | None]]
"""Name in a new file -> where the tensor is, and what it becomes; None: it stays."""


def rewrite_networks(source: Path, folder: Path, networks: Mapping[str, nn.Module]) -> None:
    """Write the files again that hold some networks; the others are left alone.

    Args:
        source: A published folder.
        folder: Exists; a file that is written again replaces one of its old name.
        networks: By name, but for autoencoder and image encoder, whose published names are others than ours.

    Raises:
        CheckpointError: The source holds no such world any more, or cannot be read.
    """
    files, changed = dict[Path, Held](), set[Path]()
    for part, entries in _parts(source).items():
        weights = networks[part].state_dict() if part in networks else {}
        for name, entry in entries.items():
            path = path_of(entry)
            files.setdefault(path, {})[entry.stored.removeprefix(WRAPPED)] = (entry, weights.get(name))
            if name in weights:
                changed.add(path)
    for path in sorted(changed):
        _write(folder, path, files[path])


def path_of(entry: Entry) -> Path:
    """Return the file that a tensor is in."""
    return entry.source.path if isinstance(entry.source, CkptFile) else entry.source.paths[0]


def _parts(source: Path) -> Mapping[str, Mapping[str, Entry]]:
    found = find_published(source)
    if found is None:
        raise CheckpointError(
            f"{source} holds no EVAC checkpoint any more. Put it back, and restart the run with --resume."
        )
    return found.parts


def _write(folder: Path, path: Path, held: Held) -> None:
    # Wide types first: every tensor has to begin at a multiple of its type's size.
    dtypes = {name: _dtype(entry) for name, (entry, _) in held.items()}
    names = sorted(held, key=lambda name: -dtypes[name].itemsize)
    specs = {name: Spec(dtypes[name], tuple(held[name][0].shape)) for name in names}

    def numbers(name: str) -> Tensor:
        entry, new = held[name]
        return entry.source.read(entry.stored) if new is None else new

    own = path.suffix == ".safetensors"
    write_file(
        folder / (path.name if own else f"{path.name}.safetensors"), specs, ((n, numbers(n)) for n in specs)
    )
    if not own:
        (folder / path.name).unlink(missing_ok=True)


def _dtype(entry: Entry) -> torch.dtype:
    if isinstance(entry.source, CkptFile):
        return entry.source.tensors[entry.stored].storage.dtype
    return entry.source.spec(entry.stored).dtype

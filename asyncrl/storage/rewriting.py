"""Write a folder of weights again with other numbers: the same files, tensor names, types and shards."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Set
from pathlib import Path

from torch import Tensor

from asyncrl.storage.tensor_reader import TensorFiles
from asyncrl.storage.tensor_writer import write_file


def rewrite_file(
    source: Path, target: Path, tensors: Mapping[str, Tensor], rename: Callable[[str], str]
) -> None:
    """Write a safetensors file as `source` is, one tensor at a time.

    Args:
        tensors: New numbers, of the shapes in the file and any dtype. What is not among them is copied.

    Raises:
        CheckpointError: The source cannot be read.
    """
    files = TensorFiles(source)
    specs = {name: files.spec(name) for name in files.names()}

    def numbers(name: str) -> Tensor:
        new = tensors.get(rename(name))
        return files.read(name) if new is None else new

    write_file(target, specs, ((name, numbers(name)) for name in specs))


def copy_others(source: Path, folder: Path, besides: Set[str]) -> None:
    """Copy what lies in a folder, but for some names and hidden ones; links are followed."""
    for path in sorted(source.iterdir()):
        if path.name in besides or path.name.startswith("."):
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)
        else:
            shutil.copyfile(path, folder / path.name)

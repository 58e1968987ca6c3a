"""Write weight files tensor by tensor, each file whole or not at all.

The safetensors library's own writer wants every tensor of a file at once, in host memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.storage.atomic import replacing, write_json
from asyncrl.storage.tensor_reader import Spec
from asyncrl.storage.weight_files import INDEX, TYPES, WEIGHTS, bytes_of

SHARD_BYTES: Final = 5_000_000_000
"""Largest weight file that is written, unless a single tensor is larger."""
_NAMES: Final = {dtype: name for name, dtype in TYPES.items()}


def write_folder(
    folder: Path,
    specs: Mapping[str, Spec],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weight files of a folder; those that were there are replaced, each as a whole.

    Args:
        tensors: Name and tensor in the order of `specs`, each of its shape there, any dtype and device; it is
            cast to its dtype there and may be freed after.
        shard_bytes: Size above which a further file is begun. One file is called `model.safetensors`.
    """
    group_files = _split(specs, shard_bytes)
    count = len(group_files)
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    files = files if count > 1 else [WEIGHTS]
    before = {path for path in folder.glob("model*.safetensors") if _is_ours(path.name)}
    stream = iter(tensors)
    for file, shard in zip(files, group_files, strict=True):
        write_file(folder / file, shard, stream)
    if count > 1:
        weight_map = {name: file for file, shard in zip(files, group_files, strict=True) for name in shard}
        total = sum(spec.nbytes for spec in specs.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for path in before - {folder / file for file in files}:
        path.unlink()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any shape and device as one safetensors file, in the dtypes that they have."""
    # Wide types first: every tensor has to begin at a multiple of its type's size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered.items()}
    write_file(path, specs, iter(ordered.items()))


def write_pth(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any shape and dtype as a ``.pth`` state dict, which published layouts want.

    The file is written as a whole or not at all.
    """
    # A copy, because torch.save writes all of the memory that a tensor is a part of.
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    with replacing(path) as part:
        torch.save(own, part)


def write_file(path: Path, specs: Mapping[str, Spec], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write one safetensors file, tensor by tensor; it appears under its name when it is complete.

    Args:
        tensors: Gives name and tensor of at least these, in this order, each of its shape there, any dtype
            and device; no more than these are taken.
    """
    with replacing(path) as part:
        _write_tensors(part, specs, tensors)


def _write_tensors(path: Path, specs: Mapping[str, Spec], tensors: Iterator[tuple[str, Tensor]]) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(_encode_header(specs))
        for name, spec in specs.items():
            found, tensor = next(tensors)
            assert (found, tuple(tensor.shape)) == (name, spec.shape), (found, name, tensor.shape)
            rest = bytes_of(tensor.detach().to("cpu", spec.dtype).contiguous())
            while len(rest):
                rest = rest[file.write(rest) :]


def _encode_header(specs: Mapping[str, Spec]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in specs.items():
        if offset % spec.dtype.itemsize:
            raise CheckpointError(
                f"Tensor {name} is wider than those before it. Write all in one type: --dtype."
            )
        offsets = [offset, offset + spec.nbytes]
        header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _split(specs: Mapping[str, Spec], shard_bytes: int) -> list[dict[str, Spec]]:
    group_files: list[dict[str, Spec]] = [{}]
    room = shard_bytes
    for name, spec in specs.items():
        if group_files[-1] and spec.nbytes > room:
            group_files.append({})
            room = shard_bytes
        group_files[-1][name] = spec
        room -= spec.nbytes
    return group_files


def _is_ours(name: str) -> bool:
    stem = name.removesuffix(".safetensors").split("-")
    return stem == ["model"] or (len(stem) == 4 and stem[2] == "of" and (stem[1] + stem[3]).isdecimal())

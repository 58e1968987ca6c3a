"""Weights on disk: safetensors files in, tensors one by one out, and back. Nothing ever holds all of them.

A folder has one `model.safetensors`, or shards `model-00001-of-00004.safetensors` ... with an index. Headers
are read and checked by the library; the numbers are read and written here: its mapped files would count
beside the weights that are copied from them, and its writer wants every tensor of a file at once.
"""

from __future__ import annotations

import json
import math
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from asyncrl.errors import CheckpointError
from asyncrl.policies.files import compare_names, read_json, write, write_json

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
SHARD_BYTES: Final = 5_000_000_000
"""Largest weight file that is written, unless a single tensor is larger."""
READERS: Final = 4
"""Tensors that are read at the same time; so many are in memory besides those in use."""
_TYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES: Final = {dtype: name for name, dtype in _TYPES.items()}


@dataclass(frozen=True)
class Spec:
    """Type and shape of a tensor that need not be in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """A tensor like it that takes no memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class _Place:
    """Where a tensor stands in a file."""

    file: Path
    kind: str
    shape: tuple[int, ...]
    begin: int


class TensorFiles:
    """The tensors of one file, or of the one or several weight files of a folder, by name.

    `changes` may hold a function per name that is applied to the tensor after reading, on the thread that
    read it; `extra` tensors come from elsewhere and are given as they are.
    """

    def __init__(self, source: Path, *, rename: Callable[[str], str] = str) -> None:
        """Read the headers.

        Args:
            source: A safetensors file or a folder.
            rename: Maps the names in the files to the names used here.

        Raises:
            CheckpointError: a file is missing or truncated, or the index and the files do not agree.
        """
        self.source = source
        self.changes: dict[str, Callable[[Tensor], Tensor]] = {}
        self.extra: dict[str, Tensor] = {}
        self._places: dict[str, _Place] = {}
        for name, place in _places(source):
            if self._places.setdefault(rename(name), place) is not place:
                raise CheckpointError(f"{source} holds tensor {rename(name)} twice. Copy it again.")

    def names(self) -> Set[str]:
        """All tensors, in the order of the files."""
        return dict.fromkeys([*self._places, *self.extra]).keys()

    def spec(self, name: str) -> Spec:
        """Type and shape, from the header.

        Raises:
            CheckpointError: the tensor does not hold floating-point numbers.
        """
        if name in self.extra:
            return Spec(self.extra[name].dtype, tuple(self.extra[name].shape))
        place = self._places[name]
        if place.kind not in _TYPES:
            raise CheckpointError(
                f"{place.file}: tensor {name} is of type {place.kind}, but weights are one of "
                f"{', '.join(_TYPES)}. Quantised checkpoints cannot be trained: take the original one."
            )
        return Spec(_TYPES[place.kind], place.shape)

    def check(self, expected: Mapping[str, tuple[int, ...]], *, optional: Set[str] = frozenset()) -> None:
        """Compare names, shapes and types with what a policy needs; reads no numbers.

        Args:
            expected: Shape by name.
            optional: Names in `expected` that may be absent.

        Raises:
            CheckpointError: a tensor is missing, unknown, misshapen or of no floating-point type.
        """
        compare_names(self.source, self.names(), expected.keys() - optional, allowed=expected.keys())
        for name in self.names():
            if self.spec(name).shape != tuple(expected[name]):
                raise CheckpointError(
                    f"{self.source}: tensor {name} has shape {list(self.spec(name).shape)}, expected "
                    f"{list(expected[name])}. The weights belong to another size of policy: use the "
                    "config.json they were saved with."
                )

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own on the CPU.

        Raises:
            CheckpointError: the file ends before the tensor does, or cannot be read.
        """
        if name in self.extra:
            return self.extra[name]
        spec, place = self.spec(name), self._places[name]
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        try:
            with place.file.open("rb", buffering=0) as file:
                file.seek(place.begin)
                _read_into(file, _bytes_of(tensor), place.file)
        except OSError as error:
            raise CheckpointError(f"{place.file} cannot be read ({error.strerror}).") from error
        return self.changes[name](tensor) if name in self.changes else tensor

    def stream(self, names: Iterable[str], *, what: str) -> Iterator[tuple[str, Tensor]]:
        """Read tensors one after the other, the next few of them ahead on other threads.

        Args:
            names: In the order wanted.
            what: Shown beside a progress bar when it takes longer than two seconds.
        """
        wanted = list(names)
        total = sum(self.spec(name).nbytes for name in wanted)
        left = iter(wanted)
        with (
            ThreadPoolExecutor(READERS) as readers,
            tqdm(
                total=total, desc=what, unit="B", unit_scale=True, delay=2, mininterval=1.0, leave=False
            ) as bar,
        ):
            ahead: deque[tuple[str, Future[Tensor]]] = deque()
            ahead.extend((name, readers.submit(self.read, name)) for name in islice(left, READERS))
            while ahead:
                name, future = ahead.popleft()
                tensor = future.result()
                del future  # It would keep the tensor while the caller works on it.
                ahead.extend((n, readers.submit(self.read, n)) for n in islice(left, 1))
                bar.update(self.spec(name).nbytes)
                yield name, tensor
                del tensor


def has_weights(folder: Path) -> bool:
    """Whether a folder has weight files, in one piece or in shards."""
    return (folder / WEIGHTS).is_file() or (folder / INDEX).is_file()


def _places(source: Path) -> Iterator[tuple[str, _Place]]:
    if not source.is_dir() or not (source / INDEX).exists():
        yield from _header(source / WEIGHTS if source.is_dir() else source).items()
        return
    index = source / INDEX
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in listed.values()
    ):
        raise CheckpointError(f"{index} has no weight_map of tensors to files beside it. Copy it again.")
    for file in sorted(set(listed.values())):
        found = _header(source / file)
        here = {name for name, place in listed.items() if place == file}
        compare_names(source / file, found.keys(), here, allowed=here)
        yield from found.items()


def _header(file: Path) -> dict[str, _Place]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing. Download or copy the checkpoint again.")
    try:
        with safe_open(file, framework="numpy"):  # checks the header and the length of the file
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or not a safetensors file ({error}). Download or copy it again."
        ) from error
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return {
        name: _Place(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0])
    }


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _read_into(file: BinaryIO, target: memoryview, path: Path) -> None:
    while len(target):  # One call reads at most 2 GiB.
        count = file.readinto(target)  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{path} became shorter while it was read. Download or copy it again.")
        target = target[count:]


# --- writing ------------------------------------------------------------------


def write_folder(
    folder: Path,
    specs: Mapping[str, Spec],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weight files of a folder; those that were there are replaced, each as a whole.

    Args:
        folder: Exists.
        specs: What the files will hold, in their order.
        tensors: In the order of `specs`, on any device; each is converted to its type and may be freed after.
        shard_bytes: Size above which a further file is begun. One file is called `model.safetensors`.
    """
    shards = _split(specs, shard_bytes)
    count = len(shards)
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    files = files if count > 1 else [WEIGHTS]
    before = {path for path in folder.glob("model*.safetensors") if _is_ours(path.name)}
    stream = iter(tensors)
    for file, shard in zip(files, shards, strict=True):
        write_file(folder / file, shard, stream)
    if count > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(spec.nbytes for spec in specs.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for path in before - {folder / file for file in files}:
        path.unlink()


def write_file(path: Path, specs: Mapping[str, Spec], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write one safetensors file, tensor by tensor; it appears under its name when it is complete.

    Args:
        path: Of the file.
        specs: What it will hold, in its order.
        tensors: Gives at least these, in this order; no more than these are taken.
    """
    write(path, lambda partial: _write_tensors(partial, specs, tensors))


def _write_tensors(path: Path, specs: Mapping[str, Spec], tensors: Iterator[tuple[str, Tensor]]) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(_encode_header(specs))
        for name, spec in specs.items():
            found, tensor = next(tensors)
            assert (found, tuple(tensor.shape)) == (name, spec.shape), (found, name, tensor.shape)
            rest = _bytes_of(tensor.detach().to("cpu", spec.dtype).contiguous())
            while len(rest):
                rest = rest[file.write(rest) :]


def _encode_header(specs: Mapping[str, Spec]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, spec in specs.items():
        if place % spec.dtype.itemsize:
            raise CheckpointError(
                f"Tensor {name} is wider than those before it. Write all in one type: --dtype."
            )
        offsets = [place, place + spec.nbytes]
        header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        place += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _split(specs: Mapping[str, Spec], shard_bytes: int) -> list[dict[str, Spec]]:
    shards: list[dict[str, Spec]] = [{}]
    room = shard_bytes
    for name, spec in specs.items():
        if shards[-1] and spec.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = spec
        room -= spec.nbytes
    return shards


def _is_ours(name: str) -> bool:
    stem = name.removesuffix(".safetensors").split("-")
    return stem == ["model"] or (len(stem) == 4 and stem[2] == "of" and (stem[1] + stem[3]).isdecimal())

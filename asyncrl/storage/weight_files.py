"""Weights on disk: safetensors files in, tensors one by one out; nothing ever holds all of them.

A folder has one `model.safetensors`, or shards `model-00001-of-00004.safetensors` ... with an index. Headers
are read and checked by the library; the numbers are read here, straight into the tensors that stay: its
mapped files would count beside the weights that are copied from them.
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
from asyncrl.storage.atomic import compare_names, read_json

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
READERS: Final = 4
"""Tensors that are read at the same time; so many are in memory besides those in use."""
TYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of weights, as safetensors names them."""


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


class WeightFiles:
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
        if place.kind not in TYPES:
            raise CheckpointError(
                f"{place.file}: tensor {name} is of type {place.kind}, but weights are one of "
                f"{', '.join(TYPES)}. Quantised checkpoints cannot be trained: take the original one."
            )
        return Spec(TYPES[place.kind], place.shape)

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
                _read_into(file, bytes_of(tensor), place.file)
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


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _read_into(file: BinaryIO, target: memoryview, path: Path) -> None:
    while len(target):  # One call reads at most 2 GiB.
        count = file.readinto(target)  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{path} became shorter while it was read. Download or copy it again.")
        target = target[count:]

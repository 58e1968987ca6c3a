"""Read weight files: names, shapes and types from their headers, and tensors one by one; never all of them.

    *.safetensors              one file, or shards with `model.safetensors.index.json`; has no code in it. The
                               library checks the header. Numbers are read here, straight into tensors that
                               stay: its mapped files would count beside the weights copied from them
    *.pth                      a state dict, read without running code (`safe_pth`)

Whether a file fits is known before a number is read, and a 10 GB file needs no second 10 GB of memory.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from asyncrl.errors import CheckpointError
from asyncrl.storage.atomic import read_json
from asyncrl.storage.safe_pth import load_pth

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
READERS: Final = 4
"""Tensors that are read at the same time; so many are in memory besides those in use."""
TYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of tensors, as safetensors names them."""
_WRAPPERS: Final = ("model_state", "model_state_dict", "state_dict")
_OPEN_BYTES: Final = 2**29
"""What was read of a mapped file counts as memory of this process until it is closed. After so many bytes a
``.pth`` file is opened anew."""
_SHOWN: Final = 5
_log = logging.getLogger(__name__)


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
        """Return a tensor of its shape and dtype that takes no memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class _Header:
    """What a file says about one of its tensors."""

    kind: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    begin: int = 0
    """First byte of the numbers; safetensors only."""


class TensorFiles:
    """The tensors of one file, of several, or of the weight files of a folder, by name."""

    def __init__(self, source: Path | Sequence[Path], *, rename: Callable[[str], str] = str) -> None:
        """Read the headers.

        Args:
            source: A file, a folder with `model.safetensors` or its shards and their index, or several files.
            rename: Maps the names in the files to the names used here.

        Raises:
            CheckpointError: a file is missing, truncated or holds something else than tensors, the index and
                the files do not agree, or two tensors have one name.
        """
        paths = [source] if isinstance(source, Path) else list(source)
        self.label = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        """What errors call these files."""
        self.changes: dict[str, Callable[[Tensor], Tensor]] = {}
        """Functions that are applied to tensors after reading, on the thread that read them."""
        self.extra: dict[str, Tensor] = {}
        """Tensors that come from elsewhere and are given as they are."""
        opened = [file for path in paths for file in _open_files(path)]
        self._set_names(((stored, (file, stored)) for file in opened for stored in file.headers), rename)

    def _set_names(self, homes: Iterable[tuple[str, _Home]], rename: Callable[[str], str]) -> None:
        self._homes: dict[str, _Home] = {}
        for name, home in homes:
            if self._homes.setdefault(rename(name), home) is not home:
                raise CheckpointError(f"{self.label} holds tensor {rename(name)} twice. Copy it again.")

    def renamed(self, rename: Callable[[str], str]) -> TensorFiles:
        """Return the same files with other names, without `changes` and `extra`; nothing is read again."""
        other = copy.copy(self)
        other.changes, other.extra = {}, {}
        other._set_names(self._homes.items(), rename)
        return other

    def names(self) -> Set[str]:
        """Return the names of all tensors, in the order of the files."""
        return dict.fromkeys([*self._homes, *self.extra]).keys()

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every tensor by name."""
        own = {name: file.headers[stored].shape for name, (file, stored) in self._homes.items()}
        return {name: torch.Size(shape) for name, shape in own.items()} | {
            name: tensor.shape for name, tensor in self.extra.items()
        }

    def spec(self, name: str) -> Spec:
        """Return type and shape, from the header.

        Raises:
            CheckpointError: the tensor is of a type that no model here has.
        """
        if name in self.extra:
            return Spec(self.extra[name].dtype, tuple(self.extra[name].shape))
        file, stored = self._homes[name]
        header = file.headers[stored]
        if header.kind not in TYPES:
            raise self._wrong_type(name)
        return Spec(TYPES[header.kind], header.shape)

    def _wrong_type(self, name: str) -> CheckpointError:
        file, stored = self._homes[name]
        floating = ", ".join(kind for kind, dtype in TYPES.items() if dtype.is_floating_point)
        return CheckpointError(
            f"{file.path}: tensor {name} is of type {file.headers[stored].kind}, but weights are one of "
            f"{floating}. Quantised checkpoints cannot be trained: take the original one."
        )

    def check(self, expected: Mapping[str, tuple[int, ...]], *, optional: Set[str] = frozenset()) -> None:
        """Compare names, shapes and types with what a policy needs; reads no numbers.

        Args:
            expected: Shape by name.
            optional: Names in `expected` that may be absent.

        Raises:
            CheckpointError: a tensor is missing, unknown, misshapen or of no floating-point type.
        """
        compare_names(self.label, self.names(), expected.keys() - optional, allowed=expected.keys())
        for name in self.names():
            spec = self.spec(name)
            if spec.shape != tuple(expected[name]):
                raise CheckpointError(
                    f"{self.label}: tensor {name} has shape {list(spec.shape)}, expected "
                    f"{list(expected[name])}. The weights belong to another size of policy: use the "
                    "config.json they were saved with."
                )
            if not spec.dtype.is_floating_point:
                raise self._wrong_type(name)

    def read(self, name: str, buffer: Tensor | None = None) -> Tensor:
        """Return one tensor on the CPU, as its file has it or `changes` makes it. Any thread may call this.

        Args:
            name: Of the tensor.
            buffer: ``[bytes]`` uint8 on the CPU, at least as large: whose memory the tensor gets. None: it
                gets memory of its own.

        Raises:
            CheckpointError: the file ends before the tensor does, or cannot be read.
        """
        if name in self.extra:
            return self.extra[name]
        (file, stored), spec = self._homes[name], self.spec(name)
        if buffer is None:
            tensor = torch.empty(spec.shape, dtype=spec.dtype)
        else:
            tensor = buffer[: spec.nbytes].view(spec.dtype).view(spec.shape)
        file.read(stored, tensor)
        return self.changes[name](tensor) if name in self.changes else tensor

    def stream(self, names: Iterable[str], *, what: str) -> Iterator[tuple[str, Tensor]]:
        """Read tensors one after the other, the next few of them ahead on other threads.

        Args:
            names: In the order wanted.
            what: Shown beside a progress bar when it takes longer than two seconds.

        Yields:
            Name and tensor, of any shape and dtype, on the CPU: what `read` returns.
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


def check_fit(module: nn.Module, files: TensorFiles, *, unused: bool = True) -> None:
    """Check that `files` hold all tensors of `module`, in its shapes. Reads no number.

    Args:
        module: On any device, also meta.
        files: Its weights, under its names.
        unused: Whether the files may hold more; what they hold is reported in the log by name.

    Raises:
        CheckpointError: A tensor is missing or has the wrong shape; names file, tensor and both shapes.
    """
    wanted, shapes = module.state_dict(), files.shapes
    for name, tensor in wanted.items():
        if name not in shapes:
            raise CheckpointError(
                f"{files.label} lacks tensor {name} of shape {list(tensor.shape)}. It belongs to another "
                "model, or was cut: download it again."
            )
        if shapes[name] != tensor.shape:
            raise CheckpointError(
                f"{files.label}: tensor {name} has shape {list(shapes[name])}, the model needs "
                f"{list(tensor.shape)}. The file belongs to a model of another size."
            )
    if extra := sorted(shapes.keys() - wanted.keys()):
        if not unused:
            raise CheckpointError(f"{files.label} holds {_listed(extra)}, which the model has no use for.")
        _log.warning(
            "%s holds %d tensors the model has no use for: %s", files.label, len(extra), _listed(extra)
        )


def fill(module: nn.Module, files: TensorFiles, *, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give `module` (which may live on the meta device) the weights of `files`, one tensor at a time.

    Args:
        module: Receives tensors of its own, on `device`.
        files: Its weights, under its names.
        dtype: Floating-point type of the weights afterwards; whole numbers stay what they are.
        device: Where the weights go.

    Raises:
        CheckpointError: See `check_fit`.
    """
    check_fit(module, files)
    wanted, ready = list(module.state_dict()), dict[str, Tensor]()
    # In one buffer, since memory that is freed after each tensor would lie in pieces between those that stay.
    buffer = torch.empty(max((files.spec(name).nbytes for name in wanted), default=0), dtype=torch.uint8)
    title = Path(files.label).name
    for name in tqdm(wanted, desc=title, unit="tensor", delay=2, mininterval=2, leave=False):
        tensor = files.read(name, buffer)
        kept = dtype if tensor.is_floating_point() else tensor.dtype
        ready[name] = tensor.to(device, kept, copy=True)
    module.load_state_dict(ready, assign=True)


def compare_names(source: Path | str, found: Set[str], required: Set[str], *, allowed: Set[str]) -> None:
    """Check the names of the tensors in `source`.

    Raises:
        CheckpointError: some that are required are missing, or some are not allowed.
    """
    missing, unknown = sorted(required - found), sorted(found - allowed)
    for problem, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            raise CheckpointError(
                f"{source} {problem} {len(names)} tensors: {_listed(names)}. It is not a complete checkpoint "
                "of this policy: copy it again, or use its own config.json."
            )


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of any shape and dtype on the CPU, as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _listed(names: Sequence[str]) -> str:
    """The first few names, for people."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _open_files(path: Path) -> Iterator[_SafetensorsFile | _PthFile]:
    """Open a file, or the weight files of a folder, which have to be those of its index."""
    if not path.is_dir():
        yield _SafetensorsFile(path) if path.suffix == ".safetensors" else _PthFile(path)
        return
    index = path / INDEX
    if not index.exists():
        yield _SafetensorsFile(path / WEIGHTS)
        return
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in weight_map.values()
    ):
        raise CheckpointError(f"{index} has no weight_map of tensors to files beside it. Copy it again.")
    for name in sorted(set(weight_map.values())):
        file = _SafetensorsFile(path / name)
        here = {tensor for tensor, file_name in weight_map.items() if file_name == name}
        compare_names(file.path, file.headers.keys(), here, allowed=here)
        yield file


class _SafetensorsFile:
    """A safetensors file, opened for each tensor that is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise CheckpointError(f"{path} is missing. Download or copy the checkpoint again.")
        try:
            with safe_open(path, framework="numpy"):  # checks the header and the length of the file
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file ({error}). Download or copy it again."
            ) from error
        with path.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            entries = json.loads(opened.read(length))
        entries.pop("__metadata__", None)
        ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0])
        self.headers = {
            name: _Header(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            for name, entry in ordered
        }

    def read(self, stored: str, into: Tensor) -> None:
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.headers[stored].begin)
                _read_into(file, bytes_of(into), self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror}).") from error


def _read_into(file: BinaryIO, target: memoryview, path: Path) -> None:
    while len(target):  # One call reads at most 2 GiB.
        count = file.readinto(target)  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{path} became shorter while it was read. Download or copy it again.")
        target = target[count:]


class _PthFile:
    """A state dict that torch.save wrote, mapped; one thread at a time reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise CheckpointError(f"{path} is missing. Download or copy the checkpoint again.")
        kinds = {dtype: kind for kind, dtype in TYPES.items()}
        self._lock, self._tensors, self._room = threading.Lock(), self._open(), _OPEN_BYTES
        self.headers = {
            name: _Header(kinds.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        self._tensors.clear()

    def read(self, stored: str, into: Tensor) -> None:
        with self._lock:
            if not self._tensors or self._room < 0:
                self._tensors.clear()
                self._tensors, self._room = self._open(), _OPEN_BYTES
            self._room -= into.nbytes
            into.copy_(self._tensors[stored])

    def _open(self) -> dict[str, Tensor]:
        content = load_pth(self.path)
        for wrapper in _WRAPPERS:
            if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
                content = content[wrapper]
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise CheckpointError(
                f"{self.path} is not a state dict of tensors. Copy it again, or save `module.state_dict()`."
            )
        return {str(name): tensor for name, tensor in content.items()}


_Home = tuple[_SafetensorsFile | _PthFile, str]
"""The file in which a tensor is, and its name there."""

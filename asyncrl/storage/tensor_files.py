"""Named tensors of weight files: check, read and write them one at a time.

*.safetensors    a file, or shards with `model.safetensors.index.json`. Numbers are read straight into
                 their tensors: a mapped file's pages would count on top of the copy
*.pth            a state dict of `torch.save`, mapped and read without running code

A file of 10 GB takes no second 10 GB of memory, and is known to fit before a number is read.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import re
import struct
import threading
import zipfile
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from asyncrl.devices.tensors import all_finite
from asyncrl.errors import CheckpointError, first_line
from asyncrl.observability.terminal import progress
from asyncrl.storage.atomic import read_json, replacing, write_json
from asyncrl.storage.untrusted import parse_json

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
TYPES: Final = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}
"""Name of a type in safetensors -> dtype."""
READERS: Final = 4
SHARD_BYTES: Final = 5_000_000_000  # Largest weight file that is written, unless a single tensor is larger
_NAMES: Final = {dtype: name for name, dtype in TYPES.items()}
_HEADER_BYTES: Final = 100_000_000
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spec:
    """Type and shape of a tensor that need not be in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the numbers in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Return a meta tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class _Stored:
    path: Path
    kind: str  # name of the type in safetensors
    shape: tuple[int, ...]
    read: Callable[[Tensor], object]  # Reads into a contiguous CPU tensor of this type and shape; thread-safe


# --- safetensors ---


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    # Tensor name -> entry, and the offset of the numbers.
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes")
        entries = parse_json(file.read(length))
    entries.pop("__metadata__", None)
    return entries, 8 + length


def header_names(path: Path) -> set[str]:
    """Read the tensor names of a safetensors file, even of a truncated one; empty for other files."""
    try:
        return set(_read_header(path)[0]) if path.is_file() else set()
    except (OSError, struct.error, ValueError):
        return set()


def open_safetensors(path: Path) -> dict[str, _Stored]:
    """Check a safetensors file and list its tensors in the order of their numbers."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. Download or copy the checkpoint again.")
    try:
        with safe_open(path, framework="numpy"):  # Checks the header and the length of the file.
            entries, begin = _read_header(path)
        return {
            name: _Stored(
                path,
                entry["dtype"],
                tuple(entry["shape"]),
                partial(_read_numbers, path, begin + entry["data_offsets"][0]),
            )
            for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0])
        }
    except (SafetensorError, OSError, struct.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({error}). Download or copy it again."
        ) from error


def _read_numbers(path: Path, begin: int, into: Tensor) -> None:
    target = _bytes_of(into)
    with path.open("rb") as file:
        file.seek(begin)
        if file.readinto(target) < len(target):
            raise CheckpointError(f"{path} became shorter while it was read. Download or copy it again.")


def _open_all(path: Path) -> Iterator[tuple[str, _Stored]]:
    # The tensors of a file, or of the weight files of a folder, which must agree with its index.
    index = path / INDEX
    if not path.is_dir():
        yield from (open_safetensors if path.suffix.lower() == ".safetensors" else _open_pth)(path).items()
    elif not index.exists():
        yield from open_safetensors(path / WEIGHTS).items()
    else:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise CheckpointError(f"{index} has no weight_map of tensors to files next to it. Copy it again.")
        for name in sorted(set(weight_map.values())):
            found = open_safetensors(path / name)
            here = {tensor for tensor, file_name in weight_map.items() if file_name == name}
            if different := sorted(found.keys() ^ here):
                raise CheckpointError(
                    f"{index} and {name} differ in {_listed(different)}. Copy the folder again."
                )
            yield from found.items()


# --- torch.save without code ---

# DeepSpeed's is the first.
_WRAPPERS: Final = ("module", "model_state", "model_state_dict", "state_dict", "")
_GLOBALS_LOCK: Final = threading.Lock()  # PyTorch's list of safe names is one for the process.


class _PassedOver:  # Stands for classes and functions of a training framework.
    def __new__(cls, *_: object, **__: object) -> Any:
        return OrderedDict()  # The one type that PyTorch both fills and gives a state.


class _NumpyPassedOver:  # Stands for those of NumPy, whose states are tuples.
    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _open_pth(path: Path) -> dict[str, _Stored]:
    return {
        name: _Stored(
            path,
            _NAMES.get(one.dtype, str(one.dtype)),
            tuple(one.shape),
            lambda into, one=one: into.copy_(one),
        )
        for name, one in load_pth(path).items()
    }


def load_pth(path: Path) -> dict[str, Tensor]:
    """Read the CPU tensors, mapped, of a `torch.save` file and its state dict; runs no code."""
    try:
        with zipfile.ZipFile(path) as file:
            records = [one for one in file.infolist() if "/data/" in one.filename]
        with _GLOBALS_LOCK:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            stand_ins: list[Any] = [
                (_NumpyPassedOver if name.startswith("numpy.") else _PassedOver, name) for name in names
            ]
            with torch.serialization.safe_globals(stand_ins):
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        leaves = [leaf.untyped_storage() for leaf in tree_leaves(content) if isinstance(leaf, Tensor)]
        plain = Counter(one.file_size for one in records if one.compress_type == zipfile.ZIP_STORED)
        # PyTorch would map the bytes that follow in the file.
        if Counter({leaf.data_ptr(): leaf.nbytes() for leaf in leaves}.values()) - plain:
            raise ValueError("a record is compressed or shorter than its tensor")
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path} was not read: it was cut short, or saved by PyTorch before 1.6. Copy or download it "
            "again, or save it with a newer PyTorch."
        ) from error
    except Exception as error:  # The unpickler raises anything on damaged files.
        refused = re.search(r"GLOBAL (\S+)", str(error))
        inner = first_line(str(error).rpartition("WeightsUnpickler error: ")[2])
        reason = type(error).__name__ if "weights_only" in inner else inner.rstrip(".")  # Not its advice.
        raise CheckpointError(
            f"{path} was not read: {f'it names {refused[1]}' if refused else reason}. Only the tensors of "
            "torch.save are read, and nothing in a file is ever executed. Copy or download it again."
        ) from error
    tensors = dict[str, Tensor]()
    for wrapper in _WRAPPERS:
        if isinstance(content, dict):
            tensors |= {n: t for n, t in content.items() if isinstance(n, str) and isinstance(t, Tensor)}
            content = content[wrapper] if isinstance(content.get(wrapper), dict) else content
    if not tensors:
        raise CheckpointError(f"{path} was not read: it holds no tensors by name. Download it again.")
    return tensors


# --- reading ---


class TensorFiles:
    """The tensors of one or several files, or of a folder's weight files, by name."""

    def __init__(self, source: Path | Sequence[Path], *, rename: Callable[[str], str] = str) -> None:
        paths = [source] if isinstance(source, Path) else list(source)
        self.label = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        self.changes: dict[str, Callable[[Tensor], Tensor]] = {}
        """Functions applied to tensors after reading, on the reading thread. They keep dtype and shape."""
        self._set((pair for path in paths for pair in _open_all(path)), rename)

    def _set(self, stored: Iterable[tuple[str, _Stored]], rename: Callable[[str], str | None]) -> None:
        self._stored: dict[str, _Stored] = {}
        for name, one in stored:
            new = rename(name)
            if new is not None and self._stored.setdefault(new, one) is not one:
                raise CheckpointError(f"{self.label} holds tensor {new} twice. Copy it again.")

    def renamed(self, rename: Callable[[str], str | None]) -> TensorFiles:
        """Return the same files with other names (None: left out), without `changes`."""
        other = copy.copy(self)
        other.changes = {}
        other._set(self._stored.items(), rename)
        return other

    def include(self, other: TensorFiles, prefix: str) -> None:
        """Add the tensors of other files, with a prefix to their names."""
        self._stored |= {prefix + name: stored for name, stored in other._stored.items()}

    def names(self) -> Set[str]:
        """Return the names of all tensors, in the order of the files."""
        return self._stored.keys()

    @property
    def paths(self) -> list[Path]:
        """Files that hold the tensors, in order."""
        return list(dict.fromkeys(stored.path for stored in self._stored.values()))

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every tensor by name."""
        return {name: torch.Size(stored.shape) for name, stored in self._stored.items()}

    def spec(self, name: str) -> Spec:
        """Return type and shape from the header."""
        stored = self._stored[name]
        if stored.kind not in TYPES:
            raise self._wrong_type(name)
        return Spec(TYPES[stored.kind], stored.shape)

    def _wrong_type(self, name: str) -> CheckpointError:
        floating = ", ".join(kind for kind, dtype in TYPES.items() if dtype.is_floating_point)
        return CheckpointError(
            f"{self._stored[name].path}: tensor {name} is of type {self._stored[name].kind}, but weights are "
            f"one of {floating}. Quantised checkpoints cannot be trained: take the original one."
        )

    def check(self, expected: Mapping[str, Sequence[int]], *, optional: Set[str] = frozenset()) -> None:
        """Compare names (`optional` ones may be absent), shapes and types with a policy's; reads headers."""
        names = self.names()
        wanted = {n: torch.Size(s) for n, s in expected.items() if n in names or n not in optional}
        check_shapes(self.label, wanted, self.shapes, unused=False)
        for name in names:
            if not self.spec(name).dtype.is_floating_point:
                raise self._wrong_type(name)

    def read(self, name: str, buffer: Tensor | None = None) -> Tensor:
        """Read one tensor to the CPU, into `buffer` (``[bytes]`` uint8) if given. Thread-safe."""
        spec = self.spec(name)
        own = torch.empty(spec.nbytes, dtype=torch.uint8) if buffer is None else buffer[: spec.nbytes]
        tensor = own.view(spec.dtype).view(spec.shape)
        self._stored[name].read(tensor)
        return self.changes[name](tensor) if name in self.changes else tensor

    def stream(self, names: Iterable[str], *, what: str) -> Iterator[tuple[str, Tensor]]:
        """Yield name and CPU tensor in order; threads read `READERS` ahead. `what` titles the progress."""
        wanted = list(names)
        bar = progress(desc=what, unit="B", unit_scale=True, delay=2, leave=False)
        bar.total = sum(self.spec(name).nbytes for name in wanted)
        with ThreadPoolExecutor(READERS) as readers, bar:
            reads = (readers.submit(self.read, name) for name in wanted)
            ahead = deque(islice(reads, READERS))
            for name in wanted:
                tensor = ahead.popleft().result()
                ahead.extend(islice(reads, 1))
                bar.update(tensor.nbytes)
                yield name, tensor
                del tensor  # It may be large.


def check_fit(module: nn.Module, files: TensorFiles, *, unused: bool = True) -> None:
    """Check in the headers that `files` hold the tensors of `module`; `unused` allows others."""
    wanted = {name: tensor.shape for name, tensor in module.state_dict().items()}
    check_shapes(files.label, wanted, files.shapes, unused=unused)


def check_shapes(
    label: str, wanted: Mapping[str, torch.Size], found: Mapping[str, torch.Size], *, unused: bool
) -> None:
    """Check names and shapes of a file's tensors; `unused` allows others."""
    for name, shape in wanted.items():
        if found.get(name) != shape:
            seen = f" lacks tensor {name} of shape"
            if name in found:
                seen = f": tensor {name} has shape {list(found[name])}, the model needs"
            raise CheckpointError(
                f"{label}{seen} {list(shape)}. It is of another size, or was cut: download it again."
            )
    if extra := sorted(found.keys() - wanted.keys()):
        if not unused:
            raise CheckpointError(f"{label} holds {_listed(extra)}, which the model has no use for.")
        _log.warning("%s holds %d tensors the model has no use for: %s", label, len(extra), _listed(extra))


def fill(
    module: nn.Module,
    files: TensorFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    exact: Set[str] = frozenset(),
) -> None:
    """Load the weights of `module` (also on meta) one by one: floats as `dtype`, `exact` ones float32."""
    check_fit(module, files)
    wanted, ready = list(module.state_dict()), dict[str, Tensor]()
    # One buffer, since memory that is freed after each tensor would be fragmented by those that stay.
    buffer = torch.empty(max((files.spec(name).nbytes for name in wanted), default=0), dtype=torch.uint8)
    for name in progress(wanted, desc=Path(files.label).name, unit="tensor", delay=2, leave=False):
        tensor = files.read(name, buffer)
        floating = torch.float32 if name in exact else dtype
        ready[name] = tensor.to(device, floating if tensor.is_floating_point() else tensor.dtype, copy=True)
    module.load_state_dict(ready, assign=True)


# --- writing ---


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any shape, dtype and device as one safetensors file, atomically."""
    # Wide types first: every tensor must begin at a multiple of its type's size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered.items()}
    write_file(path, specs, iter(ordered.items()))


def write_file(path: Path, specs: Mapping[str, Spec], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write a safetensors file tensor by tensor, atomically; the library's writer needs all in memory.

    `tensors` come in the order of `specs`, in any dtype and on any device; further ones stay unread.
    """
    header, offset = dict[str, object](__metadata__={"format": "pt"}), 0
    for name, spec in specs.items():
        if offset % spec.dtype.itemsize:
            raise CheckpointError(
                f"Tensor {name} is wider than those before it. Write all in one type: --dtype."
            )
        offsets = [offset, offset := offset + spec.nbytes]
        header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as part, part.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, spec in specs.items():
            found, tensor = next(tensors)
            assert (found, tuple(tensor.shape)) == (name, spec.shape), (found, name, tensor.shape)
            written = tensor.detach().to("cpu", spec.dtype).contiguous()
            if not all_finite(written):
                raise CheckpointError(
                    f"{path} was not written: tensor {name} would hold NaN or infinity in {spec.dtype}. Use "
                    "an earlier checkpoint, a wider type, or a lower learning rate."
                )
            file.write(_bytes_of(written))


def write_folder(
    folder: Path,
    specs: Mapping[str, Spec],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder's weight files of at most `shard_bytes`, with `tensors` as in `write_file`."""
    shards, room = [dict[str, Spec]()], shard_bytes
    for name, spec in specs.items():
        if shards[-1] and spec.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = spec
        room -= spec.nbytes
    count, files = len(shards), [WEIGHTS]
    if count > 1:
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    stream = iter(tensors)
    for file, shard in zip(files, shards, strict=True):
        write_file(folder / file, shard, stream)
    if count > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(spec.nbytes for spec in specs.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    else:
        (folder / INDEX).unlink(missing_ok=True)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data

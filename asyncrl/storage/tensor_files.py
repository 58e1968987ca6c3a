"""Named tensors of weight files: check, read and write them one at a time.

A file of 10 GB takes no second 10 GB of memory, and is known to fit before a number is read.
"""

from __future__ import annotations

import copy
import logging
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from tqdm import tqdm

from asyncrl.errors import CheckpointError
from asyncrl.storage.atomic import write_json
from asyncrl.storage.weight_files import (
    INDEX,
    TYPES,
    WEIGHTS,
    PthFile,
    SafetensorsFile,
    Spec,
    listed,
    open_files,
    write_file,
)

READERS: Final = 4
SHARD_BYTES: Final = 5_000_000_000
"""Largest weight file that is written, unless a single tensor is larger."""
_SHARD: Final = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_log = logging.getLogger(__name__)
_Home = tuple[SafetensorsFile | PthFile, str]
Shapes = Mapping[str, torch.Size]


class TensorFiles:
    """The tensors of one or several files, or of a folder's weight files, by name."""

    def __init__(self, source: Path | Sequence[Path], *, rename: Callable[[str], str] = str) -> None:
        paths = [source] if isinstance(source, Path) else list(source)
        self.label = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        self.changes: dict[str, Callable[[Tensor], Tensor]] = {}
        """Functions applied to tensors after reading, on the reading thread. They keep dtype and shape."""
        self.extra: dict[str, Tensor] = {}
        opened = [file for path in paths for file in open_files(path)]
        self._set_names(((stored, (file, stored)) for file in opened for stored in file.headers), rename)

    def _set_names(self, homes: Iterable[tuple[str, _Home]], rename: Callable[[str], str | None]) -> None:
        self._homes: dict[str, _Home] = {}
        for name, home in homes:
            new = rename(name)
            if new is not None and self._homes.setdefault(new, home) is not home:
                raise CheckpointError(f"{self.label} holds tensor {new} twice. Copy it again.")

    def renamed(self, rename: Callable[[str], str | None]) -> TensorFiles:
        """Return the same files with other names (None: left out), without `changes` and `extra`."""
        other = copy.copy(self)
        other.changes, other.extra = {}, {}
        other._set_names(self._homes.items(), rename)
        return other

    def names(self) -> Set[str]:
        """Return the names of all tensors, in the order of the files."""
        return dict.fromkeys([*self._homes, *self.extra]).keys()

    @property
    def paths(self) -> list[Path]:
        """Files that hold the tensors, in order."""
        return list(dict.fromkeys(file.path for file, _ in self._homes.values()))

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every tensor by name."""
        own = {name: torch.Size(file.headers[stored].shape) for name, (file, stored) in self._homes.items()}
        return own | {name: tensor.shape for name, tensor in self.extra.items()}

    def spec(self, name: str) -> Spec:
        """Return type and shape from the header."""
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
        if name in self.extra:
            return self.extra[name]
        (file, stored), spec = self._homes[name], self.spec(name)
        if buffer is None:
            tensor = torch.empty(spec.shape, dtype=spec.dtype)
        else:
            tensor = buffer[: spec.nbytes].view(spec.dtype).view(spec.shape)
        file.read(stored, tensor)
        if name in self.changes:
            tensor = self.changes[name](tensor)
            found = Spec(tensor.dtype, tuple(tensor.shape))
            assert found == spec, (
                f"{self.label}: {name} is {spec}, and {found} after a change that must keep it"
            )
        return tensor

    def stream(self, names: Iterable[str], *, what: str) -> Iterator[tuple[str, Tensor]]:
        """Yield name and CPU tensor in order; threads read `READERS` ahead. `what` titles the progress."""
        wanted = list(names)
        total, remaining = sum(self.spec(name).nbytes for name in wanted), iter(wanted)
        bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, delay=2, mininterval=1.0, leave=False)
        with ThreadPoolExecutor(READERS) as readers, bar:
            ahead: deque[tuple[str, Future[Tensor]]] = deque()
            ahead.extend((name, readers.submit(self.read, name)) for name in islice(remaining, READERS))
            while ahead:
                name, future = ahead.popleft()
                tensor = future.result()
                del future  # It would keep the tensor in memory while the caller works on it.
                ahead.extend((n, readers.submit(self.read, n)) for n in islice(remaining, 1))
                bar.update(self.spec(name).nbytes)
                yield name, tensor
                del tensor


def check_fit(module: nn.Module, files: TensorFiles, *, unused: bool = True) -> None:
    """Check in the headers that `files` hold the tensors of `module`; `unused` allows others."""
    wanted = {name: tensor.shape for name, tensor in module.state_dict().items()}
    check_shapes(files.label, wanted, files.shapes, unused=unused)


def check_shapes(label: str, wanted: Shapes, found: Shapes, *, unused: bool) -> None:
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
            raise CheckpointError(f"{label} holds {listed(extra)}, which the model has no use for.")
        _log.warning("%s holds %d tensors the model has no use for: %s", label, len(extra), listed(extra))


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
    for name in tqdm(wanted, desc=Path(files.label).name, unit="tensor", delay=2, mininterval=2, leave=False):
        tensor = files.read(name, buffer)
        floating = torch.float32 if name in exact else dtype
        ready[name] = tensor.to(device, floating if tensor.is_floating_point() else tensor.dtype, copy=True)
    module.load_state_dict(ready, assign=True)


def write_folder(
    folder: Path,
    specs: Mapping[str, Spec],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weight files of a folder, replacing old ones one by one.

    Args:
        tensors: Name and tensor in the order of `specs`, of these shapes, any dtype and device.
        shard_bytes: Size above which a further file is begun.
    """
    shards, room = [dict[str, Spec]()], shard_bytes
    for name, spec in specs.items():
        if shards[-1] and spec.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = spec
        room -= spec.nbytes
    count = len(shards)
    files = (
        [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [WEIGHTS]
    )
    before = [path for path in folder.glob("model*.safetensors") if _SHARD.fullmatch(path.name)]
    stream = iter(tensors)
    for file, shard in zip(files, shards, strict=True):
        write_file(folder / file, shard, stream)
    if count > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(spec.nbytes for spec in specs.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for path in before:
        if path.name not in files:
            path.unlink()


def rewrite_file(
    source: Path, target: Path, tensors: Mapping[str, Tensor], rename: Callable[[str], str]
) -> None:
    """Copy a safetensors file by tensor, with the numbers of `tensors` (any dtype) for renamed names."""
    files = TensorFiles(source)
    specs = {name: files.spec(name) for name in files.names()}

    def numbers(name: str) -> Tensor:
        new = tensors.get(rename(name))
        return files.read(name) if new is None else new

    write_file(target, specs, ((name, numbers(name)) for name in specs))


def copy_others(source: Path, folder: Path, besides: Set[str]) -> None:
    """Copy the content of a folder except the names in `besides` and hidden files; links are followed."""

    def skipped(place: str, names: list[str]) -> list[str]:
        return [n for n in names if n.startswith(".") or (Path(place) == source and n in besides)]

    shutil.copytree(source, folder, ignore=skipped, copy_function=shutil.copyfile, dirs_exist_ok=True)

"""Read weight files: names, shapes and types from their headers, and tensors one by one; never all of them.

The kinds of files are those of `weight_files`. Whether a file fits is known before a number is read, and a
10 GB file needs no second 10 GB of memory.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from tqdm import tqdm

from asyncrl.errors import CheckpointError
from asyncrl.storage.weight_files import TYPES, PthFile, SafetensorsFile, compare_names, listed, open_files

READERS: Final = 4
"""Tensors that are read at the same time; so many are in memory besides those in use."""
_log = logging.getLogger(__name__)
_Home = tuple[SafetensorsFile | PthFile, str]
"""The file in which a tensor is, and its name there."""


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


class TensorFiles:
    """The tensors of one file, of several, or of the weight files of a folder, by name."""

    def __init__(self, source: Path | Sequence[Path], *, rename: Callable[[str], str] = str) -> None:
        """Read the headers.

        Raises:
            CheckpointError: a file is missing, truncated or holds something else than tensors, the index and
                the files do not agree, or two tensors have one name.
        """
        paths = [source] if isinstance(source, Path) else list(source)
        self.label = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        """What errors call these files."""
        self.changes: dict[str, Callable[[Tensor], Tensor]] = {}
        """Functions that are applied to tensors after reading, on the thread that read them. They keep dtype
        and shape: `spec`, which headers of new files are written from, is known before a number is read."""
        self.extra: dict[str, Tensor] = {}
        """Tensors that come from elsewhere and are given as they are."""
        opened = [file for path in paths for file in open_files(path)]
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

    def only(self, names: Set[str]) -> TensorFiles:
        """Return the same files with the tensors of these names alone, without `changes` and `extra`."""
        other = copy.copy(self)
        other.changes, other.extra = {}, {}
        other._homes = {name: home for name, home in self._homes.items() if name in names}
        return other

    def names(self) -> Set[str]:
        """Return the names of all tensors, in the order of the files."""
        return dict.fromkeys([*self._homes, *self.extra]).keys()

    @property
    def paths(self) -> list[Path]:
        """Return the files that the tensors are in, in their order."""
        return list(dict.fromkeys(file.path for file, _ in self._homes.values()))

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
        if name not in self.changes:
            return tensor
        changed = self.changes[name](tensor)
        found = Spec(changed.dtype, tuple(changed.shape))
        assert found == spec, f"{self.label}: {name} is {spec}, and {found} after a change that must keep it"
        return changed

    def stream(self, names: Iterable[str], *, what: str) -> Iterator[tuple[str, Tensor]]:
        """Read tensors one after the other, the next few of them ahead on other threads.

        Args:
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
            raise CheckpointError(f"{files.label} holds {listed(extra)}, which the model has no use for.")
        _log.warning(
            "%s holds %d tensors the model has no use for: %s", files.label, len(extra), listed(extra)
        )


def fill(
    module: nn.Module,
    files: TensorFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    exact: Set[str] = frozenset(),
) -> None:
    """Give `module` (which may live on the meta device) the weights of `files`, one tensor at a time.

    Args:
        dtype: Floating-point type of the weights afterwards; whole numbers stay what they are.
        exact: Names of weights that become float32 instead; the module may have none of these names.

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
        chosen = torch.float32 if name in exact else dtype
        kept = chosen if tensor.is_floating_point() else tensor.dtype
        ready[name] = tensor.to(device, kept, copy=True)
    module.load_state_dict(ready, assign=True)

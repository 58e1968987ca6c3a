"""Weight files in, modules with their weights out. World and reward models read all their files through this.

Names and shapes come from the headers, so that whether a file fits is known before a number is read. Numbers
are read one tensor at a time, converted and put where they stay: a 10 GB file needs no second 10 GB of
memory. No file can run code: safetensors has none in it, and ``.pth`` goes through
``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import json
import logging
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from asyncrl.errors import CheckpointError

_log = logging.getLogger(__name__)
_WRAPPERS: Final = ("model_state", "model_state_dict", "state_dict")
_OPEN_BYTES: Final = 2**29
"""Files are mapped, and what was read of a mapped file counts as memory of this process until it is closed.
After so many bytes it is opened anew."""
_SHOWN: Final = 8
_UNREADABLE: Final = (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError)


class TensorFiles:
    """Named tensors in one file or in several shards.

    Raises:
        CheckpointError: A file is missing, cannot be read, or holds something else than tensors; two files
            hold a tensor of the same name.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self.shapes: dict[str, torch.Size] = {}
        """Shape of every tensor by the name in its file."""
        self._homes: dict[str, Path] = {}
        for path in self.paths:
            with _opened(path) as file:
                for name in file.names:
                    if name in self._homes:
                        raise CheckpointError(f"tensor {name} is in {self._homes[name]} and in {path}.")
                    self.shapes[name] = file.shape(name)
                    self._homes[name] = path

    @property
    def label(self) -> str:
        """What errors call these files."""
        first = str(self.paths[0])
        return first if len(self.paths) == 1 else f"{first} and {len(self.paths) - 1} more"

    def stream(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Read tensors one at a time, shard by shard. Copy what is kept: it lies in a mapped file."""
        wanted = set(names)
        for path in self.paths:
            mine = [name for name, home in self._homes.items() if home == path and name in wanted]
            while mine:
                room = _OPEN_BYTES
                with _opened(path) as file:
                    while mine and room > 0:
                        name = mine.pop(0)
                        tensor = file.read(name)
                        room -= tensor.nbytes
                        yield name, tensor


@dataclass(frozen=True)
class _OpenFile:
    """One open file."""

    names: Sequence[str]
    shape: Callable[[str], torch.Size]
    read: Callable[[str], Tensor]


@contextmanager
def _opened(path: Path) -> Iterator[_OpenFile]:
    if not path.is_file():
        raise CheckpointError(f"weight file {path} does not exist. Check the folder or download it again.")
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                yield _OpenFile(
                    list(file.keys()),
                    lambda name: torch.Size(file.get_slice(name).get_shape()),
                    file.get_tensor,
                )
        else:
            tensors = _pth_tensors(path)
            yield _OpenFile(list(tensors), lambda name: tensors[name].shape, tensors.__getitem__)
    except _UNREADABLE as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"weight file {path} cannot be read ({error}). Download or save it again."
        ) from error


def _pth_tensors(path: Path) -> dict[str, Tensor]:
    mapped = zipfile.is_zipfile(path)  # files of PyTorch before 1.6 cannot be mapped
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    for wrapper in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(
            f"weight file {path} is not a state dict of tensors. Save `module.state_dict()`."
        )
    return content


def check_fit(
    module: nn.Module, files: TensorFiles, rename: Callable[[str], str] = str, *, unused: bool = True
) -> dict[str, str]:
    """Check that `files` hold all tensors of `module`, in its shapes. Reads no number.

    Args:
        module: On any device, also meta.
        files: Its weights.
        rename: Maps a stored name to the module's name.
        unused: Whether the files may hold more; what they hold is reported in the log by name.

    Returns:
        The stored name of each of the module's tensors.

    Raises:
        CheckpointError: A tensor is missing or has the wrong shape; names file, tensor and both shapes.
    """
    stored = {rename(name): name for name in files.shapes}
    wanted = module.state_dict()
    for name, tensor in wanted.items():
        if name not in stored:
            raise CheckpointError(
                f"{files.label} lacks tensor {name} of shape {list(tensor.shape)}. It belongs to another "
                "model, or was cut: download it again."
            )
        found = files.shapes[stored[name]]
        if found != tensor.shape:
            raise CheckpointError(
                f"{files.label}: tensor {name} has shape {list(found)}, the model needs "
                f"{list(tensor.shape)}. The file belongs to a model of another size."
            )
    if extra := sorted(stored[name] for name in stored.keys() - wanted.keys()):
        if not unused:
            raise CheckpointError(f"{files.label} holds {listed(extra)}, which the model has no use for.")
        _log.warning(
            "%s holds %d tensors the model has no use for: %s", files.label, len(extra), listed(extra)
        )
    return {name: stored[name] for name in wanted}


def listed(names: Sequence[str]) -> str:
    """The first few names, for people."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def fill(
    module: nn.Module,
    files: TensorFiles,
    *,
    rename: Callable[[str], str] = str,
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Give `module` (which may live on the meta device) the weights of `files`, one tensor at a time.

    Args:
        module: Receives tensors of its own, on `device`.
        files: Its weights.
        rename: Maps a stored name to the module's name.
        dtype: Floating point type of the weights afterwards; whole numbers stay what they are.
        device: Where the weights go.

    Raises:
        CheckpointError: See `check_fit`.
    """
    names = {stored: name for name, stored in check_fit(module, files, rename).items()}
    ready: dict[str, Tensor] = {}
    shown = tqdm(
        files.stream(names),
        desc=files.paths[0].name,
        total=len(names),
        unit="tensor",
        delay=2,
        mininterval=2,
        leave=False,
    )
    for stored, tensor in shown:
        kept = dtype if tensor.is_floating_point() else tensor.dtype
        ready[names[stored]] = tensor.to(device, kept, copy=True)
    module.load_state_dict(ready, assign=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a ``.safetensors`` file so that a reader sees the old file or the new one, never half of it."""
    partial = path.with_suffix(".partial")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial)
    partial.replace(path)


def write_pth(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a ``.pth`` state dict, which published layouts want; whole or not at all."""
    partial = path.with_suffix(".partial")
    # A copy, because torch.save writes all of the memory that a tensor is a part of.
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    torch.save(own, partial)
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: The file is missing or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist, so this folder does not say which model it holds."
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}). Save the model again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, expected a JSON object.")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object so that a reader sees the old file or the new one, never half of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)

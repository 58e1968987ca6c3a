"""Weight files in, tensors that are known to fit a module out. Shared by the world models."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asyncrl.errors import CheckpointError

_log = logging.getLogger(__name__)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a ``.safetensors`` file or of a ``.pth`` state dict, without unpickling objects.

    Raises:
        CheckpointError: The file is missing, truncated or holds something else than tensors.
    """
    if not path.is_file():
        raise CheckpointError(f"weight file {path} does not exist. Check the folder or download it again.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, EOFError) as error:
        raise CheckpointError(
            f"weight file {path} cannot be read ({error}). Download or save it again."
        ) from error
    for wrapper in ("model_state", "model_state_dict", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(
            f"weight file {path} is not a state dict of tensors. Save `module.state_dict()`."
        )
    return content


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a ``.safetensors`` file so that a reader sees the old file or the new one, never half of it."""
    partial = path.with_suffix(".partial")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial)
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


def assign(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    path: Path,
    *,
    rename: Callable[[str], str] = str,
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Make `tensors` the parameters of `module` (which may live on the meta device), converted on the way.

    Extra tensors are reported in the log and left out: published checkpoints carry some.

    Args:
        module: Receives the tensors.
        tensors: By name as stored in the file.
        path: Named in errors.
        rename: Maps a stored name to the module's name.
        dtype: Floating point type of the parameters afterwards.
        device: Where the parameters go.

    Raises:
        CheckpointError: A tensor is missing or has the wrong shape; names file, tensor and both shapes.
    """
    stored = {rename(name): tensor for name, tensor in tensors.items()}
    wanted = module.state_dict()
    for name, tensor in wanted.items():
        if name not in stored:
            raise CheckpointError(
                f"{path} lacks tensor {name} of shape {list(tensor.shape)}. It belongs to another model."
            )
        if stored[name].shape != tensor.shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(stored[name].shape)}, the model needs "
                f"{list(tensor.shape)}. The file belongs to a model of another size."
            )
    if extra := sorted(stored.keys() - wanted.keys()):
        _log.warning("%s holds %d tensors the model has no use for, e.g. %s", path, len(extra), extra[0])
    ready = {
        name: stored[name].to(device, dtype if stored[name].is_floating_point() else None) for name in wanted
    }
    module.load_state_dict(ready, assign=True)

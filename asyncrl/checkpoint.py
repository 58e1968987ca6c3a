"""Everything a run needs to go on, on disk: policy, optimizer, random states and counters. No pickle.

    run_dir/checkpoints/update_000040/
      (policy files)           written by the function the caller passes, so the folder is a --policy too
      optimizer.safetensors    AdamW state, "<parameter name>.<exp_avg | exp_avg_sq | step>"
      random.safetensors       state of torch's generators
      state.json               counters, Python's random state, versions, and the size of every file

A checkpoint is written in this order, so that a crash at any point leaves the previous one the newest:
1. all files into `update_000040.tmp`, state.json last, each flushed to the disk (fsync);
2. the folder itself flushed; 3. renamed to `update_000040`; 4. the parent flushed; 5. old ones deleted.
A folder without the suffix is therefore complete; one with it is a leftover and deleted by the next save.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from asyncrl import __version__
from asyncrl.errors import CheckpointError

FORMAT: Final = 1
"""Version of state.json. Raise it when a field changes meaning."""
FOLDER: Final = "checkpoints"
_NAME = re.compile(r"update_(\d{6,})")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    version: int
    """Policy version = number of updates made."""
    groups_used: int
    """Groups the learner has taken from the replay: where the stream of start states goes on."""
    bad_updates: int = 0
    """Updates skipped so far because their gradient was not finite."""
    bad_in_a_row: int = 0
    """How many of them were the last ones."""
    config_hash: str = ""
    """Identifies the settings of the run that wrote the checkpoint."""
    asyncrl_version: str = __version__


class Checkpoints:
    """Writes the checkpoints of one run and keeps the newest few."""

    def __init__(self, run_dir: Path, *, keep: int) -> None:
        """Write into `run_dir`/checkpoints and keep the `keep` newest checkpoints (at least 1)."""
        self.folder = run_dir / FOLDER
        self.keep = keep

    def save(
        self,
        progress: Progress,
        *,
        save_policy: Callable[[Path], None],
        optimizer: Optimizer,
        tensors: Mapping[str, Tensor],
    ) -> Path:
        """Write a checkpoint, whole or not at all, and delete those that are no longer kept.

        Args:
            progress: Counters; `progress.version` names the folder.
            save_policy: Writes the policy into the (existing) folder it is given.
            optimizer: Its state is saved for every tensor of `tensors`.
            tensors: The optimizer's parameters (or tensors in the same memory) by name.

        Raises:
            CheckpointError: The disk refused; older checkpoints are untouched.
        """
        final = self.folder / f"update_{progress.version:06d}"
        part = final.with_name(final.name + ".tmp")
        try:
            for leftover in self.folder.glob("*.tmp"):
                shutil.rmtree(leftover)
            part.mkdir(parents=True)
            save_policy(part)
            save_file(optimizer_tensors(optimizer, tensors), part / "optimizer.safetensors")
            save_file(_torch_random_state(), part / "random.safetensors")
            _write_state(part, progress)
            _publish(part, final)
            for _, old in _complete(self.folder)[: -self.keep]:
                shutil.rmtree(old)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(part, ignore_errors=True)  # Half a checkpoint would only fill the disk.
            raise CheckpointError(
                f"Checkpoint {final} cannot be written ({error}). Free space on the disk "
                "(or lower --keep-checkpoints) and continue from the checkpoint before it with --resume."
            ) from error
        return final


def latest(run_dir: Path) -> Path | None:
    """Newest complete checkpoint of a run, or None."""
    complete = _complete(run_dir / FOLDER)
    return complete[-1][1] if complete else None


def load(folder: Path, *, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> Progress:
    """Restore the optimizer and the random states; the policy is loaded from the same folder before this.

    Args:
        folder: A checkpoint, for example from `latest`.
        optimizer: Fresh, over the parameters in `tensors`; its state is replaced.
        tensors: The trainable parameters by name.

    Raises:
        CheckpointError: A file is missing or truncated, or the optimizer state does not fit the parameters.
    """
    state = _read_state(folder)
    restore_optimizer(optimizer, tensors, _read(folder / "optimizer.safetensors"), str(folder))
    generators = _read(folder / "random.safetensors")
    try:
        progress = Progress(**state["progress"])
        version, internal, gauss_next = state["python_random"]
        random.setstate((version, tuple(internal), gauss_next))
        torch.set_rng_state(generators["cpu"])
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(folder / "state.json", f"unexpected content: {error!r}") from error
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in generators:
            torch.cuda.set_rng_state(generators[f"cuda.{index}"], index)
    return progress


def verify(folder: Path) -> None:
    """Check that every file of a checkpoint is there in its full size; cheap, reads no weights.

    Raises:
        CheckpointError: Names the file and the remedy.
    """
    _read_state(folder)


def optimizer_tensors(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Flatten an optimizer's state to ``{"<parameter name>.<key>": tensor}`` on the CPU."""
    return {
        f"{name}.{key}": torch.as_tensor(value).detach().cpu().contiguous()
        for name, parameter in _parameters(optimizer, tensors).items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor], where: str
) -> None:
    """Put back what `optimizer_tensors` returned, bit for bit.

    Raises:
        CheckpointError: Names or shapes do not fit the parameters.
    """
    states: dict[str, dict[str, Tensor]] = {}
    for full_name, value in saved.items():
        name, _, key = full_name.rpartition(".")
        fits = name in tensors and (key == "step" or value.shape == tensors[name].shape)
        if not fits:
            raise CheckpointError(
                f"{where}: optimizer state {full_name} {list(value.shape)} does not fit the policy. "
                "Resume with the policy settings of the run (its config.json), or start afresh with "
                "--policy and this folder."
            )
        # AdamW counts its steps on the CPU.
        states.setdefault(name, {})[key] = value if key == "step" else value.to(tensors[name].device)
    missing = sorted(set(tensors) - set(states))
    if states and missing:
        raise CheckpointError(
            f"{where} has no optimizer state for {missing[0]} and {len(missing) - 1} more. Resume with "
            "the policy settings of the run (its config.json), or start afresh with --policy and this folder."
        )
    parameters = _parameters(optimizer, tensors)
    optimizer.state.clear()
    for name, state in states.items():
        optimizer.state[parameters[name]] = state


def _parameters(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Find the optimizer's parameter behind each name; a policy hands out tensors that share their memory."""
    by_memory = {p.data_ptr(): p for group in optimizer.param_groups for p in group["params"]}
    return {name: by_memory[tensor.data_ptr()] for name, tensor in tensors.items()}


def _torch_random_state() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _write_state(part: Path, progress: Progress) -> None:
    files = sorted(path for path in part.rglob("*") if path.is_file())
    state = {
        "format": FORMAT,
        "progress": asdict(progress),
        "python_random": random.getstate(),
        "files": {path.relative_to(part).as_posix(): path.stat().st_size for path in files},
    }
    (part / "state.json").write_text(json.dumps(state) + "\n")


def _publish(part: Path, final: Path) -> None:
    """Flush everything below `part`, then give it its final name."""
    for path in [*part.rglob("*"), part]:
        _flush(path)
    replaced = final.with_name(final.name + ".replaced.tmp")
    if final.exists():  # Written by a run that then resumed from an older checkpoint.
        final.rename(replaced)
    part.rename(final)
    _flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _complete(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints with their versions, oldest first."""
    found = [(match, path) for path in folder.glob("update_*") if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found)


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text())
        files = dict(state["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, str(error)) from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {state.get('format')}, this asyncrl {__version__} reads {FORMAT}. "
            "Continue with the version that wrote it, or start afresh with --policy and this folder."
        )
    for name, size in files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            seen = "is missing" if found is None else f"has {found} bytes"
            raise _unreadable(folder / name, f"it {seen}, {size} were written")
    return state


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"Checkpoint file {path} cannot be read: {reason}. Delete the folder {path.parent.name}; --resume "
        "then continues from the checkpoint before it."
    )

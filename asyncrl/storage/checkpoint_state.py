"""Write and read weights and optimizer with torch.distributed.checkpoint, without pickle.

model.<name>                               float32 weight
optimizer.<name>.<exp_avg | exp_avg_sq>    of the weight's shape
optimizer.<name>.step                      ``[1]``: AdamW's count of steps
"""
# Every rank writes its own shard of every tensor, in safetensors files whose headers have the offsets:
# another number of ranks can read them. The planners are used rank by rank, because the library's exchange of
# plans pickles.

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from asyncrl.errors import CheckpointError, first_line
from asyncrl.storage.tensor_files import open_safetensors


class Ranks:
    """The writer threads of all ranks, which take each step together."""

    def __init__(self, link: ProcessGroup | None) -> None:
        self.rank, self.size = (0, 1) if link is None else (link.rank(), link.size())
        self._link = link

    def all(self, action: Callable[[], None]) -> None:
        """Run an action on every rank; raises on all if it fails on one."""
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            failure = error
        failures = torch.tensor([int(failure is not None)])
        if self._link is not None:
            torch.distributed.all_reduce(failures, group=self._link)
        if failure is not None:
            raise failure
        if failures.any():
            raise OSError(f"{int(failures)} of {self.size} learner ranks failed: see their output")

    def first(self, action: Callable[[], None]) -> None:
        """Run an action on rank 0 while the others wait; raises as `all` does."""
        self.all(action if self.rank == 0 else lambda: None)


FILE_BYTES: Final = 2 * 2**30  # Approximate size of a file, which is assembled in memory before it is written
Parameters = Mapping[str, nn.Parameter]
_UNREADABLE: Final = (
    *(CheckpointError, SafetensorError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError),
    *(RuntimeError, AssertionError, OverflowError, MemoryError),
)  # raised by PyTorch on inconsistent headers


def copy_state(parameters: Parameters, optimizer: Optimizer, rank: int) -> dict[str, Tensor]:
    """Copy this rank's shard of weights and optimizer to host memory; rank 0 adds unsharded tensors."""
    state: dict[str, Tensor] = {f"model.{name}": p.detach() for name, p in parameters.items()}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensor = torch.as_tensor(value).detach()
            state[f"optimizer.{name}.{key}"] = tensor.reshape(1) if key == "step" else tensor

    def is_mine(tensor: Tensor) -> bool:
        if not isinstance(tensor, DTensor):
            return rank == 0
        # With two mesh dimensions every row of ranks has all shards; the first row writes them.
        return tensor.device_mesh.ndim == 1 or tensor.device_mesh.get_local_rank(0) == 0

    copies = {name: tensor.to("cpu", copy=True) for name, tensor in state.items() if is_mine(tensor)}
    return {name: copy.contiguous() for name, copy in copies.items()}  # safetensors takes no other format


def write_state(state: Mapping[str, Tensor], folder: Path, rank: int) -> None:
    """Write this rank's result of `copy_state` into `folder`; ranks do not wait for each other."""
    files: dict[str, int] = {}
    number, room = 1, FILE_BYTES
    for name, tensor in state.items():
        local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if room < local.nbytes and room < FILE_BYTES:
            number, room = number + 1, FILE_BYTES
        files[name] = number
        room -= local.nbytes
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    # The files are numbered by the place of the plan among those of all ranks.
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
    writer.write_data(planner.finish_plan(plan), planner).wait()


def read_state(folder: Path, parameters: Parameters, optimizer: Optimizer) -> None:
    """Restore the result of `write_state` by any number of ranks, bit for bit."""
    reader = HuggingFaceStorageReader(str(folder))
    try:
        for path in folder.glob("*.safetensors"):
            open_safetensors(path)  # The library's reader checks no header, and blocks on a named pipe.
        metadata = reader.read_metadata()
    except _UNREADABLE as error:
        raise unreadable(folder, first_line(error)) from error
    saved = {name: tuple(getattr(entry, "size", ())) for name, entry in metadata.state_dict_metadata.items()}
    states = _fitting_state(saved, parameters, folder)
    target: dict[str, Tensor] = {f"model.{name}": p.detach() for name, p in parameters.items()}
    for name, state in states.items():
        target |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    planner = DefaultLoadPlanner()
    try:
        planner.set_up_planner(target, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except _UNREADABLE as error:
        raise unreadable(folder, first_line(error)) from error
    optimizer.state.clear()
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for name, state in states.items():
        # AdamW keeps its step count on the CPU, if fused on the weight's device.
        step = state["step"].reshape(()).to(parameters[name].device if fused else "cpu")
        optimizer.state[parameters[name]] = state | {"step": step}


def random_file(rank: int) -> str:
    """Return the file name of a rank's generator states."""
    return f"random-{rank:05d}.safetensors"


def copy_generators() -> dict[str, Tensor]:
    """Copy the states of torch's CPU and current GPU generators, each ``[bytes]`` uint8."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_generators(path: Path) -> None:
    """Restore the result of `copy_generators`, if the file exists."""
    if not path.exists():  # The checkpoint comes from fewer ranks.
        return
    try:
        generators = load_file(path) if path.is_file() else {}
        torch.set_rng_state(generators["cpu"])
        if "cuda" in generators and torch.cuda.is_available():
            torch.cuda.set_rng_state(generators["cuda"])
    except (SafetensorError, OSError, KeyError, TypeError, RuntimeError) as error:
        raise unreadable(path, str(error)) from error


def unreadable(path: Path, reason: str) -> CheckpointError:
    """Return the error for a file or folder of a checkpoint."""
    folder = path.parent.parent if path.parent.name == "state" else path.parent
    name = folder.name if path.name[:7] != "update_" else path.name
    return CheckpointError(
        f"Checkpoint file {path} cannot be read: {reason}. Delete the folder {name}; --resume "
        "then continues from the checkpoint before it."
    )


def _fitting_state(
    saved: Mapping[str, tuple[int, ...]], parameters: Parameters, folder: Path
) -> dict[str, dict[str, Tensor]]:
    # Allocates the optimizer's state that was saved.
    states: dict[str, dict[str, Tensor]] = {}
    for full_name, shape in saved.items():
        kind, _, name = full_name.partition(".")
        key = ""
        if kind == "optimizer":
            name, _, key = name.rpartition(".")
        like = torch.zeros(1) if key == "step" else parameters.get(name)
        if like is None or tuple(like.shape) != shape:
            raise CheckpointError(f"{folder}: {full_name} {list(shape)} does not fit the policy. {_REMEDY}")
        if key:
            states.setdefault(name, {})[key] = torch.zeros_like(like.detach())
    # Weights without a gradient so far, like the policy's in the critic's warm-up, have no state at all.
    keys = {key for state in states.values() for key in state}
    for what, names in (
        ("weight", [name for name in parameters if f"model.{name}" not in saved]),
        ("complete optimizer state", [name for name, state in states.items() if state.keys() != keys]),
    ):
        if names:
            raise CheckpointError(
                f"{folder} has no {what} for {min(names)} and {len(names) - 1} more. {_REMEDY}"
            )
    return states


_REMEDY: Final = (
    "Resume with the policy settings of the run (its config.json), or start afresh with --policy and the "
    "checkpoint's folder."
)

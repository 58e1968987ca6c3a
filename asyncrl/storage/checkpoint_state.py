"""Write and read weights and optimizer with torch.distributed.checkpoint, without pickle.

Every rank writes its own part of every tensor, in safetensors files whose headers say where the parts belong,
so that another number of ranks can read them. Because the headers are enough, the ranks exchange nothing:
the planners of torch.distributed.checkpoint are used rank by rank, and its own exchange of plans, which
pickles, is not.

    model.<name>                               float32 weight
    optimizer.<name>.<exp_avg | exp_avg_sq>    of the weight's shape
    optimizer.<name>.step                      ``[1]``: AdamW's count of steps

Write checkpoints beside the training: one thread per rank, and ranks that succeed together.

The rename that publishes a checkpoint happens after all ranks have said, through a process group of their
writers' own, that their files are written. When one fails, all of them do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from asyncrl.errors import CheckpointError, first_line
from asyncrl.observability import waits
from asyncrl.storage.weight_files import SafetensorsFile

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Ranks:
    """The writers of all ranks, step by step together."""

    def __init__(self, link: ProcessGroup | None) -> None:
        """Join the writers; None: this rank is alone."""
        self.rank, self.size = (0, 1) if link is None else (link.rank(), link.size())
        self._link = link

    def all(self, action: Callable[[], None]) -> None:
        """Do it on every rank; returns when all have."""
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            failure = error
        failures = self._count(int(failure is not None))
        if failure is not None:
            raise failure
        if failures:
            raise OSError(f"{failures} of {self.size} learner ranks failed: see their output")

    def first(self, action: Callable[[], None]) -> None:
        """Do it on rank 0; the others wait for it. Raises as `all` does."""
        self.all(action if self.rank == 0 else lambda: None)

    def _count(self, failed: int) -> int:
        if self._link is None:
            return failed
        import torch
        import torch.distributed as dist

        failures = torch.tensor([failed])
        dist.all_reduce(failures, group=self._link)
        return int(failures)


class WriterThread:
    """At most one action at a time, beside its owner. Used by one thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._name = Path()
        self._waited = 0.0

    def start(self, name: Path, action: Callable[[], None]) -> None:
        """Begin an action; the one before it must have been waited for with `finish`."""
        assert self._thread is None, "finish comes first"

        def run() -> None:
            try:
                action()
            except BaseException as error:  # Raised where the owner asks next.
                self._failure = error

        self._name = name
        self._thread = threading.Thread(target=run, name=f"write {name.name}", daemon=True)
        self._thread.start()

    def finish(self, deadline: float) -> None:
        """Wait for the action, if there is one, and raise its error."""
        if self._thread is None:
            return
        began = time.monotonic()
        with waits.waiting(waits.CHECKPOINT, deadline):
            self._thread.join(deadline)
        self._waited += time.monotonic() - began
        if self._thread.is_alive():
            raise CheckpointError(
                f"Checkpoint {self._name} is not written after {deadline:g} more seconds. Look at the disk "
                "and the output of the other learner ranks; --resume goes on from the checkpoint before it."
            )
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def take_waited(self) -> float:
        """Seconds spent in `finish` since the last call of this."""
        waited, self._waited = self._waited, 0.0
        return waited


FILE_BYTES: Final = 2 * 2**30
"""About how much one file holds: a file is put together in memory before it is written."""
Parameters = Mapping[str, nn.Parameter]
_UNREADABLE: Final = (
    *(CheckpointError, SafetensorError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError),
    *(RuntimeError, AssertionError, OverflowError, MemoryError),
)
"""What PyTorch's reader raises on headers that do not fit together."""


def copy_state(parameters: Parameters, optimizer: Optimizer, rank: int) -> dict[str, Tensor]:
    """Copy this rank's part of weights and optimizer to host memory.

    Args:
        rank: This rank; what is not sharded is kept by rank 0 only.

    Returns:
        Weights and moments by name, in the parameters' shapes and dtypes, and AdamW's steps, ``[1]`` float32.
    """
    state: dict[str, Tensor] = {f"model.{name}": p.detach() for name, p in parameters.items()}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensor = torch.as_tensor(value).detach()
            state[f"optimizer.{name}.{key}"] = tensor.reshape(1) if key == "step" else tensor
    mine = {name: t for name, t in state.items() if _is_written_by(t, rank)}
    return {name: tensor.to("cpu", copy=True) for name, tensor in mine.items()}


def _is_written_by(tensor: Tensor, rank: int) -> bool:
    """Whether this rank has a part that no other one writes."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    # Every row of ranks has all of it; the first one writes it.
    return tensor.device_mesh.ndim == 1 or tensor.device_mesh.get_local_rank(0) == 0


def write_state(state: Mapping[str, Tensor], folder: Path, rank: int) -> None:
    """Write this rank's files into `folder`; no rank needs to wait for another.

    Args:
        state: What `copy_state` returned: by name, any shapes and dtypes, sharded or not.
    """
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_files_of(state), save_distributed=True
    )
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    # The files are numbered by the place of the plan among those of all ranks.
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
    writer.write_data(planner.finish_plan(plan), planner).wait()


def read_state(folder: Path, parameters: Parameters, optimizer: Optimizer) -> None:
    """Put back what `write_state` wrote, bit for bit, whatever the number of ranks was then."""
    reader = HuggingFaceStorageReader(str(folder))
    try:
        for path in folder.glob("*.safetensors"):
            SafetensorsFile(path)  # The reader itself believes the length of a header, and opens named pipes.
        metadata = reader.read_metadata()
    except _UNREADABLE as error:
        raise unreadable(folder, first_line(error)) from error
    saved = {name: tuple(getattr(entry, "size", ())) for name, entry in metadata.state_dict_metadata.items()}
    states = _fitting_state(saved, parameters, folder)
    target: dict[str, Tensor] = {f"model.{name}": p.detach() for name, p in parameters.items()}
    for name, state in states.items():
        target |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    try:
        _read(reader, metadata, target)
    except _UNREADABLE as error:
        raise unreadable(folder, first_line(error)) from error
    optimizer.state.clear()
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for name, state in states.items():
        # AdamW counts its steps on the CPU, or where the weight is when it makes all of a step at once.
        step = state["step"].reshape(()).to(parameters[name].device if fused else "cpu")
        optimizer.state[parameters[name]] = state | {"step": step}


def random_file(rank: int) -> str:
    """Return the name of the file with the states of a rank's generators."""
    return f"random-{rank:05d}.safetensors"


def copy_generators() -> dict[str, Tensor]:
    """Copy the states of torch's generators, of the CPU and of this rank's GPU, each ``[bytes]`` uint8."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_generators(path: Path) -> None:
    """Put back what `copy_generators` returned; without the file nothing changes."""
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
    """Return the error for a file or folder inside a checkpoint's folder."""
    folder = path.parent.parent if path.parent.name == "state" else path.parent
    name = folder.name if path.name[:7] != "update_" else path.name
    return CheckpointError(
        f"Checkpoint file {path} cannot be read: {reason}. Delete the folder {name}; --resume "
        "then continues from the checkpoint before it."
    )


def _read(reader: HuggingFaceStorageReader, metadata: Metadata, target: dict[str, Tensor]) -> None:
    planner = DefaultLoadPlanner()
    planner.set_up_planner(target, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _fitting_state(
    saved: Mapping[str, tuple[int, ...]], parameters: Parameters, folder: Path
) -> dict[str, dict[str, Tensor]]:
    """Make room for the optimizer's state that was saved; refuse what does not fit."""
    states: dict[str, dict[str, Tensor]] = {}
    for full_name, shape in saved.items():
        kind, _, name = full_name.partition(".")
        key = ""
        if kind == "optimizer":
            name, _, key = name.rpartition(".")
        expected = (1,) if key == "step" else tuple(parameters[name].shape) if name in parameters else None
        if expected != shape:
            raise CheckpointError(f"{folder}: {full_name} {list(shape)} does not fit the policy. {_REMEDY}")
        if key:
            like = torch.zeros(1) if key == "step" else torch.zeros_like(parameters[name].detach())
            states.setdefault(name, {})[key] = like
    weightless = sorted(set(parameters) - {name.removeprefix("model.") for name in saved})
    # What has not had a gradient yet, like the policy in the critic's warm-up, has no state at all.
    keys = {key for state in states.values() for key in state}
    incomplete = sorted(name for name, state in states.items() if state.keys() != keys)
    for what, names in (("weight", weightless), ("complete optimizer state", incomplete)):
        if names:
            raise CheckpointError(
                f"{folder} has no {what} for {names[0]} and {len(names) - 1} more. {_REMEDY}"
            )
    return states


_REMEDY: Final = (
    "Resume with the policy settings of the run (its config.json), or start afresh with --policy and the "
    "checkpoint's folder."
)


def _files_of(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Spread tensors over numbered files of about `FILE_BYTES`."""
    files: dict[str, int] = {}
    number, room = 1, FILE_BYTES
    for name, tensor in state.items():
        local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if room < local.nbytes and room < FILE_BYTES:
            number, room = number + 1, FILE_BYTES
        files[name] = number
        room -= local.nbytes
    return files

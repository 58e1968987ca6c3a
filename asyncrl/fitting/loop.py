"""Train the parameters of a module on a loss: the one loop of all fits, alone or shared by several ranks.

All ranks draw the same examples and noise and keep their own rows: a step equals that of one rank, up to
rounding.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import get_ema_multi_avg_fn

from asyncrl.devices.tensors import to_device
from asyncrl.errors import CheckpointError, ConfigError, RunError, first_line
from asyncrl.fitting.recording_files import Frames, blocks
from asyncrl.observability import process_status
from asyncrl.observability.signals import held, held_signal
from asyncrl.observability.terminal import progress
from asyncrl.storage.assets import world_folder
from asyncrl.storage.atomic import publish, read_json, unfinished, write_json
from asyncrl.storage.checkpoint_state import copy_state, read_state, write_state
from asyncrl.storage.untrusted import remove

WARMUP: Final = 200
SETTINGS: Final = "settings.json"
KEPT_AFTER: Final = 300.0  # Seconds between two states of a fit that are kept: 20 times as long as it takes.
ON_DEVICE: Final = 0.4  # Share of a GPU's free memory that the pictures of one source may take.


@dataclass(frozen=True, kw_only=True)
class FitRanks:
    """The processes that fit one network together; each computes a part of every batch."""

    rank: int = 0
    size: int = 1
    sum: Callable[[Tensor], Tensor] = lambda value: value  # Collective, of any shape and dtype


ONE_RANK: Final = FitRanks()


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The state of an unfinished fit, in a folder next to its output: `minimise` continues from it.

    settings.json           the fit's settings
    STAGE/*.safetensors     weights, averages and moments (`storage.checkpoint_state`)
    STAGE/progress.json     steps done, their losses, and the states of the random generators
    """

    folder: Path
    settings: dict[str, Any]

    @classmethod
    def of(cls, config: Any) -> Kept:
        """Return where a fit of these settings keeps its state; `folder` need not exist."""
        out = Path(getattr(config, "out", "") or world_folder(str(config.world)))
        settings = {name: value for name, value in asdict(config).items() if name != "device"}
        files = [file for path in getattr(config, "data", ()) for file in (path, *path.rglob("*"))]
        settings["bytes of --data"] = sum(file.stat().st_size for file in files if file.is_file())
        folder = out.absolute().with_name(f"{out.absolute().name}.fit-{type(config).__name__[3:].lower()}")
        return cls(folder=folder, settings=json.loads(json.dumps(settings, default=str)))

    def check(self) -> bool:
        """Return True if there is a state to resume from; ConfigError if its settings differ."""
        if not (self.folder / SETTINGS).exists():
            return False
        begun = read_json(self.folder / SETTINGS)
        for name, value in self.settings.items():
            if begun.get(name) != value:
                raise ConfigError(
                    f"{self.folder} holds an unfinished fit with {name} {begun.get(name)}, not {value}. Use "
                    "the settings that it was begun with, or delete the folder to start over."
                )
        return True


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps, batch and learning rate of a fit, and the split of each batch."""

    steps: int
    batch: int  # Examples per step.
    learning_rate: float  # At the peak.
    seed: int = 0  # Of the choice of examples and of all noise.
    warmup: int = WARMUP  # Steps until the peak of the learning rate.
    compiled: bool = False
    micro_batch: int = 0  # Examples that a rank computes at once; 0: all of its own.
    ranks: FitRanks = ONE_RANK
    kept: Kept | None = None

    @classmethod
    def of(cls, config: Any, ranks: FitRanks = ONE_RANK) -> Schedule:
        """Copy the numbers from a fit's settings (`settings`)."""
        return cls(
            steps=config.steps,
            batch=config.batch,
            learning_rate=config.learning_rate,
            seed=config.seed,
            compiled=getattr(config, "compile", False),
            micro_batch=getattr(config, "micro_batch", 0),
            ranks=ranks,
            kept=Kept.of(config),
        )

    @property
    def parts(self) -> int:
        """Number of micro-batches of each rank."""
        return parts_of(self.batch, self.ranks.size, self.micro_batch)

    def own(self, drawn: Tensor) -> Tensor:
        """Return this rank's rows of a whole step's `drawn`, ``[batch, ...]`` of any dtype."""
        return drawn[self.ranks.rank :: self.ranks.size]

    def part(self, own: Tensor, part: int) -> Tensor:
        """Return the rows of micro-batch `part` from the result of `own`."""
        return own[part :: self.parts]


class BatchSource:
    """Pictures from which batches are drawn, resident on a GPU if they fit there."""

    def __init__(self, frames: Frames, device: torch.device, *, resident: bool = True) -> None:
        self.frames = frames
        self.device = device
        self.resident: Tensor | None = None
        on_gpu = resident and device.type == "cuda"
        if on_gpu and frames.nbytes < ON_DEVICE * torch.cuda.mem_get_info(device)[0]:
            self.resident = torch.empty(frames.shape, dtype=torch.uint8, device=device)
            for part in blocks(frames.shape):
                self.resident[part] = to_device(frames[part], device)

    def take(self, rows: Tensor) -> Tensor:
        """Return the pictures of rows ``[...]`` int64: ``[..., H, W, 3]`` uint8 on the device."""
        if self.resident is not None:
            return self.resident[rows.to(self.device)]
        found = self.frames[rows.cpu().numpy()]
        return to_device(found, self.device) if self.device.type == "cuda" else torch.from_numpy(found)


def parts_of(batch: int, ranks: int, micro_batch: int) -> int:
    """Count a rank's micro-batches, all of one size, so that the mean over them is the batch's."""
    at_once = micro_batch or batch // max(1, ranks)
    if at_once < 1 or batch % (ranks * at_once):
        raise ConfigError(
            f"--batch is {batch} for {ranks} ranks and --micro-batch {at_once}: it is shared out evenly. "
            f"Use a --batch that is a multiple of {ranks * max(1, at_once)}."
        )
    return batch // (ranks * at_once)


def prepared(function: Callable[..., Any], device: torch.device, *, compiled: bool) -> Callable[..., Any]:
    """Return `function` with bfloat16 matrix products on a GPU, compiled by `torch.compile` if `compiled`.

    Parameters, sums and losses stay float32 (automatic mixed precision); on a CPU, nothing is rounded.
    """
    fast = torch.compile(function, dynamic=False) if compiled else function

    def run(*inputs: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return fast(*inputs)

    return run


class Rounded(nn.Module):
    """Computes a network in bfloat16, norms and sums of layers included; gradients reach the float32 weights.

    Automatic mixed precision casts at every norm, which takes most of the time of many narrow layers.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Any:
        """Call the network, which casts its inputs to the dtype of its weights."""
        rounded = {name: p.to(torch.bfloat16) for name, p in self.network.named_parameters()}
        return functional_call(self.network, rounded, inputs)


def prepared_network(network: nn.Module, device: torch.device, *, compiled: bool) -> Callable[..., Any]:
    """Return a network that runs in bfloat16 on a GPU: compiled, or as CUDA graphs with gradients.

    Shapes, types and gradients of inputs are those of the first call; each call overwrites the last result.
    """
    if compiled or device.type != "cuda":
        return prepared(network, device, compiled=compiled)
    rounded, graphed = Rounded(network), list[Callable[..., Any]]()

    def run(*inputs: Tensor) -> Any:
        if not graphed:
            like = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs)
            graphed.append(torch.cuda.make_graphed_callables(rounded, like, allow_unused_input=True))
        return graphed[0](*inputs)

    return run


def learning_rate_at(step: int, schedule: Schedule) -> float:
    """Compute the rate of a step: a linear warm-up to the peak, then a cosine to zero at the last step."""
    peak, warmup = schedule.learning_rate, schedule.warmup
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, schedule.steps - warmup)))


def minimise(
    name: str,
    module: nn.Module,
    loss_at: Callable[[int], Tensor],
    schedule: Schedule,
    *,
    weight_decay: float = 0.01,
    average: float = 0.0,
    rngs: Sequence[torch.Generator | np.random.Generator] = (),
) -> float:
    """Train `module` with AdamW and return the mean loss of the last tenth; continues from `schedule.kept`.

    Args:
        loss_at: Computes the loss ``[]`` float32, with gradient, of step i; with several micro-batches,
            the loss of part ``i % parts`` of step ``i // parts``.
        average: Decay of the moving average of the weights, which replaces them at the end; 0: none.
        rngs: The generators that `loss_at` draws from.
    """
    optimizer, parts = _adamw(module, weight_decay), schedule.parts
    parameters = [p for p in module.parameters() if p.requires_grad]
    averaged = [p.detach().clone() for p in parameters] if average else []
    names = [n for n, p in module.named_parameters() if p.requires_grad]
    tensors = dict(zip(names, parameters, strict=True)) | dict(module.named_buffers())
    tensors |= {f"average of {n}": mean for n, mean in zip(names, averaged, strict=bool(averaged))}
    state = _State(name, schedule, tensors, optimizer, rngs)
    losses = state.losses

    def make(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, schedule)
        optimizer.zero_grad(set_to_none=True)
        whole = torch.zeros((), device=parameters[0].device)
        for part in range(parts):
            loss = loss_at(step * parts + part)
            loss.backward(torch.full_like(loss, 1 / parts))
            whole += loss.detach() / parts
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(whole)
        if average:
            decay = min(average, (1 + step) / (10 + step))
            get_ema_multi_avg_fn(decay)(averaged, [p.detach() for p in parameters], step)

    shown = {"desc": name, "initial": len(losses), "disable": schedule.ranks.rank > 0}
    together = held() if schedule.ranks.size > 1 else nullcontext()  # Several ranks end after the same step.
    with state.kept(), together, progress(total=schedule.steps, **shown) as bar:
        for step in range(len(losses), schedule.steps):
            with held():  # A state between two steps cannot be continued.
                make(step)
            process_status.progress()
            bar.update(1)
            if step % 25 == 0:
                loss = _finite_mean(name, losses[-100:], schedule.ranks)
                bar.set_postfix(loss=f"{loss:.4f}", refresh=False)  # A redrawn bar is a line in a pipe.
            state.keep_if_due()
    with torch.no_grad():
        for parameter, mean in zip(parameters, averaged, strict=bool(averaged)):
            parameter.copy_(mean)
    return _finite_mean(name, losses[-max(1, schedule.steps // 10) :], schedule.ranks)


class _State:
    """State of a stage of a fit, kept every few minutes and when the fit is interrupted."""

    def __init__(
        self,
        stage: str,
        schedule: Schedule,
        tensors: dict[str, Any],
        optimizer: torch.optim.Optimizer,
        rngs: Sequence[torch.Generator | np.random.Generator],
    ) -> None:
        self.losses: list[Tensor] = []  # [] each, one per step done.
        self._tensors, self._optimizer = tensors, optimizer
        self._device = next(iter(tensors.values())).device
        own = [torch.cuda.default_generators[self._device.index or 0]] if self._device.type == "cuda" else []
        self._rngs = (torch.default_generator, *own, *rngs)
        self._stage, self._schedule, self._kept = stage, schedule, schedule.kept
        if self._kept is not None and (self._kept.folder / stage).is_dir():
            self._read(self._kept.folder / stage)
        self._began = time.monotonic()
        self._due = self._began + KEPT_AFTER
        self._every = 8  # Steps until the ranks look again whether one of them was sent a signal.
        self._whole = schedule.ranks.size == 1  # All ranks are at the same step.

    def _read(self, folder: Path) -> None:
        try:
            read_state(folder, self._tensors, self._optimizer)
            saved = read_json(folder / "progress.json")
            for rng, state in zip(self._rngs, saved["rngs"], strict=True):
                if isinstance(rng, torch.Generator):
                    rng.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
                else:
                    rng.bit_generator.state = json.loads(state)
            self.losses = [*torch.tensor(saved["losses"], device=self._device)]
        except (CheckpointError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"The unfinished fit in {folder} cannot be read ({first_line(error)}). Delete "
                f"{folder.parent} to start over."
            ) from error

    def _write(self) -> None:  # A collective of all ranks.
        assert self._kept is not None
        began, folder, ranks = time.monotonic(), self._kept.folder / self._stage, self._schedule.ranks
        part = unfinished(folder)
        if ranks.rank == 0:
            remove(part)
            part.mkdir(parents=True)
            write_json(folder.parent / SETTINGS, self._kept.settings)
        ranks.sum(torch.zeros(1, device=self._device))  # The folder is there.
        write_state(copy_state(self._tensors, self._optimizer, ranks.rank), part, ranks.rank)
        ranks.sum(torch.zeros(1, device=self._device))  # All have written.
        if ranks.rank == 0:
            states = [
                r.get_state().numpy().tobytes().hex()
                if isinstance(r, torch.Generator)
                else json.dumps(r.bit_generator.state)
                for r in self._rngs
            ]
            content = {"rngs": states, "losses": torch.stack(self.losses).tolist()}
            write_json(part / "progress.json", content)
            publish(part, folder)
        self._due = time.monotonic() + max(KEPT_AFTER, 20 * (time.monotonic() - began))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Also write the state if the block is interrupted, or ends before another stage."""
        if self._kept is None:
            yield
            return
        try:
            yield
        except KeyboardInterrupt as ended:
            if self._whole and self.losses:
                self._write()
                done = f"step {len(self.losses)} of {self._schedule.steps} of `{self._stage}`"
                if not self._schedule.ranks.rank:
                    ended.add_note(f"{done} is kept: the same command goes on from it")
            raise
        if not self._kept.folder.name.endswith(self._stage):
            self._write()

    def keep_if_due(self) -> None:
        """Write the state if it is due; end all ranks together if one of them received a signal."""
        ranks, done, late = self._schedule.ranks, len(self.losses), time.monotonic() >= self._due
        if self._kept is None:
            return
        if ranks.size > 1:  # Rank 0 decides for all, but not after every fast step: that takes time.
            if done % self._every and done < self._schedule.steps:
                return
            slow = time.monotonic() - self._began > self._every
            asked = torch.tensor([not ranks.rank and late, not ranks.rank and slow, held_signal() > 0])
            late, slow, self._whole = ranks.sum(asked.to(self._device, torch.float32)).bool().tolist()
            self._began, self._every = time.monotonic(), 1 if slow else 8
            if self._whole:
                raise KeyboardInterrupt(held_signal() or signal.SIGTERM)
        if late:
            self._write()


def _adamw(module: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    from torch.distributed.tensor import DTensor  # Takes a second to import.

    parameters = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=0.0,
        betas=(0.9, 0.95),
        fused=not any(isinstance(p, DTensor) for p in parameters),  # Spread weights have no fused kernel.
    )


def _finite_mean(name: str, losses: Sequence[Tensor], ranks: FitRanks) -> float:
    mean = float(ranks.sum(torch.stack(list(losses)).mean()) / ranks.size)
    if not math.isfinite(mean):
        first = "That is its first step: give another --refine or --autoencoder"
        advice = first if len(losses) == 1 else "Lower its learning rate"
        raise RunError(f"The loss of `{name}` is {mean}. {advice}, or check the recordings.")
    return mean

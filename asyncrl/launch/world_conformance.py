"""Checks of a world model on a few decisions: frames and states alone, so that they hold for any world.

`asyncrl check world` and `asyncrl doctor` run them; `CHECKS` has them by name.
Dimension letters: B slots, C steps per decision, A numbers per action, H/W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from asyncrl.devices.offload import HoldsAddresses, OffloadedTensors
from asyncrl.errors import ConfigError
from asyncrl.learner.interface import describe_tensor
from asyncrl.records import StartState
from asyncrl.registry import FLAGS
from asyncrl.worlds.interface import World

DECISIONS: Final = 3  # most per slot in a check
SEEDS: Final = (11, 22)
LEVELS: Final = 1
"""Grey levels by which frames may differ if the batch has other rows. Of float32 weights, the
largest difference; of shorter ones, whose rounding shows in single pixels, the mean one."""
ROUNDED_FRAMES: Final = 0.5
"""Frames by which the first action may seem to act later than the last where weights are shorter than
float32: any change then rounds differently in every frame, which can hide the effect of a small action."""


class Reporter:
    """Refuses a part that breaks its protocol, in one sentence."""

    def __init__(self, kind: str, part: object) -> None:
        self.name = f"{FLAGS[kind]} names {type(part).__module__}:{type(part).__qualname__}"

    def require(self, fits: bool, method: str, came: object, expected: str) -> None:
        """Raise unless it fits."""
        if not fits:
            raise ConfigError(f"{self.name}, whose {method} is {came!s:.200}, expected {expected}.")

    def array(
        self, method: str, found: Any, dtype: str, shape: Sequence[int | str], kind: type = Tensor
    ) -> Any:
        """Return a tensor or array of this dtype and shape, as ``[2, L]`` (letters: any size); else raise."""
        came, fits = type(found).__name__, isinstance(found, kind)
        if fits:
            name, sizes = str(found.dtype).removeprefix("torch."), list(found.shape)
            came = f"{name}{sizes}"
            fits = name == dtype and len(sizes) == len(shape)
            fits = fits and all(isinstance(a, str) or a == b for a, b in zip(shape, sizes, strict=True))
        self.require(fits, method, came, f"{dtype}[{', '.join(map(str, shape))}]")
        return found


class Trial:
    """A world under check, and two slots of it with their first two decisions."""

    def __init__(self, world: World[Any], starts: Sequence[StartState]) -> None:
        self.world, self.two = world, [starts[0], starts[-1]]
        self.report = Reporter("world", world)

    @cached_property
    def opened(self) -> Any:
        """State of the two slots before their first decision."""
        return self.start(self.two)

    @cached_property
    def first(self) -> tuple[Tensor, Any]:
        """Their first decision: frames ``[2, C, H, W, 3]`` uint8, and the state after it."""
        return self.imagine(self.opened)

    @cached_property
    def second(self) -> tuple[Tensor, Any]:
        """Their second decision."""
        return self.imagine(self.first[1])

    def actions(self, rows: int) -> Tensor:
        """Return ``[rows, C, A]`` float32 on the world's device; row i is the same however many there are."""
        spec = self.world.action_spec
        drawn = [np.random.default_rng(i).uniform(-0.5, 0.5, (spec.chunk, spec.dim)) for i in range(rows)]
        return torch.from_numpy(np.stack(drawn).astype(np.float32)).to(self.world.device)

    def start(self, states: Sequence[StartState], *, decisions: int = DECISIONS) -> Any:
        """Open slots, and check the state."""
        require, size, rows = self.report.require, self.world.image_size, len(states)
        wrong = [state.frame.shape for state in states if state.frame.shape != (size, size, 3)]
        require(not wrong, "image_size", size, f"that of the start states, {wrong}")
        state = self.world.start(states, decisions=decisions)
        require(len(state) == rows, "start", f"a state of {len(state)} rows", f"{rows} rows")
        self.report.array("start().finite", state.finite, "bool", (rows,))
        require(bool(state.finite.all()), "start().finite", state.finite.tolist(), "True everywhere")
        return state

    def imagine(
        self, state: Any, actions: Tensor | None = None, seeds: Sequence[int] = SEEDS
    ) -> tuple[Tensor, Any]:
        """Imagine a decision, by default of the two slots, and check frames and state."""
        report, spec, size = self.report, self.world.action_spec, self.world.image_size
        with torch.inference_mode():
            found = self.world.imagine(state, self.actions(2) if actions is None else actions, seeds)
        pair = isinstance(found, tuple) and len(found) == 2
        report.require(pair, "imagine", type(found).__name__, "(frames, state)")
        (frames, after), rows = found, len(seeds)
        report.array("imagine()[0]", frames, "uint8", (rows, spec.chunk, size, size, 3))
        report.require(len(after) == rows, "imagine()[1]", len(after), f"a state of {rows} rows")
        report.array("imagine()[1].finite", after.finite, "bool", (rows,))
        return frames, after

    def same(self, one: Tensor, other: Tensor, method: str, said: str) -> None:
        """Check that frames are equal bit for bit."""
        off = f"{said} ({int((one.int() - other.int()).abs().max())} grey levels off)"
        self.report.require(torch.equal(one, other), method, off, "the same bits")

    def alike(self, one: Tensor, other: Tensor, method: str, said: str) -> None:
        """Check that frames differ by at most `LEVELS`."""
        gap = (one.int() - other.int()).abs().float()
        found = float(gap.mean() if self.rounds else gap.max())
        expected = f"at most {LEVELS}" + " in the mean" * self.rounds
        self.report.require(found <= LEVELS, method, f"{found:.3g} grey levels off {said}", expected)

    @cached_property
    def rounds(self) -> bool:
        """True if weights are shorter than float32."""
        return any(tensor.is_floating_point() and tensor.itemsize < 4 for tensor in self.weights())

    def weights(self) -> Iterator[Tensor]:
        """Iterate over all parameters and buffers."""
        for module in self.world.modules().values():
            yield from chain(module.parameters(), module.buffers())


def check_world(world: World[Any], starts: Sequence[StartState]) -> Iterator[str]:
    """Make all checks of a world; yields a line for everything that holds."""
    trial = Trial(world, starts)
    frames, _ = trial.first
    yield f"imagine: frames {describe_tensor(frames)} on {frames.device}"
    for name, check in CHECKS.items():
        yield f"{name}: {check(trial)}"
    named = {name: type(module).__name__ for name, module in world.modules().items()}
    yield f"modules: {named or 'none'}"


def _seeds(trial: Trial) -> str:
    again, _ = trial.imagine(trial.opened)
    trial.same(trial.first[0], again, "imagine", "another film from the same state")
    trial.second  # noqa: B018  # The state after a decision is none the worse for another one from it.
    longer, _ = trial.imagine(trial.first[1])
    trial.same(trial.second[0], longer, "imagine", "another film from the same later state")
    return "the state is not changed, and decides every bit with actions and seeds"


def _neighbours(trial: Trial) -> str:
    frames, actions = trial.first[0], trial.actions(2)
    for rows, said in (([1], "when a row is alone"), ([1, 0, 0], "between other neighbours")):
        found, _ = trial.imagine(trial.opened.select(rows), actions[rows], [SEEDS[row] for row in rows])
        trial.alike(found, frames[rows], "imagine", said)
    return "neither neighbours nor the size of the batch matter"


def _siblings(trial: Trial) -> str:
    first, other = trial.two
    state = trial.start([first, first])
    actions, seeds = trial.actions(1).expand(2, -1, -1), SEEDS[:1] * 2
    frames, _ = trial.imagine(state, actions, seeds)
    trial.alike(frames[0], frames[1], "start", "between two slots that begin alike")
    trial.alike(frames[:1], trial.first[0][:1], "start", "when another slot begins beside it")
    state.write_rows([0], trial.start([other]))
    again, _ = trial.imagine(state, actions, seeds)
    trial.alike(again[1], frames[1], "start", "in a slot whose sibling was written over")
    return "slots that begin alike are alike, and share no memory"


def _actions(trial: Trial) -> str:
    """Change one action per row, by half of its range, and measure the change of each frame."""
    steps = trial.world.action_spec.chunk
    changed = trial.actions(1).repeat(steps + 1, 1, 1)
    every = torch.arange(steps, device=changed.device)
    changed[every, every] -= changed[every, every].sign()
    frames, _ = trial.imagine(trial.start(trial.two[:1] * (steps + 1)), changed, SEEDS[:1] * (steps + 1))
    differences = (frames[:-1].int() - frames[-1:].int()).abs().float()
    gap = differences.flatten(2).mean(dim=2).cpu()  # [action, frame]
    for step in (0, steps - 1):
        moved = bool(gap[step].max() > 0)
        trial.report.require(moved, "imagine", f"blind to action {step}", "frames that follow from it")
    centre = (gap * torch.arange(steps)).sum(dim=1) / gap.sum(dim=1).clamp(min=1e-9)
    early, late = float(centre[0]), float(centre[-1])
    came = (
        f"changed by the first action at frame {early:.1f} and by the last at frame {late:.1f}, in the mean"
    )
    ordered = steps == 1 or early < late + ROUNDED_FRAMES * trial.rounds
    trial.report.require(ordered, "imagine", came, "action i to make frame i")
    return f"what the first action changes lies at frame {early:.1f} in the mean, the last at {late:.1f}"


def _put_back(trial: Trial) -> str:
    expected, state = trial.second[0], trial.first[1]
    saved, replaced = state.select([0]), state.select([0, 1])
    trial.report.require(len(saved) == 1, "select", len(saved), "a state of 1 row")
    replaced.write_rows([0], trial.opened.select([1]))
    again, _ = trial.imagine(state)
    trial.same(again, expected, "select", "no copy: what is written into it changes the state it is from")
    found, _ = trial.imagine(replaced.write_rows([0], saved))
    trial.same(found, expected, "write_rows", "another episode once it is put back")
    return "a slot that is saved in mid-episode goes on when it is put back"


def _ages(trial: Trial) -> str:
    frames, _ = trial.imagine(trial.first[1].select([0, 1]).write_rows([0], trial.opened.select([0])))
    trial.alike(frames[:1], trial.first[0][:1], "imagine", "beside an older episode")
    trial.alike(frames[1:], trial.second[0][1:], "imagine", "beside a younger episode")
    return "episodes of different age share a batch"


def _parked(trial: Trial) -> str:
    world, expected = trial.world, trial.second[0]
    moved = world.weights_moved if isinstance(world, HoldsAddresses) else lambda: None
    parked = OffloadedTensors(trial.weights, lambda: [], {world.device}, on_offload=moved)
    parked.offload()
    nbytes = parked.bytes
    parked.restore()
    frames, _ = trial.imagine(trial.first[1])
    said = "drawing something else after its weights were parked and back"
    trial.same(frames, expected, "modules", said)
    return f"{nbytes / 2**20:.1f} MiB of weights may be parked and come back"


def _not_finite(trial: Trial) -> str:
    actions, require = trial.actions(2), trial.report.require
    poisoned = actions.clone()
    poisoned[0] = float("nan")
    state: Any = trial.opened
    for given, expected in ((poisoned, trial.first[0]), (actions, trial.second[0])):
        frames, state = trial.imagine(state, given)
        found = state.finite.tolist()
        require(found == [False, True], "imagine()[1].finite", found, "[False, True] after NaN in row 0")
        trial.alike(frames[1:], expected[1:], "imagine", "beside a row of NaN")
    found = state.write_rows([0], trial.opened.select([0])).finite.tolist()
    require(found == [True, True], "write_rows().finite", found, "True for a row that was written anew")
    return "actions that are not finite spoil their row, for good, and no other"


_ALL = (_seeds, _neighbours, _siblings, _actions, _put_back, _ages, _parked, _not_finite)
CHECKS: Final = MappingProxyType({check.__name__[1:].replace("_", " "): check for check in _ALL})
"""Each checks one property of a world: raises `ConfigError` or returns a line."""

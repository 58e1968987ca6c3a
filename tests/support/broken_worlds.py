"""A small world that keeps everything asked of worlds, and worlds that break one thing each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.errors import ConfigError
from asyncrl.records import ActionSpec, ModelSummary, StartState
from asyncrl.worlds.slots import TensorState, finite_rows, imagine_full
from asyncrl.worlds.start_states import check_beginnings

SIZE = 16
DECISIONS = 3
"""That the checks announce at most."""


@dataclass(frozen=True, kw_only=True)
class Canvas(TensorState):
    """A picture, and the decisions there is room for."""

    pixels: Tensor
    """``[B, H, W, 3]`` float32 in [0, 1]."""
    left: Tensor
    """``[B]`` int64."""


def shown(pixels: Tensor) -> Tensor:
    """Reflect numbers into [0, 1] and make them uint8: a little larger is a little lighter or darker."""
    return ((1 - (pixels % 2 - 1).abs()) * 255).to(torch.uint8)


class SoundWorld:
    """Every action adds a pattern to the picture, weakly also to those before it, and noise."""

    version, image_size, action_spec = 0, SIZE, ActionSpec()
    device = torch.device("cpu")

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.patterns = nn.Linear(7, SIZE * SIZE * 3, bias=False)
        nn.init.normal_(self.patterns.weight, std=0.05, generator=generator)

    @classmethod
    def check(cls, folder: Path, settings: Any, **own: Any) -> ModelSummary:
        return ModelSummary(image_size=SIZE, nbytes=0)

    @classmethod
    def load(cls, folder: Path, device: torch.device, settings: Any, **own: Any) -> Self:
        return cls()

    def modules(self) -> dict[str, nn.Module]:
        return {"patterns": self.patterns}

    def start(self, states: Sequence[StartState], *, decisions: int) -> Canvas:
        check_beginnings(states, image_size=SIZE, context=4)
        pixels = torch.from_numpy(np.stack([state.frame for state in states])).float() / 255
        finite = torch.ones(len(states), dtype=torch.bool)
        return Canvas(pixels=pixels, left=torch.full((len(states),), decisions), finite=finite)

    def imagine(self, state: Any, actions: Any, noise_seeds: Sequence[int]) -> tuple[Tensor, Any]:
        if not state.left.all():
            raise ConfigError("there is no room for another decision")
        return imagine_full(self.draw, state, actions, noise_seeds, rows=0, device=self.device)

    def draw(self, state: Any, actions: Tensor, noise_seeds: Sequence[int]) -> tuple[Tensor, Any]:
        added = self.patterns(actions).unflatten(2, (SIZE, SIZE, 3))
        pixels = state.pixels[:, None] + added.cumsum(1) + 0.01 * added.mean(1, keepdim=True)
        noise = [torch.rand((), generator=torch.Generator().manual_seed(seed)) for seed in noise_seeds]
        frames = shown(pixels + 0.1 * torch.stack(noise)[:, None, None, None, None])
        finite = state.finite & finite_rows(pixels)
        return frames, replace(state, pixels=pixels[:, -1].clone(), left=state.left - 1, finite=finite)


# ---- seeds, neighbours, siblings, actions --------------------------------------------------------


class Unseeded(SoundWorld):
    """Draws the first decision of an episode from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def draw(self, state: Any, actions: Tensor, noise_seeds: Sequence[int]) -> tuple[Tensor, Any]:
        frames, after = super().draw(state, actions, noise_seeds)
        self.calls += bool(state.left[0] == DECISIONS)
        frames[0, 0, 0, 0, 0] ^= self.calls & 1  # one grey level in one pixel
        return frames, after


class Crowded(SoundWorld):
    """Normalises over the batch."""

    def draw(self, state: Any, actions: Tensor, noise_seeds: Sequence[int]) -> tuple[Tensor, Any]:
        return super().draw(state, actions + 0.2 * len(actions), noise_seeds)


class Numbered(SoundWorld):
    """A slot begins as its number says."""

    def start(self, states: Sequence[StartState], *, decisions: int) -> Canvas:
        state = super().start(states, decisions=decisions)
        return replace(state, pixels=state.pixels + 0.05 * torch.arange(len(states))[:, None, None, None])


def acted(change: Callable[[Tensor], Tensor]) -> Callable[[], SoundWorld]:
    """Build a world that takes its actions otherwise."""

    class Disordered(SoundWorld):
        def draw(self, state: Any, actions: Tensor, noise_seeds: Sequence[int]) -> tuple[Tensor, Any]:
            return super().draw(state, change(actions), noise_seeds)

    return Disordered


def late(actions: Tensor) -> Tensor:
    """Action i makes frame i + 1, and the last none."""
    return torch.cat([actions[:, :1], actions[:, :-1]], dim=1)


# ---- states --------------------------------------------------------------------------------------


def with_state(kind: type[Canvas]) -> Callable[[], SoundWorld]:
    """Build a world with another state."""

    class Odd(SoundWorld):
        def start(self, states: Sequence[StartState], *, decisions: int) -> Canvas:
            return kind(**vars(super().start(states, decisions=decisions)))

    return Odd


@dataclass(frozen=True, kw_only=True)
class Shared(Canvas):
    """Hands out views of itself where the rows are its own."""

    def select(self, indices: Sequence[int]) -> Self:
        return self if list(indices) == list(range(len(self))) else super().select(indices)


@dataclass(frozen=True, kw_only=True)
class Unwritten(Canvas):
    """Keeps the picture of a row that is written over."""

    def write_rows(self, indices: Sequence[int], other: Self) -> Self:
        return super().write_rows(indices, replace(other, pixels=self.select(indices).pixels))


@dataclass(frozen=True, kw_only=True)
class Lossy(Canvas):
    """Rounds what it copies."""

    def select(self, indices: Sequence[int]) -> Self:
        picked = super().select(indices)
        return replace(picked, pixels=(picked.pixels * 1024).round() / 1024)


class OneAge(SoundWorld):
    """Thinks that all slots are as old as the oldest."""

    def draw(self, state: Any, actions: Tensor, noise_seeds: Sequence[int]) -> tuple[Tensor, Any]:
        age = (100 - state.left).max()
        frames, after = super().draw(state, actions, noise_seeds)
        return frames + (10 * age).to(torch.uint8), after


class Stale(SoundWorld):
    """Forgets its weights when they move."""

    def weights_moved(self) -> None:
        self.patterns = nn.Linear(7, SIZE * SIZE * 3, bias=False)


# ---- what is not finite --------------------------------------------------------------------------


class Contagious(SoundWorld):
    """What is not finite in one row spoils all."""

    def draw(self, state: Any, actions: Tensor, noise_seeds: Sequence[int]) -> tuple[Tensor, Any]:
        frames, after = super().draw(state, actions, noise_seeds)
        return frames, replace(after, finite=after.finite & after.finite.all())


class Forgiving(SoundWorld):
    """A row is finite again as soon as its picture is."""

    def draw(self, state: Any, actions: Tensor, noise_seeds: Sequence[int]) -> tuple[Tensor, Any]:
        _, after = super().draw(state, actions, noise_seeds)
        sound = replace(state, pixels=state.pixels.nan_to_num(), finite=torch.ones_like(state.finite))
        frames, again = super().draw(sound, actions, noise_seeds)
        return frames, replace(again, pixels=after.pixels.nan_to_num())


BROKEN: Mapping[str, tuple[Callable[[], SoundWorld], str, str]] = {
    "draws from a generator of its own": (Unseeded, "seeds", "another film from the same state"),
    "normalises over the batch": (Crowded, "neighbours", "grey levels off when a row is alone"),
    "begins as the slot's number says": (Numbered, "siblings", "between two slots that begin alike"),
    "reverses the actions": (acted(lambda a: a.flip(1)), "actions", "changed by the first action at frame"),
    "is a step late": (acted(late), "actions", "blind to action 7"),
    "hands out its own memory": (with_state(Shared), "put back", "once its copy is written over"),
    "rounds what is saved": (with_state(Lossy), "put back", "off once a row is put back"),
    "does not write all of a row": (with_state(Unwritten), "put back", "next to an older episode"),
    "has one age for all": (OneAge, "put back", "next to an older episode"),
    "forgets weights that move": (Stale, "parked", "after its weights were parked and back"),
    "takes NaN for nothing": (
        acted(torch.nan_to_num),
        "not finite",
        "[True, True], expected [False, True] after NaN",
    ),
    "lets NaN spread": (Contagious, "not finite", "[False, False], expected [False, True] after NaN"),
    "forgives NaN": (Forgiving, "not finite", "expected [False, True] after NaN"),
}
"""How to build it, the check that must fail, and what it says."""

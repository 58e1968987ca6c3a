"""Slots of a world: the tensors that they remember, how they are opened, and the batches that fill them.

Dimension letters: B slots, C steps per decision, A numbers per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from asyncrl.devices.tensors import to_device
from asyncrl.records import ActionSpec, StartState
from asyncrl.worlds.interface import State

AT_ONCE: Final = 2
"""Start states opened at a time: fixed, so no bit depends on other slots. With 1 kernels round otherwise."""
USUAL: Final = ActionSpec()


@dataclass(frozen=True, kw_only=True)
class TensorState:
    """Memory of `B` slots: a frozen dataclass of tensors ``[B, ...]``, or lists of them."""

    finite: Tensor  # [B] bool: all values drawn so far were finite.

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            for tensor in tree_leaves(value):
                if not isinstance(tensor, Tensor):
                    raise TypeError(
                        f"{type(self).__name__}.{name} is a {type(value).__name__}; the fields of a state "
                        "are tensors with the slots first, or lists of them"
                    )
                if tensor.shape[:1] != self.finite.shape:
                    raise ValueError(
                        f"{type(self).__name__}.{name} has shape {list(tensor.shape)}, but by `finite` "
                        f"there are {len(self)} slots, which come first"
                    )

    def __len__(self) -> int:
        return self.finite.shape[0]

    def select(self, indices: Sequence[int]) -> Self:
        """Return a new state with copies of the rows `indices`, in that order."""
        rows = _rows(indices)
        return self._map(lambda tensor: _select(tensor, rows(tensor.device)))

    @torch.inference_mode()  # in place on tensors that may or may not have been made in inference mode
    def write_rows(self, indices: Sequence[int], other: Self) -> Self:
        """Write row k of `other` over row ``indices[k]``, in place, and return this state."""
        rows = _rows(indices)
        for target, source in zip(tree_leaves(vars(self)), tree_leaves(vars(other)), strict=True):
            target.index_copy_(0, rows(target.device), source.to(target))
        return self

    def to(self, device: torch.device | str) -> Self:
        """Return this state on `device`."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(**tree_map(change, vars(self)))


def _rows(indices: Sequence[int]) -> Callable[[torch.device], Tensor]:
    return cache(partial(to_device, np.array(indices, np.int64)))


def _select(tensor: Tensor, rows: Tensor) -> Tensor:
    """Copy rows of ``[B, ...]`` in the memory layout of `tensor`; `index_select` alone would lose it."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    copied = tensor.permute(order).index_select(order.index(0), rows)
    return copied.permute([order.index(dim) for dim in range(tensor.ndim)])


def finite_rows(values: Tensor) -> Tensor:
    """Return ``[B]`` bool: True for rows of ``[B, ...]`` that are finite throughout."""
    return values.isfinite().flatten(1).all(dim=1)


def draw_noise(seeds: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """Draw ``[B, *shape]`` float32 standard normal noise on the CPU, row i from ``seeds[i]`` alone."""
    rows = [torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
    return torch.stack(rows)


def open_each_once(states: Sequence[StartState], open_slots: Callable[[list[StartState]], State]) -> State:
    """Open one slot per start state, with memory of its own; equal ones (siblings) are opened once."""
    keys, first_of = [_content(state) for state in states], dict[tuple[object, ...], StartState]()
    for key, state in zip(keys, states, strict=True):
        first_of.setdefault(key, state)
    distinct, places = list(first_of.values()), {key: place for place, key in enumerate(first_of)}
    row_of = [places[key] for key in keys]
    width = min(AT_ONCE, len(states))
    opened: State | None = None
    for first in range(0, len(distinct), width):
        some = distinct[first : first + width]
        part = open_slots([*some, *some[:1] * (width - len(some))])
        if opened is None:  # The slots of other parts are written over.
            opened = part.select([row if row < width else 0 for row in row_of])
            continue
        slots = [slot for slot, row in enumerate(row_of) if first <= row < first + width]
        opened.write_rows(slots, part.select([row_of[slot] - first for slot in slots]))
    if opened is None:
        raise ValueError("there are no start states to open slots for")
    return opened


def _content(state: StartState) -> tuple[object, ...]:
    arrays = (state.frame, state.context_frames, state.context_actions, state.ee_pose)
    shown = [None if array is None else np.asarray(array) for array in arrays]
    return tuple(None if array is None else (array.shape, array.tobytes()) for array in shown)


def imagine_full(
    imagine: Callable[[State, Tensor, Sequence[int]], tuple[Tensor, State]],
    state: State,
    actions: Tensor | NDArray[np.float32],
    noise_seeds: Sequence[int],
    *,
    rows: int,
    device: torch.device,
    spec: ActionSpec = USUAL,
) -> tuple[Tensor, State]:
    """Check a decision, pad its batch with copies of the first row, and drop the results of the copies."""
    if not isinstance(actions, Tensor):
        actions = torch.from_numpy(np.array(actions, dtype=np.float32))  # a copy, for it may be read-only
    actions_BCA = actions.to(device, torch.float32, non_blocking=True)
    live = len(state)
    if actions_BCA.shape != (live, spec.chunk, spec.dim) or len(noise_seeds) != live:
        raise ValueError(
            f"{live} slots need actions [{live}, {spec.chunk}, {spec.dim}] and as many seeds, "
            f"got {list(actions_BCA.shape)} and {len(noise_seeds)}"
        )
    if live >= rows:
        return imagine(state, actions_BCA, noise_seeds)
    padded = [*range(live), *[0] * (rows - live)]
    filled = torch.cat([actions_BCA, actions_BCA[:1].expand(rows - live, -1, -1)])
    frames, after = imagine(state.select(padded), filled, [noise_seeds[row] for row in padded])
    return frames[:live], after.select(range(live))

"""The base of what a world remembers about each slot: a dataclass of tensors with the slots first.

Picking rows, writing rows, moving and counting are the same for every world and are written here once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor

from asyncrl.devices.tensors import to_device


@dataclass(frozen=True, kw_only=True)
class TensorState:
    """Memory of `B` slots. Row i of every tensor belongs to slot i; each state has memory of its own.

    A subclass is a frozen dataclass whose fields are tensors ``[B, ...]``, or lists of such tensors, of any
    dtype and all on one device. One of them is `finite`.

    Raises:
        TypeError: A field is neither a tensor nor a list of tensors.
        ValueError: The tensors differ in their number of rows.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Heights(TensorState):
        ...     heights: Tensor
        >>> state = Heights(finite=torch.tensor([True, True]), heights=torch.tensor([1.0, 2.0]))
        >>> state.select([1, 1]).heights
        tensor([2., 2.])
    """

    finite: Tensor
    """``[B]`` bool: all that was drawn so far was finite."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            tensors = value if isinstance(value, list) else [value]
            if not all(isinstance(tensor, Tensor) for tensor in tensors):
                raise TypeError(
                    f"{type(self).__name__}.{field.name} is a {type(value).__name__}; the fields of a state "
                    "are tensors with the slots first, or lists of them"
                )
            for tensor in tensors:
                if tensor.shape[:1] != self.finite.shape:
                    raise ValueError(
                        f"{type(self).__name__}.{field.name} has shape {list(tensor.shape)}, but finite says "
                        f"that there are {len(self)} slots, which come first"
                    )

    def __len__(self) -> int:
        """Return the number of slots."""
        return self.finite.shape[0]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one slot takes; also on the meta device, and where there are no slots."""
        return sum(math.prod(tensor.shape[1:]) * tensor.dtype.itemsize for tensor in self._tensors())

    def _tensors(self) -> list[Tensor]:
        values = [getattr(self, field.name) for field in fields(self)]
        return [tensor for value in values for tensor in (value if isinstance(value, list) else [value])]

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed = {}
        for field in fields(self):
            value = getattr(self, field.name)
            changed[field.name] = [change(x) for x in value] if isinstance(value, list) else change(value)
        return type(self)(**changed)

    def select(self, indices: Sequence[int]) -> Self:
        """Return a state of its own that holds copies of the rows `indices`, in that order."""
        rows = self._rows(indices)
        return self._map(lambda tensor: _select(tensor, rows))

    @torch.inference_mode()  # in place on tensors that may or may not have been made in inference mode
    def write_rows(self, indices: Sequence[int], other: Self) -> Self:
        """Write row k of `other` over row ``indices[k]``, in place, and return this state."""
        rows = self._rows(indices)
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine.index_copy_(0, rows, theirs.to(mine))
        return self

    def to(self, device: torch.device | str) -> Self:
        """Return this state on `device`."""
        return self._map(lambda tensor: tensor.to(device))

    def _rows(self, indices: Sequence[int]) -> Tensor:
        return to_device(np.array(indices, np.int64), self.finite.device)


def _select(tensor: Tensor, rows: Tensor) -> Tensor:
    """Copy rows of ``[B, ...]``, with the dimensions in memory as they lie there.

    `index_select` alone would put them in their usual order, and networks that keep channels last would
    rearrange what they remember in every decision.
    """
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    copied = tensor.permute(order).index_select(order.index(0), rows)
    return copied.permute([order.index(dim) for dim in range(tensor.ndim)])


def finite_rows(values: Tensor) -> Tensor:
    """Tell which rows of ``[B, ...]`` are finite throughout: ``[B]`` bool."""
    return values.isfinite().flatten(1).all(dim=1)

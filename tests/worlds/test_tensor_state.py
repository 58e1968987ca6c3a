"""States of tensors: rows that are picked, written, moved and counted, whatever the fields are."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from asyncrl.worlds.slots import TensorState


@dataclass(frozen=True, kw_only=True)
class Memory(TensorState):
    """Fields of different dtypes and shapes, and a list."""

    pictures: Tensor
    ages: Tensor
    cache: list[Tensor]


def memory(rows: int, *, first: int = 0) -> Memory:
    numbers = torch.arange(first, first + rows)
    return Memory(
        finite=numbers % 2 == 0,
        pictures=numbers[:, None, None] + torch.arange(6.0).view(1, 2, 3) / 10,
        ages=numbers.clone(),
        cache=[numbers.half().clone(), numbers[:, None].double() * torch.ones(4).double()],
    )


def assert_rows(state: Memory, numbers: list[int]) -> None:
    """Every field holds what `memory` put into the rows of these numbers."""
    all_rows = memory(20)
    for mine, source in zip(
        [state.finite, state.pictures, state.ages, *state.cache],
        [all_rows.finite, all_rows.pictures, all_rows.ages, *all_rows.cache],
        strict=True,
    ):
        assert torch.equal(mine, torch.stack([source[number] for number in numbers]))
        assert mine.dtype == source.dtype


def test_rows_are_picked_in_the_order_asked_for_and_copied() -> None:
    state = memory(4)
    picked = state.select([3, 0, 3])
    assert isinstance(picked, Memory)
    assert_rows(picked, [3, 0, 3])
    picked.pictures.fill_(-1)
    picked.cache[1].fill_(-1)
    assert_rows(state, [0, 1, 2, 3])
    assert len(state.select([])) == 0


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (0, 1, 2, 3), (0, 3, 2, 1)])
def test_rows_that_are_picked_lie_in_memory_as_before(order: tuple[int, ...]) -> None:
    usual = torch.arange(120.0).view(2, 3, 4, 5)
    inverse = [order.index(dim) for dim in range(4)]
    laid_out = usual.permute(order).contiguous().permute(inverse)
    state = replace(memory(2), pictures=laid_out)
    picked = state.select([1, 0]).pictures
    assert torch.equal(picked, usual.flip(0))
    assert picked.stride() == laid_out.stride()
    assert picked.data_ptr() != laid_out.data_ptr()
    assert state.select([0]).select([0, 0]).pictures.permute(order).is_contiguous()


def test_rows_are_written_in_place_and_the_source_stays() -> None:
    state, other = memory(4), memory(2, first=10)
    before = state.pictures
    assert state.write_rows([2, 0], other) is state
    assert_rows(state, [11, 1, 10, 3])
    assert_rows(other, [10, 11])
    assert state.pictures is before


def test_a_state_made_in_inference_mode_can_be_written_and_written_from() -> None:
    with torch.inference_mode():
        inside = memory(2)
    assert_rows(inside.write_rows([0], memory(1, first=7)), [7, 1])
    assert_rows(memory(2).write_rows([1], inside.select([1])), [0, 1])
    with torch.inference_mode():
        assert_rows(memory(2).write_rows([1], memory(1, first=5)), [0, 5])


def test_fields_that_are_no_rows_are_refused_by_name() -> None:
    state = memory(3)
    with pytest.raises(ValueError, match=r"Memory\.ages has shape \[2\], but by `finite` there are 3"):
        replace(state, ages=state.ages[:2])
    with pytest.raises(ValueError, match=r"Memory\.cache has shape \[\]"):
        replace(state, cache=[torch.tensor(1.0)])
    with pytest.raises(TypeError, match=r"Memory\.ages is a int"):
        replace(state, ages=3)

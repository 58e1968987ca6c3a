"""What the EVAC world remembers: the rule of its memory, and rows that belong to nobody else."""

import pytest
import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.worlds.evac.world import EvacState


def some_state(batch: int, room: int = 17, seed: int = 0) -> EvacState:
    g = torch.Generator().manual_seed(seed)
    return EvacState(
        history=torch.randn(batch, room, 4, 2, 2, generator=g),
        poses=torch.randn(batch, room, 8, generator=g),
        count=torch.randint(1, room - 8, (batch,), generator=g),
        first=torch.randint(0, 256, (batch, 4, 4, 3), generator=g, dtype=torch.uint8),
        finite=torch.rand(batch, generator=g) > 0.5,
        left=1 + (seed + torch.arange(batch)) % 3,
    )


def tensors(state: EvacState) -> dict[str, Tensor]:
    return {name: value for name, value in vars(state).items() if isinstance(value, Tensor)}


def test_states_for_other_numbers_of_decisions_do_not_mix() -> None:
    with pytest.raises(ConfigError, match=r"room for 25 frames .* room for 17"):
        some_state(2).write_rows([0], some_state(1, room=25))


def test_moving_gives_a_state_with_the_same_numbers() -> None:
    state = some_state(2)
    moved = state.to("cpu")
    assert all(torch.equal(t, tensors(state)[name]) for name, t in tensors(moved).items())
    moved.left[0] = 77
    assert state.left[0] != 77

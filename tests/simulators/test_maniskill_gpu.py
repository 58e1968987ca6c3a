"""All places of a ManiSkill task as one simulation on a GPU. Needs the extra, CUDA and its Vulkan driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.simulators.build import SimulatorSource
from asyncrl.simulators.interface import Demonstrator, random_start
from support.maniskill import require_maniskill

require_maniskill()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PLACES = 16


@pytest.fixture(scope="module")
def batch() -> Iterator[Any]:
    source = SimulatorSource(
        name="maniskill_pick_cube", settings=("backend=gpu",), places=PLACES, image_size=64
    )
    simulator = source.build()
    yield simulator
    simulator.close()


def begin(batch: Any, first: int) -> Any:
    return batch.reset(range(PLACES), [random_start(batch.spec, first + place) for place in range(PLACES)])


def test_a_batch_steps_together_and_begins_a_start_alike_in_every_place(batch: Any) -> None:
    assert (batch.spec.places, batch.spec.lockstep) == (PLACES, True)
    seen = begin(batch, 0)
    turned = batch.reset(range(PLACES), [random_start(batch.spec, PLACES - 1 - i) for i in range(PLACES)])
    np.testing.assert_allclose(turned.states[::-1], seen.states, atol=1e-5)
    assert np.abs(turned.images[::-1].astype(int) - seen.images).mean() < 1


def test_a_reset_of_one_place_leaves_the_others(batch: Any) -> None:
    before = begin(batch, 0)
    moved = np.random.default_rng(0).uniform(-1, 1, (PLACES, 7)).astype(np.float32)
    stepped = batch.step(range(PLACES), moved, draw=True)
    batch.reset([3], [random_start(batch.spec, 3)])
    after = batch.look(range(PLACES))
    others = [place for place in range(PLACES) if place != 3]
    np.testing.assert_allclose(after.states[others], stepped.seen.states[others], atol=1e-5)
    np.testing.assert_allclose(after.states[3], before.states[3], atol=1e-5)


def test_the_expert_fulfils_the_task_in_all_places(batch: Any) -> None:
    begin(batch, 100)
    experts = [batch.expert(i, Demonstrator(), np.random.default_rng(i)) for i in range(PLACES)]
    solved = np.zeros(PLACES, np.bool_)
    for _ in range(batch.spec.max_steps):
        solved |= batch.step(range(PLACES), np.stack([act() for act in experts]), draw=False).success
    assert solved.mean() >= 0.9

"""The EVAC world offers what a run may need; what it needs of every world is in test_world_conformance."""

from __future__ import annotations

import pytest
import torch

from asyncrl.worlds.evac.world import EvacWorld
from asyncrl.worlds.interface import BringsDefaults, CompilesWorld, CountsSlots
from support.evac import some_actions, start_state, tiny_config, tiny_networks

CONFIG = tiny_config()


def test_it_offers_what_a_world_may_offer() -> None:
    world = EvacWorld(tiny_networks(CONFIG), CONFIG)
    assert isinstance(world, BringsDefaults)
    assert isinstance(world, CountsSlots)
    assert isinstance(world, CompilesWorld)


@pytest.mark.parametrize("first_in_inference", [False, True])
@pytest.mark.parametrize("then_in_inference", [False, True])
def test_a_slot_is_refilled_whatever_mode_it_was_filled_in(
    first_in_inference: bool, then_in_inference: bool
) -> None:
    world = EvacWorld(tiny_networks(CONFIG), CONFIG)
    with torch.inference_mode(first_in_inference):
        state = world.start([start_state(1), start_state(2)], decisions=2)
        _, state = world.imagine(state, some_actions(2), [1, 2])
    with torch.inference_mode(then_in_inference):
        opened = world.start([start_state(3), start_state(3)], decisions=2)
        state.write_rows([0], opened.select([0]))
        frames, after = world.imagine(state, some_actions(2), [3, 4])
        expected, _ = world.imagine(opened, some_actions(2), [3, 4])
    assert torch.equal(frames[0], expected[0])
    assert after.count.tolist() == [9, 17]


def test_a_slot_of_siblings_is_opened_once_and_copied() -> None:
    world = EvacWorld(tiny_networks(CONFIG), CONFIG)
    copied = world.start([start_state(1)], decisions=1).select([0] * 3)
    opened = world.start([start_state(1)] * 3, decisions=1)
    frames, _ = world.imagine(copied, some_actions(3), [1, 2, 3])
    expected, _ = world.imagine(opened, some_actions(3), [1, 2, 3])
    assert (frames.int() - expected.int()).abs().max() <= 1
    assert not torch.equal(frames[0], frames[1])


def test_weights_may_go_away_and_come_back() -> None:
    world = EvacWorld(tiny_networks(CONFIG), CONFIG)
    state = world.start([start_state(1)], decisions=1)
    before, _ = world.imagine(state, some_actions(1), [1])
    assert world.to("cpu") is world
    world.weights_moved()
    after, _ = world.imagine(state.to("cpu"), some_actions(1), [1])
    assert torch.equal(before, after)

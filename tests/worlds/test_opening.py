"""Slots that begin alike are opened once, whatever the world; what cannot begin is refused by its name."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from asyncrl.cli import run
from asyncrl.config.sections import ImaginationSettings
from asyncrl.errors import ConfigError
from asyncrl.records import StartState
from asyncrl.storage.assets import start_states_path, world_folder
from asyncrl.worlds.evac.world import EvacWorld, save_world
from asyncrl.worlds.slots import TensorState, open_each_once
from asyncrl.worlds.start_states import check_beginnings, load_start_states, save_start_states
from asyncrl.worlds.wan.world import WanWorld
from support.evac import some_actions, start_state, tiny_config, tiny_networks
from support.opensora import nano_world
from support.worlds import load_world


@dataclass(frozen=True, kw_only=True)
class Means(TensorState):
    means: Tensor


class Opener:
    """Opens slots that remember the mean of their first frame; notes which were opened together."""

    def __init__(self) -> None:
        self.opened: list[list[str]] = []

    def __call__(self, states: list[StartState]) -> Means:
        self.opened.append([state.name for state in states])
        means = torch.tensor([float(state.frame.mean()) for state in states])
        return Means(means=means, finite=torch.ones(len(states), dtype=torch.bool))


@pytest.mark.parametrize(
    ("numbers", "opened"),
    [
        ([1], ["1"]),
        ([1, 1], ["11"]),
        ([1] * 8, ["11"]),
        ([1, 2], ["12"]),
        ([2, 1, 2, 1, 1], ["21"]),
        ([1, 1, 2, 3, 3, 1], ["12", "33"]),
        ([5, 4, 3, 2, 1, 5], ["54", "32", "11"]),
    ],
)
def test_each_beginning_is_opened_once_and_two_at_a_time(numbers: list[int], opened: list[str]) -> None:
    opener = Opener()
    states = [replace(start_state(n), name=str(n)) for n in numbers]
    state = open_each_once(states, opener)
    assert ["".join(names) for names in opener.opened] == opened
    assert state.means.tolist() == [pytest.approx(one.frame.mean(), abs=1e-4) for one in states]


def test_slots_that_begin_alike_share_no_memory() -> None:
    state = open_each_once([start_state(1)] * 3, Opener())
    state.means[0] = -1
    assert (state.means[1:] > 0).all()


@pytest.mark.parametrize(
    "changed",
    [
        {"frame": start_state(9).frame},
        {"context_frames": start_state(9, context=4).context_frames},
        {"context_actions": start_state(9, context=4).context_actions},
        {"ee_pose": None},
        {"ee_pose": np.ones(8, np.float32)},
    ],
)
def test_states_that_differ_in_anything_but_name_and_task_are_opened_apart(changed: dict[str, Any]) -> None:
    one = start_state(1, context=4)
    opener = Opener()
    other = replace(one, name="other", **changed)
    open_each_once([one, replace(one, name="alike", task="something else"), other], opener)
    assert opener.opened == [[one.name, "other"]]


def beginnings(size: int) -> list[StartState]:
    """Seven slots of three beginnings; the second has a context."""
    first, second, third = (
        start_state(1, size=size),
        start_state(2, size=size, context=4),
        start_state(3, size=size),
    )
    return [first, second, first, third, second, first, first]


def wan(memory: str) -> WanWorld:
    return load_world(world_folder("tabletop"), settings=ImaginationSettings(context=memory, steps=2))  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", ["latents", "frames"])
@pytest.mark.parametrize("slots", [1, 7])
def test_wan_draws_the_very_frames_of_slots_that_are_opened_each_for_itself(memory: str, slots: int) -> None:
    world = wan(memory)
    shipped = load_start_states(start_states_path("tabletop", "tabletop"))
    states = [*beginnings(64)[:4], *shipped[:2], shipped[0]][:slots]
    actions = some_actions(slots)
    shared, apart = world.start(states), world.open_slots(states)
    for one, other in zip(*(tree_leaves(vars(state)) for state in (shared, apart)), strict=True):
        assert torch.equal(one, other)
    for decision in range(2):
        frames, shared = world.imagine(shared, actions, range(slots))
        expected, apart = world.imagine(apart, actions, range(slots))
        assert torch.equal(frames, expected), decision


TINY = tiny_config()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (start_state(3, size=16), r"start-3 has a frame of shape \[16, 16, 3\], but the world draws 32x32"),
        (
            replace(start_state(3), context_frames=start_state(3, context=4, size=16).context_frames),
            r"start-3 has a frame of shape \[16, 16, 3\]",
        ),
        (start_state(3, context=3), "start-3 has 3 context frames; the world needs 0 or 4"),
        (start_state(3, pose=None), "start-3 does not say where the robot's hand is"),
        (start_state(3, pose=[0.0] * 7), "start-3 does not say where"),
        (start_state(3, pose=[float("nan")] * 8), "start-3 does not say where"),
    ],
)
def test_a_start_state_that_cannot_begin_is_named(wrong: StartState, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_beginnings([start_state(1), wrong, start_state(2)], image_size=32, context=4, needs_pose=True)
    evac = EvacWorld(tiny_networks(TINY), TINY)
    with pytest.raises(ConfigError, match=said):
        evac.start([start_state(1), wrong], decisions=1)
    if "where" not in said:
        with pytest.raises(ConfigError, match=said):
            nano_world().start([start_state(1), wrong])


def test_poses_are_not_asked_for_where_none_are_needed() -> None:
    states = [start_state(1, pose=None), start_state(2, context=4, pose=None)]
    check_beginnings(states, image_size=32, context=4)
    assert len(nano_world().start(states)) == 2


def test_a_run_in_a_world_that_needs_poses_fails_before_it_begins(tmp_path, capsys) -> None:
    save_world(tmp_path / "evac", EvacWorld(tiny_networks(TINY), TINY))
    states = [start_state(1), start_state(2, pose=None), start_state(3, pose=None)]
    save_start_states(tmp_path / "starts.h5", states)
    flags = ["--world", str(tmp_path / "evac"), "--start-states", str(tmp_path / "starts.h5")]
    assert run("train", [*flags, "--run-dir", str(tmp_path / "run"), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "start state start-2 does not say where the robot's hand is" in said
    assert "start-3" not in said

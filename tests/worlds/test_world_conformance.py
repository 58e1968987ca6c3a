"""Every world that ships keeps what a run rests on, and each check finds the world that breaks just that."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncrl import cli
from asyncrl.config.sections import ImaginationSettings
from asyncrl.errors import ConfigError
from asyncrl.launch.conformance import CHECKS, Trial, check_world
from asyncrl.records import StartState
from asyncrl.storage.assets import start_states_path, world_folder
from asyncrl.worlds.evac.world import EvacWorld
from asyncrl.worlds.evac.world import save_world as save_evac
from asyncrl.worlds.opensora.world import save_world as save_opensora
from asyncrl.worlds.start_states import load_start_states
from asyncrl.worlds.wan.world import WanWorld
from support.broken_worlds import BROKEN, SIZE, SoundWorld
from support.evac import start_state, tiny_config, tiny_networks
from support.opensora import nano_world
from support.worlds import load_world


def states(size: int) -> list[StartState]:
    return [start_state(1, size=size), start_state(2, size=size), start_state(3, size=size, context=4)]


def wan(memory: Any) -> WanWorld:
    return load_world(world_folder("tabletop"), settings=ImaginationSettings(context=memory, steps=2))


def evac(**options: Any) -> EvacWorld:
    config = replace(tiny_config(), schedule_steps=2)
    return EvacWorld(tiny_networks(config), config, **options)


WORLDS: dict[str, Callable[[], Any]] = {
    "wan, latents": lambda: wan("latents"),
    "wan, frames": lambda: wan("frames"),
    "opensora": nano_world,
    "evac": evac,
    "sound": SoundWorld,
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_world_keeps_all_of_it(name: str) -> None:
    world = WORLDS[name]()
    shipped = load_start_states(start_states_path("tabletop", "tabletop"))
    starts = shipped[:3] if name.startswith("wan") else states(world.image_size)
    lines = list(check_world(world, starts))
    assert [line.partition(":")[0] for line in lines] == ["imagine", *CHECKS, "modules"]


@pytest.mark.parametrize("name", ["wan, latents", "opensora", "evac"])
def test_seeds_actions_and_starts_all_decide_what_is_drawn(name: str) -> None:
    world = WORLDS[name]()
    starts = [start_state(seed, size=world.image_size) for seed in (1, 1, 1, 2)]
    actions = torch.zeros(4, 8, 7)
    actions[1] += 1
    frames, _ = world.imagine(world.start(starts, decisions=1), actions, [1, 1, 2, 1])
    assert [torch.equal(frames[0], frames[row]) for row in (1, 2, 3)] == [False] * 3


def failures(world: Any, starts: Sequence[StartState]) -> dict[str, str]:
    """What each check says that does not pass, by its name; every check by itself."""
    found = {}
    for name, check in CHECKS.items():
        try:
            check(Trial(world, starts))
        except ConfigError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("how", BROKEN)
def test_each_check_finds_the_world_that_breaks_just_that(how: str) -> None:
    build, check, said = BROKEN[how]
    found = failures(build(), states(SIZE))
    assert list(found) == [check], found
    assert said in found[check]
    assert f"{build().__class__.__qualname__}, whose " in found[check]


def test_there_is_a_broken_world_for_every_check() -> None:
    assert {check for _, check, _ in BROKEN.values()} == set(CHECKS)


def test_one_start_state_is_enough() -> None:
    assert len(list(check_world(SoundWorld(), states(SIZE)[:1]))) == len(CHECKS) + 2


def test_short_weights_may_round_in_single_pixels_and_not_everywhere() -> None:
    class Rounded(SoundWorld):
        most, every = 9, 1

        def __init__(self) -> None:
            super().__init__()
            self.spare = torch.nn.Linear(1, 1).to(torch.bfloat16)

        def modules(self) -> dict[str, torch.nn.Module]:
            return {**super().modules(), "spare": self.spare}

        def draw(self, state: Any, actions: torch.Tensor, noise_seeds: Sequence[int]) -> Any:
            frames, after = super().draw(state, actions, noise_seeds)
            if len(state) != 2:
                frames = frames.clone()
                frames[:, :, :: self.every] = (
                    (frames[:, :, :: self.every].int() + self.most).clamp(0, 255).byte()
                )
            return frames, after

    trial = Trial(Rounded(), states(SIZE))
    with pytest.raises(ConfigError, match=r"grey levels off .* expected at most 1 in the mean"):
        CHECKS["neighbours"](trial)
    Rounded.every = SIZE
    CHECKS["neighbours"](trial)
    exact = SoundWorld()
    assert not Trial(exact, states(SIZE)).rounds
    assert trial.rounds


def test_start_states_of_another_size_are_named() -> None:
    with pytest.raises(ConfigError, match=r"SoundWorld, whose image_size is 16, expected that of the start"):
        list(check_world(SoundWorld(), states(32)))
    without = [replace(state, ee_pose=None) for state in states(32)]
    with pytest.raises(ConfigError, match="start-1 does not say where the robot's hand is"):
        list(check_world(evac(), without))


@pytest.mark.parametrize("kind", ["opensora", "evac"])
def test_the_command_checks_a_folder_of_any_kind(kind: str, tmp_path, capsys) -> None:
    if kind == "opensora":
        save_opensora(tmp_path, nano_world())
    else:
        save_evac(tmp_path, evac())
    assert cli.run("check", ["world", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert all(f"\nok  {name}\n" in said for name in CHECKS)


def test_the_command_ends_with_what_does_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("check", ["world", "support.broken_worlds:Crowded"]) == 2
    said = capsys.readouterr()
    assert "ok  seeds\n" in said.out
    assert "neighbours" not in said.out
    assert "Crowded, whose imagine is" in said.err

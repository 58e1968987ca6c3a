"""Refits of published worlds: the layout, names and types stay, and actors load what the fitter sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.config.pace import PaceSettings
from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.fitting.loading import load_recordings
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.worlds.interface import load_fitted
from asyncrl.launch import refits
from asyncrl.pace import rounds
from asyncrl.pace.fitter import WorldAt
from asyncrl.pace.refit import Refit, check_refittable, refit
from asyncrl.pace.version_folder import copy_world
from asyncrl.rewards.model import ResNetReward, save_reward
from asyncrl.rewards.resnet import RewardConfig, build_network
from asyncrl.simulators.tabletop.scene import TASKS
from asyncrl.storage.tensor_reader import TensorFiles
from asyncrl.worlds.evac.ckpt_reader import CkptFile
from asyncrl.worlds.kinds import is_published, world_class
from asyncrl.worlds.start_states import save_start_states
from support.published_worlds import EXPORTS, SIZE, write_published_world
from support.recorded import recorded_spec, write_recorded
from support.tiny_models import start_state

CPU = torch.device("cpu")
CKPT = "epoch=3.ckpt"
PACE = PaceSettings(every=2, world_steps=1, reward_steps=2, batch=4, learning_rate=1e-2)
SPEC = recorded_spec(SIZE, simulator="tabletop", tasks=tuple(TASKS), trials=0, poses=True)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    folder = tmp_path_factory.mktemp("recorded")
    write_recorded(folder, SPEC, (9, 9))
    return load_recordings([folder])


SLOW = pytest.param("evac", marks=[pytest.mark.slow, pytest.mark.long])
"""It alone draws pictures of 256 pixels."""


@pytest.fixture(scope="module", params=[SLOW if kind == "evac" else kind for kind in EXPORTS])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """Of a run in a published world."""
    root = tmp_path_factory.mktemp(request.param)
    world = write_published_world(root / "world", request.param)
    save_start_states(root / "starts.h5", [start_state(number, SIZE) for number in range(2)])
    return TrainConfig(world=str(world), start_states=str(root / "starts.h5"), device="cpu", pace=PACE)


@pytest.fixture(scope="module")
def refitted(
    config: TrainConfig, recordings: Recordings, tmp_path_factory: pytest.TempPathFactory
) -> WorldAt:
    """Version 1."""
    first, out = refits.first_world(config), rounds.world_folder(tmp_path_factory.mktemp("run"), 1)
    made = Refit(present=first.folder, reward=first.reward, out=out, version=1, device=CPU, seed=1)
    refit(made, recordings, config.pace)
    return WorldAt(folder=out, reward=out, version=1)


def held(config: TrainConfig, at: WorldAt) -> dict[str, Tensor]:
    """All that an actor that starts with a version holds, by name."""
    world, reward = refits.load_world(config, at, CPU)
    parts = {"world": world.modules(), "reward": reward.modules()}
    return {
        f"{part}.{name}.{key}": tensor
        for part, modules in parts.items()
        for name, module in modules.items()
        for key, tensor in module.state_dict().items()
    }


def unlike(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not one[name].equal(other[name])]


def test_what_is_sent_is_what_an_actor_that_joins_loads_in_the_types_that_actors_hold(
    config: TrainConfig, refitted: WorldAt
) -> None:
    first = refits.first_world(config)
    before, sent = (refits.tensors_of(config, at, CPU) for at in (first, refitted))
    assert {name: (t.shape, t.dtype) for name, t in sent.items()} == {
        name: (t.shape, t.dtype) for name, t in before.items()
    }
    assert {t.dtype for name, t in sent.items() if name.startswith("world.")} >= {torch.bfloat16}
    assert {name.split(".")[0] for name in unlike(sent, before)} == {"world", "reward"}
    assert unlike(held(config, first) | sent, held(config, refitted)) == []


def test_a_version_of_a_version_holds_its_weights_in_the_same_files(
    config: TrainConfig, refitted: WorldAt, tmp_path: Path
) -> None:
    """Read in float32, as a refit does, and written again without one."""
    copy_world(refitted.folder, refitted.reward, tmp_path / "new", 2)
    fitted: Any = load_fitted(refitted.folder, CPU, torch.float32)
    fitted.write_refreshed(refitted.folder, tmp_path / "new")
    again = WorldAt(folder=tmp_path / "new", reward=tmp_path / "new", version=2)
    assert unlike(held(config, refitted), held(config, again)) == []
    one, two = ({path.name for path in at.folder.rglob("*")} for at in (refitted, again))
    assert one == two


def test_the_layout_stays_and_start_states_stay_behind(config: TrainConfig, refitted: WorldAt) -> None:
    source = Path(config.world)
    assert is_published(refitted.folder)
    assert world_class(refitted.folder) is world_class(source)
    kept = {path.name for path in source.iterdir()} - {"dataset", CKPT, "action_predictor.pth"}
    found = {path.name for path in refitted.folder.iterdir()}
    assert kept <= found
    assert not {"dataset", CKPT} & found
    if (source / CKPT).is_file():
        written = TensorFiles(refitted.folder / f"{CKPT}.safetensors").shapes
        assert written.items() <= CkptFile(source / CKPT).shapes.items()
        assert "betas" not in written, "nobody reads it"


def test_a_version_without_a_refit_holds_the_same_weights(config: TrainConfig, tmp_path: Path) -> None:
    first = refits.first_world(config)
    copy_world(first.folder, first.reward, tmp_path / "new", 1)
    copied = WorldAt(folder=tmp_path / "new", reward=tmp_path / "new", version=1)
    assert unlike(held(config, first), held(config, copied)) == []


def test_a_reward_model_from_another_folder_comes_along_and_no_world_with_it(
    config: TrainConfig, tmp_path: Path
) -> None:
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "world.json").write_text("{}")
    reward = RewardConfig.tiny(tasks=(), image_size=SIZE)
    save_reward(tmp_path / "judge", ResNetReward(build_network(reward), reward))
    copy_world(Path(config.world), tmp_path / "judge", tmp_path / "new", 1)
    assert is_published(tmp_path / "new")
    assert (tmp_path / "new" / "reward.json").is_file()
    assert not (tmp_path / "new" / "resnet_rm.pth").exists(), "it judges nothing here"


def test_all_kinds_can_be_refitted(config: TrainConfig) -> None:
    first = refits.first_world(config)
    check_refittable(first.folder, first.reward, config.pace)


def test_six_networks_that_judge_together_are_not_refitted(tmp_path: Path) -> None:
    world = write_published_world(tmp_path / "world", "opensora")
    for number in range(1, 7):
        (world / "judges" / f"group_{number}").mkdir(parents=True)
    (world / "resnet_rm.pth").unlink()
    with pytest.raises(ConfigError, match=r"--pace\.reward-steps 2.* Use --pace\.reward-steps 0"):
        check_refittable(world, world, PACE)
    check_refittable(world, world, PaceSettings(every=2, reward_steps=0))
    copy_world(world, world, tmp_path / "new", 1)
    assert (tmp_path / "new" / "group_6").is_dir()

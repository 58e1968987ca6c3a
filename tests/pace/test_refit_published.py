"""Refits of published worlds: the layout, names and types stay, and actors load what the fitter sends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncrl.config.pace import PaceSettings
from asyncrl.config.run import TrainConfig
from asyncrl.doctor.fitter import reward_refit, world_refit
from asyncrl.errors import ConfigError
from asyncrl.fitting.loading import load_recordings
from asyncrl.fitting.recordings import Recordings
from asyncrl.launch import refits
from asyncrl.pace import rounds
from asyncrl.pace.fitter import WorldAt
from asyncrl.pace.refit import Refit, check_refittable, refit
from asyncrl.pace.version_folder import copy_world
from asyncrl.rewards.model import ResNetReward, save_reward
from asyncrl.rewards.resnet import RewardConfig, build_network
from asyncrl.simulators.tabletop.scene import TASKS
from asyncrl.worlds.evac.ckpt_reader import CkptFile
from asyncrl.worlds.kinds import is_published, world_class
from asyncrl.worlds.start_states import save_start_states
from support.published_worlds import EXPORTS, SIZE, write_published_world
from support.recorded import recorded_spec, write_recorded
from support.tiny_models import start_state

CPU = torch.device("cpu")
PACE = PaceSettings(every=2, world_steps=1, reward_steps=2, batch=4, learning_rate=1e-2)
SPEC = recorded_spec(SIZE, simulator="tabletop", tasks=tuple(TASKS), trials=0, poses=True)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    folder = tmp_path_factory.mktemp("recorded")
    write_recorded(folder, SPEC, (9, 9))
    return load_recordings([folder])


@pytest.fixture(scope="module", params=EXPORTS)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """Of a run in a published world."""
    root = tmp_path_factory.mktemp(request.param)
    world = write_published_world(root / "world", request.param)
    save_start_states(root / "starts.h5", [start_state(number, SIZE) for number in range(2)])
    return TrainConfig(world=str(world), start_states=str(root / "starts.h5"), device="cpu", pace=PACE)


@pytest.fixture(scope="module")
def refitted(
    config: TrainConfig, recordings: Recordings, tmp_path_factory: pytest.TempPathFactory
) -> list[WorldAt]:
    """The world of the beginning, and two versions that were refitted one after the other."""
    run, found = tmp_path_factory.mktemp("run"), [refits.first_world(config)]
    for version in (1, 2):
        out, present = rounds.world_folder(run, version), found[-1]
        made = Refit(
            present=present.folder,
            reward=present.reward,
            out=out,
            version=version,
            device=CPU,
            seed=version,
        )
        refit(made, recordings, config.pace)
        found.append(WorldAt(folder=out, reward=out, version=version))
    return found


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


def test_what_is_sent_is_what_an_actor_that_joins_loads_in_the_types_that_actors_hold(
    config: TrainConfig, refitted: list[WorldAt]
) -> None:
    first, before = held(config, refitted[0]), refits.tensors_of(config, refitted[0], CPU)
    for at in refitted[1:]:
        sent, joined = refits.tensors_of(config, at, CPU), held(config, at)
        assert {name: (t.shape, t.dtype) for name, t in sent.items()} == {
            name: (t.shape, t.dtype) for name, t in before.items()
        }
        acting = first | sent
        assert acting.keys() == joined.keys()
        assert [name for name, tensor in joined.items() if not tensor.equal(acting[name])] == []
        assert {t.dtype for name, t in sent.items() if name.startswith("world.")} >= {torch.bfloat16}
        changed = {name for name, tensor in sent.items() if not tensor.equal(before[name])}
        assert {name.split(".")[0] for name in changed} == {"world", "reward"}
        before = sent


def test_the_layout_stays_and_start_states_stay_behind(config: TrainConfig, refitted: list[WorldAt]) -> None:
    source = Path(config.world)
    for at in refitted[1:]:
        assert is_published(at.folder)
        assert world_class(at.folder) is world_class(source)
        assert not (at.folder / "dataset").exists()
        kept = {path.name for path in source.iterdir()} - {"dataset", "epoch=3.ckpt"}
        assert kept <= {path.name for path in at.folder.iterdir()}
    one, two = ({path.name for path in at.folder.rglob("*")} for at in refitted[1:])
    assert one == two, "a version of a version has the same files"


def test_a_version_without_a_refit_holds_the_same_weights(config: TrainConfig, tmp_path: Path) -> None:
    first = refits.first_world(config)
    copy_world(first.folder, first.reward, tmp_path / "new", 1)
    before = held(config, first)
    after = held(config, WorldAt(folder=tmp_path / "new", reward=tmp_path / "new", version=1))
    assert before.keys() == after.keys()
    assert [name for name in after if not before[name].equal(after[name])] == []


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


def test_all_kinds_can_be_refitted_and_their_memory_is_counted(config: TrainConfig) -> None:
    first = refits.first_world(config)
    check_refittable(first.folder, first.reward, config.pace)
    world, _ = refits.load_world(config, first, CPU)
    trained = sum(p.numel() for part in world.refreshed().values() for p in part.parameters())
    assert world_refit(config, first) > 5 * 4 * trained, "weight, gradient, moments and average in float32"
    assert reward_refit(config, first) > 0


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


def test_what_a_checkpoint_holds_besides_tensors_is_not_written_again(
    recordings: Recordings, tmp_path: Path
) -> None:
    world = write_published_world(tmp_path / "world", "evac")
    made = Refit(present=world, reward=world, out=tmp_path / "new", version=1, device=CPU, seed=0)
    refit(made, recordings, PaceSettings(every=2, world_steps=1, reward_steps=0, batch=4))
    assert not (tmp_path / "new" / "epoch=3.ckpt").exists()
    new = tmp_path / "new" / "epoch=3.ckpt.safetensors"
    header = json.loads(new.read_bytes()[8 : 8 + int.from_bytes(new.read_bytes()[:8], "little")])
    written = {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    read = {name: tuple(shape) for name, shape in CkptFile(world / "epoch=3.ckpt").shapes.items()}
    assert written.items() <= read.items()
    assert "betas" not in written, "nobody reads it"

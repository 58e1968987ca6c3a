"""Fits at the recordings' picture size, with their words and the range of their actions, up to a run."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl import cli
from asyncrl.commands.fit import main as fit
from asyncrl.errors import ConfigError
from asyncrl.fitting import world as worlds
from asyncrl.fitting.fit_models import (
    action_statistics,
    check_imitable,
    fit_reward,
    fresh_policy,
    fresh_reward,
    tokens_of,
)
from asyncrl.fitting.loop import Schedule
from asyncrl.fitting.recording_files import Recordings
from asyncrl.fitting.settings import FitPolicy, FitWorld
from asyncrl.fitting.sources import load_recordings
from asyncrl.fitting.world import Size, WorldOptions, fit_class
from asyncrl.policies.action_tokens import BINS, NormStats, decode, unnormalise, with_gripper
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.export import convert
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy, load_policy
from asyncrl.policies.openvla.preprocess import WORDS, build_word_tokenizer, words_for
from asyncrl.records import dummy_action
from asyncrl.simulators.libero.tasks import INSTRUCTIONS
from asyncrl.simulators.tabletop.scene import TASKS
from asyncrl.storage.atomic import read_json
from support.recorded import KITCHEN, recorded_spec, recordings_of, write_recorded
from support.tiny_models import count_parameters


def recorded(
    image_size: int = 64,
    *,
    tasks: tuple[str, ...] = KITCHEN,
    simulator: str = "kitchen",
    actions: np.ndarray | None = None,
) -> Recordings:
    """One episode of 10 frames of each task; all pictures are black."""
    frames = 10 * len(tasks)
    drawn = np.random.default_rng(0).uniform(-1, 1, (frames, 7)).astype(np.float32)
    return recordings_of(
        [10] * len(tasks),
        size=image_size,
        actions=drawn if actions is None else actions,
        tasks=list(tasks),
        simulator=simulator,
    )


@pytest.mark.parametrize(("size", "policy", "reward"), [("tiny", 1.9, 0.4), ("small", 10.9, 0.7)])
def test_sizes_have_the_documented_numbers_of_parameters(size: str, policy: float, reward: float) -> None:
    recordings = recorded(64 if size == "tiny" else 128)
    judge = fresh_reward(size, recordings, torch.device("cpu"))
    found = [count_parameters(m) / 1e6 for m in (fresh_policy(size, recordings, "none"), judge.network)]
    assert found == pytest.approx([policy, reward], abs=0.06)


@pytest.mark.parametrize(
    ("kind", "size", "network", "autoencoder"),
    [
        ("wan", "tiny", 2.9, 2.0),
        ("wan", "small", 7.2, 4.4),
        ("opensora", "tiny", 4.0, 1.0),
        ("opensora", "small", 10.2, 2.4),
        ("evac", "tiny", 3.5, 1.0),
        ("evac", "small", 13.8, 2.4),
    ],
)
def test_worlds_of_every_kind_too(kind: str, size: Size, network: float, autoencoder: float) -> None:
    recordings = replace(recorded(64, simulator="tabletop"), poses=np.zeros((30, 8), np.float32))
    modules = fit_class(kind).fresh(size, size, recordings, WorldOptions()).world.modules()
    found = {name: count_parameters(module) / 1e6 for name, module in modules.items()}
    own = found.pop("autoencoder" if kind == "evac" else "vae")
    assert [sum(found.values()), own] == pytest.approx([network, autoencoder], abs=0.06)


def test_pictures_that_are_not_square_are_refused() -> None:
    recordings = Recordings(**{**vars(recorded()), "frames": np.zeros((30, 64, 96, 3), np.uint8)})
    with pytest.raises(ConfigError, match="64 x 96"):
        fresh_policy("tiny", recordings, "none")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (FitPolicy, {"size": "small"}),
        (FitWorld, {"size": "small"}),
        (FitWorld, {"vae_size": "small"}),
        (FitWorld, {"kind": "evac"}),
        (FitWorld, {"camera": "x"}),
    ],
)
def test_what_is_about_fresh_weights_is_refused_with_others(kind: type, changes: dict[str, str]) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} {value} .*--refine old"):
        kind(data=(Path("x"),), out=Path("y"), refine="old", **changes)


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of 96 pixels, and all that is fitted on them, in a few steps."""
    folder = tmp_path_factory.mktemp("kitchen")
    write_recorded(folder / "data", recorded_spec(96), (17, 20, 9, 17))
    data, device = ["--data", str(folder / "data")], ["--device", "cpu"]
    steps = ["--steps", "2", "--batch", "4", *device]
    world = str(folder / "world")
    fit(["policy", *data, "--out", str(folder / "policy"), *steps])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worlds, "MEASURED_CLIPS", 4)
        fit(["world", *data, "--out", world, "--vae-steps", "1", "--vae-batch", "1", *steps])
    return folder


def test_a_world_of_another_picture_size_is_refused(kitchen: Path, tmp_path: Path) -> None:
    write_recorded(tmp_path / "data", recorded_spec(64), (9, 9))
    data = ["--data", str(tmp_path / "data"), "--device", "cpu", "--steps", "1"]
    world, out = str(kitchen / "world"), str(tmp_path / "out")
    calls = {"world": ["reward", "--world", world], "refine": ["world", "--refine", world, "--out", out]}
    for flag, call in calls.items():
        with pytest.raises(ConfigError, match=f"pictures of 64 pixels, but --{flag} draws 96"):
            fit([*call, *data])


def test_a_reward_model_of_one_task_can_be_fitted(tmp_path: Path) -> None:
    write_recorded(tmp_path, recorded_spec(32, tasks=KITCHEN[:1]), (17, 17))
    recordings = load_recordings([tmp_path])
    reward = fresh_reward("tiny", recordings, torch.device("cpu"))
    schedule = Schedule(steps=3, batch=8, learning_rate=1e-3)
    assert np.isfinite(fit_reward(reward, recordings, recordings.frames, schedule))


@pytest.mark.parametrize(("solved", "said"), [(False, "shows the task solved"), (True, "shows it unsolved")])
def test_a_reward_model_needs_both_verdicts(solved: bool, said: str) -> None:
    recordings = Recordings(**{**vars(recorded(32)), "success": np.full(30, solved)})
    reward = fresh_reward("tiny", recordings, torch.device("cpu"))
    schedule = Schedule(steps=1, batch=4, learning_rate=1e-3)
    with pytest.raises(ConfigError, match=said):
        fit_reward(reward, recordings, recordings.frames, schedule)


def test_the_shipped_policys_tokenizer_is_what_tabletop_still_gives() -> None:
    assets = Path(cli.__file__).parent / "assets" / "tabletop" / "policy"
    fresh = build_word_tokenizer(words_for(TASKS))
    assert fresh.to_str() == (assets / "tokenizer.json").read_text()


@pytest.mark.parametrize("suite", sorted(INSTRUCTIONS))
def test_each_of_a_suites_instructions_has_a_prompt_of_its_own(suite: str) -> None:
    tasks = INSTRUCTIONS[suite]
    policy = fresh_policy("tiny", recorded(tasks=tasks), "none")
    prompts = {policy.tokenizer.ids(task) for task in tasks}
    assert len(prompts) == len(tasks) == 10
    assert policy.tokenizer.tokenizer.token_to_id("<unk>") not in set().union(*prompts)


def test_a_vocabulary_grows_with_the_words_of_the_recordings(tmp_path: Path) -> None:
    letters = "abcdefghijklmnop"
    tasks = tuple(f"grasp the {a}{b}x" for a in letters for b in letters)
    policy = fresh_policy("tiny", recorded(32, tasks=tasks), "none")
    words = policy.tokenizer.tokenizer.get_vocab_size()
    assert words > len(WORDS) + 256
    assert policy.config.first_action_id >= words
    policy.save(tmp_path)
    again = load_policy(tmp_path)
    assert again.tokenizer.ids(tasks[200]) == policy.tokenizer.ids(tasks[200])


@pytest.mark.parametrize(
    ("simulator", "statistics", "key"),
    [
        ("tabletop", "auto", ""),
        ("kitchen", "auto", "kitchen"),
        ("kitchen", "none", ""),
        ("tabletop", "q01_q99", "tabletop"),
    ],
)
def test_statistics_are_used_where_they_are_asked_for(simulator: str, statistics: str, key: str) -> None:
    policy = fresh_policy("tiny", recorded(simulator=simulator), statistics)
    assert policy.config.norm_key == key
    assert set(policy.config.norm_stats) == ({key} if key else set())


@pytest.mark.parametrize("gripper", ["none", "libero", "maniskill"])
def test_tokens_become_the_recorded_actions_again(gripper: str) -> None:
    rng = np.random.default_rng(0)
    wide = np.array([0.9, 0.5, 0.2, 0.1, 0.02, 0.001, 1.0], np.float32)
    actions = (rng.uniform(-1, 1, (400, 7)) * wide).astype(np.float32)
    actions[:, 6] = np.where(actions[:, 6] > 0, 1, -1)
    stats = NormStats(q01=tuple((-wide).tolist()), q99=tuple(wide.tolist()), mask=(True,) * 6 + (False,))
    config = OpenVLAOFTConfig.tiny(norm_key="x", norm_stats={"x": stats}, gripper=gripper)
    tokens = torch.from_numpy(tokens_of(actions, config))
    again = with_gripper(unnormalise(decode(tokens), stats), gripper).numpy()
    half_a_bin = wide / (BINS - 1)
    assert (np.abs(again - actions)[:, :6] <= half_a_bin[:6] * 1.001).all()
    assert (np.sign(again[:, 6]) == actions[:, 6]).all()


def test_a_fitted_policy_acts_within_what_was_recorded_and_converts(kitchen: Path, tmp_path: Path) -> None:
    read = load_recordings([kitchen / "data"])
    stats = action_statistics(read)
    policy = load_policy(kitchen / "policy")
    assert policy.config.norm_stats == {"kitchen": stats}
    lowest = policy.decode(torch.full((1, 7), BINS - 1))[0].numpy()
    np.testing.assert_allclose(lowest[:6], np.array(stats.q01[:6]), atol=0.01)
    written = read_json(kitchen / "policy" / "dataset_statistics.json")
    assert NormStats.from_published(written["kitchen"]) == stats
    assert written["kitchen"]["num_trajectories"] == 4
    assert written["kitchen"]["num_transitions"] == len(read.actions) - 4
    assert written["kitchen"]["action"]["max"][6] == 1
    convert(kitchen / "policy", tmp_path / "published")
    assert json.loads((tmp_path / "published" / "dataset_statistics.json").read_text()) == written
    convert(tmp_path / "published", tmp_path / "own")
    again = load_policy(tmp_path / "own")
    assert again.config == policy.config, "what it computes in too, however its numbers are stored"
    assert again.tokenizer.ids(KITCHEN[0]) == policy.tokenizer.ids(KITCHEN[0])


def test_a_refined_policy_keeps_its_own_statistics(kitchen: Path, tmp_path: Path) -> None:
    write_recorded(tmp_path / "data", recorded_spec(96, simulator="garage"), (17, 30))
    steps = ["--steps", "1", "--batch", "2", "--device", "cpu"]
    data, out = ["--data", str(tmp_path / "data")], tmp_path / "out"
    fit(["policy", *data, "--refine", str(kitchen / "policy"), "--out", str(out), *steps])
    assert load_policy(out).config == load_policy(kitchen / "policy").config
    known = json.loads((kitchen / "policy" / "config.json").read_text())["norm_stats"]
    assert json.loads((out / "dataset_statistics.json").read_text()).keys() == known.keys()


def test_actions_of_another_width_are_refused() -> None:
    narrow = np.zeros((30, 4), np.float32)
    policy = OpenVLAOFTPolicy(OpenVLAOFTConfig.tiny(llm_layers=1))
    with pytest.raises(ConfigError, match="actions of 4 numbers, but the policy makes 7"):
        check_imitable(policy, recorded(actions=narrow))
    assert dummy_action().shape == (7,)

"""Models of any number of action dimensions and any picture size, from recordings to a training run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl import cli
from asyncrl.commands.fit import main as fit
from asyncrl.errors import ConfigError
from asyncrl.fitting.fit_models import action_statistics, patch_size
from asyncrl.fitting.loop import Schedule
from asyncrl.fitting.recording_files import Recordings
from asyncrl.fitting.wan import ActionScale, measured_scale, take_raw, take_scaled, windows
from asyncrl.fitting.world import WorldOptions, fit_class
from asyncrl.policies.openvla.policy import load_policy
from asyncrl.records import ActionSpec
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig
from support.recorded import recorded_spec, recordings_of, write_recorded
from support.tiny_models import start_state
from support.whole_runs import rows
from support.worlds import load_world

OPTIONS = WorldOptions()


def in_degrees(numbers: int) -> Recordings:
    """Actions around 90 degrees, as a robot with absolute joint angles has them; the last never moves."""
    rng = np.random.default_rng(0)
    actions = rng.uniform(60, 120, (34, numbers)).astype(np.float32)
    actions[:, -1] = 30
    actions[[0, 17]] = 0
    frames = rng.integers(0, 256, (34, 32, 32, 3), np.uint8)
    return recordings_of([17, 17], frames=frames, actions=actions, tasks=["a", "a"])


@pytest.mark.parametrize(
    ("kind", "pixels"), [("wan", 48), pytest.param("opensora", 32, marks=pytest.mark.slow)]
)
def test_14_numbers_go_from_recordings_to_a_training_run(kind: str, pixels: int, tmp_path: Path) -> None:
    data, world, policy = (str(tmp_path / name) for name in ("data", "world", "policy"))
    write_recorded(Path(data), recorded_spec(pixels, simulator="two_arms", idle=(0.0,) * 14), (17, 17))
    cpu = ["--device", "cpu", "--batch", "4"]
    fit(["policy", "--data", data, "--out", policy, "--steps", "2", *cpu])
    steps = ["--steps", "2", "--vae-steps", "2", "--vae-batch", "2"]
    fit(["world", "--data", data, "--out", world, "--kind", kind, *steps, *cpu])
    fit(["reward", "--data", data, "--world", world, "--steps", "2", *cpu])
    fit(["starts", "--data", data, "--out", f"{world}/start_states.h5"])
    assert load_policy(Path(policy)).action_spec == ActionSpec(chunk=8, dim=14)
    run = tmp_path / "run"
    flags = ["--policy", policy, "--world", world, "--start-states", f"{world}/start_states.h5"]
    flags += ["--updates", "1", "--inline", "--device", "cpu", "--run-dir", str(run)]
    flags += ["--algorithm.group-size", "2", "--algorithm.groups-per-update", "1"]
    flags += ["--actor.max-decisions", "1"]
    assert cli.run("train", flags) == 0
    (row,) = rows(run)
    assert np.isfinite(row["train/actor/grad_norm"])


def test_scaled_and_raw_actions_lead_to_the_same_velocities() -> None:
    torch.manual_seed(0)
    size = TransformerConfig(
        heads=2, head_dim=24, layers=1, ffn_dim=40, channels=4, patch=1, freq_dim=32, action_dim=3
    )
    network = ActionWanTransformer(size).double()
    scale = ActionScale(gain=np.array([0.02, 3.0, 100.0]), offset=np.array([-2.0, 0.5, -40.0]))
    latents, times = torch.randn(2, 4, 4, 2, 2), torch.full((2, 4), 300.0)
    raw = torch.rand(2, 13, 3) * torch.tensor([200.0, 1.0, 1.0])
    scaled = raw.double() * torch.from_numpy(scale.gain) + torch.from_numpy(scale.offset)
    with torch.no_grad():
        expected = network(latents, times, scaled)
        take_raw(network, scale)
        torch.testing.assert_close(network(latents, times, raw.double()), expected)
        take_scaled(network, scale)
        torch.testing.assert_close(network(latents, times, scaled), expected)


def test_only_actions_that_the_published_network_does_not_take_are_scaled() -> None:
    angles = in_degrees(7)
    tame = replace(angles, actions=angles.actions / 180)
    assert measured_scale(tame) is None
    assert measured_scale(replace(tame, actions=tame.actions[:, :4])) is not None
    scale = measured_scale(angles)
    assert scale is not None
    scaled = scale.apply(angles.actions[1:17])
    assert np.abs(scaled[:, :-1]).max() < 1.1
    np.testing.assert_allclose(scaled[:, -1], 0, atol=2e-3)


def test_a_world_fitted_on_degrees_is_saved_exactly_and_takes_degrees(tmp_path: Path) -> None:
    recordings = in_degrees(3)
    fitted = fit_class("wan").fresh("tiny", "tiny", recordings, OPTIONS)
    fitted.fit_network(recordings, Schedule(steps=2, batch=2, learning_rate=1e-3, seed=0), OPTIONS)
    exact = fitted.world.transformer.action_mlp1[0].weight.detach().clone()
    fitted.save(tmp_path, 0)
    read = load_world(tmp_path)
    assert torch.equal(read.transformer.action_mlp1[0].weight, exact)  # pyright: ignore
    start = replace(start_state(0, 32), context_actions=np.zeros((0, 3), np.float32))
    frames, _ = read.imagine(read.start([start]), np.full((1, 8, 3), 90, np.float32), [0])
    assert frames.shape == (1, 8, 32, 32, 3)
    wrong = start_state(0, 32, context=4)
    with pytest.raises(ConfigError, match="a context of actions of 7 numbers, but the world's have 3"):
        read.start([wrong])


def test_windows_begin_with_an_action_of_zeros_where_they_are_not_7_numbers() -> None:
    recordings = in_degrees(3)
    fitted = fit_class("wan").fresh("tiny", "tiny", recordings, OPTIONS)
    cut = windows(recordings, fitted.encode(recordings))
    assert cut.actions.shape == (4, 13, 3)
    assert not cut.actions[0, :5].any()
    np.testing.assert_array_equal(cut.actions[0, 5:].numpy(), recordings.actions[1:9])


def test_the_last_number_is_scaled_like_the_others_where_it_is_no_gripper() -> None:
    assert action_statistics(in_degrees(14)).mask == (True,) * 14
    assert action_statistics(in_degrees(7)).mask == (True,) * 7
    angles = in_degrees(7)
    gripper = np.where(np.arange(34) % 2, 1, -1)[:, None]
    actions = np.concatenate([angles.actions[:, :6], gripper], axis=1).astype(np.float32)
    assert action_statistics(replace(angles, actions=actions)).mask == (True,) * 6 + (False,)


@pytest.mark.parametrize(
    ("size", "patch"), [(16, 2), (64, 8), (84, 7), (96, 12), (100, 10), (224, 16), (480, 16)]
)
def test_pictures_of_these_sizes_are_cut_into_patches(size: int, patch: int) -> None:
    assert patch_size(size) == patch


@pytest.mark.parametrize("size", [97, 106, 211])
def test_pictures_that_only_tiny_patches_tile_are_refused(size: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"pictures of {size} pixels.*--dataset.image-size \d+ for LeRobot"
    ):
        patch_size(size)

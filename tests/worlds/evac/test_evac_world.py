"""The EVAC world against its parts put together by hand, and its start states."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.records import StartState
from asyncrl.worlds.evac.conditions import estimate_slot
from asyncrl.worlds.evac.ddim import normal_noise, sampling_times, seed_words, signal_scales, signal_shares
from asyncrl.worlds.evac.unet import EvacUNet
from asyncrl.worlds.evac.world import EvacWorld
from asyncrl.worlds.rlinf_start_states import load_trajectory
from asyncrl.worlds.start_states import load_start_states, save_start_states
from support.evac import PUBLISHED, some_actions, start_state, tiny_config, tiny_networks
from support.looks import Looks
from support.tiny_models import POSE

CONFIG = tiny_config()


@pytest.fixture(scope="module")
def world() -> EvacWorld:
    return EvacWorld(tiny_networks(CONFIG), CONFIG, version=3)


class Slow:
    """One slot, one frame and one step at a time; only the networks are those of the world."""

    def __init__(self, world: EvacWorld, start: StartState) -> None:
        self.world, self.net, self.config = world, world.networks, world.config
        pictures = [start.frame, *start.context_frames]
        self.latents = [self.encode(torch.tensor(p).permute(2, 0, 1) / 127.5 - 1) for p in pictures]
        assert start.ee_pose is not None
        self.poses = [torch.tensor(start.ee_pose) for _ in pictures]
        self.first = torch.tensor(pictures[0]).permute(2, 0, 1) / 127.5 - 1

    def encode(self, picture: Tensor) -> Tensor:
        return self.net.autoencoder.encode(picture[None])[0]

    def tokens(self, poses: list[Tensor], frame: int) -> Tensor:
        before = poses[max(frame - 1, 0)]
        motion = self.world._geometry.motions(poses[frame][None, None], before[None, None])
        return self.net.action_resampler(motion)[0]

    def decide(self, actions: Tensor, seed: int) -> Tensor:
        n = len(self.latents)
        kept = [0, 0, 0, *range(n)]  # the first frame four times
        known = [kept[len(kept) * i // 3] for i in range(3)] + [n - 1]
        poses = list(self.poses)
        for action in actions:
            poses.append(self.net.pose_model(action[None], poses[-1][None])[0])
        drawer = self.world._geometry.drawer
        empty, rays = torch.zeros_like(self.latents[0]), drawer.rays
        told = []
        for frame in known:
            told.append(torch.cat([self.latents[frame], torch.ones(1, 4, 4), empty, rays]))
        for step in range(8):
            drawn = self.encode(drawer(poses[n + step][None, None])[0, 0])
            told.append(torch.cat([self.latents[-1], torch.zeros(1, 4, 4), drawn, rays]))
        actions_FTK = torch.stack([self.tokens(poses, f) for f in [*known, *range(n, n + 8)]])
        image_IK = self.net.image_resampler(self.net.image_encoder(self.first[None]))[0]
        words = torch.from_numpy(seed_words([seed]))
        x = normal_noise(words, 0, (4, 8, 4, 4))[0]
        times = [*sampling_times(len(self.world.steps)), 0]
        for number, (t, s) in enumerate(pairwise(times)):
            frames = [self.latents[f] for f in known] + list(x.unbind(1))
            window = torch.stack([torch.cat([z, c]) for z, c in zip(frames, told, strict=True)], 1)
            v = self.velocity(window, t, image_IK, actions_FTK)
            x = self.step(x, v, t, s, normal_noise(words, number + 1, (4, 8, 4, 4))[0])
        self.latents += list(x.unbind(1))
        self.poses = poses
        pictures = torch.stack([self.net.autoencoder.decode(z[None])[0] for z in x.unbind(1)])
        pixels = ((pictures.clamp(-1, 1) + 1) * 127.5).round()
        return pixels.permute(0, 2, 3, 1)

    def velocity(self, window: Tensor, t: int, image_IK: Tensor, actions_FTK: Tensor) -> Tensor:
        times = torch.tensor([[0.0] * 4 + [float(t)] * 8])
        told = (image_IK[None], actions_FTK[None], torch.tensor([2.0]), torch.tensor([11]))
        return self.net.unet(window[None], times, *told)[0][:, 4:]

    @staticmethod
    def step(x: Tensor, v: Tensor, t: int, s: int, noise: Tensor) -> Tensor:
        a, b = signal_shares()[t], signal_shares()[s]
        signal = (math.sqrt(a) * x - math.sqrt(1 - a) * v) * signal_scales()[s] / signal_scales()[t]
        told = math.sqrt(a) * v + math.sqrt(1 - a) * x
        variance = min(max((1 - b) / (1 - a) * (1 - a / b), 0), 1 - b)
        kept = math.sqrt(1 - b - variance)
        return math.sqrt(b) * signal + kept * told + math.sqrt(variance) * noise


@pytest.mark.parametrize("steps", [0, 2])
def test_decisions_are_what_the_parts_give_by_hand(world: EvacWorld, steps: int) -> None:
    asked = EvacWorld(world.networks, world.config, steps=steps)
    assert len(asked.steps) == (steps or CONFIG.schedule_steps)
    starts = [start_state(1), start_state(2, context=4)]
    state = asked.start(starts, decisions=2)
    slow = [Slow(asked, start) for start in starts]
    for decision in range(2):
        actions, seeds = some_actions(2, decision), [11 + decision, 2**62 + 5]
        frames, state = asked.imagine(state, actions, seeds)
        for row in range(2):
            expected = slow[row].decide(actions[row], seeds[row])
            difference = (frames[row].float() - expected).abs()
            assert difference.max() <= 1  # grey levels: of values that lie between two
            assert difference.mean() < 0.01
            n = len(slow[row].latents)
            assert int(state.count[row]) == n
            latents = torch.stack(slow[row].latents)
            torch.testing.assert_close(state.history[row, :n], latents, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(state.poses[row, :n], torch.stack(slow[row].poses), atol=1e-5, rtol=0)
    assert state.finite.all()
    assert frames.float().std() > 1  # something was drawn


@pytest.mark.slow
def test_the_network_compiles_in_one_piece(world: EvacWorld) -> None:
    torch._dynamo.reset()
    unet = EvacUNet(replace(CONFIG.unet, attention_levels=(1,))).eval()
    x, times = torch.randn(1, 19, 12, 4, 4), torch.zeros(1, 12)
    given = (x, times, torch.randn(1, 4, 24), torch.randn(1, 12, 3, 24), torch.ones(1), torch.tensor([11]))
    compiled = torch.compile(unet, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(*given), unet(*given), atol=1e-5, rtol=1e-5)
    noise = torch.compile(normal_noise, backend="eager", fullgraph=True, dynamic=False)
    words, draws = torch.from_numpy(seed_words([1, 2])), torch.arange(4)
    for draw in range(4):
        assert torch.equal(noise(words, draws[draw], (2, 5)), normal_noise(words, draw, (2, 5)))
    network = world.networks.autoencoder
    for coder, shape in ((network._encode, (2, 3, 32, 32)), (network._decode, (2, 4, 4, 4))):
        whole, values = (
            torch.compile(coder, backend="eager", fullgraph=True, dynamic=False),
            torch.randn(shape),
        )
        torch.testing.assert_close(whole(values), coder(values))


def test_imagining_never_asks_for_a_number(world: EvacWorld) -> None:
    state = world.start([start_state(1), start_state(2)], decisions=2)
    actions = some_actions(2)
    with Looks() as looks:
        world.imagine(state, actions, [1, 2])
    assert looks.seen == []
    with Looks() as looks:  # the count itself works
        actions[actions > 0].sum().item()
    assert looks.seen


def test_a_decision_beyond_the_announced_number_is_an_error(world: EvacWorld) -> None:
    state = world.start([start_state(1), start_state(2)], decisions=1)
    _, after = world.imagine(state, some_actions(2), [1, 2])
    state.write_rows([1], after.select([1]))
    with pytest.raises(ConfigError, match="slot 1 has imagined as many decisions as its memory was made for"):
        world.imagine(state, some_actions(2), [1, 2])
    with pytest.raises(ConfigError, match="0 decisions"):
        world.start([start_state(1)], decisions=0)


@pytest.mark.parametrize("wrong", [{"image_size": 24}, {"history": 1}, {"domain": 12}, {"schedule_steps": 0}])
def test_sizes_that_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"image_size|history"):
        replace(CONFIG, **wrong)


def test_a_slot_of_the_published_size_is_what_the_documentation_says() -> None:
    slot = estimate_slot(PUBLISHED, 32, torch.bfloat16)
    frames = 1 + 4 + 256
    state = frames * (4 * 32 * 32 * 4 + 8 * 4) + 256 * 256 * 3
    assert slot.kept == 2 * state
    assert state < 8 * 2**20


def test_the_estimate_of_a_slot_is_the_size_of_its_state(world: EvacWorld) -> None:
    state = world.start([start_state(1)], decisions=6)
    held = sum(t.nbytes for t in (state.history, state.poses, state.first))
    assert estimate_slot(CONFIG, 6, torch.float32).kept == 2 * held


OTHER = [float(i) for i in range(8)]


def write_npy(path: Path, poses: list[dict[str, Any]]) -> None:
    frames = np.empty(len(poses), dtype=object)
    for i, pose in enumerate(poses):
        image = np.full((4, 4, 3), i, np.uint8)
        frames[i] = {"image": image, "delta_action": np.zeros(7, np.float32), "task": "Go.", **pose}
    np.save(path, frames)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"init_ee_pose": np.array(OTHER, np.float64)}, OTHER),
        ({"init_ee_pose": OTHER}, OTHER),
        ({"abs_action": np.array(OTHER, np.float32)}, OTHER),
        ({"init_ee_pose": np.array(OTHER), "abs_action": np.zeros(8)}, OTHER),
        ({"init_ee_pose": None, "abs_action": np.array(OTHER)}, OTHER),
        ({"init_ee_pose": np.zeros(7), "abs_action": np.array(OTHER)}, OTHER),
        ({}, None),
        ({"abs_action": np.zeros(16)}, None),
        ({"init_ee_pose": "here"}, None),
        ({"init_ee_pose": np.full(8, np.nan)}, None),
        ({"init_ee_pose": np.full(8, 1e300)}, None),
    ],
)
def test_a_pose_is_read_where_there_is_one(tmp_path: Path, said: dict, expected: list[float] | None) -> None:
    write_npy(tmp_path / "traj0.npy", [said])
    pose = load_trajectory(tmp_path / "traj0.npy").ee_pose
    if expected is None:
        assert pose is None
    else:
        assert pose is not None
        assert pose.dtype == np.float32
        assert pose.tolist() == expected


def test_with_a_context_the_pose_is_that_of_the_last_frame(tmp_path: Path) -> None:
    write_npy(tmp_path / "traj0_kir.npy", [{"init_ee_pose": np.full(8, i, np.float32)} for i in range(5)])
    pose = load_trajectory(tmp_path / "traj0_kir.npy").ee_pose
    assert pose is not None
    assert pose.tolist() == [4.0] * 8


def test_poses_survive_our_files(tmp_path: Path) -> None:
    states = [start_state(1), start_state(2, pose=None), start_state(3, pose=OTHER)]
    save_start_states(tmp_path / "a.h5", states)
    poses = [state.ee_pose for state in load_start_states(tmp_path / "a.h5")]
    assert poses[1] is None
    assert np.array_equal(poses[0], np.array(POSE, np.float32))
    assert np.array_equal(poses[2], np.array(OTHER, np.float32))


def test_files_without_poses_are_written_and_read_as_before(tmp_path: Path) -> None:
    states = [replace(start_state(i), ee_pose=None) for i in range(2)]
    save_start_states(tmp_path / "a.h5", states)
    with h5py.File(tmp_path / "a.h5") as file:
        assert set(file) == {"name", "task", "frame", "context_length"}
    assert [state.ee_pose for state in load_start_states(tmp_path / "a.h5")] == [None, None]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("ee_pose", lambda rows: rows[:, 1:], r"ee_pose is float32\[2, 7\], expected float32 \[2, 8\]"),
        ("ee_pose", lambda rows: np.zeros((3, 8), np.float32), r"float32\[3, 8\], expected float32 \[2, 8\]"),
        ("ee_pose", lambda rows: rows.astype(float), r"ee_pose is float64\[2, 8\], expected"),
        (
            "ee_pose",
            lambda rows: np.where(np.arange(8) == 3, np.float32("nan"), rows),
            "neither finite nor all",
        ),
        (
            "ee_pose",
            lambda rows: np.where(np.arange(8) == 3, np.float32("inf"), rows),
            "neither finite nor all",
        ),
        ("elapsed", lambda rows: [0, -1], "elapsed is below 0"),
        ("elapsed", lambda rows: [0.0, 1.0], r"elapsed is float64\[2\], expected int64 \[2\]"),
        ("elapsed", lambda rows: [[0], [1]], r"elapsed is int64\[2, 1\]"),
        ("name", lambda rows: rows[:1], r"a.h5: name is \|S7\[1\], expected S \[2\]\. Write it again"),
        ("name", lambda rows: rows[[0, 0]], "a name stands there twice"),
        ("name", lambda rows: [1, 2], r"name is int64\[2\]"),
        ("task", lambda rows: np.concatenate([rows, rows]), r"task is .*\[4\], expected S \[2\]"),
        ("context_length", lambda rows: rows[:1], r"context_length is int64\[1\], expected int64 \[2\]"),
        ("context_length", lambda rows: rows - 1, "context_length is neither 0 nor 4"),
        ("context_length", lambda rows: rows.astype(float), "context_length is float64"),
        ("context_actions", lambda rows: rows[:, 1:], r"context_actions is float32\[2, 3, 7\], expected"),
        ("context_actions", lambda rows: rows * np.float32("nan"), "context_actions are not all finite"),
        ("context_actions", lambda rows: rows.astype(int), "context_actions is int64"),
        ("context_frames", lambda rows: rows[1:], r"context_frames are uint8\[1, 4,"),
        ("frame", lambda rows: rows[1:], "context_frames are uint8"),
    ],
)
def test_damaged_start_states_are_refused(tmp_path: Path, name: str, change: Any, said: str) -> None:
    path = tmp_path / "a.h5"
    states = [start_state(number, context=4) for number in (1, 2)]
    save_start_states(path, [replace(state, elapsed=1) for state in states])
    with h5py.File(path, "a") as file:
        rows = file[name][:]
        del file[name]
        file[name] = change(rows)
    with pytest.raises(ConfigError, match=said):
        load_start_states(path)

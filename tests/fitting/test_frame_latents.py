"""What OpenSora's and EVAC's fits see: latents, windows, poses and the camera, against slow references."""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.fitting import evac, opensora
from asyncrl.fitting.evac import (
    CAMERAS,
    LEAST_SPREAD,
    EvacFit,
    camera_of,
    fit_poses,
    followed_poses,
    measured_motions,
    pose_loss,
    prepare_poses,
)
from asyncrl.fitting.fit_models import action_statistics
from asyncrl.fitting.loop import BatchSource, Schedule
from asyncrl.fitting.opensora import OpenSoraFit
from asyncrl.fitting.recording_files import Recordings
from asyncrl.fitting.sources import load_recordings
from asyncrl.fitting.starts import first_states
from asyncrl.fitting.world import CLIP_FRAMES, FittedWorld, WorldOptions, fit_class
from asyncrl.worlds.evac.conditions import condition_channels
from asyncrl.worlds.evac.poses import Camera, PoseModel, roll_pitch_yaw, rotation
from asyncrl.worlds.evac.world import EvacWorld
from support.recorded import recorded_spec, recordings_of, write_recorded

LENGTHS = (12, 9, 5, 20)
"""Frames of the episodes; the third has no decision."""
SCHEDULE = Schedule(steps=1, batch=1, learning_rate=1e-3, seed=0)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    folder = tmp_path_factory.mktemp("drawn")
    write_recorded(folder, recorded_spec(32, simulator="tabletop", poses=True), LENGTHS)
    return load_recordings([folder])


def fresh(kind: str, recordings: Recordings) -> Any:
    """A world with random weights whose latents are about standard normal."""
    torch.manual_seed(0)
    made: FittedWorld = fit_class(kind).fresh("tiny", "tiny", recordings, WorldOptions())
    return made


@pytest.fixture(scope="module")
def opensora_world(recordings: Recordings) -> OpenSoraFit:
    return fresh("opensora", recordings)


@pytest.fixture(scope="module")
def evac_world(recordings: Recordings) -> EvacFit:
    return fresh("evac", recordings)


# ---- frames and their latents --------------------------------------------------------------------


@torch.no_grad()
def test_each_frame_is_encoded_and_redrawn_by_itself(recordings: Recordings) -> None:
    world = fresh("opensora", recordings)
    network = world.autoencoder
    latents, drawn = world.encode(recordings), world.redraw(recordings)
    assert [len(episode) for episode in latents] == list(LENGTHS)
    assert drawn.shape == recordings.frames.shape
    for row in (0, 11, 12, 25, 45):
        picture = torch.from_numpy(recordings.frames[row : row + 1].astype(np.float32)) / 127.5 - 1
        mean = network.quant_conv(network.encoder(picture.permute(0, 3, 1, 2)))[:, :4]
        torch.testing.assert_close(latents.all[row], mean[0], atol=1e-5, rtol=1e-5)
        seen = network.decoder(network.post_quant_conv(mean))[0].permute(1, 2, 0).clamp(-1, 1)
        grey = ((seen + 1) * 127.5).numpy()
        assert np.abs(drawn[row] - grey).max() <= 0.501


@torch.no_grad()
def test_statistics_make_latents_standard_and_change_no_picture(recordings: Recordings) -> None:
    world = fresh("evac", recordings)
    before, drawn = world.encode(recordings).all, world.redraw(recordings)[:]
    mean, std = before.mean((0, 2, 3)), before.std((0, 2, 3))
    world.set_statistics(mean.tolist(), std.tolist())
    after = world.encode(recordings).all
    expected = (before - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(after, expected, atol=1e-4, rtol=1e-4)
    assert np.abs(world.redraw(recordings)[:].astype(int) - drawn).max() <= 1


@torch.no_grad()
def test_a_clip_is_encoded_and_drawn_like_its_frames(opensora_world: OpenSoraFit) -> None:
    video = torch.rand(2, 3, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = opensora_world.encode_clips(video)
    drawn = opensora_world.decode_clips(latents)
    assert latents.shape == (2, 4, 3, 4, 4)
    for row in range(2):
        for frame in range(3):
            alone = opensora_world.world.vae.encode(video[row : row + 1, :, frame])
            torch.testing.assert_close(latents[row, :, frame], alone[0], atol=1e-5, rtol=1e-5)
            picture = opensora_world.world.vae.decode(alone)[0]
            # A batch of another size is computed in another order, through all layers of the decoder.
            torch.testing.assert_close(drawn[row, :, frame], picture, atol=1e-4, rtol=1e-4)


def test_a_clip_is_of_one_episode_and_of_all_its_frames(opensora_world: OpenSoraFit) -> None:
    recordings = recordings_of([12, 9, 5, 20])
    rows, episodes = opensora_world.clips(recordings, 200, np.random.default_rng(0))
    assert rows.shape == (200, CLIP_FRAMES)
    for row, episode in zip(rows.numpy(), episodes, strict=True):
        assert (row >= recordings.offsets[episode]).all()
        assert (row < recordings.offsets[episode + 1]).all()
    assert set(rows.flatten().tolist()) == set(range(46))


# ---- windows -------------------------------------------------------------------------------------


def slow_windows(given: Callable[[int], list[int]]) -> list[list[int]]:
    """Rows of the frames that are given and made after each frame with a decision behind it."""
    found, begin = [], 0
    for length in LENGTHS:
        for seen in range(1, length + 1):
            if seen + 8 <= length:
                frames = [*given(seen), *range(seen, seen + 8)]
                found.append([begin + frame for frame in frames])
        begin += length
    return found


def test_windows_of_opensora_are_the_last_four_frames_and_the_next_eight(recordings, opensora_world) -> None:
    world = opensora_world.world
    cut = opensora.windows(recordings, opensora_world.encode(recordings), world.action_range)
    expected = slow_windows(lambda seen: [max(0, seen - 4 + i) for i in range(4)])
    assert cut.rows.tolist() == expected
    assert len(cut.rows) == 4 + 1 + 0 + 12
    latents, actions = cut.take(torch.tensor([0, 7, 16]))
    low, high = np.array(world.action_range.q01), np.array(world.action_range.q99)
    for window, number in enumerate((0, 7, 16)):
        rows = expected[number]
        for frame in range(12):
            assert torch.equal(latents[window, :, frame], cut.latents[rows[frame]])
        scaled = 2 * (recordings.actions[rows[4:]] - low) / (high - low) - 1
        np.testing.assert_allclose(actions[window], scaled, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_first_window_of_opensora_is_what_imagination_begins_with(recordings, opensora_world) -> None:
    world = opensora_world.world
    cut = opensora.windows(recordings, opensora_world.encode(recordings), world.action_range)
    state = world.start([first_states(recordings, 4)[3]])
    first = [rows[-8] for rows in cut.rows.tolist()].index(27)  # The first action of the fourth episode.
    latents, actions = cut.take(torch.tensor([first]))
    torch.testing.assert_close(latents[:, :, :4], state.latents, atol=1e-5, rtol=1e-5)
    assert actions.shape == (1, 8, 7)


def test_windows_of_evac_are_spread_over_the_episode(recordings: Recordings, evac_world: EvacFit) -> None:
    maps = torch.zeros(46, 4, 4, 4)
    poses, latents = torch.from_numpy(recordings.poses), evac_world.encode(recordings)
    cut = evac.windows(recordings, latents, poses, maps, evac_world.world.config)
    assert cut.rows.tolist() == slow_windows(
        lambda seen: [0, *([0, 0, 0, *range(seen)][(seen + 3) * i // 3] for i in (1, 2)), seen - 1]
    )


@torch.no_grad()
def model_of_moving_hands(recordings: Recordings) -> PoseModel:
    """A model of poses that is not fitted, but by which actions move the hand."""
    torch.manual_seed(0)
    model = PoseModel()
    prepare_poses(model, recordings.poses)
    model.net[4].weight += 0.05 * torch.randn(8, 64)
    return model


@torch.no_grad()
def test_poses_are_followed_from_the_first_of_each_episode(recordings: Recordings) -> None:
    model = model_of_moving_hands(recordings)
    expected = []
    for e in range(len(recordings)):
        rows = range(recordings.offsets[e], recordings.offsets[e + 1])
        at = torch.from_numpy(recordings.poses[rows[:1]])
        expected.append(at)
        for row in rows[1:]:
            at = model(torch.from_numpy(recordings.actions[row : row + 1]), at)
            expected.append(at)
    found = followed_poses(model, recordings)
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)
    assert (found - torch.from_numpy(recordings.poses)).abs().max() > 0.01


@pytest.mark.parametrize("decision", [0, 1])
@torch.no_grad()
def test_training_of_evac_is_told_what_imagination_tells(
    decision: int, recordings: Recordings, evac_world: EvacFit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conditions of a decision in an episode whose frames are the recorded ones."""
    world, begin, seen = evac_world.world, int(recordings.offsets[3]), 1 + 8 * decision
    networks, config = deepcopy(world.networks), world.config
    networks.pose_model = model_of_moving_hands(recordings)
    latents = evac_world.encode(recordings)
    poses, actions = followed_poses(networks.pose_model, recordings), torch.from_numpy(recordings.actions)
    state = world.start([first_states(recordings, 4)[3]], decisions=3)
    made = slice(begin + 1, begin + seen)
    state = state.extended(latents.all[made][None], poses[made][None], torch.tensor([True]))
    new = slice(begin + seen, begin + seen + 8)
    told = EvacWorld(networks, config).conditions(state, actions[new][None])
    given: dict[str, Any] = {}

    def seen_by_the_loss(unet: object, *tensors: Tensor, **named: Any) -> torch.Tensor:
        names = ("history", "new", "maps", "rays", "image", "actions")
        given.update(zip(names, tensors, strict=True), **named)
        with torch.enable_grad():
            return networks.unet.out[2].bias.sum()

    monkeypatch.setattr(evac, "chunk_loss", seen_by_the_loss)
    cut = evac.windows(recordings, latents, poses, evac_world.encode_maps(poses), config)
    number = [rows[-8] for rows in cut.rows.tolist()].index(begin + seen)
    alone = replace(cut, rows=cut.rows[number : number + 1])
    pictures = BatchSource(recordings.frames, torch.device("cpu"))
    evac.fit_unet(networks, config, alone, pictures, SCHEDULE)
    close = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(given["history"].transpose(1, 2), told.history, **close)
    channels = condition_channels(given["history"], given["maps"], given["rays"])
    torch.testing.assert_close(channels, told.channels, **close)
    torch.testing.assert_close(given["image"], told.image, **close)
    torch.testing.assert_close(given["actions"], told.actions, **close)
    torch.testing.assert_close(given["new"][0], latents.all[new])
    assert given["fps"].tolist() == [config.fps]
    assert given["domain"].tolist() == [config.domain]


# ---- actions and poses ---------------------------------------------------------------------------


def test_the_range_of_the_actions_leaves_first_rows_out_and_is_never_empty() -> None:
    rng = np.random.default_rng(0)
    actions = rng.normal(0, 0.3, (30, 7)).astype(np.float32)
    actions[[0, 10, 20]] = 50.0
    actions[:, 4] = 0.25
    made = recordings_of([10, 10, 10], actions=actions)
    found = action_statistics(made)
    carried_out = np.delete(actions, [0, 10, 20], axis=0)
    for number in (0, 1, 2, 3, 5, 6):
        ends = np.quantile(carried_out[:, number].astype(np.float64), [0.01, 0.99])
        assert (found.q01[number], found.q99[number]) == pytest.approx(tuple(ends))
    assert (found.q01[4], found.q99[4]) == pytest.approx((0.2495, 0.2505))


def test_motions_are_measured_between_frames_of_an_episode(recordings: Recordings) -> None:
    found, moved = measured_motions(recordings), []
    for episode in range(len(recordings)):
        poses = recordings.poses[recordings.span(episode)]
        for before, after in pairwise(poses):
            angles = [roll_pitch_yaw(torch.from_numpy(pose[3:7])).numpy() for pose in (before, after)]
            turned = [math.remainder(float(b) - float(a), 2 * math.pi) for a, b in zip(*angles, strict=True)]
            moved.append([*(after[:3] - before[:3]), *turned])
    np.testing.assert_allclose(found.mean[:6], np.mean(moved, axis=0), atol=1e-5)
    np.testing.assert_allclose(found.std[6:], np.std(moved, axis=0, ddof=1), rtol=1e-4)
    assert found.mean[:6] == found.mean[6:]
    assert found.stride == 1


def test_what_never_moves_is_not_blown_up(recordings: Recordings) -> None:
    still = replace(recordings, poses=np.repeat(recordings.poses[:1], len(recordings.poses), axis=0))
    assert measured_motions(still).std == pytest.approx((LEAST_SPREAD,) * 12)


@torch.no_grad()
def test_a_fresh_model_of_poses_leaves_the_hand_where_it_is(recordings: Recordings) -> None:
    torch.manual_seed(0)
    model = PoseModel()
    prepare_poses(model, recordings.poses)
    poses = torch.from_numpy(recordings.poses)
    torch.testing.assert_close(model(torch.randn(46, 7), poses), poses, atol=1e-5, rtol=1e-5)


def hand_that_follows(episodes: int, frames: int) -> Recordings:
    """Recordings in which every action moves the hand by a hundredth of its first three numbers."""
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (episodes, frames, 7)).astype(np.float32)
    poses = np.tile(np.array([0.4, 0, 0.2, 1, 0, 0, 0, -1], np.float32), (episodes, frames, 1))
    poses[:, 1:, :3] += 0.01 * np.cumsum(actions[:, 1:, :3], axis=1)
    arrays = {"actions": actions.reshape(-1, 7), "poses": poses.reshape(-1, 8)}
    return recordings_of([frames] * episodes, **arrays)


@torch.no_grad()
def test_the_loss_of_poses_goes_on_from_predicted_ones() -> None:
    torch.manual_seed(0)
    model, read = PoseModel(), hand_that_follows(2, 9)
    model.abs_action_std.fill_(0.5)
    actions, poses = (torch.from_numpy(part).unflatten(0, (2, 9)) for part in (read.actions, read.poses))
    total = 0.0
    for episode in range(2):
        at = poses[episode, :1]
        for step in range(1, 9):
            at = model(actions[episode, step : step + 1], at)
            error = (at[0] - poses[episode, step]).square()
            total += float(error[:3].sum() / 0.01**2 + error[3:7].sum() / 0.05**2 + error[7] / 0.5**2) / 8
    found = pose_loss(model, actions[:, 1:], poses[:, 1:], poses[:, 0])
    assert float(found) == pytest.approx(total / 16, rel=1e-5)


def test_a_model_of_poses_learns_where_actions_take_the_hand() -> None:
    read = hand_that_follows(20, 25)
    torch.manual_seed(0)
    model = PoseModel()
    prepare_poses(model, read.poses)
    fit_poses(model, read, Schedule(steps=300, batch=1, learning_rate=1.0, seed=0))
    other = hand_that_follows(21, 25)
    poses, actions = (torch.from_numpy(part[-25:]) for part in (other.poses, other.actions))
    with torch.no_grad():
        away = (model.follow(actions[None, 1:9], poses[None, 0])[0] - poses[1:9])[:, :3].norm(dim=1)
    travelled = (poses[1:9] - poses[0])[:, :3].norm(dim=1)
    assert float(away[-1]) < 0.25 * float(travelled[-1])


# ---- the camera ----------------------------------------------------------------------------------


def test_the_tabletops_camera_is_the_simulators() -> None:
    """Points in front of it fall on the same pixels as by MuJoCo's own position, axes and field of view."""
    from asyncrl.simulators.interface import SimStart
    from asyncrl.simulators.tabletop.scene import CAMERA, Table

    table = Table(64, render=False)
    table.reset(SimStart(name="tabletop/seed-0", task=""))
    number = table.model.camera(CAMERA).id
    axes, position = table.data.cam_xmat[number].reshape(3, 3), table.data.cam_xpos[number]
    points = np.random.default_rng(0).uniform((0.2, -0.3, 0), (0.8, 0.3, 0.3), (50, 3))
    right, up, back = ((points - position) @ axes).T
    focal = 32 / math.tan(math.radians(float(table.model.cam_fovy[number])) / 2)
    expected = np.stack([32 + focal * right / -back, 32 - focal * up / -back], axis=1)
    camera = CAMERAS["tabletop"]
    local = (points - camera.position) @ rotation(torch.tensor(camera.quaternion)).numpy()
    found = (camera.focal * local[:, :2] / local[:, 2:] + camera.centre) * (64 / camera.size)
    np.testing.assert_allclose(found, expected, atol=0.05)
    assert not camera.flipped


def test_a_camera_of_ones_own_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "camera.json"
    numbers = {"focal": 100.0, "size": 200, "position": [1, 2.0, 3], "flipped": False}
    file.write_text(json.dumps(numbers))
    found = camera_of("kitchen", str(file))
    assert found == Camera(focal=100.0, size=200, position=(1, 2.0, 3), flipped=False)


@pytest.mark.parametrize(
    "text", ['{"focal": NaN}', '{"focal": "wide"}', '{"zoom": 1}', '{"position": [1, 2]}', "[]", "{"]
)
def test_a_file_that_is_no_camera_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "camera.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"camera\.json does not describe a camera .*focal, centre"):
        camera_of("tabletop", str(file))


def test_an_autoencoder_with_another_scale_is_taken_over_exactly(recordings: Recordings) -> None:
    own, given = fresh("opensora", recordings), fresh("evac", recordings)
    given.autoencoder.size = replace(given.autoencoder.size, scale=0.25)
    video = torch.rand(2, 3, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        for parameter in given.autoencoder.parameters():
            parameter += 0.01
        wanted = given.encode_clips(video) * 0.25
        drawn = given.decode_clips(given.encode_clips(video))
        own.take_autoencoder(given)
        assert torch.allclose(own.encode_clips(video), wanted, atol=1e-5)
        assert torch.allclose(own.decode_clips(wanted), drawn, atol=1e-5)

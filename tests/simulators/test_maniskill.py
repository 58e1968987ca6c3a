"""ManiSkill's tasks as simulators: what is shown, done, paid and refused. Needs the extra and Vulkan."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import AssetError, ConfigError
from asyncrl.simulators.interface import Demonstrator, SimStart, SimulatorSource, random_start
from asyncrl.simulators.maniskill.expert import SceneView
from asyncrl.simulators.maniskill.tasks import TASKS
from asyncrl.worlds.evac.poses import rotation
from support.maniskill import require_maniskill

require_maniskill()
pytestmark = [
    pytest.mark.render,
    pytest.mark.filterwarnings("ignore"),
]  # Of the packages that ManiSkill imports.

THREE = ("pick_cube", "stack_cube", "push_cube")
SIZE = 64
Build = Callable[..., Any]


@pytest.fixture(scope="module")
def build() -> Iterator[Build]:
    """Build simulators, each of them once: what was played in one before shall not matter."""
    made: dict[SimulatorSource, Any] = {}

    def build(name: str, places: int = 1, **settings: object) -> Any:
        texts = tuple(f"{key}={str(value).lower()}" for key, value in settings.items())
        wanted = source(name, places).with_(settings=texts)
        if wanted not in made:
            made[wanted] = wanted.build()
        return made[wanted]

    yield build
    for simulator in made.values():
        simulator.close()


def source(name: str, places: int = 1) -> SimulatorSource:
    return SimulatorSource(name=f"maniskill_{name}", places=places, image_size=SIZE)


def start(simulator: Any, seed: int) -> SimStart:
    return random_start(simulator.spec, seed)


def actions_of(seed: int, steps: int = 8) -> np.ndarray:
    """Mostly down, where there is something to touch."""
    actions = np.random.default_rng(seed).uniform(-1, 1, (steps, 7)).astype(np.float32)
    actions[:, 2] = -np.abs(actions[:, 2])
    return actions


def expert_run(simulator: Any, seed: int, **flaws: Any) -> tuple[bool, list[float]]:
    """Whether the expert fulfils the task, and the rewards until then."""
    simulator.reset([0], [start(simulator, seed)])
    act = simulator.expert(0, Demonstrator(**flaws), np.random.default_rng([seed, 1]))
    rewards = []
    for _ in range(simulator.spec.max_steps):
        done = simulator.step([0], act()[None], draw=False)
        rewards.append(float(done.rewards[0]))
        if done.success[0]:
            return True, rewards
    return False, rewards


@pytest.mark.parametrize(("name", "steps"), [("pick_cube", 30), ("stack_cube", 40), ("push_cube", 20)])
def test_the_expert_fulfils_the_task(name: str, steps: int, build: Build) -> None:
    one = build(name)
    runs = [expert_run(one, seed) for seed in range(8)]
    assert all(success for success, _ in runs)
    assert np.mean([len(rewards) for _, rewards in runs]) < steps
    assert all(rewards[:-1] == [0.0] * (len(rewards) - 1) and rewards[-1] == 1 for _, rewards in runs)


def test_only_a_retrying_expert_reaches_again(build: Build) -> None:
    one = build("stack_cube")
    found = {}
    for retry in (False, True):
        one.reset([0], [start(one, 1)])
        act = one.expert(0, Demonstrator(retry=retry), np.random.default_rng(0))
        scene, dropping = SceneView(one.places[0].env), 0
        for _ in range(one.spec.max_steps):
            if scene.position("cubeA")[2] > 0.05 and not dropping:
                dropping = 1
            chosen = act()
            if 1 <= dropping <= 3:
                chosen, dropping = np.array(one.spec.idle, np.float32), dropping + 1
            done = one.step([0], chosen[None], draw=False)
            if done.success[0]:
                break
        assert dropping == 4, "the cube was lifted, and dropped"
        found[retry] = bool(done.success[0])
    assert found == {False: False, True: True}


def fingers(simulator: Any, command: float) -> float:
    simulator.reset([0], [start(simulator, 0)])
    action = np.array([[0, 0, 0, 0, 0, 0, command]], np.float32)
    for _ in range(4):
        done = simulator.step([0], action, draw=True)
    return float(done.seen.states[0, -2:].sum())


def turned(simulator: Any) -> float:
    """How far the tool turns about the vertical, right-handed, when the sixth number is 1."""
    before = simulator.reset([0], [start(simulator, 0)]).states[0, 3:6]
    idle = np.array([simulator.spec.idle], np.float32)
    idle[0, 5] = 1
    for _ in range(3):
        done = simulator.step([0], idle, draw=True)
    after = done.seen.states[0, 3:6]
    # Pointing down is half a turn about (cos yaw/2, sin yaw/2, 0).
    yaw = [2 * np.arctan2(vector[1], vector[0]) for vector in (before, after)]
    return float((yaw[1] - yaw[0] + np.pi) % (2 * np.pi) - np.pi)


def test_our_convention_is_right_handed_and_minus_one_opens(build: Build) -> None:
    one = build("push_cube")
    assert one.spec.idle == (0, 0, 0, 0, 0, 0, -1)
    assert fingers(one, -1) > 0.07
    assert fingers(one, 1) < 0.01
    assert 0.1 < turned(one) < 0.4


def test_maniskills_convention_is_handed_on(build: Build) -> None:
    one = build("push_cube", convention="maniskill")
    assert one.spec.idle == (0, 0, 0, 0, 0, 0, 1)
    assert fingers(one, 1) > 0.07
    assert fingers(one, -1) < 0.01
    assert -0.4 < turned(one) < -0.1
    assert expert_run(one, 0)[0]  # The expert speaks both.


def test_the_goal_that_maniskill_hides_is_shown(build: Build) -> None:
    one = build("pick_cube")
    for seed in range(3):
        image = one.reset([0], [start(one, seed)]).images[0, 0].astype(int)
        green = (image[..., 1] > 100) & (image[..., 0] < 80) & (image[..., 2] < 80)
        red = (image[..., 0] > 100) & (image[..., 1] < 60) & (image[..., 2] < 60)
        assert green.sum() >= 2, seed
        assert red.sum() >= 2, seed


def test_the_camera_on_the_hand_is_a_second_picture(build: Build) -> None:
    one = build("stack_cube", wrist=True)
    assert one.spec.cameras == ("main", "wrist")
    images = one.reset([0], [start(one, 0)]).images
    assert images.shape == (1, 2, SIZE, SIZE, 3)
    assert (images[0, 0] != images[0, 1]).any(axis=-1).mean() > 0.5


def test_pushing_goes_alike_after_other_episodes(build: Build) -> None:
    """Contacts are solved in an order that PhysX remembers for as long as a scene lives."""
    one = build("push_cube")
    pushed, other = (expert_actions(one, seed) for seed in (1000, 4))

    def states(seed: int, actions: list[np.ndarray]) -> np.ndarray:
        one.reset([0], [start(one, seed)])
        for action in actions:
            one.step([0], action[None], draw=False)
        return one.places[0].env.get_state().numpy()

    first = states(1000, pushed)
    assert not np.array_equal(states(4, other), first)
    np.testing.assert_array_equal(states(1000, pushed), first)


def expert_actions(one: Any, seed: int) -> list[np.ndarray]:
    one.reset([0], [start(one, seed)])
    act = one.expert(0, Demonstrator(noise=(0.1, 0.3)), np.random.default_rng(1))
    actions = []
    for _ in range(20):
        actions.append(act())
        one.step([0], actions[-1][None], draw=False)
    return actions


def test_a_success_ends_nothing(build: Build) -> None:
    one = build("push_cube", horizon=14)
    one.reset([0], [start(one, 0)])
    act = one.expert(0, Demonstrator(), np.random.default_rng(0))
    done = [one.step([0], act()[None], draw=False) for _ in range(14)]
    successes = [bool(step.success[0]) for step in done]
    assert any(successes[:13]), "it is fulfilled before the end"
    assert [bool(step.truncated[0]) for step in done] == [False] * 13 + [True]
    assert not any(step.terminated[0] for step in done)


@pytest.mark.slow
def test_what_cannot_go_on_is_terminated(build: Build) -> None:
    one = build("rotate_in_hand_0")
    one.reset([0], [start(one, 0)])
    wild = np.random.default_rng(0).uniform(-1, 1, (one.spec.max_steps, 1, 16)).astype(np.float32)
    for step in range(one.spec.max_steps):
        # A posture that is held throws further than a new one at every step.
        done = one.step([0], wild[step - step % 10], draw=False)
        if done.terminated[0]:
            break
    assert done.terminated[0], "the object never falls"
    assert not done.truncated[0]
    assert not done.success[0]


def test_the_shaped_reward_sums_up_to_what_was_reached(build: Build) -> None:
    one = build("pick_cube", reward="shaped")
    assert one.spec.reward == "dense"
    success, rewards = expert_run(one, 0)
    assert success
    assert {round(reward, 6) for reward in rewards} == {0.0, 0.1, 1.0}
    assert sum(rewards) == pytest.approx(1.2)


def test_the_dense_reward_is_maniskills_and_rises(build: Build) -> None:
    success, rewards = expert_run(build("push_cube", reward="dense"), 0)
    assert success
    assert all(0 <= reward <= 1 for reward in rewards)
    assert rewards[-1] == 1
    assert rewards[-1] > rewards[len(rewards) // 2] > rewards[0]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("pick_cube", {"objects": "new"}, "objects=new cannot be. Use one of: train, test, all"),
        ("pick_cube", {"wrist": 2}, "wrist=2 cannot be. Use true or false"),
        ("pick_cube", {"wrist": True}, "maniskill_pick_cube has no camera on its hand"),
        ("push_cube", {"reward": "shaped"}, "does not say what is grasped.*maniskill_pick_cube"),
        ("draw_triangle", {"reward": "dense"}, "draw_triangle has none. Use reward=success"),
        ("pick_cube", {"colour": "red"}, "unexpected keyword argument 'colour'"),
    ],
)
def test_what_a_task_does_not_have_is_said(name, settings, words, build) -> None:
    with pytest.raises(ConfigError, match=words):
        build(name, **settings)


def test_what_put_on_plate_lacks_is_one_line(build: Build, tmp_path, monkeypatch) -> None:
    import mani_skill

    monkeypatch.setattr(mani_skill, "ASSET_DIR", tmp_path)
    with pytest.raises(AssetError) as raised:
        build("put_on_plate_25_vision_image")
    said = str(raised.value)
    assert "\n" not in said
    assert f"{tmp_path}/tasks/bridge_v2_real2sim_dataset" in said
    assert f"{tmp_path}/robots/widowx" in said
    assert f"a module that registers {TASKS['put_on_plate_25_vision_image'].environment}" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if not task.published])
def test_every_task_can_be_played_and_begins_as_its_seed_says(name: str, build: Build) -> None:
    one = build(name)
    first = one.reset([0], [start(one, 1)])
    assert first.images.shape == (1, 1, SIZE, SIZE, 3)
    assert first.images.std() > 5, "something is shown"
    assert first.states.shape == (1, one.spec.state_dim)
    wild = np.random.default_rng(0).uniform(-1, 1, (3, 1, one.spec.action_dim)).astype(np.float32)
    done = [one.step([0], action, draw=True) for action in wild]
    assert not any(step.success[0] or step.truncated[0] for step in done)
    assert (done[-1].seen.states != first.states).any()
    other = one.reset([0], [start(one, 2)])
    again = one.reset([0], [start(one, 1)])
    np.testing.assert_array_equal(again.images, first.images)
    np.testing.assert_array_equal(again.states, first.states)
    assert (other.images != first.images).any()


@pytest.mark.parametrize("name", THREE)
def test_the_pose_is_that_of_the_tool_point(name: str, build: Build) -> None:
    two = build(name, places=2)
    two.reset([0, 1], [start(two, 3), start(two, 4)])
    for action in actions_of(3):
        seen = two.step([1, 0], np.stack([action, -action]), draw=True).seen
        for place, pose, state in zip((1, 0), seen.poses, seen.states, strict=True):
            agent = two.places[place].env.agent
            np.testing.assert_allclose(pose[:3], agent.tcp.pose.p[0].numpy(), atol=1e-6)
            expected = agent.tcp.pose.to_transformation_matrix()[0, :3, :3].double()
            torch.testing.assert_close(
                rotation(torch.from_numpy(pose[3:7]).double()), expected, atol=1e-5, rtol=0
            )
            opened = np.clip(state[-2:].sum() / 0.08, 0, 1)
            assert pose[7] == pytest.approx(1 - 2 * opened, abs=1e-5)


def test_a_robot_without_a_gripper_of_its_own_says_no_pose(build: Build) -> None:
    seen = build("push_t").reset([0], [start(build("push_t"), 1)])
    assert (build("push_t").spec.poses, seen.poses) == (False, None)

"""Vector environments as simulators: episodes do not depend on the mode of automatic reset."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import ConfigError, RunError
from asyncrl.simulators.interface import SimStart, SimulatorSource, random_start
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import Observations, Play, rollout
from asyncrl.simulators.vector_env import VectorEnvSimulator
from support.pages import DOT, write_files

gym = pytest.importorskip("gymnasium", reason="gymnasium comes with the extras libero and maniskill")
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper  # noqa: E402

MODES = [mode.name for mode in AutoresetMode]
PICTURE = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
BOX = gym.spaces.Box(-1, 1, (3,), np.float32)
TWO = gym.spaces.Dict(a=PICTURE, b=PICTURE)


IN_PROCESSES = """
from my_lab import dot

def make(places, image_size, mode):
    dot.SyncVectorEnv = dot.gym.vector.AsyncVectorEnv
    return dot.make(places, image_size, mode=mode)
"""


@pytest.fixture
def my_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(write_files("own_environment.md", tmp_path))
    (tmp_path / "my_lab" / "many.py").write_text(IN_PROCESSES)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]


class Counter(gym.Env):
    """Shows its seed and how many steps it made; ends after as many steps as the first action says."""

    def __init__(
        self, observation: Any = PICTURE, actions: Any = BOX, says: str = "", limit: int = 0, log: Any = None
    ) -> None:
        self.observation_space, self.action_space = observation, actions
        self.says, self.limit, self.log = says, limit, log

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.begun, self.steps = seed or 0, 0
        return self._observe(), {"task": f"Count from {self.begun}."} if self.says == "task" else {}

    def step(self, action):
        if self.log is not None:
            self.log.append((self.begun, action.tolist()))
        self.steps += 1
        info = {"success": self.steps == 2} if self.says == "success" else {}
        over = self.steps == self.limit
        return self._observe(), float(action[1]), bool(action[0] > 0.5), over, info

    def _observe(self):
        image = np.zeros((8, 8, 3), np.uint8)
        image[0, 0], image[0, 1] = self.begun, self.steps
        return image if isinstance(self.observation_space, gym.spaces.Box) else {"camera": image}


def vector_env(mode: str = "DISABLED", places: int = 2, **settings: Any) -> Any:
    return SyncVectorEnv([lambda: Counter(**settings)] * places, autoreset_mode=AutoresetMode[mode])


def simulator(mode: str = "DISABLED", places: int = 2, **settings: Any) -> VectorEnvSimulator:
    options = {name: settings.pop(name) for name in ("task_key", "success_key", "idle") if name in settings}
    env = vector_env(mode, places, **settings)
    task = "" if settings.get("says") == "task" else "Count."
    return VectorEnvSimulator(env, task=task, max_steps=5, name="counter", **options)


def start(seed: int) -> SimStart:
    return SimStart(name=f"counter/seed-{seed}", task="", seed=seed)


def action(stop: float = 0.0, reward: float = 0.0) -> list[float]:
    return [stop, reward, 0.0]


def steps(made: VectorEnvSimulator, places: list[int], *actions: list[float]) -> Any:
    return made.step(places, np.array(actions, np.float32), draw=True)


def shown(seen: Any) -> list[tuple[int, int]]:
    """Seed and step of what is shown in each place."""
    return [(int(image[0, 0, 0, 0]), int(image[0, 0, 1, 0])) for image in seen.images]


def actions_of(seed: int) -> np.ndarray:
    """Some stay in the picture, others leave it."""
    rng = np.random.default_rng(seed)
    return rng.uniform(-1, 1, (24, 2)).astype(np.float32) * (1.0 if seed % 2 else 0.4)


def play_alone(seed: int) -> list[tuple[Any, ...]]:
    """Play an episode of the page's example without any vector environment: what is true of it."""
    from my_lab.dot import Dot

    env = Dot(32)
    observation, _ = env.reset(seed=seed)
    rows: list[tuple[Any, ...]] = [(observation["camera"], observation["position"], 0.0, False, False, False)]
    for number, chosen in enumerate(actions_of(seed), start=1):
        observation, reward, terminated, _, info = env.step(chosen)
        ends = (terminated, number == 24 and not terminated)
        rows.append((observation["camera"], observation["position"], reward, info["success"], *ends))
        if any(ends):
            break
    return rows


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("mode", "name", "workers"),
    [*((mode, name, 0) for mode in MODES for name in (DOT, "my_lab.many:make")), ("SAME_STEP", DOT, 2)],
)
def test_every_mode_gives_the_episodes_of_the_environment_alone(mode, name, workers, my_lab) -> None:
    def act(shown: Observations) -> list[np.ndarray]:
        made = zip(shown.plays, shown.decisions, strict=True)
        return [actions_of(play.start.seed)[8 * done : 8 * done + 8] for play, done in made]

    seeds = [4, 1, 0, 3, 12, 5, 8, 7]
    with SimulatorPool(SimulatorSource(name=name, settings=(f"mode={mode}",), places=3), workers) as pool:
        spec = pool.spec
        assert (spec.places, spec.lockstep, spec.image_size) == (3, True, 32)
        assert (spec.action_dim, spec.state_dim, spec.reward) == (2, 2, "dense")
        plays = [Play(start=random_start(spec, seed)) for seed in seeds]
        played = {e.seed: e for e in rollout(pool, act, plays, keep_frames=True, extra_decisions=99)}
    for seed in seeds:
        frames, states, rewards, success, terminated, truncated = zip(*play_alone(seed), strict=True)
        np.testing.assert_array_equal(played[seed].frames, frames)
        np.testing.assert_array_equal(played[seed].states, states)
        np.testing.assert_allclose(played[seed].rewards, rewards, atol=1e-6)
        assert played[seed].success.tolist() == list(success)
        assert (played[seed].terminated, played[seed].truncated) == (terminated[-1], truncated[-1])
    ends = {(episode.terminated, episode.truncated) for episode in played.values()}
    assert ends == {(True, False), (False, True)}, "some leave the picture, some are truncated"


@pytest.mark.parametrize("mode", MODES)
def test_an_ended_place_shows_its_end_and_plays_nothing_until_it_is_reset(mode: str) -> None:
    made = simulator(mode)
    made.reset([0, 1], [start(7), start(9)])
    ended = steps(made, [0, 1], action(stop=1), action())
    assert ended.terminated.tolist() == [True, False]
    assert shown(ended.seen) == [(7, 1), (9, 1)]
    with pytest.raises(ValueError, match=r"places \[0\] have no episode"):
        steps(made, [0, 1], action(), action())
    steps(made, [1], action())
    assert shown(made.look([0, 1])) == [(7, 1), (9, 2)]
    assert shown(made.reset([0], [start(3)])) == [(3, 0)]
    assert shown(steps(made, [0, 1], action(), action()).seen) == [(3, 1), (9, 3)]


@pytest.mark.parametrize("mode", MODES)
def test_places_without_an_episode_get_the_idle_action(mode: str) -> None:
    log: list[Any] = []
    made = simulator(mode, idle=(-1, 0, 0.5), log=log)
    made.reset([1], [start(9)])
    steps(made, [1], action(reward=0.25))
    assert log == [(0, [-1, 0, 0.5]), (9, [0, 0.25, 0])]


def test_an_episode_that_is_left_out_of_a_step_is_over() -> None:
    made = simulator()
    made.reset([0, 1], [start(7), start(9)])
    steps(made, [1], action())
    with pytest.raises(ValueError, match=r"places \[0\] have no episode"):
        steps(made, [0, 1], action(), action())


@pytest.mark.parametrize("mode", MODES)
def test_truncation_is_told_from_termination_and_leaves_the_other_place_alone(mode: str) -> None:
    made = simulator(mode, limit=3)
    made.reset([0, 1], [start(1), start(2)])
    for _ in range(2):
        assert not steps(made, [0, 1], action(), action()).truncated.any()
    last = steps(made, [0, 1], action(), action(stop=1))
    assert last.truncated.tolist() == [True, False]
    assert last.terminated.tolist() == [False, True]
    made = simulator(mode)  # Of 5 steps at most, whatever its own limit is.
    made.reset([0], [start(1)])
    for _ in range(3):
        steps(made, [0], action())
    made.reset([1], [start(2)])
    steps(made, [0, 1], action(), action())
    last = steps(made, [0, 1], action(), action())
    assert (last.truncated.tolist(), last.terminated.any()) == ([True, False], False)
    assert shown(steps(made, [1], action()).seen) == [(2, 3)]


@pytest.mark.parametrize("mode", MODES)
def test_success_is_what_info_says_or_else_an_end_with_a_positive_reward(mode: str) -> None:
    made = simulator(mode, says="success")
    made.reset([0, 1], [start(1), start(2)])
    assert steps(made, [0, 1], action(), action(stop=1, reward=1)).success.tolist() == [False, False]
    assert steps(made, [0], action(stop=1)).success.tolist() == [True]
    made = simulator(mode, places=3)
    made.reset([0, 1, 2], [start(1), start(2), start(3)])
    last = steps(made, [0, 1, 2], action(stop=1, reward=1), action(stop=1), action(reward=1))
    assert last.success.tolist() == [True, False, False]
    assert last.rewards.tolist() == [1, 0, 1]


def test_every_reset_may_say_its_own_instruction() -> None:
    made = simulator(says="task")
    assert made.spec.tasks == ()
    assert made.reset([1, 0], [start(4), start(5)]).tasks == ("count from 4", "count from 5")
    silent = VectorEnvSimulator(vector_env(), task_key="order", max_steps=5)
    with pytest.raises(
        ConfigError, match=r"info\['order'\] of place 0 .* task='push it' .* None is no text like"
    ):
        silent.reset([0], [start(0)])


def test_a_registered_environment_says_its_own_name_and_length() -> None:
    gym.register("lab/Counter-v3", entry_point=lambda: Counter(says="task"), max_episode_steps=4)
    try:
        for env in (
            gym.make_vec("lab/Counter-v3", num_envs=2, vectorization_mode="sync"),
            SyncVectorEnv([lambda: gym.make("lab/Counter-v3", disable_env_checker=True)]),
        ):
            spec = VectorEnvSimulator(env).spec
            assert (spec.name, spec.max_steps) == ("lab_Counter-v3", 4)
    finally:
        del gym.registry["lab/Counter-v3"]


class IgnoresMask(VectorWrapper):
    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=[value or 0 for value in seed])


def test_an_environment_that_resets_all_places_at_once_is_refused() -> None:
    made = VectorEnvSimulator(IgnoresMask(vector_env()), task="count", max_steps=9)
    made.reset([0], [start(4)])
    steps(made, [0], action())
    with pytest.raises(RunError, match=r"reset the places \[1\], but \[0\] show something else"):
        made.reset([1], [start(5)])


def box(*shape: int, dtype: Any = np.uint8) -> Any:
    return gym.spaces.Box(0, 255, shape, dtype)


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({"observation": gym.spaces.Dict(x=box(4, dtype=np.float32))}, {}, r"no square.*x \(float32\[4\]\)"),
        ({"observation": box(3, 8, 8)}, {}, r"no square.*colours last.*one array \(uint8\[3, 8, 8\]\)"),
        ({"observation": box(8, 6, 3)}, {}, r"no square picture.*ResizeObservation"),
        ({"observation": TWO}, {}, r"shows 2 square pictures,.*a \(uint8\[8, 8, 3\]\), b.*image_key="),
        ({"observation": TWO}, {"image_key": "c"}, r"no square picture called c,.*a \(uint8\[8, 8, 3\]"),
        ({}, {"state_key": "joints"}, "state_key is 'joints', which is no box of numbers"),
        ({"actions": gym.spaces.Discrete(4)}, {}, r"actions are Discrete\(4\)"),
        ({"actions": gym.spaces.Box(-np.inf, np.inf, (2,))}, {}, "within finite bounds"),
        ({}, {"idle": (0.0, 0.0)}, "an action is 3 numbers between"),
        ({}, {"idle": (0.0, 0.0, 7.0)}, "an action is 3 numbers between"),
        ({}, {"max_steps": 0}, r"does not say after how many steps.*max_steps=200"),
    ],
)
def test_what_does_not_fit_is_said(settings: Any, options: Any, words: str) -> None:
    env = vector_env(**settings)
    with pytest.raises(ConfigError, match=words):
        VectorEnvSimulator(env, **{"task": "count", "max_steps": 9, **options})


def test_a_picture_among_others_is_found_by_its_path() -> None:
    space = gym.spaces.Dict(sensors=gym.spaces.Dict(left=PICTURE, depth=box(8, 8, 1)), joints=box(4))

    class Nested(Counter):
        def _observe(self):
            return {
                **space.sample(),
                "sensors": {"left": np.full((8, 8, 3), 5, np.uint8), "depth": box(8, 8, 1).sample()},
            }

    env = SyncVectorEnv([lambda: Nested(space)])
    made = VectorEnvSimulator(env, task="count", max_steps=9, state_key="joints")
    assert (made.spec.state_dim, made.spec.image_size) == (4, 8)
    assert (made.reset([0], [start(0)]).images == 5).all()


def test_an_environment_must_say_its_mode() -> None:
    env = vector_env()
    env.metadata = {}
    with pytest.raises(ConfigError, match=r"metadata\['autoreset_mode'\].*NEXT_STEP"):
        VectorEnvSimulator(env, task="count", max_steps=9)

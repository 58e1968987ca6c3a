"""What every simulator keeps to, whatever it simulates: the same tests for all that can be built here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.simulators.interface import (
    SimStart,
    Simulator,
    SimulatorSource,
    SimulatorSpec,
    random_start,
    stored_start,
)
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import Act, Observations, Play, rollout
from support.pages import DOT, write_files
from support.simulated import COUNTING

STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """A simulator under test."""

    source: SimulatorSource
    slow: bool = False

    def __str__(self) -> str:
        return "-".join([self.source.name.rpartition(":")[2], *self.source.settings])


def case(name: str, *settings: str, slow: bool = False, horizon: int = 0) -> Case:
    return Case(source=SimulatorSource(name=name, settings=settings, horizon=horizon), slow=slow)


CASES = [
    case(COUNTING),
    case(COUNTING, "trials=3"),
    case("tabletop"),
    *(case(DOT, f"mode={mode}") for mode in ("DISABLED", "NEXT_STEP", "SAME_STEP")),
    case("libero_spatial", "wrist=false", slow=True),
    *(case(f"libero_{suite}", "wrist=false", slow=True) for suite in ("object", "goal", "10")),
    *(case(f"maniskill_{task}", slow=True) for task in ("pick_cube", "push_cube", "stack_cube")),
]


SLOW = (pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore"))
"""Of simulators of other projects, whose libraries warn of themselves."""
PARAMS = [pytest.param(one, id=str(one), marks=SLOW if one.slow else ()) for one in CASES]


@pytest.fixture(scope="module", params=PARAMS)
def tested(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """A simulator that can be built here; another is skipped by what it lacks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(write_files("own_environment.md", tmp_path_factory.mktemp("lab")))
        try:
            request.param.source.build().close()
        except ConfigError as error:
            pytest.skip(f"{request.param}: {error}")
        yield request.param


def starts_of(spec: SimulatorSpec) -> list[SimStart]:
    """Two starts, one of them stored where there are such."""
    stored = [stored_start(spec, 0, 1)] if spec.trials else []
    return [*stored, random_start(spec, 1000 * max(1, len(spec.tasks))), random_start(spec, 4)][:2]


def actions_of(spec: SimulatorSpec, seed: int = 0) -> np.ndarray:
    low, high = np.array(spec.action_low), np.array(spec.action_high)
    low, high = np.maximum(low, -1), np.minimum(high, 1)
    return np.random.default_rng(seed).uniform(low, high, (STEPS, len(low))).astype(np.float32)


def play(simulator: Simulator, start: SimStart, place: int = 0) -> tuple[list[np.ndarray], list[bool]]:
    """Pictures and successes of one start in one place; the others do nothing, or what lockstep asks."""
    spec = simulator.spec
    every = list(range(spec.places)) if spec.lockstep else [place]
    simulator.reset(every, [start if other == place else random_start(spec, 77 + other) for other in every])
    row = every.index(place)
    pictures, success = [simulator.look([place]).images[0]], []
    for action in actions_of(spec):
        stepped = simulator.step(every, np.repeat(action[None], len(every), axis=0), draw=True)
        assert stepped.seen is not None
        pictures.append(stepped.seen.images[row])
        success.append(bool(stepped.success[row]))
    return pictures, success


def same(one: tuple[list[np.ndarray], list[bool]], other: tuple[list[np.ndarray], list[bool]]) -> bool:
    return one[1] == other[1] and all(map(np.array_equal, one[0], other[0]))


def test_a_start_and_actions_decide_everything(tested: Case) -> None:
    fresh, used = tested.source.build(), tested.source.build()
    first, second = starts_of(fresh.spec)
    alone = play(fresh, first)
    other = play(used, second)
    again = play(used, first)
    assert same(alone, again), "after another episode"
    assert not same(alone, other)
    assert same(alone, play(used, first)), "after itself"
    for simulator in (fresh, used):
        simulator.close()
        simulator.close()


def test_another_place_shows_the_same(tested: Case) -> None:
    if tested.source.usual_places() == 1:
        pytest.skip("it has one place")
    alone, beside = tested.source.build(), tested.source.with_(places=3).build()
    start = starts_of(alone.spec)[0]
    assert same(play(alone, start), play(beside, start, place=2))


def test_what_is_not_drawn_changes_nothing(tested: Case) -> None:
    simulator = tested.source.build()
    start = starts_of(simulator.spec)[0]
    drawn, _ = play(simulator, start)
    simulator.reset([0], [start])
    for number, action in enumerate(actions_of(simulator.spec), 1):
        last = number == STEPS
        stepped = simulator.step([0], action[None], draw=last)
        assert (stepped.seen is not None) == last
    assert stepped.seen is not None
    np.testing.assert_array_equal(stepped.seen.images[0], drawn[-1])
    np.testing.assert_array_equal(simulator.look([0]).images[0], drawn[-1])


def test_time_runs_out_once_and_nothing_begins_by_itself(tested: Case) -> None:
    short = tested.source.with_(horizon=STEPS - 1)
    with SimulatorPool(short, workers=0) as pool:
        spec = pool.spec
        assert spec.max_steps == STEPS - 1
        pool.reset(0, starts_of(spec)[0])
        pool.ready(60)
        pool.step(0, np.repeat(np.array([spec.idle], np.float32), 8, axis=0), past_success=True)
        (answer,) = pool.ready(60)
        assert (answer.steps, answer.truncated, answer.terminated) == (STEPS - 1, True, False)
    simulator = tested.source.with_(horizon=1).build()
    simulator.reset([0], starts_of(simulator.spec)[:1])
    assert simulator.step([0], actions_of(simulator.spec)[:1], draw=False).truncated.tolist() == [True]
    with pytest.raises(ValueError, match="no episode under way"):
        simulator.step([0], actions_of(simulator.spec)[:1], draw=False)


def test_actions_are_clipped_and_ragged_ones_refused(tested: Case) -> None:
    simulator = tested.source.build()
    start, high = starts_of(simulator.spec)[0], np.array([simulator.spec.action_high], np.float32)
    seen = []
    for scale in (1, 9):
        simulator.reset([0], [start])
        seen.append(simulator.step([0], scale * high, draw=True).seen)
    for one, other in zip(*seen, strict=True):
        np.testing.assert_array_equal(one, other)
    for wrong in (high[:, 1:], np.full_like(high, np.nan)):
        with pytest.raises(ValueError, match=r"actions must be finite \[1, "):
            simulator.step([0], wrong, draw=False)


def test_where_the_hand_is_follows_from_start_and_actions(tested: Case) -> None:
    simulator = tested.source.build()
    start = starts_of(simulator.spec)[0]

    def poses() -> list[np.ndarray | None]:
        found = [simulator.reset([0], [start]).poses]
        for action in actions_of(simulator.spec):
            seen = simulator.step([0], action[None], draw=True).seen
            assert seen is not None
            found.append(seen.poses)
        return [*found, simulator.look([0]).poses]

    first, again = poses(), poses()
    simulator.close()
    if not simulator.spec.poses:
        assert first == [None] * len(first)
        return
    one, other = (
        np.concatenate([p for p in first if p is not None]),
        np.stack([p[0] for p in again if p is not None]),
    )
    assert one.shape == (STEPS + 2, 8)
    assert one.dtype == np.float32
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(one[-1], one[-2])
    np.testing.assert_allclose(np.linalg.norm(one[:, 3:7], axis=1), 1, atol=1e-4)
    assert np.abs(np.diff(one[:, 3:7], axis=0)).max() < 0.5, "the quaternion's sign does not jump"
    assert 1e-4 < np.abs(np.diff(one[:-1, :3], axis=0)).max() < 0.3, "metres"
    assert one[0, 7] < -0.8, "an episode begins with an open gripper"
    assert np.abs(one[:, 7]).max() <= 1


def idle(spec: SimulatorSpec) -> Act:
    def act(shown: Observations) -> np.ndarray:
        return np.tile(np.array(spec.idle, np.float32), (len(shown.tasks), 8, 1))

    return act


@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_neither_workers_nor_order_change_an_episode(tested: Case) -> None:
    def played(workers: int, order: Sequence[int]) -> list[tuple[str, str, bool, int, bytes]]:
        with SimulatorPool(tested.source.with_(horizon=11), workers=workers) as pool:
            spec = pool.spec
            starts = [*starts_of(spec), random_start(spec, 2 * max(1, len(spec.tasks)))]
            plays = [Play(start=starts[i]) for i in order]
            episodes = list(rollout(pool, idle(spec), plays, keep_frames=True))
        return sorted(
            (
                e.start.name,
                e.task,
                e.solved,
                e.steps,
                e.frames.tobytes() + e.states.tobytes() + e.poses.tobytes(),
            )
            for e in episodes
        )

    assert played(0, [0, 1, 2]) == played(1, [0, 1, 2]) == played(2, [2, 0, 1])

"""Record a scripted expert of adjustable quality, or a policy, in the simulator."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.fitting.recordings import write_part
from asyncrl.records import CHUNK, DUMMY_ACTION
from asyncrl.simulators.rollout import Act, Pool, SimulatedEpisode, rollout

EPISODES_PER_PART = 32


@dataclass(frozen=True, kw_only=True)
class Demonstrator:
    """How good the scripted expert is. All draws are made once per episode, from the episode's seed."""

    noise: tuple[float, float] = (0.0, 0.0)
    """Standard deviation of the noise on each action is drawn between these, in units of the action range."""
    offset: tuple[float, float] = (0.0, 0.0)
    """Constant error of the grasp position in metres (x, y): a badly calibrated demonstrator."""
    retry: bool = False
    """Whether it reaches again after a missed grasp."""
    spread: float = 0.0
    """Standard deviation of a further grasp error in metres, drawn per episode."""
    place_offset: tuple[float, float] = (0.0, 0.0)
    """Constant error of where the cube is set down, in metres (x, y)."""
    place_spread: float = 0.0
    """Standard deviation of a further error of the same in metres, drawn per episode."""
    extra_decisions: int = 1
    """Decisions recorded after the task is solved."""


def record_expert(
    folder: Path,
    demonstrator: Demonstrator,
    *,
    episodes: int,
    first_seed: int,
    max_decisions: int,
    workers: int,
    image_size: int,
) -> int:
    """Record the expert on ``episodes`` seeds from ``first_seed`` on and return the episodes written.

    Raises:
        ConfigError: the folder already holds recordings.
    """
    from tqdm import tqdm

    _must_be_new(folder)
    jobs = [
        (str(folder / f"part-{number:05d}.h5"), json.dumps(asdict(demonstrator)), seed,
         min(EPISODES_PER_PART, first_seed + episodes - seed), max_decisions, image_size)
        for number, seed in enumerate(range(first_seed, first_seed + episodes, EPISODES_PER_PART))
    ]  # fmt: skip
    written = 0
    with (
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
        tqdm(total=episodes, desc=f"record {folder.name}", unit="episode", mininterval=2.0) as bar,
    ):
        for done in as_completed([pool.submit(_record_part, *job) for job in jobs]):
            written += done.result()
            bar.update(done.result())
    return written


def record_policy(
    folder: Path,
    pool: Pool,
    act: Act,
    *,
    episodes: int,
    first_seed: int,
    max_decisions: int,
    about: dict[str, object],
) -> int:
    """Record a policy playing ``episodes`` seeds from ``first_seed`` on; an episode ends with success."""
    from tqdm import tqdm

    _must_be_new(folder)
    seeds = list(range(first_seed, first_seed + episodes))
    finished: list[SimulatedEpisode] = []
    bar = tqdm(
        rollout(pool, act, seeds, max_decisions=max_decisions), total=episodes, desc=f"record {folder.name}"
    )
    for episode in bar:
        finished.append(episode)
    for number, start in enumerate(range(0, len(finished), EPISODES_PER_PART)):
        write_part(folder / f"part-{number:05d}.h5", finished[start : start + EPISODES_PER_PART], about)
    return len(finished)


def _must_be_new(folder: Path) -> None:
    if any(folder.glob("part-*.h5")):
        raise ConfigError(
            f"--out {folder} already holds recordings; they are not overwritten. Choose another folder."
        )


def _record_part(
    path: str, demonstrator: str, seed: int, episodes: int, max_decisions: int, image_size: int
) -> int:
    """Run in a worker process: record consecutive seeds into one file."""
    from asyncrl.simulators.rendering import require_backend

    require_backend()
    from asyncrl.simulators.tabletop.simulator import Tabletop

    settings = Demonstrator(**json.loads(demonstrator))
    simulator = Tabletop(image_size=image_size)
    play = (_demonstrate(simulator, settings, s, max_decisions) for s in range(seed, seed + episodes))
    return write_part(Path(path), play, {"demonstrator": json.loads(demonstrator)})


def _demonstrate(
    simulator: object, settings: Demonstrator, seed: int, max_decisions: int
) -> SimulatedEpisode:
    """Play one episode with the expert, to a whole number of decisions."""
    from asyncrl.simulators.tabletop.expert import Expert
    from asyncrl.simulators.tabletop.simulator import Tabletop

    assert isinstance(simulator, Tabletop)
    rng = np.random.default_rng([seed, 1])
    expert = Expert(
        noise=float(rng.uniform(*settings.noise)),
        grasp_offset=(settings.offset[0], settings.offset[1]),
        grasp_error=settings.spread,
        place_offset=(settings.place_offset[0], settings.place_offset[1]),
        place_error=settings.place_spread,
        retry=settings.retry,
        rng=rng,
    )
    seen = simulator.reset(seed)
    frames, actions, success = [seen.image], [DUMMY_ACTION], [False]
    decisions_left = max_decisions
    while decisions_left:
        for _ in range(CHUNK):
            action = expert.act(simulator).astype(np.float32)
            seen = simulator.step(action)
            frames.append(seen.image)
            actions.append(action)
            success.append(seen.success)
        decisions_left -= 1
        if any(success):
            decisions_left = min(decisions_left, settings.extra_decisions - _decisions_since(success))
    return SimulatedEpisode(
        seed=seed,
        task=seen.task,
        frames=np.stack(frames),
        actions=np.stack(actions),
        success=np.array(success),
    )


def _decisions_since(success: list[bool]) -> int:
    """Count the whole decisions recorded after the one in which the task was first solved."""
    return (len(success) - 2) // CHUNK - (success.index(True) - 1) // CHUNK

"""Record a scripted expert of adjustable quality, or a policy, in the simulator."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncrl import registry
from asyncrl.errors import ConfigError
from asyncrl.fitting.recordings import write_part
from asyncrl.observability.signals import die_with_parent
from asyncrl.records import CHUNK, ActionSpec
from asyncrl.simulators.interface import Demonstrator, HasExpert, Simulator
from asyncrl.simulators.pool_worker import Environments
from asyncrl.simulators.rollout import Act, Pool, SimulatedEpisode, first_action, rollout

EPISODES_PER_PART = 32


def record_expert(
    folder: Path,
    demonstrator: Demonstrator,
    *,
    episodes: int,
    first_seed: int,
    max_decisions: int,
    workers: int,
    image_size: int,
    simulator: str = "tabletop",
    settings: Sequence[str] = (),
) -> int:
    """Record the expert of a simulator on ``episodes`` seeds from ``first_seed`` on.

    Args:
        folder: Where the recordings go.
        demonstrator: How good the expert is.
        episodes: How many, each of its own seed.
        first_seed: Of the simulator.
        max_decisions: Longest episode, in decisions of 8 steps.
        workers: Processes.
        image_size: Side of the pictures in pixels.
        simulator: Short name, or 'package.module:Class'.
        settings: Keywords of its class, as 'key=value' texts.

    Returns:
        The episodes written.

    Raises:
        ConfigError: the folder already holds recordings, or the simulator has no expert.
    """
    from tqdm import tqdm

    _must_be_new(folder)
    if not hasattr(registry.resolve("simulator", simulator), "expert"):
        raise ConfigError(
            f"--simulator {simulator} has no expert to record. Record a policy in it with --policy, or add "
            "the method `expert`: docs/extending.md."
        )
    environments = Environments(
        simulator=simulator,
        settings=tuple(settings),
        count=1,
        image_size=image_size,
        action_spec=ActionSpec(),
    )
    jobs = [
        (str(folder / f"part-{number:05d}.h5"), environments, demonstrator, seed,
         min(EPISODES_PER_PART, first_seed + episodes - seed), max_decisions)
        for number, seed in enumerate(range(first_seed, first_seed + episodes, EPISODES_PER_PART))
    ]  # fmt: skip
    written = 0
    with (
        ProcessPoolExecutor(
            workers, get_context("spawn"), initializer=die_with_parent, initargs=(os.getpid(),)
        ) as pool,
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
    if not folder.is_dir() and (folder.exists() or folder.is_symlink()):
        raise ConfigError(f"--out {folder} is a file, where a folder is expected. Choose another name.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {folder} cannot be made ({error.strerror}). Choose another folder."
        ) from None
    if any(folder.glob("part-*.h5")):
        raise ConfigError(
            f"--out {folder} already holds recordings; they are not overwritten. Choose another folder."
        )


def _record_part(
    path: str,
    environments: Environments,
    demonstrator: Demonstrator,
    seed: int,
    episodes: int,
    max_decisions: int,
) -> int:
    """Run in a worker process: record consecutive seeds into one file."""
    simulator = environments.build()
    play = (_demonstrate(simulator, demonstrator, s, max_decisions) for s in range(seed, seed + episodes))
    return write_part(Path(path), play, {"demonstrator": asdict(demonstrator)})


def _demonstrate(
    simulator: Simulator, settings: Demonstrator, seed: int, max_decisions: int
) -> SimulatedEpisode:
    """Play one episode with the expert, to a whole number of decisions."""
    assert isinstance(simulator, HasExpert)
    seen = simulator.reset(seed)
    choose = simulator.expert(settings, np.random.default_rng([seed, 1]))
    frames, actions, success = [seen.image], list[NDArray[np.float32]](), [False]
    decisions_left = max_decisions
    while decisions_left:
        for _ in range(CHUNK):
            action = choose().astype(np.float32)
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
        actions=np.stack([first_action(len(actions[0])), *actions]),
        success=np.array(success),
    )


def _decisions_since(success: list[bool]) -> int:
    """Count the whole decisions recorded after the one in which the task was first solved."""
    return (len(success) - 2) // CHUNK - (success.index(True) - 1) // CHUNK

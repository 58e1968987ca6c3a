"""Choose the episodes of an evaluation: which nothing that is trained on ever contains."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Final

from asyncrl.errors import ConfigError
from asyncrl.simulators.interface import SimulatorSpec, random_start, stored_start
from asyncrl.simulators.rollout import Play

HELD_OUT: Final = 1_000_000
"""Seeds from here on are never used for recordings, start states or training."""
SEEDS_PER_EVALUATION: Final = 100_000
EPISODES: Final = 256
"""Of an evaluation at seeds, where nobody says another number."""


def evaluation_seeds(seed: int, episodes: int) -> list[int]:
    """Return the simulator seeds of evaluation number `seed`, which nothing else ever uses.

    Raises:
        ConfigError: more episodes were asked for than one evaluation owns, or the seed is negative.
    """
    if seed < 0 or not 0 < episodes <= SEEDS_PER_EVALUATION:
        raise ConfigError(
            f"--seed {seed} with --episodes {episodes}: the seed must be 0 or more and the episodes 1 to "
            f"{SEEDS_PER_EVALUATION}. Use --seed 0 --episodes 256."
        )
    return [HELD_OUT + seed * SEEDS_PER_EVALUATION + i for i in range(episodes)]


def evaluation_plays(
    spec: SimulatorSpec, *, episodes: int = 0, seed: int = 0, tasks: Sequence[str], trials: int, repeats: int
) -> list[Play]:
    """List every episode of an evaluation once: of stored starts trial by trial, else by seed.

    Args:
        episodes: Where every seed is a start: how many; 0: 256.
        trials: Of each task; 0: all that are stored.

    Raises:
        ConfigError: The simulator does not have what was asked for.
    """
    if not spec.trials:
        if tasks or trials:
            raise ConfigError(
                f"--tasks and --trials choose stored starts, but in {spec.name} every seed is a start. Leave "
                "them out; --episodes and --seed say which starts are played."
            )
        starts = [random_start(spec, one) for one in evaluation_seeds(seed, episodes or EPISODES)]
    else:
        if episodes or seed:
            raise ConfigError(
                f"--episodes and --seed choose among seeds, but the starts of {spec.name} are stored. Leave "
                "them out; --tasks and --trials say which starts are played."
            )
        if trials > spec.trials:
            raise ConfigError(
                f"--trials {trials}: {spec.name} has {spec.trials} stored starts per task. Use that or less."
            )
        chosen = chosen_tasks(spec, tasks)
        starts = [
            stored_start(spec, task, trial) for trial in range(trials or spec.trials) for task in chosen
        ]
    return [Play(start=start, repeat=repeat) for repeat in range(repeats) for start in starts]


def chosen_tasks(spec: SimulatorSpec, tasks: Sequence[str]) -> list[int]:
    """Return the numbers of tasks, each once, in the order in which they are named; none named: all.

    Raises:
        ConfigError: There is no such task.
    """
    return list(dict.fromkeys(task_id(spec, task) for task in tasks)) or list(range(len(spec.tasks)))


def task_id(spec: SimulatorSpec, text: str) -> int:
    """Return the number of a task that is named by it or by its instruction."""
    if text.isdecimal() and int(text) < len(spec.tasks):
        return int(text)
    if text in spec.tasks:
        return spec.tasks.index(text)
    near = difflib.get_close_matches(text, spec.tasks, n=1, cutoff=0.0)
    raise ConfigError(
        f"--tasks {text!r}: {spec.name} has no such task. Its tasks are 0..{len(spec.tasks) - 1}; the "
        f"nearest is {spec.tasks.index(near[0])}, {near[0]!r}."
    )

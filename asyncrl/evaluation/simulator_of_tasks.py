"""Find the built-in simulator whose tasks an instruction belongs to. Builds none, and needs no extra."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from asyncrl.errors import ConfigError
from asyncrl.rewards.libero_tasks import SUITES
from asyncrl.simulators.tabletop.scene import TASKS

_KNOWN = {"tabletop": frozenset(TASKS), **{suite: frozenset(tasks) for suite, tasks in SUITES.items()}}


def simulator_of_tasks(tasks: Collection[str]) -> str:
    """Return the built-in simulator that has all `tasks`; empty: there is none, or no task."""
    wanted = {plain(task) for task in tasks}
    return next((name for name, known in _KNOWN.items() if wanted and wanted <= known), "")


def refuse_foreign_tasks(tasks: Collection[str], known: Sequence[str], simulator: str, remedy: str) -> None:
    """Refuse a simulator that does not have the tasks a policy was trained on.

    Raises:
        ConfigError: It lacks one. Names it, what is nearest, and the simulator that has all.
    """
    foreign = sorted({plain(task) for task in tasks} - {plain(task) for task in known}) if known else []
    if not foreign:
        return
    near = difflib.get_close_matches(foreign[0], known, n=1, cutoff=0.0)[0]
    right = simulator_of_tasks(tasks)
    raise ConfigError(
        f"the run's policy was trained on {foreign[0]!r}, which is no task of --simulator {simulator} (the "
        f"nearest of its {len(known)} is {near!r}). {f'Use --simulator {right}.' if right else remedy}"
    )


def plain(task: str) -> str:
    """Return an instruction as simulators write it.

    >>> plain("Open the drawer. ")
    'open the drawer'
    """
    return task.strip().rstrip(".").lower()

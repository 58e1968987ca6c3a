"""RLinf's shaped reward of ManiSkill's pick-and-place tasks."""

from __future__ import annotations

from typing import Final

import numpy as np

GRASPED: Final = 0.1
HELD: Final = 0.1
HELD_STEPS: Final = 5
"""Steps in a row after which an object counts as held."""
SOLVED: Final = 1.0


class GraspReward:
    """Pays for what was reached: 0.1 for a grasp, 0.1 for holding on, 1 while the task is fulfilled.

    Grasp and hold count once they were seen, to the end of the episode; the success counts at its moment, and
    only after a grasp. Each step pays the difference to the step before, so an episode sums up to what it has
    in the end.

    Args:
        places: Number of places.
        grasped: Whether the environment says that an object is held; empty: it does not.

    Example:
        >>> reward = GraspReward(1, "is_grasped")
        >>> reward.begin(0, held=False)
        >>> [round(reward.step(0, success, held), 1) for success, held in [(False, True), (True, False)]]
        [0.1, 1.0]
    """

    def __init__(self, places: int, grasped: str) -> None:
        self.grasped = grasped
        self._in_row = np.zeros(places, np.int64)
        self._was_grasped = np.zeros(places, np.bool_)
        self._was_held = np.zeros(places, np.bool_)
        self._before = np.zeros(places)

    def begin(self, place: int, held: bool) -> None:
        """Begin an episode in a place; `held`: whether the object is held from the beginning."""
        self._in_row[place], self._was_grasped[place], self._was_held[place] = int(held), held, False
        self._before[place] = 0.0

    def step(self, place: int, success: bool, held: bool) -> float:
        """Return the reward of a step after which `success` and `held` are so."""
        self._in_row[place] = self._in_row[place] + 1 if held else 0
        self._was_grasped[place] |= held
        self._was_held[place] |= self._in_row[place] >= HELD_STEPS
        worth = GRASPED * self._was_grasped[place] + HELD * self._was_held[place]
        worth += SOLVED * (success and self._was_grasped[place])
        paid = worth - self._before[place]
        self._before[place] = worth
        return float(paid)

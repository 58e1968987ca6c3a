"""Choose which of the usable groups the learner gets.

Chance follows from seed and cursor alone. The cursor counts the groups of the batches given away, so the same
seed over the same groups gives the same batches, also after a restart. Every number has its own draw: other
groups do not change it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Final

from asyncrl.config.replay import ReplaySampler
from asyncrl.replay.groups import ReadyGroup

FLOOR: Final = 0.05
"""Least weight of a group in `prioritized`: one without spread (0 of at most 0.5) comes rarely, but comes."""


def pick_in_order(
    usable: Mapping[int, ReadyGroup], groups: int, order: ReplaySampler, *, seed: int, cursor: int
) -> list[int]:
    """Choose `groups` different groups.

    Args:
        usable: Group number -> group; at least `groups` of them.
        groups: How many.
        order: oldest: by number. newest: by the version of the oldest decision, then by number. uniform:
            each alike. prioritized: in proportion to the spread of returns, at least `FLOOR`, without
            repetition.
        seed: Of the run.
        cursor: See above.
    """
    numbers = sorted(usable)
    if order == "oldest":
        return numbers[:groups]
    if order == "newest":
        by_age = sorted(numbers, key=lambda number: (usable[number].oldest_version, number))
        return by_age[: -groups - 1 : -1]

    def key(number: int) -> float:  # An exponential waiting time at the rate of the weight: the soonest win.
        draw = random.Random(f"{seed}/{cursor}/{number}").random()
        weight = 1.0 if order == "uniform" else max(FLOOR, usable[number].spread)
        return -math.log(1.0 - draw) / weight

    return sorted(numbers, key=lambda number: (key(number), number))[:groups]

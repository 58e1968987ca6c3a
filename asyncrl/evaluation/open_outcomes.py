"""Tell from which start states the outcome is open: of the episodes imagined there some succeed and some not.

A group whose episodes all end alike has no advantage to learn from, so a key frame from which the policy
always succeeds, or never, is of no use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from asyncrl.evaluation.audit import Models
from asyncrl.records import StartState
from asyncrl.seeds import episode_seed

LOWEST: Final = 1 / 8
HIGHEST: Final = 7 / 8


def is_open(share: float) -> bool:
    """Tell whether so many successes, in [0, 1], leave the outcome open.

    Example:
        >>> [is_open(successes / 8) for successes in (0, 1, 7, 8)]
        [False, True, True, False]
    """
    return LOWEST <= share <= HIGHEST


def open_starts(
    models: Models,
    starts: Sequence[StartState],
    *,
    siblings: int,
    rows: int,
    seed: int,
    progress: Callable[[int], object] = lambda _: None,
) -> list[StartState]:
    """Keep the start states whose outcome is open; see `success_shares`."""
    shares = success_shares(models, starts, siblings=siblings, rows=rows, seed=seed, progress=progress)
    return [start for start, share in zip(starts, shares, strict=True) if is_open(share)]


def success_shares(
    models: Models,
    starts: Sequence[StartState],
    *,
    siblings: int,
    rows: int,
    seed: int,
    progress: Callable[[int], object] = lambda _: None,
) -> list[float]:
    """Imagine episodes from every start state, closed loop, with the decisions that are left there.

    Args:
        siblings: Episodes from each, at least 1.

    Returns:
        Share of successes from each start state, in [0, 1].
    """
    # What has the most decisions left comes first, so that few rows imagine on behind their end.
    order = sorted(range(len(starts)), key=lambda number: starts[number].elapsed)
    episodes = [(number, member) for number in order for member in range(siblings)]
    successes = [0] * len(starts)
    for first in range(0, len(episodes), rows):
        batch = episodes[first : first + rows]
        filled = batch + batch[:1] * (rows - len(batch))
        imagined = models.imagine(
            [starts[number] for number, _ in filled],
            [episode_seed(seed, number, member) for number, member in filled],
        )
        for (number, _), scores_NC in zip(batch, imagined.scores, strict=False):
            left = models.max_decisions - starts[number].elapsed
            successes[number] += models.end(scores_NC[:left]) is not None
        progress(len(batch))
    return [count / siblings for count in successes]

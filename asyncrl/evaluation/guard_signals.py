"""Signals that might tell a false imagined success from a true one, and how well they do.

Signals without another draw: scores of the decision in which the episode succeeds. With one: the same actions
imagined again with other noise (RAW-Dream, arXiv 2605.12334).

Letters: N decisions of an episode, C steps of a decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Draw = tuple[NDArray[np.float32], NDArray[np.uint8]]
"""Scores ``[N, C]`` and frames ``[N * C, H, W, 3]`` of an episode up to its end."""


def signals_of(
    draw: Draw, other: Draw, *, threshold: float, end: Callable[[NDArray[np.float32]], int | None]
) -> dict[str, float]:
    """Compute the signals of an imagined success: by name, larger where it is more likely to be false.

    Args:
        draw: The episode, which succeeds in its last decision.
        other: Its actions imagined with other noise.
        threshold: From which a frame scores.
        end: Says in which decision scores ``[N, C]`` succeed; None: in none.
    """
    (scores, frames), (others, drawn) = draw, other
    last, last_other = scores[-1], others[-1]
    difference = frames[-len(last) :].astype(np.float32) - drawn[-len(last) :].astype(np.float32)
    return {
        "decision": float(len(scores)),
        "last frame": 1.0 - float(last[-1]),
        "best frame": 1.0 - float(last.max()),
        "frames that score": float((last < threshold).mean()),
        "second draw: verdict": float(end(others) is None),
        "second draw: best frame": abs(float(scores.max()) - float(others.max())),
        "second draw: last frame of both": 1.0 - min(float(last[-1]), float(last_other[-1])),
        "second draw: pictures": float(np.abs(difference).mean()),
    }


def auroc(values: Sequence[float], false: Sequence[bool], strata: Sequence[int] | None = None) -> float:
    """Compute how often a false success has the larger signal than a true one; a tie counts half.

    Args:
        values: Signal of every imagined success.
        false: Whether it is false.
        strata: Only pairs of the same number are compared; None: all pairs.

    Returns:
        In [0, 1], 0.5 by chance; not a number where there is no pair.

    Example:
        >>> auroc([0.1, 0.4, 0.4, 0.9], [False, False, True, True])
        0.875
        >>> auroc([1, 1, 2, 2], [False, True, False, True], [1, 1, 2, 2])
        0.5
    """
    groups = np.zeros(len(values), np.int64) if strata is None else np.asarray(strata)
    signal, is_false = np.asarray(values, np.float64), np.asarray(false, bool)
    won, pairs = 0.0, 0
    for group in np.unique(groups):
        inside = groups == group
        above = signal[inside & is_false][:, None] - signal[inside & ~is_false][None]
        won += float((above > 0).sum() + 0.5 * (above == 0).sum())
        pairs += above.size
    return won / pairs if pairs else math.nan

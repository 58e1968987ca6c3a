"""Decides from the reward model's scores when an imagined episode has succeeded: the one place that does.

The step at which it is decided gets the reward, and learning counts the steps up to it.

RLinf ends an episode when the largest score of a decision reaches the threshold, and pays
``coefficient * (score_t - score_{t-1})`` at step t, whose sum is the score of the decision's last frame:
where a frame scores and the decision's last one does not, the episode ends with the return 0. Here, with
``frames=1``, it ends at the same decision and is paid, since a success that is not paid teaches the opposite.
With ``"last"`` it is not paid and goes on. The coefficient is no setting: it cancels in group advantages.

Dimension letters: N decisions so far, C steps per decision.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.actor import SuccessFrames


def deciding_step(
    scores_NC: NDArray[np.float32], threshold: float, frames: SuccessFrames
) -> tuple[int, int] | None:
    """Find where an episode succeeds.

    Args:
        scores_NC: ``[N, C]`` float32 probabilities of success of the frames that the steps led to.
        threshold: From which a frame scores.
        frames: k: at the first step that ends k scoring frames in a row, which may reach over the border of
            two decisions. "last": at the last step of the first decision whose last frame scores.

    Returns:
        Decision and step within it; None while the episode has not succeeded.

    Example:
        >>> scores = np.array([[0, 1, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0]], np.float32)
        >>> [deciding_step(scores, 0.7, frames) for frames in (1, 2, 3, "last")]
        [(0, 1), (2, 0), None, (1, 3)]
    """
    solved_NC = scores_NC >= threshold
    steps = solved_NC.shape[1]
    if frames == "last":
        ends = np.flatnonzero(solved_NC[:, -1])
        return (int(ends[0]), steps - 1) if ends.size else None
    scored = np.concatenate([[0], np.cumsum(solved_NC)])
    ends = np.flatnonzero(scored[frames:] - scored[:-frames] == frames)
    if not ends.size:
        return None
    decision, step = divmod(int(ends[0]) + frames - 1, steps)
    return decision, step

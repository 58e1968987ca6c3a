"""Rewards of an episode in, which of its tokens count out. Pure functions of arrays.

Dimension letters used in this file:
    N  decisions of an episode     C  steps per decision (8)     A  action dimensions (7)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncrl.records import ACTION_DIM


def valid_steps(rewards_NC: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Mark the steps up to and including the first success.

    A decision chooses 8 actions at once. When the third of them succeeds, the other five were drawn by the
    policy but changed nothing, so rewarding them would be noise. RLinf keeps the whole chunk that holds the
    first success (its mask counts finished decisions, not steps); a comparison with its numbers has to allow
    for at most 7 steps per successful episode.

    Args:
        rewards_NC: ``[N, 8]`` float32, positive at a successful step, 0 elsewhere.

    Returns:
        ``[N, 8]`` bool. All True when no step succeeded.

    Example:
        >>> rewards = np.zeros((2, 8), np.float32)
        >>> rewards[1, 2] = 1
        >>> valid_steps(rewards).astype(int)
        array([[1, 1, 1, 1, 1, 1, 1, 1],
               [1, 1, 1, 0, 0, 0, 0, 0]])
    """
    hits = rewards_NC.reshape(-1) > 0
    successes_before = np.cumsum(hits) - hits
    return (successes_before == 0).reshape(rewards_NC.shape)


def token_mask(steps_NC: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Give each of the 7 tokens of a step the step's validity.

    Args:
        steps_NC: ``[N, 8]`` bool.

    Returns:
        ``[N, 8, 7]`` bool.

    Example:
        >>> token_mask(np.array([[True, False]])).sum(axis=-1)
        array([[7, 0]])
    """
    return np.repeat(steps_NC[..., None], ACTION_DIM, axis=-1)

"""Choose the key frames of recorded episodes, and make start states of them.

Imagination that begins on the way makes fewer decisions, so a world's errors add up less. How WoVR (arXiv
2602.13977) chose its key frames was not published; this is the rule here. Only true frames are used, and
nothing that a robot could not know but whether the task was solved. An episode has at most two, both at the
end of a decision:

    contact   one decision before the one in which the gripper's command changes for the first time
    late      one decision before the one that solves the task; of an episode that was not solved, two before
              its end: there a world's error is small and the outcome still open

A key frame with nothing after it, or within the first decision, is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.fitting.recordings import Recordings
from asyncrl.records import CHUNK, StartState
from asyncrl.worlds.rlinf_start_states import CONTEXT

_GRIPPER: Final = -1
T = TypeVar("T")


def keyframes(actions: NDArray[np.float32], success: NDArray[np.bool_]) -> list[int]:
    """Choose the steps of an episode at which imagination may begin.

    Args:
        actions: ``[F, 7]``; action i produced frame i.
        success: ``[F]``.

    Returns:
        Multiples of 8, in order.

    Example:
        >>> grasp = np.repeat(np.array([-1.0, 1.0]), [31, 19])[:, None] * np.ones(7)
        >>> keyframes(grasp, np.arange(50) == 45)
        [16, 32]
    """
    last = (len(actions) - 1) // CHUNK
    changed = np.flatnonzero(np.diff(np.sign(actions[1:, _GRIPPER])) != 0) + 2
    deciding = (int(changed[0]) - 1) // CHUNK if len(changed) else 0
    solving = (int(success.argmax()) - 1) // CHUNK if success.any() else last - 1
    chosen = {deciding - 1, solving - 1}
    return [CHUNK * decision for decision in sorted(chosen) if 1 <= decision < last]


def keyframe_states(recordings: Recordings, count: int) -> list[StartState]:
    """Make start states of key frames: of every task as many, as far as it has them.

    Returns:
        In the order of the recordings; each with the episode's first frame, the four frames up to the key
        frame with their actions, and the decisions that were made until then.

    Raises:
        ConfigError: No episode has a key frame.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for episode, task in enumerate(recordings.tasks):
        span = recordings.span(episode)
        steps = keyframes(recordings.actions[span], recordings.success[span])
        found.setdefault(task, []).extend((episode, step) for step in steps)
    places = sorted(
        place for task, share in _shares(found, count).items() for place in spread(found[task], share)
    )
    if not places:
        raise ConfigError(
            f"None of the {len(recordings)} episodes of --data has a key frame: they are shorter than three "
            "decisions. Record longer ones."
        )
    return [state_at(recordings, episode, step) for episode, step in places]


def balanced(states: Sequence[StartState], count: int) -> list[StartState]:
    """Choose at most so many, of every task as many as it has, each spread over those of its task."""
    found: dict[str, list[StartState]] = {}
    for state in states:
        found.setdefault(state.task, []).append(state)
    return [state for task, share in _shares(found, count).items() for state in spread(found[task], share)]


def _shares(found: Mapping[str, Sequence[object]], count: int) -> dict[str, int]:
    """Say how many key frames each task gives: alike, and what one lacks the others give."""
    shares, left = dict.fromkeys(found, 0), count
    while left:
        open_tasks = [task for task in found if shares[task] < len(found[task])]
        if not open_tasks:
            break
        for task in open_tasks[:left]:
            shares[task] += 1
        left -= min(left, len(open_tasks))
    return shares


def spread(places: Sequence[T], count: int) -> list[T]:
    """Choose so many of the places, spread over all of them."""
    rows = np.linspace(0, len(places) - 1, count).round().astype(int) if count else []
    return [places[row] for row in rows]


def state_at(recordings: Recordings, episode: int, step: int) -> StartState:
    """Make a start state of an episode: where it began, or on the way."""
    first = int(recordings.offsets[episode])
    seen = slice(first + step - CONTEXT + 1, first + step + 1) if step else slice(0)
    return StartState(
        name=f"episode-{episode}-seed-{recordings.seeds[episode]}-step-{step}",
        task=recordings.tasks[episode],
        frame=recordings.frames[first],
        context_frames=recordings.frames[seen],
        context_actions=recordings.actions[seen].astype(np.float32),
        ee_pose=recordings.poses[first + step] if len(recordings.poses) else None,
        elapsed=step // CHUNK,
    )

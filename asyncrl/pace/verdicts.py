"""Judge a world by true episodes: imagine the same actions, and compare what training would have rewarded.

Dimension letters: E episodes, F pictures of an episode, C steps of a decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config.actor import SuccessFrames
from asyncrl.evaluation.contact_sheet import imagine_again
from asyncrl.fitting.recordings import Recordings
from asyncrl.observability import process_status
from asyncrl.rewards.interface import RewardModel
from asyncrl.rewards.success_rule import deciding_step
from asyncrl.worlds.interface import World


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """Of E episodes."""

    judged: NDArray[np.bool_]
    """``[E]`` whether the imagined episode would have been rewarded."""
    solved: NDArray[np.bool_]
    """``[E]`` whether the true one solved its task."""

    @property
    def wrong(self) -> int:
        """Count the episodes that are judged unlike the truth."""
        return int((self.judged != self.solved).sum())

    @property
    def false(self) -> int:
        """Count the episodes that are judged a success and are none."""
        return int((self.judged & ~self.solved).sum())


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """`contact_sheet.Shown` of an episode that was read from recordings."""

    seed: int
    task: str
    frames: NDArray[np.uint8]
    actions: NDArray[np.float32]
    poses: NDArray[np.float32]
    success: NDArray[np.bool_]


@torch.inference_mode()
def verdicts(
    world: World[Any],
    reward: RewardModel,
    recordings: Recordings,
    *,
    threshold: float,
    success_frames: SuccessFrames,
) -> Verdicts:
    """Imagine what the actions of true episodes lead to, and judge it as training does.

    The noise follows from the episodes' seeds, so two worlds are compared with the same noise.

    Args:
        world: Draws pictures of the recordings' size.
        reward: Judges them.
        recordings: E episodes.
        threshold: See `ActorSettings.success_threshold`.
        success_frames: See `ActorSettings.success_frames`.
    """
    chunk, judged = world.action_spec.chunk, list[bool]()
    episodes = [_recorded(recordings, number) for number in range(len(recordings))]
    for episode, frames in zip(episodes, imagine_again(world, episodes), strict=True):
        drawn = torch.from_numpy(frames[1:]).to(world.device)[None]
        scores = np.zeros(-(-drawn.shape[1] // chunk) * chunk, np.float32)
        if drawn.shape[1]:
            scores[: drawn.shape[1]] = reward.score(drawn, [episode.task]).float().cpu().numpy()[0]
        decided = deciding_step(scores.reshape(-1, chunk), threshold, success_frames) if len(scores) else None
        judged.append(decided is not None)
        process_status.progress()
    return Verdicts(judged=np.array(judged, bool), solved=recordings.solved())


def _recorded(recordings: Recordings, number: int) -> _Recorded:
    span = recordings.span(number)
    return _Recorded(
        seed=int(recordings.seeds[number]),
        task=recordings.tasks[number],
        frames=recordings.frames[span],
        actions=recordings.actions[span],
        poses=recordings.poses[span] if len(recordings.poses) else recordings.poses,
        success=recordings.success[span],
    )

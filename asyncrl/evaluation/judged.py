"""Imagine episodes of the true simulator again, and let the reward model judge what is imagined.

So truth and imagination can be compared for the same actions: where they part, the world model errs, and
where the verdicts differ, the policy is trained on an error.

Dimension letters: F pictures of an episode, the first of them before any step; H, W picture size in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config.actor import SuccessFrames
from asyncrl.evaluation.contact_sheet import imagine_again
from asyncrl.rewards.interface import RewardModel, deciding_step
from asyncrl.simulators.rollout import SimulatedEpisode
from asyncrl.worlds.interface import World


@dataclass(frozen=True, kw_only=True)
class JudgedEpisode:
    """A true episode, and what the world model made of its actions."""

    task: str
    truth: NDArray[np.uint8]
    """``[F, H, W, 3]``."""
    solved_at: int | None
    """Step after which the task was fulfilled in truth; None: it was not."""
    imagined: NDArray[np.uint8]
    """``[F, H, W, 3]``; ``[0, ...]`` where there is no world model."""
    scores: NDArray[np.float32]
    """``[F]`` probability of success of each imagined picture; the first is 0, nobody judges it."""
    judged_at: int | None
    """Step at which training would have called the imagined episode a success; None: it would not."""

    @property
    def shown_step(self) -> int:
        """Return the step whose imagined picture tells most: the judged one, else the best scored."""
        return int(self.scores.argmax()) if self.judged_at is None else self.judged_at


@torch.inference_mode()
def judge(
    episodes: Sequence[SimulatedEpisode],
    world: World[Any],
    reward: RewardModel,
    *,
    threshold: float,
    frames: SuccessFrames,
) -> list[JudgedEpisode]:
    """Imagine what the actions of true episodes lead to, and judge it as training does."""
    chunk, found = world.action_spec.chunk, []
    for episode, imagined in zip(episodes, imagine_again(world, episodes), strict=True):
        steps = len(imagined) - 1
        drawn = torch.from_numpy(imagined[1:]).to(world.device)[None]
        scores = np.zeros(steps + 1, np.float32)
        scores[1:] = reward.score(drawn, [episode.task]).float().cpu().numpy()[0]
        whole = np.zeros(
            -(-steps // chunk) * chunk, np.float32
        )  # The episode may have ended within a decision.
        whole[:steps] = scores[1:]
        decided = deciding_step(whole.reshape(-1, chunk), threshold, frames)
        judged_at = None if decided is None else decided[0] * chunk + decided[1] + 1
        found.append(_joined(episode, imagined, scores, judged_at))
    return found


def unjudged(episodes: Sequence[SimulatedEpisode]) -> list[JudgedEpisode]:
    """Return true episodes alone, of a run that has no world model."""
    return [
        _joined(episode, episode.frames[:0], np.zeros(len(episode.frames), np.float32), None)
        for episode in episodes
    ]


def _joined(
    episode: SimulatedEpisode,
    imagined: NDArray[np.uint8],
    scores: NDArray[np.float32],
    judged_at: int | None,
) -> JudgedEpisode:
    return JudgedEpisode(
        task=episode.task,
        truth=episode.frames,
        solved_at=episode.steps if episode.solved else None,
        imagined=imagined,
        scores=scores,
        judged_at=judged_at,
    )

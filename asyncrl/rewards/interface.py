"""The interface of every reward model, and the rule of success on its scores.

Dimension letters: B slots, C frames per slot (steps per decision), N decisions so far, H/W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.sections import SuccessFrames
from asyncrl.records import ModelSummary

if TYPE_CHECKING:  # The rule alone needs no torch.
    import torch
    from torch import Tensor, nn


class RewardModel(Protocol):
    """Estimates the probability that the task is fulfilled in each frame."""

    @classmethod
    def check(cls, folder: Path, tasks: Sequence[str], **own: Any) -> ModelSummary:
        """Check that `load` can read a folder for these tasks; reads no weights."""
        ...

    @classmethod
    def load(cls, folder: Path, device: torch.device, tasks: Sequence[str], **own: Any) -> Self:
        """Read a model for inference."""
        ...

    @property
    def image_size(self) -> int:
        """Height and width of the frames in pixels; 0: any."""
        ...

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the networks by name, which move to host memory while nothing is imagined."""
        ...

    def score(self, frames: Tensor, tasks: Sequence[str]) -> Tensor:
        """Score ``[B, C, H, W, 3]`` uint8: ``[B, C]`` float32 in [0, 1]. Never waits for the device."""
        ...


def deciding_step(
    scores_NC: NDArray[np.float32], threshold: float, frames: SuccessFrames
) -> tuple[int, int] | None:
    """Return the decision and step that get the reward and end the episode for learning; None without one.

    RLinf pays the score of the frame that ends the decision, so a success that relapses within it returns 0.
    Here ``frames=1`` rewards it; ``"last"`` neither rewards it nor ends the episode.

    Args:
        scores_NC: ``[N, C]`` float32 probabilities of success.
        threshold: Least probability at which a frame scores.
        frames: k: at the first step that ends k scoring frames in a row, across decisions too. "last": at the
            last step of the first decision whose last frame scores.

    >>> scores = np.array([[0, 1, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0]], np.float32)
    >>> {frames: deciding_step(scores, 0.7, frames) for frames in (1, 2, 3, "last")}
    {1: (0, 1), 2: (2, 0), 3: None, 'last': (1, 3)}
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

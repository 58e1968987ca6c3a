"""Compare stored episodes with the same ones imagined again, as a table and as a picture. Runs no models.

Dimension letters:
    N  decisions of an episode    C  steps per decision    A  numbers per step    H, W  image size in pixels
    M = N C  frames that were drawn
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from asyncrl.config.actor import SuccessFrames
from asyncrl.records import Episode
from asyncrl.replay_tools.sheet import WIDTH, lay_out
from asyncrl.replay_tools.text import NOTHING, table
from asyncrl.rewards.interface import deciding_step
from asyncrl.storage.drawing import PAPER, captioned, enlarged
from asyncrl.storage.movies import GREEN, RED

CLOSE_FRAMES: Final = 2
"""Grey levels by which frames may differ and be called close: what rounding explains."""
CLOSE_SCORES: Final = 0.01
CLOSE_LOGPROBS: Final = 0.05
"""Nats; `evaluate` and `act` agree so far in bfloat16."""
AMPLIFIED: Final = 32
"""Factor by which the picture shows differences."""
TITLES: Final = ("member", "decisions", "ended", "the same end", "frames", "scores", "log-probs", "verdict")
Verdict = Literal["equal", "close", "differs"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A stored episode beside the same one, imagined again."""

    episode: Episode
    video: NDArray[np.uint8]
    """``[M, H, W, 3]`` every frame that was imagined again."""
    scores: NDArray[np.float32]
    """``[N, C]`` their scores."""
    logprobs: NDArray[np.float32]
    """``[N, C, A]`` of the stored samples by the policy of the version that sampled them, in nats; NaN where
    that is not there."""
    threshold: float
    """Score from which a frame scores."""
    success_frames: SuccessFrames
    """See `ActorSettings.success_frames`."""

    @property
    def frame_gap(self) -> int:
        """Return the largest difference of two frames, in grey levels: of all frames that are stored."""
        steps = self.scores.shape[1]
        stored = np.concatenate([self.episode.frames[1:], self.episode.final_frame[None]])
        gap = _largest(stored, self.video[steps - 1 :: steps])
        return max(gap, _largest(self.episode.video, self.video)) if len(self.episode.video) else gap

    @property
    def score_gap(self) -> float:
        """Return the largest difference of two scores."""
        return float(np.abs(self.episode.success_scores - self.scores).max())

    @property
    def logprob_gap(self) -> float:
        """Return the largest difference of two log-probs, in nats; NaN when none can be compared."""
        gaps = np.abs(self.episode.logprobs - self.logprobs)
        return float(np.nanmax(gaps)) if np.isfinite(gaps).any() else float("nan")

    @property
    def same_end(self) -> bool:
        """Tell whether it would have ended at the same step for the same reason."""
        solved = deciding_step(self.scores, self.threshold, self.success_frames)
        steps = self.scores.size if solved is None else solved[0] * self.scores.shape[1] + solved[1] + 1
        return (solved is not None, steps) == (self.episode.success, self.episode.steps)

    @property
    def verdict(self) -> Verdict:
        """Say how far both are the same.

        Log-probs come from `evaluate`, as in the learner, and not from `act`, so they are never asked to be
        equal.
        """
        agreed = self.same_end and not self.logprob_gap > CLOSE_LOGPROBS
        if agreed and self.frame_gap == 0 and self.score_gap == 0:
            return "equal"
        near = self.frame_gap <= CLOSE_FRAMES and self.score_gap <= CLOSE_SCORES
        return "close" if agreed and near else "differs"


def comparison_table(found: Sequence[Comparison]) -> str:
    """Return one row per member: the largest differences, and a verdict."""
    return table([TITLES, *(_cells(one) for one in found)])


def comparison_sheet(found: Sequence[Comparison]) -> Image.Image:
    """Draw the final frame of each member: stored, imagined again, and the difference."""
    half = -(-len(found) // 2)
    head = f"stored, imagined again, difference x {AMPLIFIED}"
    columns = [[_tile(one) for one in some] for some in (found[:half], found[half:])]
    return lay_out(columns, [head, head])


def stored_film(episode: Episode) -> NDArray[np.uint8]:
    """Return what is stored of an episode's frames: what it began with, then one per step.

    ``[M + 1, H, W, 3]`` uint8. Where the video was not kept, an observation stands until the next one.
    """
    if len(episode.video):
        return np.concatenate([episode.frames[:1], episode.video])
    observations = np.concatenate([episode.frames, episode.final_frame[None]])
    steps = episode.success_scores.shape[1]
    return observations[np.arange(episode.success_scores.size + 1) // steps]


def imagined_film(found: Comparison) -> NDArray[np.uint8]:
    """Return the frames imagined again, behind the one it began with: ``[M + 1, H, W, 3]`` uint8."""
    return np.concatenate([found.episode.frames[:1], found.video])


def _tile(found: Comparison) -> Image.Image:
    stored, again = found.episode.final_frame, found.video[-1]
    difference = np.abs(stored.astype(np.int16) - again) * AMPLIFIED
    frames = [stored, again, difference.clip(0, 255).astype(np.uint8)]
    pictures = [enlarged(frame, WIDTH) for frame in frames]
    width, height = pictures[0].size
    strip = Image.new("RGB", (3 * width + 4, height), PAPER)
    for index, picture in enumerate(pictures):
        strip.paste(picture, (index * (width + 2), 0))
    lines = [
        f"member {found.episode.member}: {_end(found.episode)}",
        f"{found.verdict}   frames {found.frame_gap}   scores {found.score_gap:.1g}",
    ]
    return captioned(strip, lines, edge=RED if found.verdict == "differs" else GREEN)


def _cells(found: Comparison) -> tuple[str, ...]:
    return (
        str(found.episode.member),
        str(len(found.episode.actions)),
        _end(found.episode),
        "yes" if found.same_end else "no",
        str(found.frame_gap),
        f"{found.score_gap:.2g}",
        NOTHING if np.isnan(found.logprob_gap) else f"{found.logprob_gap:.2g}",
        found.verdict,
    )


def _end(episode: Episode) -> str:
    return f"success at step {episode.steps}" if episode.success else episode.end_reason


def _largest(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> int:
    return int(np.abs(one.astype(np.int16) - other).max())

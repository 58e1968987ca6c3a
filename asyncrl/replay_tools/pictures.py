"""Run `asyncrl replay sheet` and `video`; compare stored episodes with the same ones imagined again.

N decisions of an episode, C steps per decision, A numbers per step, H x W pixels, M = N C frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import numpy as np
import tyro
from numpy.typing import NDArray
from PIL import Image

from asyncrl.config.bounds import AtLeast
from asyncrl.config.sections import SuccessFrames
from asyncrl.errors import ConfigError, ReplayError
from asyncrl.records import UNKNOWN_LENGTH, Episode
from asyncrl.replay_tools import episodes as stored
from asyncrl.replay_tools.episodes import StoredEpisode, table, watched
from asyncrl.rewards.interface import deciding_step
from asyncrl.storage import media

TILE_WIDTH = 128
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sheet(stored.EpisodeSelection):
    """Draw episodes in rows: first, middle and last observation, and the frame that was judged."""

    out: Path
    """File to write, ending in .png."""
    successes: Annotated[int, AtLeast(0, "it counts episodes.", "Use 0 for none.")] = 6
    """Successful episodes to draw."""
    failures: Annotated[int, AtLeast(0, "it counts episodes.", "Use 0 for none.")] = 6
    """Failed episodes to draw."""

    def __post_init__(self) -> None:
        super().__post_init__()
        media.require_png(self.out)

    def run(self) -> int:
        """Draw successes at the left and failures at the right, old versions at the top."""
        rows = list(self.rows())
        if not rows:
            raise ConfigError(
                f"{self.path} holds no episode that fits. `asyncrl replay stats` counts what it has."
            )
        columns, heads = [], []
        for name, success, count in (("successes", True, self.successes), ("failures", False, self.failures)):
            half = [row for row in rows if row.episode.success == success]
            columns.append(_tiles(spread(half, count), name))
            heads.append(f"{len(columns[-1])} of {len(half)} {name}")
        if not any(columns):
            raise ConfigError(f"{self.path} holds no episode to draw. Raise --successes or --failures.")
        media.in_columns(columns, heads).save(self.out)
        print(f"{self.out}: {heads[0]}, {heads[1]}")
        return 0


def spread(rows: Sequence[StoredEpisode], count: int) -> list[StoredEpisode]:
    """Take `count` rows at even distances in the order of policy versions, oldest and newest among them."""
    return evenly(
        sorted(rows, key=lambda row: (row.episode.oldest_version, row.number, row.episode.member)), count
    )


def evenly(items: Sequence[T], count: int) -> list[T]:
    """Take `count` items at even distances, the first and the last among them."""
    if len(items) <= count or count < 2:
        return list(items[:count])
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def tile(episode: Episode) -> Image.Image:
    """Draw one episode: four pictures in a row, each with its step and score, and two lines below them."""
    chunk, last = episode.rewards.shape[1], len(episode.frames) - 1
    shown = [
        ("start", episode.frames[0]),
        (f"step {last // 2 * chunk}", episode.frames[last // 2]),
        (f"step {last * chunk}", episode.frames[last]),
        last_picture(episode),
    ]
    pictures = [
        media.captioned(media.enlarged(frame, TILE_WIDTH), [text], edge=media.PAPER) for text, frame in shown
    ]
    outcome = (
        f"success in step {episode.steps}" if episode.success else f"no success in {episode.steps} steps"
    )
    about = f"{outcome}   version {stored.versions_of(episode)}   {episode.episode_id[:8]}"
    return media.captioned(
        media.in_row(pictures, 2), [episode.task, about], edge=media.GREEN if episode.success else media.RED
    )


def last_picture(episode: Episode) -> tuple[str, NDArray[np.uint8]]:
    """Return title and judged picture; if that was not kept, the last one with its own score."""
    scores = episode.success_scores.reshape(-1)
    end = len(scores)
    if episode.success and len(episode.video) >= episode.steps:
        return f"judged {scores[episode.steps - 1]:.2f}", episode.video[episode.steps - 1]
    word = "judged" if episode.success and episode.steps == end else f"step {end}:"
    return f"{word} {scores[end - 1]:.2f}", episode.final_frame


def sheet_of(episodes: Sequence[Episode], each: int = 6) -> Image.Image:
    """Draw up to `each` successes at the left and failures at the right."""
    columns, heads = [], []
    for name, success in (("successes", True), ("failures", False)):
        half = [episode for episode in episodes if episode.success == success]
        columns.append([tile(episode) for episode in evenly(half, each)])
        heads.append(f"{len(columns[-1])} of {len(half)} {name}")
    return media.in_columns(columns, heads)


def _tiles(rows: Sequence[StoredEpisode], what: str) -> list[Image.Image]:
    """Draw the rows that can still be read; a live run may have deleted some."""
    tiles = []
    for row in watched(rows, f"drawing {what}"):
        try:
            tiles.append(tile(stored.reread(row)))
        except ReplayError as error:
            stored.warn(f"warning: left out: {error}")
    return tiles


MOVIE_WIDTH = 256


@dataclass(frozen=True, kw_only=True)
class Video(stored.ReplayCommand):
    """Write episodes as movies with step, reward, score and policy version below the picture."""

    episodes: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ID...")]
    """Ids, or the beginnings of them; none: the newest success and the newest failure."""
    out: Path = Path()
    """A folder for files named by the ids, or for one episode a file ending in .mp4 or .gif."""
    rate: Annotated[int, AtLeast(1, "it counts frames per second.", "20 is real time.", highest=100)] = 10
    """Steps per second; 20 is real time. Without video, each observation is shown for about 8 steps."""

    def run(self) -> int:
        """Write the movies, and print which frames were used."""
        episodes = self.episodes or stored.newest_of_each_outcome(self.folder)
        if not episodes:
            raise ConfigError(f"{self.folder} holds no episode yet. Wait for the first group.")
        if not media.can_write_mp4() and self.out.suffix.lower() != ".mp4":
            print("av is not installed, so this writes .gif; for .mp4: pip install 'asyncrl[video]'")
        named = self.out.suffix.lower() in (".mp4", ".gif")
        self._check_out(named, len(episodes))
        for beginning in watched(episodes, "movies"):
            episode = stored.find_row(self.folder, beginning).episode
            path = self.out if named else self.out / f"{episode.episode_id[:12]}{media.movie_suffix()}"
            frames = movie_of(episode)
            kept = len(episode.video) > 0
            media.write_movie(
                path,
                (np.asarray(frame) for frame in frames),
                rate=self.rate if kept else max(1, self.rate // episode.rewards.shape[1]),
            )
            source = "every imagined frame" if kept else "one per decision and the last: no video was kept"
            print(f"{path}: {len(frames)} frames of {episode.episode_id[:12]}, {source}")
        return 0

    def _check_out(self, named: bool, count: int) -> None:
        if named and count > 1:
            raise ConfigError(f"--out {self.out} is one file, but {count} episodes are drawn. Give a folder.")
        if not named and not self.out.is_dir():
            raise ConfigError(
                f"--out {self.out} is neither an existing folder nor a name ending in .mp4 or .gif."
            )
        if named and not self.out.parent.is_dir():
            raise ConfigError(f"--out {self.out} is not in an existing folder. Make {self.out.parent} first.")


def movie_of(episode: Episode) -> list[Image.Image]:
    """Draw an episode: from the kept video frame by frame, else from the observations of its decisions."""
    if len(episode.video):
        shown = list(enumerate([episode.frames[0], *episode.video]))
    else:
        frames = [*episode.frames, episode.final_frame]
        taken = episode.rewards.size if episode.steps_taken == UNKNOWN_LENGTH else episode.steps_taken
        shown = [(min(episode.rewards.shape[1] * n, taken), frame) for n, frame in enumerate(frames)]
    return [_frame(episode, step, media.enlarged(frame, MOVIE_WIDTH)) for step, frame in shown]


def _frame(episode: Episode, steps: int, picture: Image.Image) -> Image.Image:
    scores, rewards = episode.success_scores.reshape(-1), episode.rewards.reshape(-1)
    rewarded = float(rewards[:steps].sum())
    fulfilled = episode.success and steps >= episode.steps
    decision = max(0, steps - 1) // episode.rewards.shape[1]
    score = f"{scores[steps - 1]:.2f}" if steps else "-"
    lines = [
        episode.task,
        f"step {steps} / {len(scores)}   version {episode.policy_versions[decision]}",
        f"score {score}   reward {rewarded:g}",
    ]
    return media.captioned(picture, lines, edge=media.GREEN if fulfilled else media.INK)


CLOSE_FRAMES: Final = 2  # Grey levels by which frames may differ and be called close: what rounding explains
CLOSE_SCORES: Final = 0.01
CLOSE_LOGPROBS: Final = 0.05  # Nats; `evaluate` and `act` agree so far in bfloat16
Verdict = Literal["equal", "close", "differs"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A stored episode next to the same one, imagined again."""

    episode: Episode
    video: NDArray[np.uint8]  # ``[M, H, W, 3]`` every frame that was imagined again
    scores: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    """``[N, C, A]`` of the stored samples by the policy of the version that sampled them, in nats; NaN
    without that version."""
    threshold: float  # score from which a frame scores
    success_frames: SuccessFrames  # of `ActorSettings`

    @property
    def frame_gap(self) -> int:
        """Return the largest difference between a stored frame and the imagined one, in grey levels."""
        steps = self.scores.shape[1]
        stored = np.concatenate([self.episode.frames[1:], self.episode.final_frame[None]])
        gap = _largest(stored, self.video[steps - 1 :: steps])
        return max(gap, _largest(self.episode.video, self.video)) if len(self.episode.video) else gap

    @property
    def score_gap(self) -> float:
        """Return the largest difference between a stored score and the imagined one."""
        return float(np.abs(self.episode.success_scores - self.scores).max())

    @property
    def logprob_gap(self) -> float:
        """Return the largest difference between stored and computed log-probs, in nats; NaN without any."""
        gaps = np.abs(self.episode.logprobs - self.logprobs)
        return float(np.nanmax(gaps)) if np.isfinite(gaps).any() else float("nan")

    @property
    def same_end(self) -> bool:
        """True if both episodes end at the same step for the same reason."""
        solved = deciding_step(self.scores, self.threshold, self.success_frames)
        steps = self.scores.size if solved is None else solved[0] * self.scores.shape[1] + solved[1] + 1
        return (solved is not None, steps) == (self.episode.success, self.episode.steps)

    @property
    def verdict(self) -> Verdict:
        """Return how far both agree; log-probs of `evaluate` and `act` are never equal bit for bit."""
        agreed = self.same_end and not self.logprob_gap > CLOSE_LOGPROBS
        if agreed and self.frame_gap == 0 and self.score_gap == 0:
            return "equal"
        near = self.frame_gap <= CLOSE_FRAMES and self.score_gap <= CLOSE_SCORES
        return "close" if agreed and near else "differs"


def comparison_table(found: Sequence[Comparison]) -> str:
    """Return one row per member: the largest differences, and a verdict."""
    titles = ("member", "decisions", "ended", "the same end", "frames", "scores", "log-probs", "verdict")
    rows = [
        (
            *(str(x.episode.member), str(len(x.episode.actions)), _end(x.episode)),
            *("yes" if x.same_end else "no", str(x.frame_gap), f"{x.score_gap:.2g}"),
            *(stored.NOTHING if np.isnan(x.logprob_gap) else f"{x.logprob_gap:.2g}", x.verdict),
        )
        for x in found
    ]
    return table([titles, *rows])


def _end(episode: Episode) -> str:
    return f"success at step {episode.steps}" if episode.success else episode.end_reason


def _largest(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> int:
    return int(np.abs(one.astype(np.int16) - other).max())

"""Run `asyncrl replay video`: draw stored episodes as movies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from PIL import Image

from asyncrl.errors import ConfigError
from asyncrl.records import REWARDED, Episode
from asyncrl.replay_tools.episodes import find_row
from asyncrl.replay_tools.selection import ReplayCommand
from asyncrl.replay_tools.text import watched
from asyncrl.storage.drawing import INK, captioned, enlarged
from asyncrl.storage.movies import GREEN, can_write_mp4, movie_suffix, write_movie

WIDTH = 256
"""Least width of a movie in pixels."""


@dataclass(frozen=True, kw_only=True)
class Video(ReplayCommand):
    """Write episodes as movies with step, reward, score and policy version below the picture."""

    episodes: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ID...")]
    """Ids, or the beginnings of them."""
    out: Path = Path()
    """A folder for files named by the ids, or for one episode a file ending in .mp4 or .gif."""
    rate: int = 10
    """Steps per second; 20 is real time. Without video, each observation is shown for about 8 steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.rate <= 100:
            raise ConfigError(f"--rate is {self.rate} frames per second. Use 1 to 100; 20 is real time.")
        if not self.episodes:
            raise ConfigError("no episode was named. `asyncrl replay list` shows their ids.")

    def run(self) -> int:
        """Write the movies, and say from which frames."""
        if not can_write_mp4() and self.out.suffix != ".mp4":
            print("av is not installed, so this writes .gif; for .mp4: pip install 'asyncrl[video]'")
        targets = [self._target(beginning) for beginning in self.episodes]
        for beginning, target in watched(list(zip(self.episodes, targets, strict=True)), "movies"):
            episode = find_row(self.folder, beginning).episode
            path = target / f"{episode.episode_id[:12]}{movie_suffix()}" if target.is_dir() else target
            frames = movie_of(episode)
            kept = len(episode.video) > 0
            write_movie(
                path,
                (np.asarray(frame) for frame in frames),
                rate=self.rate if kept else max(1, self.rate // episode.rewards.shape[1]),
            )
            source = "every imagined frame" if kept else "one per decision and the last: no video was kept"
            print(f"{path}: {len(frames)} frames of {episode.episode_id[:12]}, {source}")
        return 0

    def _target(self, beginning: str) -> Path:
        """Say where one episode goes: a folder, or a file."""
        named = self.out.suffix in (".mp4", ".gif")
        if named and len(self.episodes) > 1:
            raise ConfigError(
                f"--out {self.out} is one file, but {len(self.episodes)} episodes were named. Give a folder."
            )
        if not named and not self.out.is_dir():
            raise ConfigError(
                f"--out {self.out} is neither an existing folder nor a name ending in .mp4 or .gif."
            )
        if named and not self.out.parent.is_dir():
            raise ConfigError(f"--out {self.out} is not in an existing folder. Make {self.out.parent} first.")
        return self.out


def movie_of(episode: Episode) -> list[Image.Image]:
    """Draw an episode: from the kept video frame by frame, else from the observations of its decisions."""
    if len(episode.video):
        first = [(0, episode.frames[0])]
        shown = first + [(step + 1, frame) for step, frame in enumerate(episode.video)]
    else:
        frames = [*episode.frames, episode.final_frame]
        taken = episode.rewards.size if episode.steps_taken == REWARDED else episode.steps_taken
        shown = [(min(episode.rewards.shape[1] * n, taken), frame) for n, frame in enumerate(frames)]
    return [_frame(episode, step, enlarged(frame, WIDTH)) for step, frame in shown]


def _frame(episode: Episode, steps: int, picture: Image.Image) -> Image.Image:
    """Return the picture seen after `steps` steps; the reward is the sum until then."""
    scores, rewards = episode.success_scores.reshape(-1), episode.rewards.reshape(-1)
    rewarded = float(rewards[:steps].sum())
    fulfilled = episode.success and steps >= episode.steps
    decision = max(0, steps - 1) // episode.rewards.shape[1]
    score = f"{scores[steps - 1]:.2f}" if steps else "-"
    lines = [
        f"step {steps} / {len(scores)}   version {episode.policy_versions[decision]}",
        f"score {score}   reward {rewarded:g}",
    ]
    return captioned(picture, lines, edge=GREEN if fulfilled else INK)

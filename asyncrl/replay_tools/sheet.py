"""Run `asyncrl replay sheet`: draw successes and failures in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from asyncrl.errors import ConfigError, ReplayError
from asyncrl.records import Episode
from asyncrl.replay_tools.episodes import StoredEpisode, reread, warn
from asyncrl.replay_tools.selection import EpisodeSelection
from asyncrl.replay_tools.text import watched
from asyncrl.storage.drawing import INK, PAPER, captioned, enlarged, font, require_png
from asyncrl.storage.movies import GREEN, RED

WIDTH = 96
"""Least width of one picture in pixels."""
SPACE = 10
"""Pixels between episodes."""
HEAD = 26
"""Height of the headings in pixels."""


@dataclass(frozen=True, kw_only=True)
class Sheet(EpisodeSelection):
    """Draw episodes in rows: first, middle and last observation, and the frame that was judged."""

    out: Path
    """File to write, ending in .png."""
    successes: int = 6
    """Successful episodes to draw."""
    failures: int = 6
    """Failed episodes to draw."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, count in (("successes", self.successes), ("failures", self.failures)):
            if count < 0:
                raise ConfigError(f"--{name} is {count}, but it counts episodes. Use 0 for none.")
        if self.successes == self.failures == 0:
            raise ConfigError(
                "--successes and --failures are both 0, which leaves nothing to draw. Raise one."
            )
        require_png(self.out)

    def run(self) -> int:
        """Draw successes at the left and failures at the right, old versions at the top."""
        rows = list(self.rows())
        if not rows:
            raise ConfigError(
                f"{self.path} holds no episode that fits. `asyncrl replay stats` says what it has."
            )
        columns, heads = [], []
        for name, success, count in (("successes", True, self.successes), ("failures", False, self.failures)):
            half = [row for row in rows if row.episode.success == success]
            columns.append(_tiles(spread(half, count), name))
            heads.append(f"{len(columns[-1])} of {len(half)} {name}")
        if not any(columns):
            raise ConfigError(f"{self.path} holds no episode to draw. Raise --successes or --failures.")
        lay_out(columns, heads).save(self.out)
        print(f"{self.out}: {heads[0]}, {heads[1]}")
        return 0


def spread(rows: Sequence[StoredEpisode], count: int) -> list[StoredEpisode]:
    """Take `count` rows at even distances in the order of policy versions, oldest and newest among them."""
    ordered = sorted(rows, key=lambda row: (row.episode.oldest_version, row.number, row.episode.member))
    if len(ordered) <= count:
        return ordered
    if count < 2:
        return ordered[:count]
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]


def tile(row: StoredEpisode, episode: Episode) -> Image.Image:
    """Draw one episode: four pictures in a row, each with its step and score, and two lines below them."""
    chunk, last = episode.rewards.shape[1], len(episode.frames) - 1
    told = [
        ("start", episode.frames[0]),
        (f"step {last // 2 * chunk}", episode.frames[last // 2]),
        (f"step {last * chunk}", episode.frames[last]),
        last_picture(episode),
    ]
    pictures = [captioned(enlarged(frame, WIDTH), [text], edge=PAPER) for text, frame in told]
    width, height = pictures[0].size
    strip = Image.new("RGB", (4 * width + 6, height), PAPER)
    for index, picture in enumerate(pictures):
        strip.paste(picture, (index * (width + 2), 0))
    outcome = f"success in step {episode.steps}" if episode.success else f"no success in {row.steps} steps"
    about = f"{outcome}   version {row.versions}   {episode.episode_id[:8]}"
    return captioned(strip, [episode.task, about], edge=GREEN if episode.success else RED)


def last_picture(episode: Episode) -> tuple[str, NDArray[np.uint8]]:
    """Return the picture that an episode's verdict is about, and what it is.

    The one that was judged is there when its video was kept, or when it is the last of all; else the last
    one is shown, with its own score, which may be another.
    """
    scores = episode.success_scores.reshape(-1)
    end = min(len(scores), len(episode.rewards) * episode.rewards.shape[1])
    if episode.success and len(episode.video) >= episode.steps:
        return f"judged {scores[episode.steps - 1]:.2f}", episode.video[episode.steps - 1]
    word = "judged" if episode.success and episode.steps == end else f"step {end}:"
    return f"{word} {scores[end - 1]:.2f}", episode.final_frame


def lay_out(columns: Sequence[Sequence[Image.Image]], heads: Sequence[str]) -> Image.Image:
    """Lay columns of tiles side by side under their headings; a tile fits the largest one's place."""
    tiles = [tile for column in columns for tile in column]
    width = max(tile.width for tile in tiles) + SPACE
    height = max(tile.height for tile in tiles) + SPACE
    shown = [(column, head) for column, head in zip(columns, heads, strict=True) if column]
    rows = max(len(column) for column, _ in shown)
    size = (len(shown) * width + SPACE, HEAD + rows * height + SPACE)
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    for index, (column, head) in enumerate(shown):
        left = SPACE + index * width
        draw.text((left, SPACE // 2), head, fill=INK, font=font(16))
        for rank, picture in enumerate(column):
            sheet.paste(picture, (left, HEAD + SPACE // 2 + rank * height))
    return sheet


def _tiles(rows: Sequence[StoredEpisode], what: str) -> list[Image.Image]:
    """Draw what can still be read; a live run may have deleted some meanwhile."""
    tiles = []
    for row in watched(rows, f"drawing {what}"):
        try:
            tiles.append(tile(row, reread(row)))
        except ReplayError as error:
            warn(f"warning: left out: {error}")
    return tiles

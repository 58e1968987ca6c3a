"""Draw judged episodes: a movie of truth beside imagination, and a sheet of the pictures that decided.

Dimension letters: H, W picture size in pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from asyncrl.evaluation.judged import JudgedEpisode
from asyncrl.storage.atomic import replacing
from asyncrl.storage.drawing import INK, PAPER, captioned, enlarged, fitted, font
from asyncrl.storage.movies import GREEN, RED, write_movie

RATE: Final = 10
"""Steps per second of a movie."""
WIDTH: Final = 128
"""Least width of one picture in pixels."""
_COLUMNS: Final = 3
_SPACE: Final = 10
_TEXT: Final = 13
_HEAD: Final = 24
"""Height of a line of headings in pixels."""


def write_judged_movie(path: Path, episodes: Sequence[JudgedEpisode], title: str) -> None:
    """Write truth beside imagination, step by step; what is over keeps its last picture.

    The imagined half stops at the step at which training would have called it a success.
    """
    length = max(len(episode.truth) for episode in episodes)
    suffix = path.suffix
    with replacing(path) as part:
        written = part.with_suffix(suffix)
        write_movie(written, _movie(episodes, title, length), rate=RATE)
        written.replace(part)


def write_judged_sheet(path: Path, episodes: Sequence[JudgedEpisode], title: str) -> None:
    """Write a row per episode: first picture, judged imagined picture, the true one then, end."""
    with replacing(path) as part:
        judged_sheet(episodes, title).save(part, "PNG")


def judged_sheet(episodes: Sequence[JudgedEpisode], title: str) -> Image.Image:
    """Draw the sheet of `write_judged_sheet`."""
    rows = [_row(episode) for episode in episodes]
    width = max(row.width for row in rows) + 2 * _SPACE
    sheet = _page(width, sum(row.height + _SPACE for row in rows), title)
    top = _HEAD + _SPACE // 2
    for row in rows:
        sheet.paste(row, (_SPACE, top))
        top += row.height + _SPACE
    return sheet


def _row(episode: JudgedEpisode) -> Image.Image:
    """Draw the pictures of one episode with what each is, and both verdicts below them."""
    last = len(episode.truth) - 1
    told = [("start", episode.truth[0])]
    if len(episode.imagined):
        at = episode.shown_step
        word = "judged" if episode.judged_at is not None else "best score"
        told += [
            (f"imagined, {word} {episode.scores[at]:.2f}, step {at}", episode.imagined[at]),
            (f"truth, step {at}", episode.truth[min(at, last)]),
        ]
    told.append((f"truth, end, step {last}", episode.truth[last]))
    parts = [captioned(enlarged(frame, 2 * WIDTH), [text], edge=INK) for text, frame in told]
    strip = Image.new("RGB", (sum(part.width + 4 for part in parts), parts[0].height), PAPER)
    for place, part in enumerate(parts):
        strip.paste(part, (place * (part.width + 4), 0))
    return captioned(strip, [episode.task, "   ".join(filter(None, verdicts(episode)))], edge=_edge(episode))


def verdicts(episode: JudgedEpisode) -> list[str]:
    """Say in a line each how truth and, where there is one, imagination ended, and whether they differ."""
    truth = f"solved in step {episode.solved_at}" if episode.solved_at is not None else "not solved"
    if not len(episode.imagined):
        return [f"truth: {truth}"]
    score = f"score {episode.scores[episode.shown_step]:.2f}"
    imagined = f"best {score}: no success"
    if episode.judged_at is not None:
        imagined = f"success in step {episode.judged_at}, {score}"
    agree = (episode.solved_at is None) == (episode.judged_at is None)
    return [f"truth: {truth}", f"imagined: {imagined}", "" if agree else "wrong verdict"]


def _edge(episode: JudgedEpisode) -> tuple[int, int, int]:
    """Return green where the truth was a success, else red."""
    return GREEN if episode.solved_at is not None else RED


def _movie(episodes: Sequence[JudgedEpisode], title: str, length: int) -> Iterator[NDArray[np.uint8]]:
    for step in range(length):
        tiles = [_tile(episode, step) for episode in episodes]
        width, height = tiles[0].width + _SPACE, tiles[0].height + _SPACE
        columns = min(_COLUMNS, len(tiles))
        page = _page(columns * width + _SPACE, -(-len(tiles) // columns) * height, title)
        for place, tile in enumerate(tiles):
            row, column = divmod(place, columns)
            page.paste(tile, (_SPACE + column * width, _HEAD + _SPACE // 2 + row * height))
        yield np.asarray(page)


def _tile(episode: JudgedEpisode, step: int) -> Image.Image:
    """Draw one episode after `step` steps: truth left, imagination right, and in the end both verdicts."""
    true_step = min(step, len(episode.truth) - 1)
    halves = [_named(enlarged(episode.truth[true_step], WIDTH), "true")]
    lines = [episode.task, f"step {true_step}"]
    if len(episode.imagined):
        imagined_step = min(true_step, len(episode.truth) if episode.judged_at is None else episode.judged_at)
        halves.append(_named(enlarged(episode.imagined[imagined_step], WIDTH), "imagined"))
        lines[1] += f"   score {episode.scores[imagined_step]:.2f}"
        if episode.judged_at is not None and step >= episode.judged_at:
            halves[1] = _edged(halves[1], GREEN)
    if episode.solved_at is not None and step >= episode.solved_at:
        halves[0] = _edged(halves[0], GREEN)
    over = step >= len(episode.truth) - 1
    lines += verdicts(episode) if over else [""] * len(verdicts(episode))
    strip = Image.new("RGB", (sum(half.width + 2 for half in halves) - 2, halves[0].height), PAPER)
    for place, half in enumerate(halves):
        strip.paste(half, (place * (half.width + 2), 0))
    return captioned(strip, lines, edge=_edge(episode) if over else INK)


def _named(picture: Image.Image, name: str) -> Image.Image:
    """Put a name above a picture."""
    whole = Image.new("RGB", (picture.width, picture.height + _TEXT + 5), PAPER)
    whole.paste(picture, (0, _TEXT + 5))
    ImageDraw.Draw(whole).text((2, 0), name, fill=INK, font=font(_TEXT))
    return whole


def _edged(picture: Image.Image, colour: tuple[int, int, int]) -> Image.Image:
    """Draw a frame around the picture below its name."""
    box = (0, _TEXT + 5, picture.width - 1, picture.height - 1)
    ImageDraw.Draw(picture).rectangle(box, outline=colour, width=3)
    return picture


def _page(width: int, height: int, title: str) -> Image.Image:
    """Begin a white page with its title."""
    page = Image.new("RGB", (width, height + _HEAD + _SPACE), PAPER)
    ImageDraw.Draw(page).text((_SPACE, 4), fitted(title, width - 2 * _SPACE, 15), fill=INK, font=font(15))
    return page

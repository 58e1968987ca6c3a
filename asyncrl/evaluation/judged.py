"""Imagine episodes of the true simulator again, and let the reward model judge what is imagined.

So truth and imagination can be compared for the same actions: where they part, the world model errs, and
where the verdicts differ, the policy is trained on an error.

Dimension letters: F pictures of an episode, the first of them before any step; H, W picture size in pixels.

Draw judged episodes: a movie of truth beside imagination, and a sheet of the pictures that decided.

Dimension letters: H, W picture size in pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from asyncrl.config.sections import SuccessFrames
from asyncrl.evaluation.contact_sheet import imagine_again
from asyncrl.rewards.interface import RewardModel, deciding_step
from asyncrl.simulators.rollout import SimulatedEpisode
from asyncrl.storage.atomic import replacing
from asyncrl.storage.media import GREEN, INK, PAPER, RED, captioned, enlarged, fitted, font, write_movie
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

"""Imagine the actions of true episodes again, and draw both next to each other: sheets and movies.

Letters: B episodes, F pictures of an episode, the first of them before any step; H, W picture size in pixels.
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
from asyncrl.errors import ConfigError
from asyncrl.observability import process_status
from asyncrl.records import StartState
from asyncrl.rewards.interface import RewardModel, deciding_step
from asyncrl.simulators.interface import SimulatorSpec
from asyncrl.simulators.rollout import SimulatedEpisode
from asyncrl.storage.atomic import replacing
from asyncrl.storage.media import (
    GREEN,
    INK,
    PAPER,
    RED,
    captioned,
    enlarged,
    fitted,
    font,
    require_mp4,
    write_movie,
)
from asyncrl.worlds.interface import NeedsPose, State, World

PAIRS: Final = 16
"""Most episodes on a contact sheet."""
RATE: Final = 10
"""Steps per second of a movie."""
_BATCH: Final = 32
_SHEET_COLUMNS: Final = 4
_ENLARGE: Final = 2
_WIDTH: Final = 128
"""Least width of one judged picture in pixels."""
_COLUMNS: Final = 3
_SPACE: Final = 10
_TEXT: Final = 13
_HEAD: Final = 24
"""Height of a line of headings in pixels."""


def imagine_again(world: World[State], episodes: Sequence[SimulatedEpisode]) -> list[NDArray[np.uint8]]:
    """Imagine the frames of recorded actions, from the first frames and poses of the episodes.

    Returns:
        One ``[F, H, W, 3]`` uint8 array per episode, frame 0 being the true one.
    """
    lengths = [len(episode.frames) for episode in episodes]
    drawn: dict[int, NDArray[np.uint8]] = {}
    for length in sorted(set(lengths)):
        rows = [i for i, own in enumerate(lengths) if own == length]
        for start in range(0, len(rows), _BATCH):
            part = rows[start : start + _BATCH]
            drawn |= dict(zip(part, _imagine_alike(world, [episodes[i] for i in part]), strict=True))
    return [drawn[i] for i in range(len(episodes))]


def _imagine_alike(world: World[State], episodes: Sequence[SimulatedEpisode]) -> NDArray[np.uint8]:
    """Imagine episodes of one length: ``[B, F, H, W, 3]`` uint8."""
    actions_BFA = np.stack([episode.actions for episode in episodes])
    length = actions_BFA.shape[1]
    chunk = world.action_spec.chunk
    missing = -(length - 1) % chunk  # a world draws whole decisions; the policy may have ended within one
    actions_BFA = np.concatenate([actions_BFA, np.repeat(actions_BFA[:, -1:], missing, axis=1)], axis=1)
    parts = [np.stack([episode.frames[:1] for episode in episodes])]
    decisions = (actions_BFA.shape[1] - 1) // chunk
    state = world.start([start_of(episode) for episode in episodes], decisions=decisions)
    for decision in range(decisions):
        actions = actions_BFA[:, 1 + chunk * decision : 1 + chunk * (decision + 1)]
        frames, state = world.imagine(state, actions, [episode.seed + decision for episode in episodes])
        parts.append(frames.cpu().numpy())
        process_status.progress()
    return np.concatenate(parts, axis=1)[:, :length]


def start_of(episode: SimulatedEpisode) -> StartState:
    """Return the start state of an episode."""
    return StartState(
        name=f"seed-{episode.seed}",
        task=episode.task,
        frame=episode.frames[0],
        context_frames=episode.frames[:0],
        context_actions=episode.actions[:0],
        ee_pose=episode.poses[0] if episode.poses.size else None,
    )


def check_suffix(path: Path) -> None:
    """Refuse a file that cannot be written as a movie.

    Raises:
        ConfigError: another suffix than .gif or .mp4, or .mp4 without the package `av`.
    """
    if path.suffix not in (".gif", ".mp4"):
        raise ConfigError(f"--video {path} must end in .gif or .mp4.")
    if path.suffix == ".mp4":
        require_mp4(path)


def check_imagines(world: World[Any], spec: SimulatorSpec, what: str = "--video") -> None:
    """Refuse a world that does not fit a simulator.

    Raises:
        ConfigError: It draws another picture size, takes another width of actions, or lacks poses.
    """
    wanted, drawn = (spec.image_size, spec.action_dim), (world.image_size, world.action_spec.dim)
    if wanted != drawn:
        raise ConfigError(
            f"{what}: {spec.name} shows {wanted[0]} pixels and takes {wanted[1]} numbers, but --world draws "
            f"{drawn[0]} pixels and takes {drawn[1]}. Set --image-size {drawn[0]}, or another --world."
        )
    if isinstance(world, NeedsPose) and world.needs_pose and not spec.poses:
        raise ConfigError(
            f"{what}: --world needs to know where the robot's hand is, but {spec.name} does not say it. "
            "Choose another --world or --simulator."
        )


def write_contact_sheet(path: Path, episodes: Sequence[SimulatedEpisode], world: World[Any]) -> None:
    """Write up to 16 pairs (true left, imagined right; green edge: solved) as .gif or .mp4.

    Raises:
        ConfigError: See `check_suffix`.
    """
    chosen = list(episodes[:PAIRS])
    drawn = imagine_again(world, chosen)
    movie = tile([pair(e.frames, d, won=bool(e.success.any())) for e, d in zip(chosen, drawn, strict=True)])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_movie(path, movie, rate=RATE)


def pair(left: NDArray[np.uint8], right: NDArray[np.uint8], *, won: bool) -> NDArray[np.uint8]:
    """Join two clips in an edge of the outcome's colour.

    Args:
        left: ``[F, H, W, 3]`` uint8.
        right: The same shape and dtype.

    Returns:
        ``[F, H + 4, 2 W + 4, 3]`` uint8.
    """
    both = np.concatenate([left, right], axis=2)
    framed = np.empty((len(both), both.shape[1] + 4, both.shape[2] + 4, 3), np.uint8)
    framed[:] = GREEN if won else RED
    framed[:, 2:-2, 2:-2] = both
    return framed


def tile(clips: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Lay clips out in rows; a clip that is over keeps its last frame.

    Args:
        clips: ``[F, H, W, 3]`` uint8 each; F may differ.

    Returns:
        ``[F, H, W, 3]`` uint8, F of the longest clip, H and W of the whole sheet.
    """
    length = max(map(len, clips))
    held = [np.concatenate([clip, np.repeat(clip[-1:], length - len(clip), 0)]) for clip in clips]
    held += [np.zeros_like(held[0])] * (-len(held) % _SHEET_COLUMNS)
    rows = [np.concatenate(held[i : i + _SHEET_COLUMNS], axis=2) for i in range(0, len(held), _SHEET_COLUMNS)]
    return np.concatenate(rows, axis=1).repeat(_ENLARGE, 1).repeat(_ENLARGE, 2)


@dataclass(frozen=True, kw_only=True)
class JudgedEpisode:
    """A true episode, and the imagined one of its actions."""

    task: str
    truth: NDArray[np.uint8]
    """``[F, H, W, 3]``."""
    solved_at: int | None
    """Step that solved the task in truth; None if none did."""
    imagined: NDArray[np.uint8]
    """``[F, H, W, 3]``; ``[0, ...]`` without a world model."""
    scores: NDArray[np.float32]
    """``[F]`` probability of success of each imagined picture; the first is not judged and 0."""
    judged_at: int | None
    """Step at which training calls the imagined episode a success; None if it does not."""

    @property
    def shown_step(self) -> int:
        """Return the judged step, else the one with the best score."""
        return int(self.scores.argmax()) if self.judged_at is None else self.judged_at

    @property
    def edge(self) -> tuple[int, int, int]:
        """Green if the truth was a success, else red."""
        return GREEN if self.solved_at is not None else RED


@torch.inference_mode()
def judge(
    episodes: Sequence[SimulatedEpisode],
    world: World[Any],
    reward: RewardModel,
    *,
    threshold: float,
    frames: SuccessFrames,
) -> list[JudgedEpisode]:
    """Imagine the actions of true episodes again, and judge the frames as training does."""
    chunk, found = world.action_spec.chunk, []
    for episode, imagined in zip(episodes, imagine_again(world, episodes), strict=True):
        steps = len(imagined) - 1
        drawn = torch.from_numpy(imagined[1:]).to(world.device)[None]
        scores = np.zeros(steps + 1, np.float32)
        scores[1:] = reward.score(drawn, [episode.task]).float().cpu().numpy()[0]
        # The episode may have ended within a decision.
        whole = np.zeros(-(-steps // chunk) * chunk, np.float32)
        whole[:steps] = scores[1:]
        decided = deciding_step(whole.reshape(-1, chunk), threshold, frames)
        judged_at = None if decided is None else decided[0] * chunk + decided[1] + 1
        found.append(_joined(episode, imagined, scores, judged_at))
    return found


def unjudged(episodes: Sequence[SimulatedEpisode]) -> list[JudgedEpisode]:
    """Return true episodes alone, of a run without a world model."""
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


def write_judged_movie(path: Path, episodes: Sequence[JudgedEpisode], title: str) -> None:
    """Write truth next to imagination, step by step; ended episodes keep their last picture.

    The imagined half stops at the step at which training calls it a success.
    """
    with replacing(path) as part:
        written = part.with_suffix(path.suffix)
        write_movie(written, _movie(episodes, title), rate=RATE)
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
    """Draw the captioned pictures of one episode, and both verdicts below them."""
    last = len(episode.truth) - 1
    shown = [("start", episode.truth[0])]
    if len(episode.imagined):
        at = episode.shown_step
        word = "judged" if episode.judged_at is not None else "best score"
        shown += [
            (f"imagined, {word} {episode.scores[at]:.2f}, step {at}", episode.imagined[at]),
            (f"truth, step {at}", episode.truth[min(at, last)]),
        ]
    shown.append((f"truth, end, step {last}", episode.truth[last]))
    parts = [captioned(enlarged(frame, 2 * _WIDTH), [text], edge=INK) for text, frame in shown]
    strip = Image.new("RGB", (sum(part.width + 4 for part in parts), parts[0].height), PAPER)
    for place, part in enumerate(parts):
        strip.paste(part, (place * (part.width + 4), 0))
    return captioned(strip, [episode.task, "   ".join(filter(None, verdicts(episode)))], edge=episode.edge)


def verdicts(episode: JudgedEpisode) -> list[str]:
    """Describe in a line each how truth and imagination ended, and whether they differ."""
    truth = f"solved in step {episode.solved_at}" if episode.solved_at is not None else "not solved"
    if not len(episode.imagined):
        return [f"truth: {truth}"]
    score = f"score {episode.scores[episode.shown_step]:.2f}"
    imagined = f"best {score}: no success"
    if episode.judged_at is not None:
        imagined = f"success in step {episode.judged_at}, {score}"
    agree = (episode.solved_at is None) == (episode.judged_at is None)
    return [f"truth: {truth}", f"imagined: {imagined}", "" if agree else "wrong verdict"]


def _movie(episodes: Sequence[JudgedEpisode], title: str) -> Iterator[NDArray[np.uint8]]:
    for step in range(max(len(episode.truth) for episode in episodes)):
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
    halves = [_named(enlarged(episode.truth[true_step], _WIDTH), "true")]
    lines = [episode.task, f"step {true_step}"]
    if len(episode.imagined):
        imagined_step = min(true_step, len(episode.truth) if episode.judged_at is None else episode.judged_at)
        halves.append(_named(enlarged(episode.imagined[imagined_step], _WIDTH), "imagined"))
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
    return captioned(strip, lines, edge=episode.edge if over else INK)


def _named(picture: Image.Image, name: str) -> Image.Image:
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

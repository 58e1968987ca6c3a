"""Imagine the actions of true episodes again, and draw both next to each other: sheets and movies.

Letters: B episodes, F pictures of an episode, the first of them before any step; H, W picture size in pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from asyncrl.config.sections import SuccessFrames
from asyncrl.devices.tensors import require_finite
from asyncrl.errors import ConfigError
from asyncrl.observability import process_status
from asyncrl.records import CHUNK, StartState
from asyncrl.rewards.interface import RewardModel, deciding_step
from asyncrl.simulators.interface import SimulatorSpec
from asyncrl.simulators.rollout import SimulatedEpisode
from asyncrl.storage import media
from asyncrl.storage.atomic import replacing
from asyncrl.storage.media import GREEN, INK, RED, captioned, enlarged, in_columns, in_row
from asyncrl.worlds.interface import State, World, imagine
from asyncrl.worlds.rlinf_start_states import CONTEXT

PAIRS: Final = 16  # Most episodes on a contact sheet.
RATE: Final = 10  # Steps per second of a movie.
_BATCH: Final = 32
_WIDTH: Final = 128  # Least side of one judged picture in pixels.
_COLUMNS: Final = 3
_TEXT: Final = 13


def imagine_again(world: World[State], episodes: Sequence[SimulatedEpisode]) -> list[NDArray[np.uint8]]:
    """Imagine recorded actions: ``[F, H, W, 3]`` uint8 per episode, frame 0 being the true one."""
    batches = [episodes[first : first + _BATCH] for first in range(0, len(episodes), _BATCH)]
    return [drawn for batch in batches for drawn in _imagine_together(world, batch)]


def _imagine_together(world: World[State], episodes: Sequence[SimulatedEpisode]) -> list[NDArray[np.uint8]]:
    """Imagine whole decisions until the longest episode has ended; others repeat their last action."""
    chunk, longest = world.action_spec.chunk, max(len(episode.actions) for episode in episodes)
    decisions = -(-(longest - 1) // chunk)
    steps = np.arange(1 + decisions * chunk)
    actions_BFA = np.stack([e.actions[np.minimum(steps, len(e.actions) - 1)] for e in episodes])
    parts = [np.stack([episode.frames[:1] for episode in episodes])]
    state = world.start([start_of(episode) for episode in episodes], decisions=decisions)
    for decision in range(decisions):
        actions = actions_BFA[:, 1 + chunk * decision : 1 + chunk * (decision + 1)]
        seeds = [episode.seed + decision for episode in episodes]
        frames, state = imagine(world, state, actions, seeds)
        require_finite("world model", frames=state.finite)
        parts.append(frames.cpu().numpy())
        process_status.progress()
    drawn = np.concatenate(parts, axis=1)
    return [frames[: len(episode.frames)] for frames, episode in zip(drawn, episodes, strict=True)]


def start_of(episode: SimulatedEpisode, step: int = 0) -> StartState:
    """Return the start state at a step of an episode, a multiple of its decisions' length."""
    seen = slice(step - CONTEXT + 1, step + 1) if step else slice(0)
    return StartState(
        name=f"seed-{episode.seed}",
        task=episode.task,
        frame=episode.frames[0],
        context_frames=episode.frames[seen],
        context_actions=episode.actions[seen],
        ee_pose=episode.poses[step] if episode.poses.size else None,
        elapsed=step // CHUNK,
    )


def check_suffix(path: Path) -> None:
    """Refuse suffixes other than .gif and .mp4, and .mp4 without the package `av`."""
    if path.suffix.lower() not in (".gif", ".mp4"):
        raise ConfigError(f"--video {path} must end in .gif or .mp4.")
    if path.suffix.lower() == ".mp4":
        media.require_mp4(path)


def check_imagines(world: World[Any], spec: SimulatorSpec, what: str = "--video") -> None:
    """Refuse a world whose pictures or actions differ from the simulator's, or that needs missing poses."""
    wanted, drawn = (spec.image_size, spec.action_dim), (world.image_size, world.action_spec.dim)
    if wanted != drawn:
        raise ConfigError(
            f"{what}: {spec.name} shows {wanted[0]} pixels and takes {wanted[1]} numbers, but --world draws "
            f"{drawn[0]} pixels and takes {drawn[1]}. Choose another --world or --simulator."
        )
    if getattr(world, "needs_pose", False) and not spec.poses:
        raise ConfigError(
            f"{what}: --world needs to know where the robot's hand is, but {spec.name} does not say it. "
            "Choose another --world or --simulator."
        )


@dataclass(frozen=True, kw_only=True)
class JudgedEpisode:
    """A true episode and the imagination of the same actions."""

    task: str
    truth: NDArray[np.uint8]  # [F, H, W, 3].
    solved_at: int | None  # Step that solved the task in truth; None if none did.
    imagined: NDArray[np.uint8]  # [F, H, W, 3]; [0, ...] without a world model.
    scores: NDArray[np.float32] | None = None  # [F] probability of success; None without a reward model.
    judged_at: int | None = None  # Step of the imagined success, by the rule of training; None without one.

    @property
    def shown_step(self) -> int:
        """Return the judged step, else the one with the best score."""
        if self.judged_at is not None or self.scores is None:
            return self.judged_at or 0
        return int(self.scores.argmax())

    @property
    def edge(self) -> tuple[int, int, int]:
        """Colour of the edge: green if the true episode succeeded, else red."""
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
        whole = np.zeros(-(-steps // chunk) * chunk, np.float32)  # It may have ended within a decision.
        whole[:steps] = scores_of(reward, drawn, [episode.task])[0]
        decided = deciding_step(whole.reshape(-1, chunk), threshold, frames)
        judged_at = None if decided is None else decided[0] * chunk + decided[1] + 1
        scores = np.concatenate([np.zeros(1, np.float32), whole[:steps]])
        found.append(replace(unjudged(episode, imagined), scores=scores, judged_at=judged_at))
    return found


def scores_of(reward: RewardModel, frames_BTHW3: Tensor, tasks: Sequence[str]) -> NDArray[np.float32]:
    """Return the probabilities of success ``[B, T]``; a RunError if they are not finite."""
    scores = reward.score(frames_BTHW3, tasks).float()
    require_finite("reward model", scores=scores)
    return scores.cpu().numpy()


def unjudged(episode: SimulatedEpisode, imagined: NDArray[np.uint8] | None = None) -> JudgedEpisode:
    """Pair a true episode with its imagination, if any, without the verdicts of a reward model."""
    return JudgedEpisode(
        task=episode.task,
        truth=episode.frames,
        solved_at=episode.steps if episode.solved else None,
        imagined=episode.frames[:0] if imagined is None else imagined,
    )


def write_contact_sheet(path: Path, episodes: Sequence[SimulatedEpisode], world: World[Any]) -> None:
    """Write a movie, .gif or .mp4, of up to 16 episodes next to the imagination of their actions."""
    chosen = episodes[:PAIRS]
    rows = [unjudged(e, drawn) for e, drawn in zip(chosen, imagine_again(world, chosen), strict=True)]
    path.parent.mkdir(parents=True, exist_ok=True)
    media.write_movie(path, movie(rows, "true and imagined episodes"), rate=RATE)


def write_judged_movie(path: Path, episodes: Sequence[JudgedEpisode], title: str) -> None:
    """Write true and imagined movies side by side; imagination stops at its success, else at its end."""
    with replacing(path) as part:
        written = part.with_suffix(path.suffix)
        media.write_movie(written, movie(episodes, title), rate=RATE)
        written.replace(part)


def write_judged_sheet(path: Path, episodes: Sequence[JudgedEpisode], title: str) -> None:
    """Write a row per episode: true start, judged imagined picture, true picture of that step, true end."""
    with replacing(path) as part:
        in_columns([[_row(episode) for episode in episodes]], [title]).save(part, "PNG")


def movie(episodes: Sequence[JudgedEpisode], title: str) -> Iterator[NDArray[np.uint8]]:
    """Draw the frames of `write_judged_movie`."""
    for step in range(max(len(episode.truth) for episode in episodes)):
        tiles = [_tile(episode, step) for episode in episodes]
        columns = [tiles[first::_COLUMNS] for first in range(_COLUMNS)]
        yield np.asarray(in_columns(columns, [title, *[""] * (_COLUMNS - 1)]))


def verdicts(episode: JudgedEpisode) -> list[str]:
    """Describe in a line each how truth and imagination ended, and whether they differ."""
    truth = f"solved in step {episode.solved_at}" if episode.solved_at is not None else "not solved"
    if episode.scores is None:
        return [f"truth: {truth}"]
    score = f"score {episode.scores[episode.shown_step]:.2f}"
    imagined = f"best {score}: no success"
    if episode.judged_at is not None:
        imagined = f"success in step {episode.judged_at}, {score}"
    agree = (episode.solved_at is None) == (episode.judged_at is None)
    return [f"truth: {truth}", f"imagined: {imagined}", "" if agree else "wrong verdict"]


def _row(episode: JudgedEpisode) -> Image.Image:
    last = len(episode.truth) - 1
    shown = [("start", episode.truth[0])]
    if episode.scores is not None:
        at = episode.shown_step
        word = "judged" if episode.judged_at is not None else "best score"
        shown += [
            (f"imagined, {word} {episode.scores[at]:.2f}, step {at}", episode.imagined[at]),
            (f"truth, step {at}", episode.truth[min(at, last)]),
        ]
    shown.append((f"truth, end, step {last}", episode.truth[last]))
    parts = [captioned(enlarged(frame, 2 * _WIDTH), [text], edge=INK) for text, frame in shown]
    lines = [episode.task, "   ".join(filter(None, verdicts(episode)))]
    return captioned(in_row(parts, 4), lines, edge=episode.edge)


def _tile(episode: JudgedEpisode, step: int) -> Image.Image:
    true_step = min(step, len(episode.truth) - 1)
    solved = episode.solved_at is not None and step >= episode.solved_at
    width = _WIDTH if len(episode.imagined) else 2 * _WIDTH
    halves = [_half(episode.truth[true_step], "true", solved, width)]
    lines = [episode.task, f"step {true_step}"]
    if len(episode.imagined):
        judged = episode.judged_at is not None and step >= episode.judged_at
        imagined_step = episode.shown_step if judged else true_step
        halves.append(_half(episode.imagined[imagined_step], "imagined", judged, width))
        if episode.scores is not None:
            lines[1] += f"   score {episode.scores[imagined_step]:.2f}"
    over = step >= len(episode.truth) - 1
    lines += verdicts(episode) if over else [""] * len(verdicts(episode))
    return captioned(in_row(halves, 2), lines, edge=episode.edge if over else INK)


def _half(frame: NDArray[np.uint8], name: str, success: bool, width: int) -> Image.Image:
    picture, top = enlarged(frame, width), _TEXT + 5
    whole = Image.new("RGB", (picture.width, picture.height + top), media.PAPER)
    whole.paste(picture, (0, top))
    draw = ImageDraw.Draw(whole)
    draw.text((2, 0), name, fill=INK, font=media.font(_TEXT))
    if success:
        draw.rectangle((0, top, whole.width - 1, whole.height - 1), outline=GREEN, width=3)
    return whole

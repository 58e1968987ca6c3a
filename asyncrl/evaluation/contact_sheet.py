"""Draw true and imagined episodes side by side as an animated picture.

The imagined half gets the first true frame, where the hand is in it, and the same actions, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.observability import process_status
from asyncrl.records import StartState
from asyncrl.simulators.interface import SimulatorSpec
from asyncrl.storage.media import GREEN, RED, require_mp4, write_movie
from asyncrl.worlds.interface import NeedsPose, State, World


class Shown(Protocol):
    """What is drawn of an episode: a `SimulatedEpisode`, or one that was read from recordings."""

    @property
    def seed(self) -> int:
        """Of its start."""
        ...

    @property
    def task(self) -> str:
        """Its instruction."""
        ...

    @property
    def frames(self) -> NDArray[np.uint8]:
        """``[F, H, W, 3]``."""
        ...

    @property
    def actions(self) -> NDArray[np.float32]:
        """``[F, A]``; row i made frame i."""
        ...

    @property
    def poses(self) -> NDArray[np.float32]:
        """``[F, 8]`` where the hand is; empty: not known."""
        ...

    @property
    def success(self) -> NDArray[np.bool_]:
        """``[F]``."""
        ...


COLUMNS = 4
PAIRS = 16
"""That a sheet shows at most."""
BATCH = 32
FRAMES_PER_SECOND = 10
ENLARGE = 2


def imagine_again(world: World[State], episodes: Sequence[Shown]) -> list[NDArray[np.uint8]]:
    """Imagine what the recorded actions lead to.

    Args:
        episodes: Simulated episodes; only their first frames and poses and their actions are used.

    Returns:
        One ``[F, H, W, 3]`` uint8 array per episode, frame 0 being the true one.
    """
    lengths = [len(episode.frames) for episode in episodes]
    drawn: dict[int, NDArray[np.uint8]] = {}
    for length in sorted(set(lengths)):
        rows = [i for i, own in enumerate(lengths) if own == length]
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            drawn |= dict(zip(part, _imagine_alike(world, [episodes[i] for i in part]), strict=True))
    return [drawn[i] for i in range(len(episodes))]


def _imagine_alike(world: World[State], episodes: Sequence[Shown]) -> NDArray[np.uint8]:
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


def start_of(episode: Shown) -> StartState:
    """Return the start state of an episode that begins where another one did."""
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
    """Refuse a world that cannot imagine what a simulator shows.

    Raises:
        ConfigError: It draws pictures of another size, takes actions of another width, or needs poses that
            the simulator does not say.
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


def write_contact_sheet(path: Path, episodes: Sequence[Shown], world: World[Any]) -> None:
    """Write up to 16 pairs (true left, imagined right; green edge: solved) as .gif or .mp4.

    Raises:
        ConfigError: See `check_suffix`.
    """
    chosen = list(episodes[:PAIRS])
    drawn = imagine_again(world, chosen)
    movie = tile([pair(e.frames, d, won=bool(e.success.any())) for e, d in zip(chosen, drawn, strict=True)])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_movie(path, movie, rate=FRAMES_PER_SECOND)


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
    held += [np.zeros_like(held[0])] * (-len(held) % COLUMNS)
    rows = [np.concatenate(held[i : i + COLUMNS], axis=2) for i in range(0, len(held), COLUMNS)]
    return np.concatenate(rows, axis=1).repeat(ENLARGE, 1).repeat(ENLARGE, 2)

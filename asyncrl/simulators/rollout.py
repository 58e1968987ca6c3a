"""Play episodes in simulators, by a policy or by the simulator's expert, and yield them as they end.

Slots are filled continuously, with a start of the task that is loaded there where one is left. All slots
whose answer is there are decided together, while the others step; no episode depends on that.

Dimension letters:
    B  slots that are decided      C  steps per decision      F  frames of an episode, the first included
    K  cameras                     H, W  picture size in pixels (equal)
    Q  numbers of state            A  numbers per action
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, RunError
from asyncrl.records import CHUNK, dummy_action
from asyncrl.seeds import simulated_sampling_seed
from asyncrl.simulators.interface import Demonstrator, SimStart
from asyncrl.simulators.pool import Pool, SlotAnswer
from asyncrl.simulators.pool_worker import Frames

PATIENCE: Final = 600.0
"""Seconds without any answer after which something is wrong beyond what the pool sees."""
REPEAT_STRIDE: Final = 1 << 40
"""What the sampling seeds of an episode's further plays are apart from those of its first."""


@dataclass(frozen=True, kw_only=True)
class Observations:
    """What B slots show, and what is to be done there."""

    images: NDArray[np.uint8]
    """``[B, K, H, W, 3]``."""
    states: NDArray[np.float32]
    """``[B, Q]``."""
    tasks: list[str]
    seeds: list[int]
    """Of the policy's sampling."""
    plays: list[Play]
    """Which episodes they are."""
    decisions: list[int]
    """How many were made in each before."""


Act = Callable[[Observations], Sequence[NDArray[np.float32] | None] | NDArray[np.float32]]
"""Chooses ``[B, C, A]`` float32 actions; None in place of a row's ``[C, A]``: its episode ends here."""


@dataclass(frozen=True, kw_only=True)
class Play:
    """One episode to be played."""

    start: SimStart
    repeat: int = 0
    """How often the start was played before: a policy samples anew."""

    @property
    def key(self) -> tuple[str, int]:
        """Return what no other play of the same list has."""
        return self.start.name, self.repeat


@dataclass(kw_only=True)
class SimulatedEpisode:
    """One episode of a simulator; frame i was produced by action i."""

    start: SimStart
    repeat: int
    task: str
    frames: NDArray[np.uint8]
    """``[F, H, W, 3]`` of the first camera, from the first observation on; ``[1, ...]``, only that one, where
    frames are not kept."""
    more_frames: NDArray[np.uint8]
    """``[F, K - 1, H, W, 3]`` of the others; as `frames`."""
    states: NDArray[np.float32]
    """``[F, Q]``; as `frames`."""
    poses: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """``[F, 8]`` where the hand was (`interface.hand_pose`); as `frames`. Empty: the simulator says none."""
    actions: NDArray[np.float32]
    """``[F, A]``; row 0 is `DUMMY_ACTION`, or zeros where A is not 7."""
    rewards: NDArray[np.float32]
    """``[F]``; row 0 is 0."""
    success: NDArray[np.bool_]
    """``[F]`` whether the task was solved in that frame."""
    terminated: bool
    """It could not go on."""
    truncated: bool
    """Time ran out."""
    seconds: float
    """From the reset until its end."""

    @property
    def seed(self) -> int:
        """Return the seed of its start."""
        return self.start.seed

    @property
    def solved(self) -> bool:
        """Tell whether the task was fulfilled at any step."""
        return bool(self.success.any())

    @property
    def steps(self) -> int:
        """Count the steps to success, or all of them."""
        return int(self.success.argmax()) if self.solved else len(self.success) - 1

    def drop_frames(self) -> None:
        """Keep of frames and states only the first: an evaluation's would not fit into memory."""
        self.frames, self.more_frames = self.frames[:1].copy(), self.more_frames[:1].copy()
        self.states, self.poses = self.states[:1].copy(), self.poses[:1].copy()


@dataclass(kw_only=True)
class _Running:
    play: Play
    began: float = field(default_factory=time.monotonic)
    task: str = ""
    answers: list[SlotAnswer] = field(default_factory=list)
    """The first is the reset's, each further one a decision's."""
    solved_for: int = -1
    """Decisions since the task was solved; -1: it is not."""

    @property
    def sampling_seed(self) -> int:
        seed = self.play.start.seed + self.play.repeat * REPEAT_STRIDE
        return simulated_sampling_seed(seed, len(self.answers) - 1)

    def finish(self, keep_frames: bool, width: int) -> SimulatedEpisode:
        first, *others = self.answers
        shown = self.answers if keep_frames else [first]
        images = np.concatenate([answer.frames for answer in shown])
        return SimulatedEpisode(
            start=self.play.start,
            repeat=self.play.repeat,
            task=self.task,
            frames=images[:, 0].copy(),
            more_frames=images[:, 1:].copy(),
            states=np.concatenate([answer.states for answer in shown]),
            poses=np.concatenate([answer.poses for answer in shown]),
            actions=np.concatenate([first_action(width)[None], *(answer.actions for answer in others)]),
            rewards=np.concatenate([np.zeros(1, np.float32), *(answer.rewards for answer in others)]),
            success=np.concatenate([np.zeros(1, np.bool_), *(answer.success for answer in others)]),
            terminated=bool(others) and others[-1].terminated,
            truncated=bool(others) and others[-1].truncated,
            seconds=time.monotonic() - self.began,
        )


def first_action(width: int) -> NDArray[np.float32]:
    """Return ``[A]`` float32, what stands for the action before the first frame."""
    return dummy_action(width)


def rollout(
    pool: Pool,
    act: Act | Demonstrator,
    plays: Sequence[Play],
    *,
    keep_frames: bool = False,
    extra_decisions: int = -1,
) -> Iterator[SimulatedEpisode]:
    """Play every start once and yield the episodes in the order they end.

    An episode ends when it is truncated or terminated, with success, or where `act` ends it. One whose
    worker is lost is played again from its start, with the same seeds.

    Args:
        extra_decisions: Decisions that are made after the one with the success, which then is carried out as
            a whole; -1: the episode ends with the very step that succeeds.

    Raises:
        RunError: The pool gives up, or does not answer.
        ConfigError: An action that was chosen is not finite, or of another width.
    """
    expert = act if isinstance(act, Demonstrator) else None
    waiting, running = _Waiting(plays), dict[int, _Running]()
    while waiting or running:
        for slot in range(pool.slots):
            if slot not in running and waiting:
                running[slot] = _Running(play=waiting.take(pool, slot))
                pool.reset(slot, running[slot].play.start, expert)
        answers = pool.ready(PATIENCE)
        if not answers:
            raise RunError(f"The simulators did not answer within {PATIENCE:.0f} s.")
        undecided = []
        for answer in answers:
            episode = running.get(answer.slot)
            if episode is None:
                continue
            if answer.lost:
                del running[answer.slot]
                waiting.put_back(episode.play)
            elif _goes_on(episode, answer, extra_decisions):
                undecided.append(answer.slot)
            else:
                pool.leave(answer.slot)
                yield running.pop(answer.slot).finish(keep_frames, pool.spec.action_dim)
        live = {slot: running[slot] for slot in sorted(undecided)}
        for slot in _decide(pool, act, live, keep_frames, extra_decisions):
            pool.leave(slot)
            yield running.pop(slot).finish(keep_frames, pool.spec.action_dim)


def _goes_on(episode: _Running, answer: SlotAnswer, extra_decisions: int) -> bool:
    """Take what became of a decision (or of the reset); return whether another one follows."""
    episode.answers.append(answer)
    if not answer.steps:
        episode.task = answer.task
        return True
    if episode.solved_for >= 0 or answer.success.any():
        episode.solved_for += 1
    solved = episode.solved_for >= max(0, extra_decisions)
    return not (answer.terminated or answer.truncated or solved)


def _decide(
    pool: Pool,
    act: Act | Demonstrator,
    undecided: dict[int, _Running],
    keep_frames: bool,
    extra_decisions: int,
) -> list[int]:
    """Ask for the next decision of slots, all at once; returns the slots whose episode ends instead."""
    if not undecided:
        return []
    frames: Frames = "all" if keep_frames else "last"
    if isinstance(act, Demonstrator):
        frames = "all" if keep_frames else "none"  # It sees the true state.
        chosen: list[NDArray[np.float32] | int | None] = [CHUNK] * len(undecided)
    else:
        live = list(undecided.values())
        chosen = list(
            act(
                Observations(
                    images=np.stack([episode.answers[-1].frames[-1] for episode in live]),
                    states=np.stack([episode.answers[-1].states[-1] for episode in live]),
                    tasks=[episode.task for episode in live],
                    seeds=[episode.sampling_seed for episode in live],
                    plays=[episode.play for episode in live],
                    decisions=[len(episode.answers) - 1 for episode in live],
                )
            )
        )
    ended = []
    for slot, actions in zip(undecided, chosen, strict=True):
        if actions is None:
            ended.append(slot)
            continue
        if not isinstance(actions, int):
            _check(actions, pool.spec.action_dim, undecided[slot].play.start)
        pool.step(slot, actions, frames=frames, past_success=extra_decisions >= 0)
    return ended


def _check(actions: NDArray[np.float32], width: int, start: SimStart) -> None:
    if actions.ndim != 2 or actions.shape[1] != width or not np.isfinite(actions).all():
        finite = "" if np.isfinite(actions).all() else ", not all of them finite"
        raise ConfigError(
            f"The policy chose actions of shape {list(actions.shape)}{finite} in {start.name}; a decision is "
            f"[steps, {width}] finite numbers. Look at its weights and at its action statistics."
        )


class _Waiting:
    """Plays that have not begun.

    A slot gets one of the task it has loaded, else of the task that most wait for and fewest have loaded.
    """

    def __init__(self, plays: Sequence[Play]) -> None:
        self._plays = list(plays)

    def __len__(self) -> int:
        return len(self._plays)

    def put_back(self, play: Play) -> None:
        self._plays.insert(0, play)

    def take(self, pool: Pool, slot: int) -> Play:
        loaded = pool.loaded_task(slot)
        of_task = next((i for i, play in enumerate(self._plays) if play.start.task_id == loaded), None)
        if of_task is None:
            elsewhere = Counter(pool.loaded_task(other) for other in range(pool.slots))
            left = Counter(play.start.task_id for play in self._plays)
            best = max(left, key=lambda task: left[task] / (1 + elsewhere[task]))
            of_task = next(i for i, play in enumerate(self._plays) if play.start.task_id == best)
        return self._plays.pop(of_task)

"""Play episodes in simulators, by a policy or by the simulator's expert, and yield them as they end.

Slots are filled continuously, if possible with a start of the task that is loaded there. All slots that have
answered are decided together while the others step; no episode depends on that.

Letters: B slots that are decided, C steps per decision, F frames of an episode with the first, K cameras,
H W picture size in pixels (equal), Q numbers of state, A numbers per action.
"""

from __future__ import annotations

import difflib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, RunError
from asyncrl.facts import plain_task
from asyncrl.records import CHUNK, dummy_action
from asyncrl.simulators.interface import Demonstrator, SimStart, SimulatorSpec, random_start, stored_start
from asyncrl.simulators.pool import SimulatorPool, SlotAnswer
from asyncrl.simulators.pool_worker import Frames

PATIENCE: Final = 600.0  # Seconds without any answer after which the simulators are given up.
REPEAT_STRIDE: Final = 1 << 40  # Distance of the sampling seeds of an episode's repeated plays.
HELD_OUT: Final = 1_000_000  # First seed of evaluation; all other uses stay below.
SEEDS_PER_EVALUATION: Final = 100_000  # Most episodes of one.
DURING_TRAINING: Final = 20_000  # Number of the evaluation whose starts --evaluate-every plays.
EPISODES: Final = 256  # Default length of an evaluation at seeds.


@dataclass(frozen=True, kw_only=True)
class Play:
    """One episode to be played."""

    start: SimStart
    repeat: int = 0  # Number of earlier plays of the start: a policy samples with other seeds.

    @property
    def key(self) -> tuple[str, int]:
        """Key that is unique among the plays of a list."""
        return self.start.name, self.repeat


@dataclass(frozen=True, kw_only=True)
class Observations:
    """Observations of B slots to be decided."""

    images: NDArray[np.uint8]  # [B, K, H, W, 3].
    states: NDArray[np.float32]  # [B, Q].
    tasks: list[str]
    seeds: list[int]  # Of the policy's sampling.
    plays: list[Play]
    decisions: list[int]  # Decisions made before in each episode.


Act = Callable[[Observations], Sequence[NDArray[np.float32] | None] | NDArray[np.float32]]
"""Chooses ``[B, C, A]`` float32 actions; None in place of a row's ``[C, A]`` ends its episode."""


@dataclass(kw_only=True)
class SimulatedEpisode:
    """One episode of a simulator; frame i was produced by action i."""

    start: SimStart
    repeat: int
    task: str
    frames: NDArray[np.uint8]
    """``[F, H, W, 3]`` of the first camera, from the first observation on. Without frames, this and the next
    three hold only the first observation, ``[1, ...]``."""
    more_frames: NDArray[np.uint8]  # [F, K - 1, H, W, 3] of the other cameras.
    states: NDArray[np.float32]  # [F, Q].
    poses: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """``[F, 8]`` hand poses (`interface.hand_pose`); empty without `SimulatorSpec.poses`."""
    actions: NDArray[np.float32]  # [F, A]; row 0 is `records.dummy_action`.
    rewards: NDArray[np.float32]  # [F]; row 0 is 0.
    success: NDArray[np.bool_]  # [F] True where the task was solved in that frame.
    terminated: bool
    truncated: bool
    seconds: float  # From the reset until its end.

    @property
    def seed(self) -> int:
        """Seed of its start."""
        return self.start.seed

    @property
    def solved(self) -> bool:
        """True if the task was fulfilled at any step."""
        return bool(self.success.any())

    @property
    def steps(self) -> int:
        """Steps to success, or all of them."""
        return int(self.success.argmax()) if self.solved else len(self.success) - 1


def simulated_sampling_seed(simulator: int, decision: int) -> int:
    """Return the seed of the policy's sampling in a simulator that was reset with the seed `simulator`."""
    return (simulator * 1_000_003 + decision * 7919 + 17) % (2**62)


@dataclass(kw_only=True)
class _Running:
    play: Play
    began: float = field(default_factory=time.monotonic)
    task: str = ""
    answers: list[SlotAnswer] = field(default_factory=list)  # Of the reset, then of each decision.
    solved_for: int = -1  # Decisions since the task was solved; -1 if it is not.

    @property
    def sampling_seed(self) -> int:
        seed = self.play.start.seed + self.play.repeat * REPEAT_STRIDE
        return simulated_sampling_seed(seed, len(self.answers) - 1)

    def goes_on(self, answer: SlotAnswer, extra_decisions: int) -> bool:
        """Add the answer to a decision or a reset; True if another decision follows."""
        self.answers.append(answer)
        if not answer.steps:
            self.task = answer.task
            return True
        if not np.isfinite(answer.rewards).all():
            raise ConfigError(
                f"The simulator's rewards of {self.play.start.name} are {answer.rewards.tolist()}, but not "
                "all are finite. Mend the simulator."
            )
        if self.solved_for >= 0 or answer.success.any():
            self.solved_for += 1
        solved = self.solved_for >= max(0, extra_decisions)
        return not (answer.terminated or answer.truncated or solved)

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
            actions=np.concatenate([dummy_action(width)[None], *(answer.actions for answer in others)]),
            rewards=np.concatenate([np.zeros(1, np.float32), *(answer.rewards for answer in others)]),
            success=np.concatenate([np.zeros(1, np.bool_), *(answer.success for answer in others)]),
            terminated=bool(others) and others[-1].terminated,
            truncated=bool(others) and others[-1].truncated,
            seconds=time.monotonic() - self.began,
        )


def rollout(
    pool: SimulatorPool,
    act: Act | Demonstrator,
    plays: Sequence[Play],
    *,
    keep_frames: bool = False,
    extra_decisions: int = -1,
) -> Iterator[SimulatedEpisode]:
    """Play every start once and yield the episodes in the order they end.

    An episode ends when it is truncated or terminated, with success, or where `act` ends it. One whose
    worker is lost is played again from its start, with the same seeds.

    `extra_decisions`: decisions after the one with the success, which then is carried out as a whole; -1:
    the episode ends with the step that succeeds.

    Raises:
        RunError: The pool gives up, or does not answer.
        ConfigError: An action that was chosen is not finite, or of another width.
    """
    expert = act if isinstance(act, Demonstrator) else None
    waiting, running = list(plays), dict[int, _Running]()
    while waiting or running:
        for slot in range(pool.slots):
            if slot not in running and waiting:
                running[slot] = _Running(play=_pop_play(waiting, pool, slot))
                pool.reset(slot, running[slot].play.start, expert)
        answers = pool.ready(PATIENCE)
        if not answers:
            raise RunError(f"The simulators did not answer within {PATIENCE:.0f} s.")
        undecided, ended = {}, []
        for answer in answers:
            episode = running.get(answer.slot)
            if episode is None:
                continue
            if answer.lost:
                del running[answer.slot]
                waiting.insert(0, episode.play)
            elif episode.goes_on(answer, extra_decisions):
                undecided[answer.slot] = episode
            else:
                ended.append(answer.slot)
        undecided = dict(sorted(undecided.items()))
        for slot in [*ended, *_decide(pool, act, undecided, keep_frames, extra_decisions)]:
            pool.leave(slot)
            yield running.pop(slot).finish(keep_frames, pool.spec.action_dim)


def _decide(
    pool: SimulatorPool,
    act: Act | Demonstrator,
    undecided: dict[int, _Running],
    keep_frames: bool,
    extra_decisions: int,
) -> Iterator[int]:
    if not undecided:
        return
    frames: Frames = "all" if keep_frames else "last"
    if isinstance(act, Demonstrator):
        frames = "all" if keep_frames else "none"  # It sees the true state.
        chosen: Sequence[NDArray[np.float32] | int | None] = [CHUNK] * len(undecided)
    else:
        live = list(undecided.values())
        shown = Observations(
            images=np.stack([episode.answers[-1].frames[-1] for episode in live]),
            states=np.stack([episode.answers[-1].states[-1] for episode in live]),
            tasks=[episode.task for episode in live],
            seeds=[episode.sampling_seed for episode in live],
            plays=[episode.play for episode in live],
            decisions=[len(episode.answers) - 1 for episode in live],
        )
        chosen = list(act(shown))
    for slot, actions in zip(undecided, chosen, strict=True):
        if actions is None:
            yield slot
        else:
            pool.step(slot, actions, frames=frames, past_success=extra_decisions >= 0)


def _pop_play(waiting: list[Play], pool: SimulatorPool, slot: int) -> Play:
    """Remove a play of the task that the slot has loaded, else of the task with most plays per slot."""
    wanted = pool.loaded_task(slot)
    remaining = Counter(play.start.task_id for play in waiting)
    if wanted not in remaining:
        loaded = Counter(pool.loaded_task(other) for other in range(pool.slots))
        wanted = max(remaining, key=lambda task: remaining[task] / (1 + loaded[task]))
    return waiting.pop(next(i for i, play in enumerate(waiting) if play.start.task_id == wanted))


def evaluation_seeds(seed: int, episodes: int) -> list[int]:
    """Return the simulator seeds of evaluation number `seed`, which nothing else ever uses."""
    return [HELD_OUT + seed * SEEDS_PER_EVALUATION + i for i in range(episodes)]


def evaluation_plays(
    spec: SimulatorSpec, *, episodes: int = 0, seed: int = 0, tasks: Sequence[str], trials: int, repeats: int
) -> list[Play]:
    """List every episode of an evaluation once: stored starts trial by trial, or random starts."""
    of_seeds, of_stored = "--episodes and --seed", "--tasks and --trials"
    if (episodes or seed) if spec.trials else (tasks or trials):
        wrong, right = (of_seeds, of_stored) if spec.trials else (of_stored, of_seeds)
        kind = "stored ones" if spec.trials else "seeds"
        raise ConfigError(f"{wrong} do not choose starts of {spec.name}, which are {kind}: use {right}.")
    if seed == DURING_TRAINING:
        raise ConfigError(f"--seed {seed} has the starts that --evaluate-every plays. Use another number.")
    if trials > spec.trials:
        raise ConfigError(
            f"--trials {trials}: {spec.name} has {spec.trials} stored starts per task. Use that or less."
        )
    if spec.trials:
        places = product(range(trials or spec.trials), chosen_tasks(spec, tasks))
        starts = [stored_start(spec, task, trial) for trial, task in places]
    else:
        starts = [random_start(spec, one) for one in evaluation_seeds(seed, episodes or EPISODES)]
    return [Play(start=start, repeat=repeat) for repeat in range(repeats) for start in starts]


def chosen_tasks(spec: SimulatorSpec, tasks: Sequence[str]) -> list[int]:
    """Return the task ids of `--tasks` (numbers or instructions), each once; all if empty."""
    numbers = {str(number): number for number in range(len(spec.tasks))}
    tasks = [text if text in numbers else plain_task(text) for text in tasks]
    known = numbers | {task: number for number, task in enumerate(spec.tasks)}
    for text in tasks:
        if text not in known:
            near = difflib.get_close_matches(text, spec.tasks, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"--tasks {text!r}: {spec.name} has no such task. Its tasks are 0..{len(numbers) - 1}; the "
                f"nearest is {known[near]}, {near!r}."
            )
    return list(dict.fromkeys(known[text] for text in tasks)) or list(numbers.values())

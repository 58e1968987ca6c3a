"""Play a policy in the true simulator and yield finished episodes.

Slots are filled continuously: as soon as an episode ends, the next seed starts in its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.records import CHUNK, DUMMY_ACTION
from asyncrl.seeds import simulated_sampling_seed

Act = Callable[[NDArray[np.uint8], list[str], list[int]], NDArray[np.float32]]
"""``(frames [B, H, W, 3] uint8, tasks, sampling seeds) -> actions [B, C, A] float32``."""


class Pool(Protocol):
    """What `rollout` needs of a simulator pool."""

    slots: int

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> tuple[NDArray[np.uint8], list[str]]:
        """Start an episode in each of the given slots.

        Returns:
            Pictures ``[n, H, W, 3]`` uint8 and n instructions.
        """
        ...

    def step_chunk(
        self, indices: Sequence[int], actions: NDArray[np.float32]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Carry out C actions in each of the given slots.

        Args:
            indices: ``n`` slots.
            actions: ``[n, C, A]`` float32.

        Returns:
            Pictures ``[n, C, H, W, 3]`` uint8 and success ``[n, C]`` bool.
        """
        ...


@dataclass(kw_only=True)
class SimulatedEpisode:
    """One episode of the true simulator; frame i was produced by action i."""

    seed: int
    task: str
    frames: NDArray[np.uint8]
    """``[F, H, W, 3]``; frame 0 is the first observation and F - 1 whole decisions of the policy follow."""
    actions: NDArray[np.float32]
    """``[F, A]``; row 0 is `DUMMY_ACTION`, or zeros where A is not 7."""
    success: NDArray[np.bool_]
    """``[F]`` whether the task was solved in that frame."""


@dataclass(kw_only=True)
class _Running:
    seed: int
    task: str
    frames: list[NDArray[np.uint8]]
    actions: list[NDArray[np.float32]] = field(default_factory=list)
    success: list[NDArray[np.bool_]] = field(default_factory=lambda: [np.zeros(1, bool)])

    @property
    def decisions(self) -> int:
        return len(self.frames) - 1

    @property
    def steps(self) -> int:
        return sum(map(len, self.frames)) - 1

    @property
    def solved(self) -> bool:
        return any(part.any() for part in self.success)

    def finish(self) -> SimulatedEpisode:
        return SimulatedEpisode(
            seed=self.seed,
            task=self.task,
            frames=np.concatenate(self.frames),
            actions=np.concatenate([first_action(self.actions[0].shape[1])[None], *self.actions]),
            success=np.concatenate(self.success),
        )


def first_action(width: int) -> NDArray[np.float32]:
    """Return ``[A]`` float32, what stands for the action before the first frame."""
    return DUMMY_ACTION if width == len(DUMMY_ACTION) else np.zeros(width, np.float32)


def rollout(pool: Pool, act: Act, seeds: Sequence[int], *, max_decisions: int) -> Iterator[SimulatedEpisode]:
    """Play every seed once and yield the episodes in the order they end.

    An episode ends after the decision in which the task was solved, or which reaches `max_decisions` times
    8 steps: a policy that makes fewer steps per decision gets as much time as the others.
    """
    waiting = list(reversed(seeds))
    running: dict[int, _Running] = {}
    while waiting or running:
        _fill(pool, waiting, running)
        slots = sorted(running)
        live = [running[slot] for slot in slots]
        frames = np.stack([episode.frames[-1][-1] for episode in live])
        noise = [simulated_sampling_seed(episode.seed, episode.decisions) for episode in live]
        actions = act(frames, [episode.task for episode in live], noise)
        new_frames, success = pool.step_chunk(slots, actions)
        for row, (slot, episode) in enumerate(zip(slots, live, strict=True)):
            episode.frames.append(new_frames[row].copy())
            episode.actions.append(actions[row].copy())
            episode.success.append(success[row].copy())
            if episode.solved or episode.steps >= max_decisions * CHUNK:
                del running[slot]
                yield episode.finish()


def _fill(pool: Pool, waiting: list[int], running: dict[int, _Running]) -> None:
    free = [slot for slot in range(pool.slots) if slot not in running][: len(waiting)]
    if not free:
        return
    seeds = [waiting.pop() for _ in free]
    images, tasks = pool.reset(free, seeds)
    for slot, seed, image, task in zip(free, seeds, images, tasks, strict=True):
        running[slot] = _Running(seed=seed, task=task, frames=[image[None].copy()])

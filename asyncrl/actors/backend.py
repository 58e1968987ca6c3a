"""An actor's slots and stages, and the interface of the backends that decide for them.

Each slot holds one episode, and the next pending one takes its place when it ends. A stage is a share of the
slots with the world's state of their episodes and the decision in flight.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Generic

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.devices.tensors import DeviceEvent
from asyncrl.episode_layout import EPISODE_ARRAYS, OPTIONAL_ARRAYS
from asyncrl.observability.metrics import Metric
from asyncrl.observability.metrics_system import ACTOR_DECISIONS
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.records import UNKNOWN_LENGTH, EndReason, Episode, StartState, episode_seed, noise_seed
from asyncrl.replay.interface import Cause, GroupGrant
from asyncrl.simulators.interface import SimStart
from asyncrl.worlds.interface import State

_NO_FRAME: Final = np.zeros((0, 0, 3), np.uint8)
Decision = dict[str, NDArray[Any]]
"""One decision: the arrays of an `Episode` by name, without the axis of decisions.

`video` is ``[C, H, W, 3]``; `values` is absent without a critic, `rewards` may be absent.
"""
TimedWork = tuple[Metric, DeviceEvent, DeviceEvent]  # Metric, and the events between which a device worked


EpisodeStart = StartState | SimStart


@dataclass(frozen=True, kw_only=True)
class EpisodePlan:
    """An episode to make: its group, its place in it, and its start."""

    grant: GroupGrant
    member: int
    start: EpisodeStart


@dataclass(kw_only=True)
class EpisodeInProgress:
    """One running episode; task, frames and state are set when its backend has begun it."""

    plan: EpisodePlan
    seed: int
    task: str = ""
    frame: NDArray[np.uint8] = field(default_factory=lambda: _NO_FRAME)  # [H, W, 3] the present frame
    more_frames: NDArray[np.uint8] | None = None  # [V, H, W, 3] of the other cameras; None without any
    state: NDArray[np.float32] | None = None  # [Q] the robot's present state; None if unknown
    decisions: list[Decision] = field(default_factory=list)
    decisions_reported: int = 0

    def next_noise_seed(self) -> int:
        """Return the noise seed of the next decision."""
        return noise_seed(self.seed, len(self.decisions))

    def add(self, decision: Decision) -> None:
        """Append a decision and move on to its last frame."""
        self.decisions.append(decision)
        self.frame = decision["video"][-1]


@dataclass(frozen=True, kw_only=True)
class EpisodeEnd:
    """End of an episode of N decisions of C steps."""

    reason: EndReason
    rewards: NDArray[np.float32]  # [N, C]
    steps_taken: int = UNKNOWN_LENGTH


class Slots:
    """The actor's batch of `size` slots, and the queue of episodes that wait for one."""

    def __init__(self, size: int, *, run_seed: int) -> None:
        self.episodes: list[EpisodeInProgress | None] = [None] * size
        self.pending: deque[EpisodePlan] = deque()
        self._run_seed = run_seed

    @property
    def live(self) -> list[int]:
        """Return the slots with a running episode."""
        return self.live_among(range(len(self.episodes)))

    def live_among(self, indices: range) -> list[int]:
        """Return those of `indices` with a running episode."""
        return [index for index in indices if self.episodes[index] is not None]

    def wanted(self, prefetch: int) -> int:
        """Count the episodes missing until every slot has one and `prefetch` more are pending."""
        return max(0, len(self.episodes) + prefetch - len(self.live) - len(self.pending))

    def add_group(self, grant: GroupGrant, start: EpisodeStart, group_size: int) -> None:
        """Queue a grant's episodes, in place of those of an earlier grant with the same number."""
        self.remove_group(grant.number)
        episodes = [EpisodePlan(grant=grant, member=i, start=start) for i in range(group_size)]
        self.pending = deque(sorted([*self.pending, *episodes], key=lambda pending: pending.grant.number))

    def fill(
        self,
        policy_version: int,
        among: range,
        is_cheapest: Callable[[int, EpisodeStart], bool] = lambda index, start: True,
    ) -> list[int]:
        """Fill free slots with pending episodes that `policy_version` may sample; return these slots."""
        filled, free = [], [index for index in among if self.episodes[index] is None]
        while free and self.pending and self.pending[0].grant.min_version <= policy_version:
            pending = self.pending.popleft()
            index = next((index for index in free if is_cheapest(index, pending.start)), free[0])
            free.remove(index)
            seed = episode_seed(self._run_seed, pending.grant.number, pending.member)
            self.episodes[index] = EpisodeInProgress(plan=pending, seed=seed)
            filled.append(index)
        return sorted(filled)

    def episode(self, index: int) -> EpisodeInProgress:
        """Return the episode in a slot that has one."""
        episode = self.episodes[index]
        assert episode is not None
        return episode

    def remove_group(self, number: int) -> None:
        """Remove the running and pending episodes of a group."""
        self.episodes = [e if e and e.plan.grant.number != number else None for e in self.episodes]
        self.pending = deque(pending for pending in self.pending if pending.grant.number != number)

    def clear(self, index: int) -> EpisodeInProgress:
        """Remove the episode from a slot and return it."""
        episode = self.episode(index)
        self.episodes[index] = None
        return episode


def build_episode(
    episode: EpisodeInProgress,
    end: EpisodeEnd,
    *,
    group_size: int,
    actor: str,
    world_version: int,
    sampling: SamplingParams,
) -> Episode:
    """Build the `Episode` record of an episode that ended."""
    rows, plan, grant = episode.decisions, episode.plan, episode.plan.grant
    arrays: dict[str, Any] = {n: np.stack([row[n] for row in rows]) for n in rows[0] if n != "video"}
    known = EPISODE_ARRAYS.keys() | OPTIONAL_ARRAYS.keys()
    sample = {name: arrays.pop(name) for name in list(arrays) if name not in known}
    arrays = {"values": np.full(len(rows), np.nan, np.float32)} | arrays | {"rewards": end.rewards}
    none = np.empty((0, *episode.frame.shape), np.uint8)
    return Episode(
        episode_id=os.urandom(16).hex(),
        group_id=grant.group_id,
        member=plan.member,
        group_size=group_size,
        actor=actor,
        task=episode.task,
        start_state=plan.start.name,
        world_version=world_version,
        seed=episode.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        end_reason=end.reason,
        sample=sample,
        final_frame=episode.frame.copy(),  # A view would keep alive the frames of all slots.
        video=np.concatenate([row["video"] for row in rows]) if grant.keep_video else none,
        steps_taken=end.steps_taken,
        final_more_frames=None if episode.more_frames is None else episode.more_frames.copy(),
        final_state=None if episode.state is None else episode.state.copy(),
        **arrays,
    )


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Failure of the episode in one slot."""

    index: int  # The slot; -1: none
    cause: Cause
    reason: str  # One line of printable characters
    error: Exception | None = None


@dataclass(kw_only=True)
class Stage(Generic[State]):
    """Slots that decide together, with the world's state of each."""

    indices: range
    in_flight: list[Any] = field(default_factory=list)
    """World: launched decisions, several only if the joint attempt raised. Simulator: awaited slots."""
    timed_work: list[TimedWork] = field(default_factory=list)  # Besides `in_flight`, not counted yet
    _rows: list[int] = field(default_factory=list, init=False)  # The slot of each row of the state, ascending
    _state: Any = field(default=None, init=False)  # None without rows

    def open(self, indices: Sequence[int], fresh: State) -> None:
        """Insert the rows of `fresh` for episodes that begin in the slots `indices`, ascending."""
        if set(self._rows) <= set(indices):
            self._state, self._rows = fresh, list(indices)
        else:
            self.keep(sorted({*self._rows, *indices}))
            self.replace(indices, fresh)

    def keep(self, indices: Sequence[int]) -> None:
        """Keep only the rows of the slots `indices`, ascending; a slot without a row copies row 0."""
        if list(indices) != self._rows:
            known = {index: row for row, index in enumerate(self._rows)}
            rows = [known.get(index, 0) for index in indices]
            self._state, self._rows = self._state.select(rows) if rows else None, list(indices)

    def state_of(self, indices: Sequence[int]) -> State:
        """Return the rows of the slots `indices`: the state itself if these are all slots, else copies."""
        if self._rows == list(indices):
            return self._state
        return self._state.select([self._rows.index(index) for index in indices])

    def replace(self, indices: Sequence[int], after: State) -> None:
        """Replace the rows of the slots `indices`; if these are all, the state is swapped without a copy."""
        if self._rows == list(indices):
            self._state = after
        else:
            self._state = self._state.write_rows([self._rows.index(index) for index in indices], after)


def split_slots(slots: int, stages: int) -> list[range]:
    """Split slots into stages whose sizes differ by at most one."""
    ends = [slots * n // stages for n in range(stages + 1)]
    return [range(first, last) for first, last in pairwise(ends)]


# --- backends ---


class Backend(ABC, Generic[State]):
    """Decides for the slots of a stage and imagines or simulates the results.

    The actor calls `begin` for new episodes of an idle stage, `launch`, `collect`, then `episode_end`. The
    first three return the slots that failed.
    """

    world_version: int  # `Episode.world_version`

    def __init__(self, policy: Policy, sampling: SamplingParams, device: torch.device) -> None:
        self.policy, self.sampling, self.device = policy, sampling, device
        self.decisions = 0  # Since the actor began
        self._seconds: dict[Metric, float] = defaultdict(float)

    @property
    def counts(self) -> Mapping[Metric, int]:
        """Return counters since the actor began."""
        return {ACTOR_DECISIONS: self.decisions}

    def pop_device_seconds(self) -> dict[Metric, float]:
        """Return the busy seconds of policy, world and others since the last call."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return seconds

    def is_cheapest(self, index: int, start: EpisodeStart) -> bool:
        """Return True if no slot is a cheaper place for `start` than slot `index`."""
        return True

    @abstractmethod
    def begin(self, slots: Slots, stage: Stage[State], indices: list[int]) -> list[Failure]:
        """Begin the episodes just put into slots of an idle stage."""

    @abstractmethod
    def launch(
        self, slots: Slots, stage: Stage[State], indices: list[int], policy_version: int
    ) -> list[Failure]:
        """Begin one decision in `indices`, the stage's slots with an episode."""

    @abstractmethod
    def collect(self, slots: Slots, stage: Stage[State], timeout: float) -> tuple[list[Failure], float]:
        """Append the stage's decisions; return failures and seconds waited, except for devices."""

    @abstractmethod
    def release(self, slots: Slots, stage: Stage[State]) -> None:
        """Free the stage's resources of removed episodes."""

    @abstractmethod
    def episode_end(self, episode: EpisodeInProgress) -> EpisodeEnd | None:
        """Return how an episode ended with its last decision; None while it goes on."""

    def close(self) -> None:
        """End the processes it has started. May be called again."""

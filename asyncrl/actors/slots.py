"""Keeps an actor's batch full: pending episodes of granted groups go into slots, finished ones come out.

A slot holds one episode with its own step counter, seeds, start state and group; when it ends, the next
pending episode takes the slot, so the batch stays full whatever the neighbours do. A stage is a share of the
slots with the world's state of their episodes and the decision in flight: the host works on one stage while
a device works on the other.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Generic, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.devices.events import DeviceEvent
from asyncrl.episode_layout import EPISODE_ARRAYS, OPTIONAL_ARRAYS
from asyncrl.observability.metrics import Metric
from asyncrl.records import REWARDED, EndReason, Episode
from asyncrl.replay.interface import GroupGrant
from asyncrl.seeds import episode_seed, noise_seed
from asyncrl.worlds.interface import State

_NOTHING: Final = np.zeros((0, 0, 3), np.uint8)


class Start(Protocol):
    """Where an episode begins: a `StartState`, or a `SimStart`."""

    @property
    def name(self) -> str:
        """Return `Episode.start_state`."""
        ...

    @property
    def task(self) -> str:
        """Return the instruction; empty: it is said when the episode has begun."""
        ...


@dataclass(frozen=True, kw_only=True)
class PendingEpisode:
    """One episode that has not begun."""

    grant: GroupGrant
    member: int
    start: Start


@dataclass(kw_only=True)
class EpisodeInProgress:
    """One episode under way."""

    pending: PendingEpisode
    """What it was before it began."""
    seed: int
    task: str = ""
    """The instruction, once it has begun."""
    frame: NDArray[np.uint8] = field(default_factory=lambda: _NOTHING)
    """``[H, W, 3]`` what is seen now, once it has begun."""
    more_frames: NDArray[np.uint8] | None = None
    """``[V, H, W, 3]`` what other cameras see now; None: there are none."""
    state: NDArray[np.float32] | None = None
    """``[Q]`` the robot's state now; None: it is not known."""
    decisions: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    """One row per decision of the arrays of an `Episode` (`EPISODE_ARRAYS` and the policy's sample), by name:
    `video` has ``[C, H, W, 3]``, `values` is left out without a critic, `rewards` may come at the end."""
    counted: int = 0
    """Decisions that the actor has looked at."""

    def next_noise_seed(self) -> int:
        """Return the noise seed of the decision that comes next."""
        return noise_seed(self.seed, len(self.decisions))

    def add(self, decision: dict[str, NDArray[Any]]) -> None:
        """Append a decision and move on to its last frame.

        Args:
            decision: See `decisions`, of which it becomes the last; `video` is ``[C, H, W, 3]`` uint8, with
                fewer frames where fewer were drawn.
        """
        self.decisions.append(decision)
        self.frame = decision["video"][-1]


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an episode of N decisions of C steps ended."""

    reason: EndReason
    rewards: NDArray[np.float32]
    """``[N, C]``."""
    steps_taken: int = REWARDED
    """As in `Episode`."""


def _everywhere(index: int, start: Start) -> bool:
    return True


class Slots:
    """The actor's batch of `size` slots, known by index, and the queue of episodes that wait for one."""

    def __init__(self, size: int, *, run_seed: int) -> None:
        self.episodes: list[EpisodeInProgress | None] = [None] * size
        self.pending: deque[PendingEpisode] = deque()
        self._run_seed = run_seed

    @property
    def live(self) -> list[int]:
        """Return the slots with an episode under way."""
        return [index for index, episode in enumerate(self.episodes) if episode is not None]

    def wanted(self, spare: int) -> int:
        """Count the episodes that lack for every slot to have one, and for `spare` more to be pending."""
        return max(0, len(self.episodes) + spare - len(self.live) - len(self.pending))

    def add_group(self, grant: GroupGrant, start: Start, group_size: int) -> None:
        """Queue all episodes of a granted group behind those of lower numbers, which are used before.

        What there is of an earlier grant of the same number is forgotten: that one was given up.
        """
        self.remove_group(grant.number)
        episodes = [PendingEpisode(grant=grant, member=i, start=start) for i in range(group_size)]
        self.pending = deque(sorted([*self.pending, *episodes], key=lambda pending: pending.grant.number))

    def fill(
        self,
        policy_version: int,
        among: range,
        suits: Callable[[int, Start], bool] = _everywhere,
    ) -> list[int]:
        """Put pending episodes into free slots, oldest grant first; return the slots that were filled.

        An episode waits while the policy held is older than its grant allows.

        Args:
            among: Slots that may be filled.
        """
        filled, free = [], [index for index in among if self.episodes[index] is None]
        while free and self.pending and self.pending[0].grant.min_version <= policy_version:
            pending = self.pending.popleft()
            index = next((index for index in free if suits(index, pending.start)), free[0])
            free.remove(index)
            seed = episode_seed(self._run_seed, pending.grant.number, pending.member)
            self.episodes[index] = EpisodeInProgress(pending=pending, seed=seed)
            filled.append(index)
        return sorted(filled)

    def episode(self, index: int) -> EpisodeInProgress:
        """Return the episode in a slot that has one."""
        episode = self.episodes[index]
        assert episode is not None
        return episode

    def remove_group(self, number: int) -> None:
        """Stop the episodes of a group that are under way, and forget those that are pending."""
        for index in self.live:
            if self.episode(index).pending.grant.number == number:
                self.episodes[index] = None
        self.pending = deque(pending for pending in self.pending if pending.grant.number != number)

    def clear(self, index: int) -> EpisodeInProgress:
        """Take the episode out of a slot."""
        episode = self.episode(index)
        self.episodes[index] = None
        return episode


def finished_episode(
    episode: EpisodeInProgress,
    ending: Ending,
    *,
    group_size: int,
    actor: str,
    world_version: int,
    temperature: float,
    top_k: int,
) -> Episode:
    """Make the `Episode` record of an episode that ended."""
    rows, pending = episode.decisions, episode.pending
    arrays: dict[str, Any] = {n: np.stack([row[n] for row in rows]) for n in rows[0] if n != "video"}
    known = EPISODE_ARRAYS.keys() | OPTIONAL_ARRAYS.keys()
    sample = {name: arrays.pop(name) for name in list(arrays) if name not in known}
    arrays.setdefault("values", np.full(len(rows), np.nan, np.float32))
    arrays["rewards"] = ending.rewards
    return Episode(
        episode_id=os.urandom(16).hex(),
        group_id=pending.grant.group_id,
        member=pending.member,
        group_size=group_size,
        actor=actor,
        task=episode.task,
        start_state=pending.start.name,
        world_version=world_version,
        seed=episode.seed,
        temperature=temperature,
        top_k=top_k,
        end_reason=ending.reason,
        sample=sample,
        final_frame=episode.frame.copy(),  # Not a view, which would keep alive what was drawn for all slots.
        video=_video(episode),
        steps_taken=ending.steps_taken,
        final_more_frames=None if episode.more_frames is None else episode.more_frames.copy(),
        final_state=None if episode.state is None else episode.state.copy(),
        **arrays,
    )


def _video(episode: EpisodeInProgress) -> NDArray[np.uint8]:
    """``[M, H, W, 3]`` every frame that was drawn, or none when the grant does not ask for them."""
    if not episode.pending.grant.keep_video:
        return np.empty((0, *episode.frame.shape), np.uint8)
    return np.concatenate([row["video"] for row in episode.decisions])


TimedWork = tuple[Metric, DeviceEvent, DeviceEvent]
"""What a device was busy with, from when to when."""


@dataclass(frozen=True, kw_only=True)
class InFlightDecision:
    """One decision of B slots that the devices may still be working on; no episode has any of it yet.

    The tensors are in host memory, and whole once all of `done_events` have passed.
    """

    indices: list[int]
    """The slots."""
    episodes: list[EpisodeInProgress]
    """What was in the slots; one that has something else by now gets nothing of this."""
    arrays: dict[str, Tensor]
    """Name -> ``[B, ...]``, or more rows that mean nothing: what becomes of `EpisodeInProgress.decisions`."""
    finite: Tensor
    """``[B]`` bool, or more rows that mean nothing: `WorldState.finite` after the decision."""
    timed_work: list[TimedWork]
    done_events: tuple[DeviceEvent, ...]


@dataclass(kw_only=True)
class Stage(Generic[State]):
    """Slots that decide together, and what the world remembers about each."""

    indices: range
    """The slots."""
    in_flight: list[Any] = field(default_factory=list)
    """The decision under way: parts (`InFlightDecision`), several only where all slots together raised an
    error; of a simulator the slots that are asked something."""
    timed_work: list[TimedWork] = field(default_factory=list)
    """Work besides `in_flight` that has not been counted."""
    _rows: list[int] = field(default_factory=list, init=False)
    """The slot that each row of the state belongs to, ascending."""
    _state: State | None = field(default=None, init=False)

    def open(self, indices: Sequence[int], fresh: State) -> None:
        """Take over the rows of `fresh` for episodes that begin in the slots `indices`, ascending."""
        if self._state is None or set(self._rows) <= set(indices):
            self._state, self._rows = fresh, list(indices)
            return
        self._arrange(sorted({*self._rows, *indices}))
        self._state = self._state.write_rows([self._rows.index(index) for index in indices], fresh)

    def keep(self, indices: Sequence[int]) -> None:
        """Forget all rows but those of the slots `indices`, ascending: from now on these are the rows."""
        if not indices:
            self._state, self._rows = None, []
        else:
            self._arrange(list(indices))

    def state_of(self, indices: Sequence[int]) -> State:
        """The rows of the slots `indices`: the state itself where these are all, else copies."""
        assert self._state is not None
        if self._rows == list(indices):
            return self._state
        return self._state.select([self._rows.index(index) for index in indices])

    def replace(self, indices: Sequence[int], after: State) -> None:
        """Take over what a decision made of the rows of the slots `indices`.

        A decision of all rows, which is the rule, swaps the states: at full size a row has hundreds of MB.
        """
        if self._rows == list(indices):
            self._state = after
        else:
            assert self._state is not None
            self._state = self._state.write_rows([self._rows.index(index) for index in indices], after)

    def _arrange(self, rows: list[int]) -> None:
        if rows != self._rows:
            assert self._state is not None
            known = {index: row for row, index in enumerate(self._rows)}
            # A new slot gets a copy of some row, which is written over before it is used.
            self._state = self._state.select([known.get(index, 0) for index in rows])
            self._rows = rows


def split_slots(slots: int, stages: int) -> list[range]:
    """Cut the slots of a batch into parts that differ by one at most.

    >>> split_slots(5, 2)
    [range(0, 2), range(2, 5)]
    """
    ends = [slots * n // stages for n in range(stages + 1)]
    return [range(first, last) for first, last in pairwise(ends)]

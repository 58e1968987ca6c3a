"""Slots: the places of an actor's batch. Pending members of granted groups in, finished episodes out.

A slot carries one episode with its own step counter, seeds, start state and group; when it ends, the next
pending member takes its place, so the batch stays full whatever the neighbours do.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.records import Episode, StartState
from asyncrl.replay.interface import GroupGrant
from asyncrl.seeds import episode_seed, noise_seed


@dataclass(frozen=True, kw_only=True)
class PendingEpisode:
    """One episode that has not begun."""

    grant: GroupGrant
    member: int
    start: StartState


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """What one decision of one slot saw, did and led to."""

    frame: NDArray[np.uint8]
    """``[H, W, 3]`` what the policy saw."""
    sample: Mapping[str, NDArray[Any]]
    """One decision of each array of `Episode.sample`."""
    logprobs: NDArray[np.float32]
    """``[C, A]``."""
    value: float
    actions: NDArray[np.float32]
    """``[C, A]``."""
    scores: NDArray[np.float32]
    """``[C]`` success probability of each new frame."""
    new_frames: NDArray[np.uint8]
    """``[C, H, W, 3]``."""
    policy_version: int
    noise_seed: int


@dataclass(kw_only=True)
class Slot:
    """One episode under way."""

    member: PendingEpisode
    seed: int
    frame: NDArray[np.uint8]
    """``[H, W, 3]`` what is seen now."""
    decisions: list[DecisionRecord] = field(default_factory=list)

    def next_noise_seed(self) -> int:
        """Noise seed of the decision that comes next."""
        return noise_seed(self.seed, len(self.decisions))

    def add(self, decision: DecisionRecord) -> None:
        """Append a decision and move on to its last frame."""
        self.decisions.append(decision)
        self.frame = decision.new_frames[-1]


class Slots:
    """The actor's batch of `size` places and the queue of members that wait for one."""

    def __init__(self, size: int, *, run_seed: int) -> None:
        self.places: list[Slot | None] = [None] * size
        self.pending: deque[PendingEpisode] = deque()
        self._run_seed = run_seed

    @property
    def live(self) -> list[int]:
        """Indices of the places with an episode under way."""
        return [i for i, slot in enumerate(self.places) if slot is not None]

    @property
    def wanted(self) -> int:
        """Places that neither have an episode nor a pending member."""
        return max(0, len(self.places) - len(self.live) - len(self.pending))

    def add_group(self, grant: GroupGrant, start: StartState, group_size: int) -> None:
        """Queue all members of a granted group."""
        self.pending.extend(PendingEpisode(grant=grant, member=i, start=start) for i in range(group_size))

    def fill(self, policy_version: int, among: range) -> list[int]:
        """Begin pending episodes in free places, oldest grant first; return the places that were filled.

        A member waits while the policy held is older than its grant allows.

        Args:
            policy_version: That of the policy held.
            among: Places that may be filled.
        """
        filled = []
        for index in among:
            if self.places[index] is not None:
                continue
            if not self.pending or self.pending[0].grant.min_version > policy_version:
                break
            member = self.pending.popleft()
            seed = episode_seed(self._run_seed, member.grant.number, member.member)
            frames = member.start.context_frames
            now = frames[-1] if len(frames) else member.start.frame
            self.places[index] = Slot(member=member, seed=seed, frame=now)
            filled.append(index)
        return filled

    def slot(self, index: int) -> Slot:
        """The episode in a place that has one."""
        slot = self.places[index]
        assert slot is not None
        return slot

    def remove_group(self, number: int) -> None:
        """Stop the episodes of a group that are under way, and forget those that are pending."""
        for index in self.live:
            if self.slot(index).member.grant.number == number:
                self.places[index] = None
        self.pending = deque(member for member in self.pending if member.grant.number != number)

    def clear(self, index: int) -> Slot:
        """Take the episode out of a place."""
        slot = self.slot(index)
        self.places[index] = None
        return slot


def finished_episode(
    slot: Slot,
    *,
    threshold: float,
    max_decisions: int,
    group_size: int,
    actor: str,
    world_version: int,
    temperature: float,
    top_k: int,
) -> Episode | None:
    """Make the `Episode` record if the slot's episode is over, else None.

    It is over when a frame of the last decision scores at least `threshold`, or after `max_decisions`.
    """
    solved_C = slot.decisions[-1].scores >= threshold
    if not solved_C.any() and len(slot.decisions) < max_decisions:
        return None
    decisions, member = slot.decisions, slot.member
    rewards = np.zeros((len(decisions), solved_C.size), np.float32)
    if solved_C.any():
        rewards[-1, int(solved_C.argmax())] = 1.0
    return Episode(
        episode_id=os.urandom(16).hex(),
        group_id=member.grant.group_id,
        member=member.member,
        group_size=group_size,
        actor=actor,
        task=member.start.task,
        start_state=member.start.name,
        world_version=world_version,
        seed=slot.seed,
        temperature=temperature,
        top_k=top_k,
        end_reason="success" if solved_C.any() else "truncated",
        frames=np.stack([d.frame for d in decisions]),
        sample={name: np.stack([d.sample[name] for d in decisions]) for name in decisions[0].sample},
        logprobs=np.stack([d.logprobs for d in decisions]),
        values=np.array([d.value for d in decisions], np.float32),
        actions=np.stack([d.actions for d in decisions]),
        rewards=rewards,
        success_scores=np.stack([d.scores for d in decisions]),
        policy_versions=np.array([d.policy_version for d in decisions], np.int64),
        noise_seeds=np.array([d.noise_seed for d in decisions], np.int64),
        final_frame=slot.frame.copy(),  # not a view, which would keep alive what was drawn for all slots
        video=_video(slot),
    )


def _video(slot: Slot) -> NDArray[np.uint8]:
    """``[M, H, W, 3]`` every frame that was drawn, or none when the grant does not ask for them."""
    if not slot.member.grant.keep_video:
        return np.empty((0, *slot.frame.shape), np.uint8)
    return np.concatenate([decision.new_frames for decision in slot.decisions])

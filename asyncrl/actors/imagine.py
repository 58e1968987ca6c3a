"""One round of imagination: the observations of all live slots in, one decision more in each of them out.

observations → policy.act → world model → reward model → decision records, and the places that are poisoned
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Generic

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.actors.poison import Poison, find_poison, one_by_one
from asyncrl.actors.seeds import sampling_seed
from asyncrl.actors.slots import DecisionRecord, Slots
from asyncrl.policies.protocol import ActResult, Policy, SamplingParams
from asyncrl.replay.ports import Cause
from asyncrl.rewards.resnet import RewardModel
from asyncrl.worlds.protocol import State, World


@dataclass(frozen=True, kw_only=True)
class _Round(Generic[State]):
    """What some places decided and led to; nothing of it is in the slots yet."""

    state: State
    decisions: list[DecisionRecord]
    poison: list[tuple[Cause, str] | None]


class Imagination(Generic[State]):
    """The models of an actor and the world's state of every slot."""

    def __init__(
        self, policy: Policy, world: World[State], reward: RewardModel, sampling: SamplingParams
    ) -> None:
        self.policy = policy
        self.world = world
        self.reward = reward
        self.sampling = sampling
        self._state: State | None = None
        """One row per place; absent until the first episode begins."""

    def begin(self, slots: Slots, places: list[int]) -> list[Poison]:
        """Open the world for the episodes that were just put into `places`.

        Returns:
            Places for whose start state the world raises; they have no state and must be cleared.
        """
        opened, failed = one_by_one(
            places, lambda some: self.world.start([slots.slot(i).member.start for i in some])
        )
        for some, fresh in opened:
            before = fresh.select([0] * len(slots.places)) if self._state is None else self._state
            self._state = before.put(some, fresh)
        return failed

    @torch.inference_mode()
    def step(self, slots: Slots, policy_version: int) -> list[Poison]:
        """Make one decision in every live slot.

        Returns:
            Places that are poisoned: they made no decision and must be cleared. The others do not notice.
        """
        rounds, failed = one_by_one(slots.live, partial(self._decide, slots, policy_version))
        for places, made in rounds:
            assert self._state is not None
            self._state = self._state.put(places, made.state)
            for place, decision, poison in zip(places, made.decisions, made.poison, strict=True):
                if poison is None:
                    slots.slot(place).add(decision)
                else:
                    failed.append(Poison(place=place, cause=poison[0], reason=poison[1]))
        return failed

    def _decide(self, slots: Slots, policy_version: int, places: list[int]) -> _Round[State]:
        """Make one decision in `places`, without any effect on them.

        What is checked comes to host memory anyway, but for the world's ``[B]`` flags; and these come last,
        when the device has nothing left to do.
        """
        seeds = [slots.slot(i).next_noise_seed() for i in places]
        frames_B = np.stack([slots.slot(i).frame for i in places])
        tasks_B = [slots.slot(i).member.start.task for i in places]
        acted = self.policy.act(
            self.policy.preprocess(frames_B, tasks_B), self.sampling, [sampling_seed(seed) for seed in seeds]
        )
        assert self._state is not None
        new_frames, state = self.world.imagine(self._state.select(places), acted.actions, seeds)
        scores_B8 = self.reward.score(new_frames, tasks_B).cpu().numpy()
        tokens, logprobs = acted.tokens.cpu().numpy().astype(np.int32), acted.logprob.cpu().numpy()
        actions, drawn = acted.actions.cpu().numpy().astype(np.float32), new_frames.cpu().numpy()
        values = _values(acted, len(places))
        checks: list[tuple[Cause, str, NDArray[np.generic]]] = [
            ("policy", "policy's log-probs are", logprobs),
            ("policy", "policy's actions are", actions),
            ("world", "world model's frames or latents are", state.finite.cpu().numpy()),
            ("reward", "reward model's scores are", scores_B8),
        ]
        if acted.value is not None:
            checks.insert(0, ("policy", "policy's value is", values))
        return _Round(
            state=state,
            poison=[find_poison(checks, row) for row in range(len(places))],
            decisions=[
                DecisionRecord(
                    frame=frames_B[row],
                    tokens=tokens[row],
                    logprobs=logprobs[row],
                    value=float(values[row]),
                    actions=actions[row],
                    scores=scores_B8[row],
                    new_frames=drawn[row],
                    policy_version=policy_version,
                    noise_seed=seeds[row],
                )
                for row in range(len(places))
            ],
        )


def _values(acted: ActResult, rows: int) -> NDArray[np.float32]:
    """``[B]`` the critic's first value of each row; nan without a critic."""
    if acted.value is None:
        return np.full(rows, np.nan, np.float32)
    return acted.value[:, 0].float().cpu().numpy()

"""One round of imagination: the observations of all live slots in, one decision more in each of them out.

observations → policy.act → world model → reward model → decision records
"""

from __future__ import annotations

from typing import Generic

import numpy as np
import torch

from asyncrl.actors.seeds import sampling_seed
from asyncrl.actors.slots import DecisionRecord, Slots
from asyncrl.policies.protocol import Policy, SamplingParams
from asyncrl.rewards.resnet import RewardModel
from asyncrl.worlds.protocol import State, World


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

    def begin(self, slots: Slots, places: list[int]) -> None:
        """Open the world for the episodes that were just put into `places`."""
        fresh = self.world.start([slots.slot(i).member.start for i in places])
        before = fresh.select([0] * len(slots.places)) if self._state is None else self._state
        self._state = before.put(places, fresh)

    @torch.inference_mode()
    def step(self, slots: Slots, policy_version: int) -> None:
        """Make one decision in every live slot."""
        live = slots.live
        seeds = [slots.slot(i).next_noise_seed() for i in live]
        frames_B = np.stack([slots.slot(i).frame for i in live])
        tasks_B = [slots.slot(i).member.start.task for i in live]
        acted = self.policy.act(
            self.policy.preprocess(frames_B, tasks_B), self.sampling, [sampling_seed(seed) for seed in seeds]
        )
        assert self._state is not None
        new_frames, state = self.world.imagine(self._state.select(live), acted.actions, seeds)
        self._state = self._state.put(live, state)
        scores_B8 = self.reward.score(new_frames, tasks_B).cpu().numpy()
        tokens, logprobs = acted.tokens.cpu().numpy().astype(np.int32), acted.logprob.cpu().numpy()
        actions, drawn = acted.actions.cpu().numpy().astype(np.float32), new_frames.cpu().numpy()
        values = (
            np.full(len(live), np.nan) if acted.value is None else acted.value[:, 0].float().cpu().numpy()
        )
        for row, index in enumerate(live):
            slots.slot(index).add(
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
            )

"""Makes decisions in a simulator: the policy decides, the workers of a pool carry it out slot by slot.

`launch` decides for the slots of a stage that wait for a decision and sends each its steps; `collect` waits
until simulators of the stage have answered. No slot waits for the slowest reset. A step has side effects, so
no request is ever repeated: episodes of a lost worker begin again from their starts, with the same seeds and
the current weights.

B slots that are decided, C steps per decision, S steps that were carried out, K cameras, V = K - 1,
Q numbers of state, A numbers per step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import numpy as np
import torch

from asyncrl.actors.backend import (
    Backend,
    Decision,
    EpisodeEnd,
    EpisodeInProgress,
    EpisodeStart,
    Failure,
    Slots,
    Stage,
)
from asyncrl.actors.imagination import CPU, Check, decision_tensors, find_failure, retry_slots_singly
from asyncrl.devices.tensors import DeviceEvent
from asyncrl.errors import RunError
from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import Metric
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.records import EndReason, sampling_seed
from asyncrl.simulators.interface import SimStart
from asyncrl.simulators.pool import SimulatorPool, SlotAnswer

SIMULATOR: Final = -1  # Episode.world_version of a simulated episode
MOST_RESTARTS: Final = 2  # Restarts of an episode after lost workers; then its group is given up
CHECKED: Final = (("values", "values"), ("logprobs", "log-probs"), ("actions", "actions"))
_POLL: Final = 1.0


@dataclass(kw_only=True)
class _SlotState:
    episode: EpisodeInProgress | None = None  # Episode of the last request
    awaits_answer: bool = False
    decision: Decision = field(default_factory=dict)  # The decision being carried out; empty during a reset
    restarts: int = 0
    steps_taken: int = 0
    end: EndReason | None = None

    def is_over(self, max_decisions: int) -> bool:
        decisions = self.episode.decisions if self.episode else []
        return self.end is not None or len(decisions) >= max_decisions


class SimulatorBackend(Backend[Any]):
    """A policy and a pool of simulators. Used by one thread."""

    def __init__(
        self,
        policy: Policy,
        pool: SimulatorPool,
        sampling: SamplingParams,
        *,
        max_decisions: int,
        cameras: int = 1,
        shows_state: bool = False,
        together: bool = False,
        patience: float = 900.0,
        device: torch.device = CPU,
    ) -> None:
        """Join the parts; with `together`, a decision waits for all slots' answers, at most `patience` s."""
        super().__init__(policy, sampling, device)
        self.pool, self.world_version = pool, SIMULATOR
        self.max_decisions, self.cameras, self.shows_state = max_decisions, cameras, shows_state
        self.together, self.patience = together, patience
        self.restarted = 0
        self._slots = [_SlotState() for _ in range(pool.slots)]

    @property
    def counts(self) -> Mapping[Metric, int]:
        """Return the decisions carried out and the episodes restarted since the actor began."""
        return {**super().counts, m.ACTOR_RESTARTED: self.restarted}

    def is_cheapest(self, index: int, start: EpisodeStart) -> bool:
        """Return True if the scene of the start's task is loaded in the slot."""
        return self.pool.loaded_task(index) == getattr(start, "task_id", -1)

    def begin(self, slots: Slots, stage: Stage[Any], indices: list[int]) -> list[Failure]:
        """Request resets for new episodes; a slot that still steps a removed episode is reset afterwards."""
        self.release(slots, stage)
        for index in indices:
            if not self._slots[index].awaits_answer:
                self._reset(index, slots.episode(index))
        return []

    def launch(
        self, slots: Slots, stage: Stage[Any], indices: list[int], policy_version: int
    ) -> list[Failure]:
        """Decide for the slots that are ready for a decision and send them the steps."""
        self.release(slots, stage)
        if self.together:
            failed, _ = self._wait(slots, indices, self.patience)
        else:
            failed = self._handle_answers(slots, 0.0)
        own = [index for index in indices if self._slots[index].episode is slots.episode(index)]
        # An answer handled just now may be an episode's last: `collect` hands it over.
        over = {index for index in own if self._slots[index].is_over(self.max_decisions)}
        ready = [index for index in own if not self._slots[index].awaits_answer and index not in over]
        if ready:
            parts, raised = retry_slots_singly(ready, partial(self._decide, slots, policy_version))
            failed += raised
            for part, rows in parts:
                failed += self._send(slots, part, rows)
        for failure in failed:  # Simulators that step together would wait for these slots.
            if not self._slots[failure.index].awaits_answer:
                self._leave(failure.index)
        stage.in_flight = [index for index in indices if self._slots[index].awaits_answer or index in over]
        return failed

    def collect(self, slots: Slots, stage: Stage[Any], timeout: float) -> tuple[list[Failure], float]:
        """Wait for the first answers of the stage, or with `together` for all."""
        awaited, stage.in_flight = stage.in_flight, []
        failed, waited = self._wait(slots, awaited, timeout)
        self._seconds[m.ACTOR_SIMULATORS] += waited
        # On the CPU the actor subtracts all of `pop_device_seconds` from its own time, this wait included.
        return failed, 0.0 if self.device.type == "cpu" else waited

    def release(self, slots: Slots, stage: Stage[Any]) -> None:
        """Free slots whose episode is gone, so that simulators that step together do not wait for them."""
        for index in stage.indices:
            slot = self._slots[index]
            if slots.episodes[index] is not slot.episode and not slot.awaits_answer:
                self._leave(index)

    def episode_end(self, episode: EpisodeInProgress) -> EpisodeEnd | None:
        """End an episode with its simulator, or after `max_decisions`."""
        slot = next(slot for slot in self._slots if slot.episode is episode)
        if not slot.is_over(self.max_decisions):
            return None
        return EpisodeEnd(
            reason=slot.end or "truncated",
            rewards=np.stack([row["rewards"] for row in episode.decisions]),
            steps_taken=slot.steps_taken,
        )

    def close(self) -> None:
        """End the workers."""
        self.pool.close()

    def _reset(self, index: int, episode: EpisodeInProgress, restarts: int = 0) -> None:
        self._slots[index] = _SlotState(episode=episode, awaits_answer=True, restarts=restarts)
        self.pool.reset(index, cast("SimStart", episode.plan.start))  # The stream has no others.

    def _leave(self, index: int) -> None:
        if self._slots[index].episode is not None:
            self.pool.leave(index)
            self._slots[index] = _SlotState()

    # --- answers ---

    def _wait(self, slots: Slots, awaited: list[int], timeout: float) -> tuple[list[Failure], float]:
        failed, began = list[Failure](), time.monotonic()
        while True:
            still = [index for index in awaited if self._slots[index].awaits_answer]
            if not still or (not self.together and len(still) < len(awaited)):
                return failed, time.monotonic() - began
            remaining = began + timeout - time.monotonic()
            if remaining <= 0:
                raise RunError(
                    f"No simulator answered for slot {still[0]} within {timeout:g} s (--hang-timeout), so "
                    "it hangs or the machine is overloaded. Use fewer --simulator.workers or --actor.slots."
                )
            failed += self._handle_answers(slots, min(remaining, _POLL))

    def _handle_answers(self, slots: Slots, patience: float) -> list[Failure]:
        handled = (self._handle(slots, answer) for answer in self.pool.ready(patience))
        return [failure for failure in handled if failure is not None]

    def _handle(self, slots: Slots, answer: SlotAnswer) -> Failure | None:
        index, slot = answer.slot, self._slots[answer.slot]
        slot.awaits_answer, episode = False, slots.episodes[answer.slot]
        if episode is None or episode is not slot.episode:  # Its group was given up since the request.
            if answer.lost:
                self._slots[index] = _SlotState()
            else:
                self._leave(index)
            if episode is not None:
                self._reset(index, episode)
            return None
        if answer.lost:
            return self._restart(index, episode, answer.lost)
        if not answer.steps:
            episode.task = answer.task
            self._show(episode, answer)
            return None
        return self._add_decision(slot, episode, answer)

    def _restart(self, index: int, episode: EpisodeInProgress, reason: str) -> Failure | None:
        restarts = self._slots[index].restarts
        if restarts >= MOST_RESTARTS:
            self._slots[index] = _SlotState()
            reason = f"its worker was lost {restarts + 1} times: {reason}"
            return Failure(index=index, cause="world", reason=reason)
        self.restarted += 1
        episode.decisions, episode.decisions_reported = [], 0
        self._reset(index, episode, restarts + 1)
        return None

    def _show(self, episode: EpisodeInProgress, answer: SlotAnswer) -> None:
        episode.frame = answer.frames[-1, 0]
        if self.cameras > 1:
            episode.more_frames = answer.frames[-1, 1 : self.cameras]
        if self.shows_state:
            episode.state = answer.states[-1]

    def _add_decision(
        self, slot: _SlotState, episode: EpisodeInProgress, answer: SlotAnswer
    ) -> Failure | None:
        checks: list[Check] = [
            ("world", "simulator's rewards are", answer.rewards[None]),
            ("world", "simulator's state is", answer.states),
        ]
        if failure := find_failure(checks, 0, answer.slot):
            return failure
        decision, slot.decision = slot.decision, {}
        chunk = len(decision["actions"])
        results = {
            "rewards": np.pad(answer.rewards.astype(np.float32), (0, chunk - answer.steps)),
            "success_scores": np.pad(answer.success.astype(np.float32), (0, chunk - answer.steps)),
            "video": answer.frames[:, 0],
        }
        episode.add(decision | results)
        self._show(episode, answer)
        slot.steps_taken += answer.steps
        if answer.success.any():
            slot.end = "success"
        elif answer.terminated or answer.truncated:
            slot.end = "terminated" if answer.terminated else "truncated"
        self.decisions += 1
        if slot.end is None and answer.steps < chunk:
            reason = f"the simulator stopped after {answer.steps} of {chunk} steps without an end"
            return Failure(index=answer.slot, cause="world", reason=reason)
        return None

    # --- decisions ---

    @torch.inference_mode()
    def _decide(self, slots: Slots, policy_version: int, indices: list[int]) -> list[Decision]:
        """Run the policy; changes no state."""
        episodes = [slots.episode(index) for index in indices]
        seeds = [episode.next_noise_seed() for episode in episodes]
        named = [{"frames": e.frame, "more_frames": e.more_frames, "states": e.state} for e in episodes]
        observations: list[Decision] = [{n: x for n, x in seen.items() if x is not None} for seen in named]
        frames = np.stack([row["frames"] for row in observations])
        if self.cameras > 1:
            more = np.stack([row["more_frames"] for row in observations])
            frames = np.concatenate([frames[:, None], more], axis=1)
        states = [np.stack([row["states"] for row in observations])] if self.shows_state else []
        began = DeviceEvent(self.device)
        inputs = self.policy.preprocess(frames, [episode.task for episode in episodes], *states)
        acted = self.policy.act(inputs, self.sampling, [sampling_seed(seed) for seed in seeds])
        tensors = decision_tensors(self.policy, acted)
        decided = DeviceEvent(self.device)
        arrays = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
        self._seconds[m.ACTOR_POLICY] += decided.since(began)
        return [
            {name: array[row].copy() for name, array in arrays.items()}
            | {"policy_versions": np.array(policy_version), "noise_seeds": np.array(seeds[row])}
            | observation
            for row, observation in enumerate(observations)
        ]

    def _send(self, slots: Slots, indices: list[int], rows: list[Decision]) -> list[Failure]:
        failed = []
        names = [(key, name) for key, name in CHECKED if key in rows[0]]
        for index, row in zip(indices, rows, strict=True):
            checks: list[Check] = [("policy", f"policy's {name} are", row[key][None]) for key, name in names]
            if failure := find_failure(checks, 0, index):
                failed.append(failure)
                continue
            slot = self._slots[index]
            slot.decision, slot.awaits_answer = row, True
            keep_video = slots.episode(index).plan.grant.keep_video
            self.pool.step(index, row["actions"], frames="all" if keep_video else "last")
        return failed

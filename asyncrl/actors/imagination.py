"""Makes one decision for all episodes of a stage: policy, world model, reward model.

`launch` gives the devices their work and waits for nothing; `collect` waits for them, appends the decision to
the episodes and names those that failed.

On CUDA everything between is given to the current streams of the devices, one launch after the other. So a
launch never overtakes the one before, a state that is swapped or overwritten was read before, and weights
that are copied into the policy between two launches are those of the later one. Where policy and world are on
two devices, copying the actions makes the world's stream wait for the policy's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.actors.acting import RowFailure, first_failure, retry_rows_singly
from asyncrl.actors.slots import Ending, EpisodeInProgress, InFlightDecision, Slots, Stage, Start, TimedWork
from asyncrl.config.sections import SuccessFrames
from asyncrl.devices.events import DeviceEvent, wait_for
from asyncrl.episode_layout import SAMPLE_DTYPES
from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import Metric
from asyncrl.policies.interface import ActResult, Policy, SamplingParams
from asyncrl.records import StartState
from asyncrl.replay.interface import Cause
from asyncrl.rewards.interface import RewardModel, deciding_step
from asyncrl.seeds import sampling_seed
from asyncrl.worlds.interface import State, World

CPU: Final = torch.device("cpu")
TORCH_DTYPES: Final = {name: getattr(torch, name) for name in SAMPLE_DTYPES}
"""Of the arrays of a sample."""


@dataclass(frozen=True, kw_only=True)
class EndRule:
    """When an imagined episode is over."""

    max_decisions: int = 6
    threshold: float = 0.7
    success_frames: SuccessFrames = 1
    """All three as in `ActorSettings`."""


class Imagination(Generic[State]):
    """Decides with the models of an actor. What the world remembers of the episodes is in the stages."""

    def __init__(
        self,
        policy: Policy,
        world: World[State],
        reward: RewardModel,
        sampling: SamplingParams,
        *,
        rule: EndRule = EndRule(),
        policy_device: torch.device = CPU,
        world_device: torch.device = CPU,
        rows: int = 0,
    ) -> None:
        """Join the models.

        Args:
            rows: Rows of every pass of every model; where fewer slots take part, copies of the first fill it
                up. What a model computes of a row depends on how many there are, in the last digits, but not
                on which: so an episode is the same whatever else is imagined. 0: no copies.
        """
        self.policy = policy
        self.world = world
        self.reward = reward
        self.sampling = sampling
        self.rule = rule
        self.policy_device, self.world_device = policy_device, world_device
        self.rows = rows
        self.decisions = 0
        """Decisions that were made since the actor began."""
        self._seconds: dict[Metric, float] = {}

    @property
    def devices(self) -> set[torch.device]:
        """Where the models are."""
        return {self.policy_device, self.world_device}

    @property
    def models(self) -> list[World[State] | RewardModel]:
        """What is there besides the policy."""
        return [self.world, self.reward]

    @property
    def version(self) -> int:
        """Which world model it is."""
        return self.world.version

    @property
    def counts(self) -> Mapping[Metric, int]:
        """What was counted since the actor began."""
        return {m.ACTOR_DECISIONS: self.decisions}

    def suits(self, index: int, start: Start) -> bool:
        """Say that any slot takes any start state."""
        return True

    @torch.inference_mode()
    def begin(self, slots: Slots, stage: Stage[State], indices: list[int]) -> list[RowFailure]:
        """Open the world for the episodes that were just put into slots of a stage that is not in flight.

        Returns:
            Slots for whose start state the world raises; they have no state and must be cleared.
        """
        for index in indices:
            episode = slots.episode(index)
            episode.task, episode.frame = episode.pending.start.task, _start_state(episode).present_frame
        began = DeviceEvent(self.world_device)
        opened, failed = retry_rows_singly(indices, partial(self._start, slots))
        for part, fresh in opened:
            stage.open(part, fresh)
        stage.timed_work.append((m.ACTOR_WORLD, began, DeviceEvent(self.world_device)))
        return failed

    @torch.inference_mode()
    def launch(
        self, slots: Slots, stage: Stage[State], indices: list[int], policy_version: int
    ) -> list[RowFailure]:
        """Let the devices begin one decision in `indices`: all slots of the stage that have an episode.

        Returns:
            Slots for which something raises at once: they make no decision and must be cleared.
        """
        stage.keep(indices)
        parts, failed = retry_rows_singly(indices, partial(self._decide, slots, stage, policy_version))
        for part, (decision, after) in parts:
            stage.replace(part, after)
            stage.in_flight.append(decision)
        return failed

    def collect(self, slots: Slots, stage: Stage[State], deadline: float) -> tuple[list[RowFailure], float]:
        """Wait for the stage's decision and append it to the episodes.

        Returns:
            Slots that failed: they made no decision and must be cleared. The others do not notice. And the
            seconds waited.

        Raises:
            RunError: The devices did not finish within `deadline` seconds.
        """
        in_flight, stage.in_flight = stage.in_flight, []
        waited = wait_for([event for decision in in_flight for event in decision.done_events], deadline)
        failed = []
        for decision in in_flight:
            stage.timed_work += decision.timed_work
            checks = _checks(decision)
            for row, (index, episode) in enumerate(zip(decision.indices, decision.episodes, strict=True)):
                if slots.episodes[index] is not episode:
                    continue  # Its group was given up meanwhile.
                if (failure := first_failure(checks, row)) is None:
                    # Copied: a view would keep the rows of all slots in pinned memory until its episode ends.
                    episode.add({name: array[row].numpy().copy() for name, array in decision.arrays.items()})
                    self.decisions += 1
                else:
                    failed.append(RowFailure(index=index, cause=failure[0], reason=failure[1]))
        self._count(stage)
        return failed, waited

    def release(self, slots: Slots, stage: Stage[State]) -> None:
        """Give back the memory of the stage's states."""
        stage.keep([])

    def ending(self, episode: EpisodeInProgress) -> Ending | None:
        """End an episode when its scores make a success (`deciding_step`), or at the limit."""
        rule, rows = self.rule, episode.decisions
        scores_NC = np.stack([row["success_scores"] for row in rows])
        solved = deciding_step(scores_NC, rule.threshold, rule.success_frames)
        if solved is None and len(rows) < rule.max_decisions - _start_state(episode).elapsed:
            return None
        rewards = np.zeros(scores_NC.shape, np.float32)
        if solved is not None:
            rewards[solved] = 1.0
        return Ending(reason="truncated" if solved is None else "success", rewards=rewards)

    def close(self) -> None:
        """Do nothing: there are no other processes."""

    def pop_device_seconds(self) -> dict[Metric, float]:
        """Return the seconds that policy, world and reward kept the devices busy since this was asked."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _count(self, stage: Stage[State]) -> None:
        for metric, began, ended in stage.timed_work:
            self._seconds[metric] = self._seconds.get(metric, 0.0) + ended.since(began)
        stage.timed_work = []

    def _start(self, slots: Slots, indices: list[int]) -> State:
        starts = [_start_state(slots.episode(i)) for i in self._filled(indices)]
        state = self.world.start(starts, decisions=self.rule.max_decisions)
        return _first_rows(state, len(indices))

    def _filled(self, indices: list[int]) -> list[int]:
        """Return the slots of a pass: those that take part, and the first of them for each row left over."""
        return [*indices, *indices[:1] * (self.rows - len(indices))]

    def _decide(
        self,
        slots: Slots,
        stage: Stage[State],
        policy_version: int,
        indices: list[int],
    ) -> tuple[InFlightDecision, State]:
        """Launch one decision in `indices`, without any effect on them; the world's state after it is new."""
        filled = self._filled(indices)
        episodes = [slots.episode(i) for i in filled]
        seeds = [episode.next_noise_seed() for episode in episodes]
        frames_B = np.stack([episode.frame for episode in episodes])
        tasks_B = [episode.task for episode in episodes]
        began = DeviceEvent(self.policy_device)
        acted = self.policy.act(
            self.policy.preprocess(frames_B, tasks_B), self.sampling, [sampling_seed(seed) for seed in seeds]
        )
        decided = DeviceEvent(self.policy_device)
        actions = acted.actions.to(self.world_device)
        received = DeviceEvent(self.world_device)
        new_frames, state = self.world.imagine(stage.state_of(filled), actions, seeds)
        drawn = DeviceEvent(self.world_device)
        scores = self.reward.score(new_frames, tasks_B)
        scored = DeviceEvent(self.world_device)
        timed_work: list[TimedWork] = [
            (m.ACTOR_POLICY, began, decided),
            (m.ACTOR_WORLD, received, drawn),
            (m.ACTOR_REWARD, drawn, scored),
        ]
        arrays = {
            "frames": torch.from_numpy(frames_B),
            **self._sample(acted),
            "logprobs": _to_host(acted.logprob.float()),
            "actions": _to_host(acted.actions.float()),
            "success_scores": _to_host(scores),
            "policy_versions": torch.full((len(seeds),), policy_version),
            "noise_seeds": torch.tensor(seeds),
            "video": _to_host(new_frames),
        }
        if acted.value is not None:
            arrays["values"] = _to_host(acted.value[:, 0].float())
        decision = InFlightDecision(  # Its arrays may have more rows than it has slots: nobody looks at them.
            indices=indices,
            episodes=episodes[: len(indices)],
            arrays=arrays,
            finite=_to_host(state.finite),
            timed_work=timed_work,
            done_events=(DeviceEvent(self.policy_device), DeviceEvent(self.world_device)),
        )
        return decision, _first_rows(state, len(indices))

    def _sample(self, acted: ActResult) -> dict[str, Tensor]:
        """Copy the arrays that the policy declares to host memory, in the types that it declares."""
        specs = self.policy.sample_arrays
        return {name: _to_host(acted.sample[name].to(TORCH_DTYPES[specs[name].dtype])) for name in specs}


def _start_state(episode: EpisodeInProgress) -> StartState:
    return cast("StartState", episode.pending.start)  # The stream of a world model has no others.


def _first_rows(state: State, count: int) -> State:
    return state if len(state) == count else state.select(range(count))


def _to_host(tensor: Tensor) -> Tensor:
    """Copy to host memory in stream order: into pinned memory, so that the host need not wait."""
    return tensor.to(CPU, non_blocking=True)


def _checks(decision: InFlightDecision) -> Sequence[tuple[Cause, str, NDArray[np.generic]]]:
    """Say what must be finite, and by whose fault it is not."""
    arrays = {name: array.numpy() for name, array in decision.arrays.items()}
    checks: list[tuple[Cause, str, NDArray[np.generic]]] = [
        ("policy", "policy's log-probs are", arrays["logprobs"]),
        ("policy", "policy's actions are", arrays["actions"]),
        ("world", "world model's frames or latents are", decision.finite.numpy()),
        ("reward", "reward model's scores are", arrays["success_scores"]),
    ]
    if "values" in arrays:
        checks.insert(0, ("policy", "policy's value is", arrays["values"]))
    return checks

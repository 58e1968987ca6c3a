"""Makes one decision for all episodes of a stage: policy, world model, reward model.

`launch` queues the device's work without waiting; `collect` waits for it. On CUDA, all work is queued on
the current stream of the device, in the order of the launches. So a state is read before it is swapped or
overwritten, and weights copied into the policy between two launches apply to the later one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.actors.backend import Backend, EpisodeEnd, EpisodeInProgress, Failure, Slots, Stage, TimedWork
from asyncrl.config.sections import ActorSettings
from asyncrl.devices.tensors import DeviceEvent
from asyncrl.episode_layout import SAMPLE_DTYPES
from asyncrl.errors import AsyncRLError, RunError, first_line
from asyncrl.observability import metrics_system as m
from asyncrl.observability import process_status, waits
from asyncrl.policies.interface import ActResult, Policy, SamplingParams
from asyncrl.records import StartState, sampling_seed
from asyncrl.replay.interface import Cause
from asyncrl.rewards.interface import RewardModel, deciding_step
from asyncrl.worlds.interface import State, World, imagine

CPU: Final = torch.device("cpu")
Result = TypeVar("Result")
Check = tuple[Cause, str, NDArray[np.generic]]
"""Cause, name, and ``[B, ...]`` floats, or ``[B]`` bool that is False where they are not finite."""
_REASON: Final = 300
POLL_INTERVAL: Final = 0.0002  # Seconds between two queries of a device: a blocking call has no deadline
_log = logging.getLogger(__name__)
_TORCH_DTYPES: Final = {name: getattr(torch, name) for name in SAMPLE_DTYPES}


@dataclass(frozen=True, kw_only=True)
class InFlightDecision:
    """One decision of B slots that the device may still be working on; not yet in its episodes.

    The tensors are in host memory, and complete once `done` has passed; further rows are padding.
    """

    indices: list[int]
    episodes: list[EpisodeInProgress]  # Of the slots at the launch
    arrays: dict[str, Tensor]  # Decision with an axis of slots: name -> [B or more, ...]
    finite: Tensor  # [B or more] bool: WorldState.finite after the decision
    timed_work: list[TimedWork]
    done: DeviceEvent

    def checks(self) -> list[Check]:
        """Return the arrays that must be finite."""
        arrays = {name: array.numpy() for name, array in self.arrays.items()}
        value: list[Check] = [("policy", "policy's value is", arrays["values"])] if "values" in arrays else []
        return [
            *value,
            ("policy", "policy's log-probs are", arrays["logprobs"]),
            ("policy", "policy's actions are", arrays["actions"]),
            ("world", "world model's frames or latents are", self.finite.numpy()),
            ("reward", "reward model's scores are", arrays["success_scores"]),
        ]


class WorldBackend(Backend[State]):
    """Policy, world and reward model; stages hold the world's state of their episodes."""

    def __init__(
        self,
        policy: Policy,
        world: World[State],
        reward: RewardModel,
        sampling: SamplingParams,
        *,
        rule: ActorSettings,
        device: torch.device = CPU,
        rows: int = 0,
    ) -> None:
        """Join the models; passes are padded to `rows`, because rounding depends on the number of rows."""
        super().__init__(policy, sampling, device)
        self.world, self.reward, self.rule, self.rows = world, reward, rule, rows
        self.world_version, self.models = world.version, (world, reward)

    @torch.inference_mode()
    def begin(self, slots: Slots, stage: Stage[State], indices: list[int]) -> list[Failure]:
        """Open the world for new episodes; returns the slots whose start state it rejected."""
        for index in indices:
            episode = slots.episode(index)
            episode.task, episode.frame = episode.plan.start.task, _start_state(episode).present_frame
        began = DeviceEvent(self.device)
        opened, failed = retry_slots_singly(indices, partial(self._open, slots))
        for part, fresh in opened:
            stage.open(part, fresh)
        stage.timed_work.append((m.ACTOR_WORLD, began, DeviceEvent(self.device)))
        return failed

    @torch.inference_mode()
    def launch(
        self, slots: Slots, stage: Stage[State], indices: list[int], policy_version: int
    ) -> list[Failure]:
        """Queue one decision in `indices`; returns the slots whose models raised while queueing."""
        stage.keep(indices)
        parts, failed = retry_slots_singly(indices, partial(self._decide, slots, stage, policy_version))
        for part, (decision, after) in parts:
            stage.replace(part, after)
            stage.in_flight.append(decision)
        return failed

    def collect(self, slots: Slots, stage: Stage[State], timeout: float) -> tuple[list[Failure], float]:
        """Wait for the stage's decision and append it to the episodes."""
        in_flight, stage.in_flight = stage.in_flight, []
        waited = wait_for([decision.done for decision in in_flight], timeout)
        failed = []
        for decision in in_flight:
            stage.timed_work += decision.timed_work
            checks = decision.checks()
            for row, (index, episode) in enumerate(zip(decision.indices, decision.episodes, strict=True)):
                if slots.episodes[index] is not episode:
                    continue  # Its group was given up since the launch.
                if failure := find_failure(checks, row, index):
                    failed.append(failure)
                    continue
                # Copied: a view would keep the rows of all slots in pinned memory until its episode ends.
                episode.add({name: array[row].numpy().copy() for name, array in decision.arrays.items()})
                self.decisions += 1
        for metric, began, ended in stage.timed_work:
            self._seconds[metric] += ended.since(began)
        stage.timed_work = []
        return failed, waited

    def release(self, slots: Slots, stage: Stage[State]) -> None:
        """Free the stage's states."""
        stage.keep([])

    def episode_end(self, episode: EpisodeInProgress) -> EpisodeEnd | None:
        """End an episode when its scores make a success (`deciding_step`), or at the limit."""
        rule, rows = self.rule, episode.decisions
        scores_NC = np.stack([row["success_scores"] for row in rows])
        solved = deciding_step(scores_NC, rule.success_threshold, rule.success_frames)
        if solved is None and len(rows) < rule.max_decisions - _start_state(episode).elapsed:
            return None
        rewards = np.zeros(scores_NC.shape, np.float32)
        if solved is not None:
            rewards[solved] = 1.0
        return EpisodeEnd(reason="truncated" if solved is None else "success", rewards=rewards)

    def _open(self, slots: Slots, indices: list[int]) -> State:
        starts = [_start_state(slots.episode(i)) for i in self._filled_up(indices)]
        state = self.world.start(starts, decisions=self.rule.max_decisions)
        return _first_rows(state, len(indices))

    def _filled_up(self, indices: list[int]) -> list[int]:
        return [*indices, *indices[:1] * (self.rows - len(indices))]

    def _decide(
        self, slots: Slots, stage: Stage[State], policy_version: int, indices: list[int]
    ) -> tuple[InFlightDecision, State]:
        """Queue a decision of the rows; changes no state."""
        rows = self._filled_up(indices)
        episodes = [slots.episode(i) for i in rows]
        seeds = [episode.next_noise_seed() for episode in episodes]
        frames_B = np.stack([episode.frame for episode in episodes])
        tasks_B = [episode.task for episode in episodes]
        began = DeviceEvent(self.device)
        inputs = self.policy.preprocess(frames_B, tasks_B)
        acted = self.policy.act(inputs, self.sampling, [sampling_seed(seed) for seed in seeds])
        decided = DeviceEvent(self.device)
        actions = acted.actions.to(self.device)
        new_frames, state = imagine(self.world, stage.state_of(rows), actions, seeds)
        imagined = DeviceEvent(self.device)
        scores = self.reward.score(new_frames, tasks_B)
        scored = DeviceEvent(self.device)
        copied = decision_tensors(self.policy, acted) | {"success_scores": scores, "video": new_frames}
        arrays = {
            "frames": torch.from_numpy(frames_B),
            "policy_versions": torch.full((len(seeds),), policy_version),
            "noise_seeds": torch.tensor(seeds),
            **{name: tensor.to(CPU, non_blocking=True) for name, tensor in copied.items()},
        }
        decision = InFlightDecision(
            indices=indices,
            episodes=episodes[: len(indices)],
            arrays=arrays,
            finite=state.finite.to(CPU, non_blocking=True),
            timed_work=[
                (m.ACTOR_POLICY, began, decided),
                (m.ACTOR_WORLD, decided, imagined),
                (m.ACTOR_REWARD, imagined, scored),
            ],
            done=DeviceEvent(self.device),
        )
        return decision, _first_rows(state, len(indices))


def wait_for(events: Sequence[DeviceEvent], deadline: float) -> float:
    """Wait until all `events` have passed; return the seconds waited. RunError at the deadline."""
    if all(event.passed for event in events):
        return 0.0
    began = time.monotonic()
    with process_status.waiting(waits.DECISION, deadline):
        while not all(event.passed for event in events):
            if time.monotonic() - began > deadline:
                raise RunError(
                    f"The device did not finish one decision of a part of the slots within {deadline:g} s "
                    "(--hang-timeout). Use fewer --actor.slots, or a larger timeout if it is only slow."
                )
            time.sleep(POLL_INTERVAL)
    return time.monotonic() - began


def decision_tensors(policy: Policy, acted: ActResult) -> dict[str, Tensor]:
    """Return the policy's arrays of B decisions, ``[B, ...]``, by the names and dtypes of `Episode`."""
    specs = policy.sample_arrays
    tensors = {name: acted.sample[name].to(_TORCH_DTYPES[specs[name].dtype]) for name in specs}
    tensors |= {"logprobs": acted.logprob.float(), "actions": acted.actions.float()}
    if acted.value is not None:
        tensors["values"] = acted.value[:, 0].float()
    return tensors


def _start_state(episode: EpisodeInProgress) -> StartState:
    return cast("StartState", episode.plan.start)  # The stream of a world model has no others.


def _first_rows(state: State, count: int) -> State:
    return state if len(state) == count else state.select(range(count))


# --- rows that fail ---
# By a number that is not finite, or by an error of a model, found by retrying the rows alone.


def find_failure(checks: Sequence[Check], row: int, index: int) -> Failure | None:
    """Return the failure of slot `index`: the first array whose `row` is not finite; or None."""
    for cause, name, values_B in checks:
        finite = values_B[row] if values_B.dtype == np.bool_ else np.isfinite(values_B[row]).all()
        if not finite:
            return Failure(index=index, cause=cause, reason=f"the {name} not finite")
    return None


def retry_slots_singly(
    indices: Sequence[int], attempt: Callable[[list[int]], Result]
) -> tuple[list[tuple[list[int], Result]], list[Failure]]:
    """Attempt all slots together; if that raises, each alone, so that only the culprits fail."""
    try:
        return [(list(indices), attempt(list(indices)))], []
    except torch.OutOfMemoryError as error:
        reason, raised = _reason(error), error
    except Exception as error:
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            raise  # The device computes nothing more.
        reason, raised = _reason(error), None if isinstance(error, AsyncRLError) else error
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # Raises again if the error was the device's and shows only now.
    if len(indices) == 1:
        return [], [Failure(index=indices[0], cause="raised", reason=reason, error=raised)]
    alone = [retry_slots_singly([index], attempt) for index in indices]
    failed = [failure for _, failures in alone for failure in failures]
    if not failed:
        _log.warning("%d rows raised together, but none alone: %s", len(indices), reason)
    return [part for parts, _ in alone for part in parts], failed


def _reason(error: Exception) -> str:
    text = f"{type(error).__name__}: {first_line(error)}"[:_REASON]
    return "".join(letter if letter.isprintable() else "?" for letter in text)

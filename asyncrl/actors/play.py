"""Makes decisions in a simulator: the policy chooses, the workers of a pool carry it out slot by slot.

`launch` decides for the slots of a stage that show something and sends each its steps; `collect` waits until
simulators of the stage have answered, and turns each answer into a decision of its episode. So the policy
works while simulators do, and no slot waits for the slowest reset.

A step has effects: nothing that a simulator was asked is ever asked again. Where a worker is lost its
episodes begin again from their starts, with the same seeds and whatever weights there are then: their
decisions say which these were, so the oldest version of such an episode is never older than it was.

Dimension letters:
    B  slots that are decided      C  steps per decision      S  steps that were carried out
    K  cameras, V = K - 1          Q  numbers of state        A  numbers per step
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.actors.acting import RowFailure, first_failure, retry_rows_singly
from asyncrl.actors.imagination import CPU, TORCH_DTYPES
from asyncrl.actors.slots import Ending, EpisodeInProgress, Slots, Stage, Start
from asyncrl.devices.events import DeviceEvent
from asyncrl.errors import RunError
from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import Metric
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.records import EndReason
from asyncrl.replay.interface import Cause
from asyncrl.seeds import sampling_seed
from asyncrl.simulators.interface import SimStart
from asyncrl.simulators.pool import Pool, SlotAnswer

SIMULATOR: Final = -1
"""`Episode.world_version` of what no world model imagined."""
MOST_RESTARTS: Final = 2
"""How often an episode begins again because its worker was lost; then its group is given up."""
_AT_ONCE: Final = 1.0
"""Seconds after which a wait for answers looks at its deadline again."""
Row = dict[str, NDArray[Any]]
"""One decision of one slot, as in `EpisodeInProgress.decisions`."""


class ClosesPool(Pool, Protocol):
    """A pool with something to end."""

    def close(self) -> None:
        """End the workers. May be called again."""
        ...


@dataclass(kw_only=True)
class _Place:
    """What is known of a slot of the pool."""

    episode: EpisodeInProgress | None = None
    """Whose reset or steps it was asked last."""
    asked: bool = False
    """Whether an answer will come."""
    decision: Row = field(default_factory=dict)
    """What is being carried out; empty during a reset."""
    restarts: int = 0
    """How often `episode` began again."""
    taken: int = 0
    """Steps of `episode` that were carried out."""
    end: EndReason | None = None
    """How `episode` ended."""

    @property
    def shows(self) -> bool:
        """Whether there is something to decide on."""
        return self.episode is not None and not self.asked and self.end is None


class Play:
    """Decides in a simulator. Keeps `acting.Acting`; used by one thread."""

    def __init__(
        self,
        policy: Policy,
        pool: ClosesPool,
        sampling: SamplingParams,
        *,
        max_decisions: int,
        cameras: int = 1,
        shows_state: bool = False,
        together: bool = False,
        patience: float = 900.0,
        policy_device: torch.device = CPU,
    ) -> None:
        """Join the parts.

        Args:
            pool: Plays; it has at least as many slots as the actor.
        """
        self.policy, self.pool, self.sampling = policy, pool, sampling
        self.max_decisions, self.cameras, self.shows_state = max_decisions, cameras, shows_state
        self.together, self.patience = together, patience
        self.policy_device = policy_device
        self.version = SIMULATOR
        self.decisions = self.restarted = 0
        self._places = [_Place() for _ in range(pool.slots)]
        self._seconds: dict[Metric, float] = {}

    @property
    def devices(self) -> set[torch.device]:
        """Where the policy is."""
        return {self.policy_device}

    @property
    def counts(self) -> Mapping[Metric, int]:
        """Decisions that were carried out, and episodes that began again, since the actor began."""
        return {m.ACTOR_DECISIONS: self.decisions, m.ACTOR_RESTARTED: self.restarted}

    def suits(self, index: int, start: Start) -> bool:
        """Tell whether the scene of the start's task is the one loaded in the slot."""
        return self.pool.loaded_task(index) == getattr(start, "task_id", -1)

    def begin(self, slots: Slots, stage: Stage[Any], indices: list[int]) -> list[RowFailure]:
        """Ask for the resets of episodes that were just put into slots; their answers come later.

        A slot that still carries out what an episode wanted that is gone is reset when it has answered.
        """
        self.release(slots, stage)
        for index in indices:
            if not self._places[index].asked:
                self._reset(index, slots.episode(index))
        return []

    def launch(
        self, slots: Slots, stage: Stage[Any], indices: list[int], policy_version: int
    ) -> list[RowFailure]:
        """Decide for those of the slots `indices` that show something, and send them their steps.

        Deciding has no effect, so where it raises for all it is tried slot by slot (`retry_rows_singly`).

        Returns:
            Slots whose decision or reset failed: they must be cleared.
        """
        self.release(slots, stage)
        if self.together:
            failed, _ = self._wait(slots, indices, self.patience)
        else:
            failed = self._take(slots, 0.0)
        own = self._own(slots, indices)
        # An answer that was taken just now may be an episode's last: `collect` hands it over.
        over = {index for index in own if self._is_over(slots.episode(index), self._places[index])}
        showing = [index for index in own if self._places[index].shows and index not in over]
        if showing:
            parts, raised = retry_rows_singly(showing, partial(self._decide, slots, policy_version))
            failed += raised
            for some, rows in parts:
                failed += self._send(slots, some, rows)
        self._leave_failed(failed)
        stage.in_flight = [index for index in indices if self._places[index].asked or index in over]
        return failed

    def collect(self, slots: Slots, stage: Stage[Any], deadline: float) -> tuple[list[RowFailure], float]:
        """Wait for answers: the first ones of the stage, or with `together` all of them.

        Returns:
            Slots whose decision failed. And seconds, as `Acting.collect` says: none where the models run on
            this thread, for the waits for simulators are told apart.

        Raises:
            RunError: No simulator answered within `deadline` seconds.
        """
        wanted, stage.in_flight = stage.in_flight, []
        failed, waited = self._wait(slots, wanted, deadline)
        self._add_seconds(m.ACTOR_SIMULATORS, waited)
        on_this_thread = self.policy_device.type == "cpu"
        return failed, 0.0 if on_this_thread else waited

    def release(self, slots: Slots, stage: Stage[Any]) -> None:
        """Tell simulators which step together that nobody plays on where an episode is gone."""
        for index in stage.indices:
            place = self._places[index]
            if place.episode is not None and slots.episodes[index] is not place.episode and not place.asked:
                self.pool.leave(index)
                self._places[index] = _Place()

    def ending(self, episode: EpisodeInProgress) -> Ending | None:
        """Say how an episode ended: as its simulator says, or because `max_decisions` are made."""
        place = next(place for place in self._places if place.episode is episode)
        if not self._is_over(episode, place):
            return None
        return Ending(
            reason=place.end or "truncated",
            rewards=np.stack([row["rewards"] for row in episode.decisions]),
            steps_taken=place.taken,
        )

    def close(self) -> None:
        """End the workers."""
        self.pool.close()

    def pop_device_seconds(self) -> dict[Metric, float]:
        """Return the seconds of the policy, and those that simulators were waited for."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _is_over(self, episode: EpisodeInProgress, place: _Place) -> bool:
        return place.end is not None or len(episode.decisions) >= self.max_decisions

    def _leave_failed(self, failed: list[RowFailure]) -> None:
        """Leave the places of decisions that failed, which simulators that step together would wait for."""
        for failure in failed:
            place = self._places[failure.index]
            if place.episode is not None and not place.asked:
                self.pool.leave(failure.index)
                self._places[failure.index] = _Place()

    def _own(self, slots: Slots, indices: list[int]) -> list[int]:
        """Keep the slots whose place plays the episode that is there now."""
        return [index for index in indices if self._places[index].episode is slots.episode(index)]

    def _reset(self, index: int, episode: EpisodeInProgress, restarts: int = 0) -> None:
        self._places[index] = _Place(episode=episode, asked=True, restarts=restarts)
        self.pool.reset(index, cast("SimStart", episode.pending.start))  # The stream has no others.

    def _add_seconds(self, metric: Metric, seconds: float) -> None:
        self._seconds[metric] = self._seconds.get(metric, 0.0) + seconds

    # ---- answers ---------------------------------------------------------------------------------

    def _wait(self, slots: Slots, wanted: list[int], deadline: float) -> tuple[list[RowFailure], float]:
        """Take answers until one of the slots `wanted` has its own, or with `together` all have."""
        failed, began = list[RowFailure](), time.monotonic()
        while True:
            still = [index for index in wanted if self._places[index].asked]
            if not still or (not self.together and len(still) < len(wanted)):
                return failed, time.monotonic() - began
            left = began + deadline - time.monotonic()
            if left <= 0:
                raise RunError(
                    f"No simulator answered for slot {still[0]} within {deadline:g} s (--hang-timeout), so "
                    "it hangs or the machine is overloaded. Use fewer --simulator.workers or --actor.slots."
                )
            failed += self._take(slots, min(left, _AT_ONCE))

    def _take(self, slots: Slots, patience: float) -> list[RowFailure]:
        """Take the answers that have come, of whatever stage."""
        found = [self._follow(slots, answer) for answer in self.pool.ready(patience)]
        return [failure for failure in found if failure is not None]

    def _follow(self, slots: Slots, answer: SlotAnswer) -> RowFailure | None:
        """Take one answer; returns why the slot's episode cannot go on, if it cannot."""
        index, place = answer.slot, self._places[answer.slot]
        place.asked, now = False, slots.episodes[answer.slot]
        if now is None or now is not place.episode:  # Its group was given up meanwhile.
            if place.episode is not None and not answer.lost:
                self.pool.leave(index)
            self._places[index] = _Place()
            if now is not None:
                self._reset(index, now)
            return None
        if answer.lost:
            return self._begin_again(index, now, place.restarts, answer.lost)
        if not answer.steps:
            now.task = answer.task
            self._look(now, answer)
            return None
        return self._record(index, place, now, answer)

    def _begin_again(
        self, index: int, episode: EpisodeInProgress, restarts: int, reason: str
    ) -> RowFailure | None:
        if restarts >= MOST_RESTARTS:
            self._places[index] = _Place()
            return RowFailure(
                index=index, cause="world", reason=f"its worker was lost {restarts + 1} times: {reason}"
            )
        self.restarted += 1
        episode.decisions, episode.counted = [], 0
        self._reset(index, episode, restarts + 1)
        return None

    def _look(self, episode: EpisodeInProgress, answer: SlotAnswer) -> None:
        """Take over what the slot shows now."""
        episode.frame = answer.frames[-1, 0]
        if self.cameras > 1:
            episode.more_frames = answer.frames[-1, 1 : self.cameras]
        if self.shows_state:
            episode.state = answer.states[-1]

    def _record(
        self, index: int, place: _Place, episode: EpisodeInProgress, answer: SlotAnswer
    ) -> RowFailure | None:
        """Append a decision with what became of it: S steps, filled up with zeros to C."""
        checks: list[tuple[Cause, str, NDArray[np.generic]]] = [
            ("world", "simulator's rewards are", answer.rewards[None]),
            ("world", "simulator's state is", answer.states),
        ]
        if (problem := first_failure(checks, 0)) is not None:
            return RowFailure(index=index, cause=problem[0], reason=problem[1])
        decision, place.decision = place.decision, {}
        chunk = len(decision["actions"])
        outcome = {
            "rewards": _filled_up(answer.rewards, chunk),
            "success_scores": _filled_up(answer.success, chunk),
            "video": answer.frames[:, 0],
        }
        episode.add(decision | outcome)
        self._look(episode, answer)
        place.taken += answer.steps
        place.end = _end_of(answer)
        self.decisions += 1
        if place.end is None and answer.steps < chunk:
            return RowFailure(
                index=index,
                cause="world",
                reason=f"the simulator stopped after {answer.steps} of {chunk} steps without an end",
            )
        return None

    # ---- decisions -------------------------------------------------------------------------------

    @torch.inference_mode()
    def _decide(self, slots: Slots, policy_version: int, indices: list[int]) -> list[Row]:
        """Let the policy choose for the slots `indices`; returns one row per slot. Without any effect."""
        episodes = [slots.episode(index) for index in indices]
        seeds = [episode.next_noise_seed() for episode in episodes]
        shown = np.stack([episode.frame for episode in episodes])
        if self.cameras > 1:
            more = np.stack([episode.more_frames for episode in episodes if episode.more_frames is not None])
            shown = np.concatenate([shown[:, None], more], axis=1)
        tasks, sees = [episode.task for episode in episodes], []
        if self.shows_state:
            sees = [np.stack([episode.state for episode in episodes if episode.state is not None])]
        began = DeviceEvent(self.policy_device)
        inputs = self.policy.preprocess(shown, tasks, *sees)
        acted = self.policy.act(inputs, self.sampling, [sampling_seed(seed) for seed in seeds])
        specs = self.policy.sample_arrays
        chosen = {name: acted.sample[name].to(TORCH_DTYPES[specs[name].dtype]) for name in specs}
        chosen |= {"logprobs": acted.logprob.float(), "actions": acted.actions.float()}
        if acted.value is not None:
            chosen["values"] = acted.value[:, 0].float()
        decided = DeviceEvent(self.policy_device)
        arrays = {name: tensor.cpu().numpy() for name, tensor in chosen.items()}
        self._add_seconds(m.ACTOR_POLICY, decided.since(began))
        return [
            {name: array[row].copy() for name, array in arrays.items()}
            | {"policy_versions": np.array(policy_version), "noise_seeds": np.array(seeds[row])}
            | _seen(episode)
            for row, episode in enumerate(episodes)
        ]

    def _send(self, slots: Slots, indices: list[int], rows: list[Row]) -> list[RowFailure]:
        """Have decisions carried out, but those that are not finite."""
        failed = []
        for index, row in zip(indices, rows, strict=True):
            checks: list[tuple[Cause, str, NDArray[np.generic]]] = [
                ("policy", f"policy's {what} are", row[name][None])
                for name, what in (("values", "values"), ("logprobs", "log-probs"), ("actions", "actions"))
                if name in row
            ]
            if (problem := first_failure(checks, 0)) is not None:
                failed.append(RowFailure(index=index, cause=problem[0], reason=problem[1]))
                continue
            place = self._places[index]
            place.decision, place.asked = row, True
            keep_video = slots.episode(index).pending.grant.keep_video
            self.pool.step(index, row["actions"], frames="all" if keep_video else "last")
        return failed


def _seen(episode: EpisodeInProgress) -> Row:
    """What a decision was taken on."""
    found = {"frames": episode.frame, "more_frames": episode.more_frames, "states": episode.state}
    return {name: array for name, array in found.items() if array is not None}


def _end_of(answer: SlotAnswer) -> EndReason | None:
    if answer.success.any():
        return "success"
    return "terminated" if answer.terminated else "truncated" if answer.truncated else None


def _filled_up(values_S: NDArray[Any], chunk: int) -> NDArray[np.float32]:
    """``[C]`` float32: what each step gave, and 0 for those that were not carried out."""
    filled = np.zeros(chunk, np.float32)
    filled[: len(values_S)] = values_S
    return filled

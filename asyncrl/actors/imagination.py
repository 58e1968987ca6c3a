"""One decision of one stage: the observations of its live slots in, one decision more in each of them out.

launch    observations → policy.act → world model → reward model → host memory      waits for nothing
collect   waits for the devices → decision records, and the places that are poisoned

On CUDA everything between is given to the current streams of the devices, one launch after the other. So a
launch never overtakes the one before, a state that is swapped or overwritten was read before, and weights
that are copied into the policy between two launches are those of the later one. Where policy and world are on
two devices, copying the actions makes the world's stream wait for the policy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, Generic

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.actors.failures import Poison, find_poison, one_by_one
from asyncrl.actors.pipeline import Flight, Span, Stage
from asyncrl.actors.seeds import sampling_seed
from asyncrl.actors.slots import DecisionRecord, Slots
from asyncrl.devices.device_events import DeviceEvent, wait_for
from asyncrl.observability import metrics as m
from asyncrl.observability.metrics import Metric
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.replay.interface import Cause
from asyncrl.rewards.resnet import RewardModel
from asyncrl.worlds.interface import State, World

CPU: Final = torch.device("cpu")


class Imagination(Generic[State]):
    """The models of an actor. What the world remembers about the episodes is in the stages."""

    def __init__(
        self,
        policy: Policy,
        world: World[State],
        reward: RewardModel,
        sampling: SamplingParams,
        *,
        policy_device: torch.device = CPU,
        world_device: torch.device = CPU,
    ) -> None:
        """Join the models; `world_device` holds the reward model too."""
        self.policy = policy
        self.world = world
        self.reward = reward
        self.sampling = sampling
        self.policy_device, self.world_device = policy_device, world_device
        self._seconds: dict[Metric, float] = {}

    @property
    def devices(self) -> set[torch.device]:
        """Where the models are."""
        return {self.policy_device, self.world_device}

    @torch.inference_mode()
    def begin(self, slots: Slots, stage: Stage[State], places: list[int]) -> list[Poison]:
        """Open the world for the episodes that were just put into `places` of a stage that is not in flight.

        Returns:
            Places for whose start state the world raises; they have no state and must be cleared.
        """
        began = DeviceEvent(self.world_device)
        opened, failed = one_by_one(
            places, lambda some: self.world.start([slots.slot(i).member.start for i in some])
        )
        for some, fresh in opened:
            stage.open(some, fresh)
        stage.spans.append((m.ACTOR_WORLD, began, DeviceEvent(self.world_device)))
        return failed

    @torch.inference_mode()
    def launch(
        self, slots: Slots, stage: Stage[State], places: list[int], policy_version: int
    ) -> list[Poison]:
        """Let the devices begin one decision in `places`: all those of the stage that have an episode.

        Returns:
            Places for which something raises at once: they make no decision and must be cleared.
        """
        stage.keep(places)
        parts, failed = one_by_one(places, partial(self._decide, slots, stage, policy_version))
        for some, (flight, after) in parts:
            stage.replace(some, after)
            stage.flights.append(flight)
        return failed

    def collect(self, slots: Slots, stage: Stage[State], deadline: float) -> tuple[list[Poison], float]:
        """Wait for the stage's decision and put it into the slots.

        Returns:
            Places that are poisoned: they made no decision and must be cleared. The others do not notice. And
            the seconds waited.

        Raises:
            RunError: The devices did not finish within `deadline` seconds.
        """
        flights, stage.flights = stage.flights, []
        waited = wait_for([moment for flight in flights for moment in flight.landed], deadline)
        failed = []
        for flight in flights:
            stage.spans += flight.spans
            checks = _checks(flight)
            for row, (place, episode) in enumerate(zip(flight.places, flight.episodes, strict=True)):
                if slots.places[place] is not episode:
                    continue  # Its group was given up meanwhile.
                if (poison := find_poison(checks, row)) is None:
                    episode.add(_record(flight, row))
                else:
                    failed.append(Poison(place=place, cause=poison[0], reason=poison[1]))
        self._count(stage)
        return failed, waited

    def take_seconds(self) -> dict[Metric, float]:
        """Seconds the devices were busy with the policy, the world and the reward since this was asked."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _count(self, stage: Stage[State]) -> None:
        for metric, began, ended in stage.spans:
            self._seconds[metric] = self._seconds.get(metric, 0.0) + ended.since(began)
        stage.spans = []

    def _decide(
        self, slots: Slots, stage: Stage[State], policy_version: int, places: list[int]
    ) -> tuple[Flight, State]:
        """Launch one decision in `places`, without any effect on them; the world's state after it is new."""
        episodes = [slots.slot(i) for i in places]
        seeds = [episode.next_noise_seed() for episode in episodes]
        frames_B = np.stack([episode.frame for episode in episodes])
        tasks_B = [episode.member.start.task for episode in episodes]
        began = DeviceEvent(self.policy_device)
        acted = self.policy.act(
            self.policy.preprocess(frames_B, tasks_B), self.sampling, [sampling_seed(seed) for seed in seeds]
        )
        decided = DeviceEvent(self.policy_device)
        actions = acted.actions.to(self.world_device)
        received = DeviceEvent(self.world_device)
        new_frames, state = self.world.imagine(stage.state_of(places), actions, seeds)
        drawn = DeviceEvent(self.world_device)
        scores = self.reward.score(new_frames, tasks_B)
        scored = DeviceEvent(self.world_device)
        spans: list[Span] = [
            (m.ACTOR_POLICY, began, decided),
            (m.ACTOR_WORLD, received, drawn),
            (m.ACTOR_REWARD, drawn, scored),
        ]
        flight = Flight(
            places=places,
            episodes=episodes,
            policy_version=policy_version,
            noise_seeds=seeds,
            frames=frames_B,
            tokens=_to_host(acted.tokens.int()),
            logprobs=_to_host(acted.logprob),
            actions=_to_host(acted.actions.float()),
            values=None if acted.value is None else _to_host(acted.value[:, 0].float()),
            new_frames=_to_host(new_frames),
            finite=_to_host(state.finite),
            scores=_to_host(scores),
            spans=spans,
            landed=(DeviceEvent(self.policy_device), DeviceEvent(self.world_device)),
        )
        return flight, state


def _to_host(tensor: Tensor) -> Tensor:
    """Copy to host memory in stream order: into pinned memory, so that the host need not wait."""
    return tensor.to(CPU, non_blocking=True)


def _checks(flight: Flight) -> Sequence[tuple[Cause, str, NDArray[np.generic]]]:
    """What must be finite, by whose fault it is not."""
    checks: list[tuple[Cause, str, NDArray[np.generic]]] = [
        ("policy", "policy's log-probs are", flight.logprobs.numpy()),
        ("policy", "policy's actions are", flight.actions.numpy()),
        ("world", "world model's frames or latents are", flight.finite.numpy()),
        ("reward", "reward model's scores are", flight.scores.numpy()),
    ]
    if flight.values is not None:
        checks.insert(0, ("policy", "policy's value is", flight.values.numpy()))
    return checks


def _record(flight: Flight, row: int) -> DecisionRecord:
    """Copy one row: a view would keep the rows of all slots in (pinned) memory until its episode ends."""

    def copied(tensor: Tensor) -> NDArray:
        return tensor[row].numpy().copy()

    return DecisionRecord(
        frame=flight.frames[row],
        tokens=copied(flight.tokens),
        logprobs=copied(flight.logprobs),
        value=float("nan") if flight.values is None else float(flight.values[row]),
        actions=copied(flight.actions),
        scores=copied(flight.scores),
        new_frames=copied(flight.new_frames),
        policy_version=flight.policy_version,
        noise_seed=flight.noise_seeds[row],
    )

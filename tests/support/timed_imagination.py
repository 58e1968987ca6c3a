"""Decisions that take a set time and nothing else, for an actor whose refilling is looked at."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from asyncrl.actors.actor import Actor
from asyncrl.actors.backend import RowFailure
from asyncrl.actors.slots import EpisodeEnd, EpisodeInProgress, InFlightDecision, Slots, Stage
from asyncrl.config.run import TrainConfig
from asyncrl.errors import SampleTimeout
from asyncrl.observability import metrics_system as m
from asyncrl.policies.interface import SamplingParams
from asyncrl.records import StartState
from asyncrl.replay.client import WINDOW, ZmqActorPort, ZmqLearnerPort
from asyncrl.weights.transports.in_process import build_in_process
from asyncrl.worlds.start_states import StartStateStream
from support.replay_server import Served

STEPS, NUMBERS, PIXELS = 2, 2, 4
WEIGHTS = {"weight": torch.zeros(1)}


class TimedImagination:
    """In place of `Imagination`: an episode succeeds after a number of decisions drawn by its seed."""

    def __init__(self, seconds: float, shortest: int, longest: int) -> None:
        self.seconds, self.shortest, self.longest = seconds, shortest, longest
        self.sampling = SamplingParams(temperature=1.0)
        self.policy: Any = SimpleNamespace(acting_tensors=lambda: dict(WEIGHTS))
        self.world_version = 0
        self.devices = {torch.device("cpu")}
        self.decisions = 0
        self.most_groups = 0
        """Largest number of groups under way at once."""
        self.live: list[float] = []
        """Share of the slots with an episode, at each decision."""

    def begin(self, slots: Slots, stage: Stage[Any], indices: list[int]) -> list[RowFailure]:
        for index in indices:
            slots.episode(index).task = slots.episode(index).pending.start.task
        return []

    def launch(self, slots: Slots, stage: Stage[Any], indices: list[int], version: int) -> list[RowFailure]:
        episodes = [slots.episode(index) for index in indices]
        self.most_groups = max(self.most_groups, len({e.pending.grant.number for e in episodes}))
        self.live.append(len(slots.live) / len(slots.episodes))
        rows = len(indices)
        ends = [
            len(e.decisions) + 1 >= random.Random(e.seed).randint(self.shortest, self.longest)
            for e in episodes
        ]
        arrays = {
            "frames": torch.zeros(rows, PIXELS, PIXELS, 3, dtype=torch.uint8),
            "tokens": torch.zeros(rows, STEPS, NUMBERS, dtype=torch.int32),
            "logprobs": torch.full((rows, STEPS, NUMBERS), -1.0),
            "actions": torch.zeros(rows, STEPS, NUMBERS),
            "success_scores": torch.tensor(ends).float()[:, None].expand(rows, STEPS),
            "policy_versions": torch.full((rows,), version),
            "noise_seeds": torch.tensor([e.next_noise_seed() for e in episodes]),
            "video": torch.zeros(rows, STEPS, PIXELS, PIXELS, 3, dtype=torch.uint8),
        }
        decision = InFlightDecision(
            indices=indices,
            episodes=episodes,
            arrays=arrays,
            finite=torch.ones(rows, dtype=torch.bool),
            timed_work=[],
            done_events=(),  # type: ignore[arg-type]
        )
        stage.in_flight.append(decision)
        return []

    def collect(self, slots: Slots, stage: Stage[Any], deadline: float) -> tuple[list[RowFailure], float]:
        time.sleep(self.seconds)
        in_flight, stage.in_flight = stage.in_flight, []
        for decision in in_flight:
            self.decisions += len(decision.indices)
            for row, (index, episode) in enumerate(zip(decision.indices, decision.episodes, strict=True)):
                if slots.episodes[index] is episode:
                    episode.add({name: np.array(x[row]) for name, x in decision.arrays.items()})
        return [], self.seconds

    @property
    def counts(self) -> dict[Any, int]:
        return {m.ACTOR_DECISIONS: self.decisions}

    def is_cheapest(self, index: int, start: object) -> bool:
        return True

    def release(self, slots: Slots, stage: Stage[Any]) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing to end."""

    def episode_end(self, episode: EpisodeInProgress) -> EpisodeEnd | None:
        rewards = np.zeros((len(episode.decisions), STEPS), np.float32)
        rewards[-1, 0] = episode.decisions[-1]["success_scores"][0]
        return EpisodeEnd(reason="success", rewards=rewards) if rewards.any() else None

    def pop_device_seconds(self) -> dict[Any, float]:
        return {}


@dataclass(frozen=True, kw_only=True)
class SlotUse:
    """How full an actor was, from its second decision on."""

    live: float
    """Share of slots with an episode, in [0, 1]."""
    most_groups: int


def measure_slots(
    folder: Path, config: TrainConfig, *, shortest: int, longest: int, seconds: float, decisions: int
) -> SlotUse:
    """Run a real actor and replay over a socket; a learner takes every batch at once.

    Args:
        folder: Of the replay; new.
        config: Slots, stages, groups, lag.
        shortest: Decisions of the shortest episode, at least.
        longest: Of the longest.
        seconds: That one decision of all slots takes.
        decisions: Rounds to look at.
    """
    endpoint = f"ipc://{folder}/replay.ipc"
    folder.mkdir(mode=0o700)
    imagination = TimedImagination(seconds, shortest, longest)
    publisher, receiver = build_in_process()
    publisher.publish(WEIGHTS, 0)
    with Served(folder / "replay", endpoint, config):
        port = ZmqActorPort(endpoint, "actor-0", window=WINDOW + config.actor.slots)
        starts = StartStateStream([_start()], seed=0)
        actor = Actor(
            "actor-0",
            imagination,
            starts,
            port,
            receiver,
            config.actor,
            group_size=config.algorithm.group_size,
            run_seed=0,
        )
        stop = threading.Event()
        learner = threading.Thread(target=_learn, args=(endpoint, config, publisher, stop))
        learner.start()
        try:
            actor.version = receiver.wait_for_first(10.0)
            while not actor.slots.live:
                actor.step()
            while len(imagination.live) < decisions:
                actor.step()
        finally:
            stop.set()
            learner.join(20)
            port.close(10.0)
    live = imagination.live[1:]
    return SlotUse(live=sum(live) / len(live), most_groups=imagination.most_groups)


def _learn(endpoint: str, config: TrainConfig, publisher: Any, stop: threading.Event) -> None:
    port, version = ZmqLearnerPort(endpoint), 0
    while not stop.is_set():
        try:
            port.sample(groups=config.algorithm.groups_per_update, version=version, timeout=0.2)
        except SampleTimeout:
            continue
        version += 1
        publisher.publish(WEIGHTS, version)
        port.report_version(version)
    port.stop()
    port.close()


def _start() -> StartState:
    blank = np.zeros((PIXELS, PIXELS, 3), np.uint8)
    return StartState(
        name="start",
        task="a task",
        frame=blank,
        context_frames=np.zeros((0, *blank.shape), np.uint8),
        context_actions=np.zeros((0, NUMBERS), np.float32),
    )

"""Models whose rows are strictly independent, with one start state or several that poison one of them.

The number of a start state is the first pixel of its frame, and the world keeps it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.actors.actor import Actor
from asyncrl.actors.imagination import WorldBackend
from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ActorSettings, ReplaySettings
from asyncrl.episode_layout import TOKENS
from asyncrl.launch.roles import open_run_replay
from asyncrl.policies.interface import ActResult, SamplingParams
from asyncrl.records import Episode, StartState
from asyncrl.replay.buffer import Replay
from asyncrl.replay.inline_ports import InProcessLearnerPort
from asyncrl.replay.interface import ActorPort
from asyncrl.replay.state import COUNTERS
from asyncrl.weights.packing import WholeTensors
from asyncrl.weights.transports.in_process import build_in_process
from asyncrl.worlds.start_states import StartStateStream, start_state_at
from support.replay import next_batch
from support.tiny_models import start_state

GROUP = 2
IMAGE = 4
NAN = float("nan")


def start(number: int) -> StartState:
    frame = np.zeros((IMAGE, IMAGE, 3), np.uint8)
    frame[0, 0, 0] = number
    return replace(start_state(number, IMAGE, task="any", pose=None), frame=frame)


@dataclass
class Poisoned:
    """Start state -> the part of the models that fails for it, from its second decision on or at once."""

    where: dict[int, str] = field(default_factory=dict)
    late: bool = False
    begun: list[int] = field(default_factory=list)
    """Start states in the order in which the world opened them, one entry per episode."""

    def hits(self, part: str, number: int, decision: int) -> bool:
        return self.where.get(number) == part and decision >= int(self.late)


@dataclass
class RowState:
    number: Tensor
    decisions: Tensor
    total: Tensor

    @property
    def finite(self) -> Tensor:
        return self.total.isfinite()

    def __len__(self) -> int:
        return len(self.number)

    def select(self, indices: Sequence[int]) -> RowState:
        rows = list(indices)
        return RowState(self.number[rows], self.decisions[rows], self.total[rows])

    def write_rows(self, indices: Sequence[int], other: RowState) -> RowState:
        for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True):
            mine[list(indices)] = theirs
        return self

    def to(self, device: object) -> RowState:
        return self


class RowModels:
    """World, policy and reward in one: every row is computed of itself and its seed alone."""

    sample_arrays = TOKENS

    version = 0
    image_size = IMAGE

    def __init__(self, poisoned: Poisoned) -> None:
        self.poisoned = poisoned

    def _raise_for(self, part: str, numbers: Sequence[int], decisions: Sequence[int]) -> None:
        for number, decision in zip(numbers, decisions, strict=True):
            if self.poisoned.hits(part, number, decision):
                raise RuntimeError(f"{part} for {number}\nmore lines")

    def start(self, states: Sequence[StartState], *, decisions: int = 0) -> RowState:
        numbers = [int(state.frame[0, 0, 0]) for state in states]
        self._raise_for("start raises", numbers, [1] * len(numbers))
        self.poisoned.begun += numbers
        total = torch.tensor([NAN if self.poisoned.where.get(n) == "start" else 0.0 for n in numbers])
        return RowState(torch.tensor(numbers), torch.zeros(len(numbers), dtype=torch.long), total)

    def imagine(
        self, state: RowState, actions: Tensor, noise_seeds: Sequence[int]
    ) -> tuple[Tensor, RowState]:
        numbers, decisions = state.number.tolist(), state.decisions.tolist()
        self._raise_for("imagine raises", numbers, decisions)
        total = state.total.clone()
        frames = torch.zeros(len(state), 8, IMAGE, IMAGE, 3, dtype=torch.uint8)
        for row, seed in enumerate(noise_seeds):
            draw = torch.rand((), generator=torch.Generator().manual_seed(seed))
            total[row] += draw + actions[row].nan_to_num().mean()
            if self.poisoned.hits("world", numbers[row], decisions[row]):
                total[row] = NAN
            frames[row, ..., 1] = int(total[row].nan_to_num() * 40) % 256
        frames[..., 0, 0, 0] = state.number[:, None].to(torch.uint8)
        frames[..., 0, 0, 2] = (state.decisions[:, None] + 1).to(torch.uint8)
        return frames, RowState(state.number, state.decisions + 1, total)

    def preprocess(self, frames: Any, tasks: Sequence[str]) -> Any:
        return torch.from_numpy(frames)

    def act(self, inputs: Tensor, sampling: SamplingParams, seeds: Sequence[int]) -> ActResult:
        numbers, decisions = inputs[:, 0, 0, 0].tolist(), inputs[:, 0, 0, 2].tolist()
        self._raise_for("act raises", numbers, decisions)
        tokens = torch.stack(
            [torch.randint(256, (8, 7), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        )
        logprob, actions = -1 - tokens / 256, tokens / 256
        value = torch.zeros(len(seeds), 1)
        for row, (number, decision) in enumerate(zip(numbers, decisions, strict=True)):
            for part, tensor in (("logprob", logprob), ("actions", actions), ("value", value)):
                if self.poisoned.hits(part, number, decision):
                    tensor[row, 0] = NAN
        return ActResult(
            actions=actions,
            sample={"tokens": tokens.int()},
            logprob=logprob,
            value=value,
            entropy=torch.zeros(()),
        )

    def score(self, frames: Tensor, tasks: Sequence[str]) -> Tensor:
        numbers, decisions = frames[:, 0, 0, 0, 0].tolist(), (frames[:, 0, 0, 0, 2].long() - 1).tolist()
        self._raise_for("score raises", numbers, decisions)
        scores = frames[..., 0, 0, 1] / 512
        for row, (number, decision) in enumerate(zip(numbers, decisions, strict=True)):
            if self.poisoned.hits("score", number, decision):
                scores[row, 3] = NAN
        return scores

    def acting_tensors(self) -> dict[str, Tensor]:
        return {"weight": torch.zeros(1)}


def config(*, per_update: int = 4) -> TrainConfig:
    return TrainConfig(
        algorithm=AlgorithmSettings(group_size=GROUP, groups_per_update=per_update),
        replay=ReplaySettings(max_lag=0, keep_video_every=1),
    )


def actor_of(
    poisoned: Poisoned,
    port: ActorPort,
    *,
    starts: int = 4,
    slots: int = 4,
    stages: int = 1,
    threshold: float = 0.9,
) -> Actor:
    models: Any = RowModels(poisoned)
    publisher, receiver = build_in_process()
    publisher.publish(WholeTensors(models.acting_tensors()), 0)
    settings = ActorSettings(slots=slots, pipeline_stages=stages, max_decisions=3)
    rule = ActorSettings(max_decisions=3, success_threshold=threshold)
    imagination = WorldBackend(models, models, models, SamplingParams(temperature=1.0), rule=rule)
    stream = StartStateStream([start(n) for n in range(starts)], 0)
    return Actor("inline", imagination, stream, port, receiver, settings, group_size=GROUP, run_seed=0)


class InlineRun(SimpleNamespace):
    """An actor and a learner's port on one replay."""

    actor: Actor
    replay: Replay
    learner: InProcessLearnerPort


def inline_run(folder: Path, poisoned: Poisoned, *, per_update: int = 4, **actor: Any) -> InlineRun:
    """Join both; `actor` goes to `actor_of`."""
    replay = open_run_replay(folder, config(per_update=per_update))
    run = InlineRun(replay=replay)
    run.learner = InProcessLearnerPort(replay, imagine=lambda: run.actor.step(0.0))
    run.actor = actor_of(poisoned, run.learner.actor_port(), **actor)
    return run


def named(run: InlineRun, number: int) -> str:
    return start_state_at(run.actor.starts.states, 0, number).name


def counts(run: InlineRun) -> dict[str, float]:
    return {cause: run.replay.status()[metric] for cause, metric in COUNTERS.items()}


def episodes_of(run: InlineRun, groups: int) -> dict[tuple[str, int], Episode]:
    batch = next_batch(run.learner, groups=groups, version=0, timeout=30.0)
    return {(e.group_id, e.member): e for group in batch for e in group}

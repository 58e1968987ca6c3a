"""Stages on a GPU: launches do not wait, halves overlap, and episodes are those of the CPU."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.actors.actor import Actor
from asyncrl.actors.imagination import WorldBackend
from asyncrl.config.sections import ActorSettings
from asyncrl.episode_layout import TOKENS, episode_arrays
from asyncrl.launch.roles import open_run_replay
from asyncrl.observability import metrics_system as m
from asyncrl.policies.interface import ActResult, SamplingParams
from asyncrl.records import StartState
from asyncrl.replay.inline_ports import InProcessLearnerPort
from asyncrl.weights.packing import WholeTensors
from asyncrl.weights.transports.in_process import build_in_process
from asyncrl.worlds.start_states import StartStateStream
from support.failing_models import GROUP, IMAGE, RowState, config, start
from support.replay import next_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CPU = torch.device("cpu")
CYCLES = 100_000_000
"""Of a GPU, for one drawing: tens of milliseconds."""


def moved(array: Any, device: torch.device) -> Tensor:
    """Copy to a device without making the host wait for what the device does."""
    tensor = torch.as_tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Integers:
    """Policy, world and reward of integer arithmetic: every device computes the same."""

    sample_arrays = TOKENS

    version = 0
    image_size = IMAGE

    def __init__(self, device: torch.device, cycles: int = 0) -> None:
        self.device, self.cycles = device, cycles
        self.weight = torch.zeros(1, device=device)

    def start(self, states: Sequence[StartState], *, decisions: int = 0) -> RowState:
        numbers = moved(np.stack([state.frame[0, 0, 0] for state in states]).astype(np.int64), self.device)
        return RowState(numbers, torch.zeros_like(numbers), torch.zeros_like(numbers, dtype=torch.float32))

    def preprocess(self, frames: Any, tasks: Sequence[str]) -> Tensor:
        return moved(frames, self.device).flatten(1).long().sum(dim=1)

    def act(self, inputs: Tensor, sampling: SamplingParams, seeds: Sequence[int]) -> ActResult:
        place = moved(np.arange(56).reshape(1, 8, 7), self.device)
        seed = moved(np.array(seeds) % 9973, self.device)
        tokens = ((inputs + seed)[:, None, None] * (place + 1)) % 256
        logprob = -(1.0 + tokens / 256) + self.weight
        return ActResult(
            actions=tokens / 256,
            sample={"tokens": tokens.int()},
            logprob=logprob,
            value=None,
            entropy=torch.zeros(()),
        )

    def imagine(self, state: RowState, actions: Tensor, seeds: Sequence[int]) -> tuple[Tensor, RowState]:
        if self.cycles:
            torch.cuda._sleep(self.cycles)
        total = state.total + (actions * 256).sum(dim=(1, 2)) + moved(np.array(seeds) % 97, self.device)
        drawn = (total.long()[:, None] * torch.arange(1, 9, device=self.device)) % 256
        frames = drawn[..., None, None, None].expand(-1, -1, IMAGE, IMAGE, 3).to(torch.uint8)
        return frames, RowState(state.number, state.decisions + 1, total)

    def score(self, frames: Tensor, tasks: Sequence[str]) -> Tensor:
        return frames[..., 0, 0, 0].float() / 512

    def acting_tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight}


def actor_on(folder: Path, device: torch.device, *, stages: int, cycles: int = 0) -> Any:
    """An actor of 8 slots, its learner's port and its replay."""
    models: Any = Integers(device, cycles)
    replay = open_run_replay(folder, config())
    publisher, receiver = build_in_process()
    publisher.publish(WholeTensors(models.acting_tensors()), 0)
    settings = ActorSettings(slots=8, pipeline_stages=stages, max_decisions=3)
    imagination = WorldBackend(
        models,
        models,
        models,
        SamplingParams(temperature=1.0),
        rule=ActorSettings(max_decisions=3, success_threshold=0.9),
        device=device,
    )
    starts = StartStateStream([start(n) for n in range(4)], 0)
    learner = InProcessLearnerPort(replay, imagine=lambda: actor.step(0.0))
    port = learner.actor_port()
    actor = Actor("inline", imagination, starts, port, receiver, settings, group_size=GROUP, run_seed=0)
    actor.telemetry._interval = float("inf")  # A report would take the seconds that tests read.
    return actor, learner, replay


@pytest.mark.parametrize("stages", [1, 2])
def test_episodes_on_a_gpu_are_those_on_the_cpu(stages: int, tmp_path: Path) -> None:
    _, learner, replay = actor_on(tmp_path / "cpu", CPU, stages=1)
    expected = next_batch(learner, groups=4, version=0, timeout=60.0)
    replay.close()
    actor, learner, replay = actor_on(tmp_path / "gpu", torch.device("cuda", 0), stages=stages)
    found = next_batch(learner, groups=4, version=0, timeout=60.0)
    for one, other in zip(chain(*expected), chain(*found), strict=True):
        assert (one.group_id, one.member) == (other.group_id, other.member)
        for name, array in episode_arrays(one).items():
            np.testing.assert_array_equal(array, episode_arrays(other)[name], name)
    seconds = actor.backend.pop_device_seconds()
    assert all(seconds[metric] > 0 for metric in (m.ACTOR_POLICY, m.ACTOR_WORLD, m.ACTOR_REWARD))
    replay.close()


def test_weights_that_change_between_launches_are_those_of_the_later_one(tmp_path: Path) -> None:
    """Stream order: the first half's decision was launched before and must not see the new weight."""
    gpu = torch.device("cuda", 0)
    actor, _, replay = actor_on(tmp_path, gpu, stages=2, cycles=CYCLES)
    actor.step(0.0)
    publisher, actor.receiver = build_in_process()
    publisher.publish(WholeTensors({"weight": torch.full((1,), -100.0, device=gpu)}), 5)
    actor.step(0.0)
    actor.step(0.0)
    first, second = (actor.slots.episode(index).decisions[0] for index in (0, 4))
    assert (first["policy_versions"], second["policy_versions"]) == (0, 5)
    assert first["logprobs"].min() > -3
    assert second["logprobs"].max() < -100
    replay.close()

"""On a GPU, with every kind of world: two stages overlap, and opening slots makes no call that waits."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.actors.actor import Actor
from asyncrl.actors.imagination import WorldBackend
from asyncrl.config.sections import ActorSettings, ImaginationSettings
from asyncrl.policies.interface import SamplingParams
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from asyncrl.records import StartState
from asyncrl.rewards.resnet import ResNetReward, RewardConfig, RewardNetwork
from asyncrl.worlds.files import KINDS, world_class
from support.tiny_actor import GROUP, TASKS, actor_with, start
from support.tiny_models import WORLDS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CYCLES = 2_000_000_000
"""Of a GPU, behind each drawing: a second, beside which the host's work is short."""
DECISIONS = 3
HALF = 2 * GROUP
"""Slots of a stage."""


class Slowed:
    """A world whose every decision keeps the device busy for a while longer.

    Behind the drawing, not before it: of an eager drawing a device cannot queue all launches.
    """

    def __init__(self, world: Any) -> None:
        self.inner = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def start(self, states: Sequence[StartState], *, decisions: int) -> Any:
        return self.inner.start(states, decisions=decisions)

    def imagine(self, state: Any, actions: Tensor, noise_seeds: Sequence[int]) -> Any:
        drawn = self.inner.imagine(state, actions, noise_seeds)
        if self.inner.device.type == "cuda":
            torch.cuda._sleep(CYCLES)
        return drawn


def models_on(device: torch.device, kind: str, folder: Path) -> WorldBackend[Any]:
    """Tiny models with random weights, the world read from its folder."""
    torch.manual_seed(0)
    WORLDS[kind](folder)
    world: Any = Slowed(world_class(folder).load(folder, device, ImaginationSettings()))
    policy = OpenVLAOFTPolicy(OpenVLAOFTConfig.tiny()).eval().to(device)
    config = RewardConfig.tiny(TASKS)
    reward = ResNetReward(RewardNetwork(config), config, device=device)
    sampling = SamplingParams(temperature=1.0)
    rule = ActorSettings(max_decisions=6)
    return WorldBackend(policy, world, reward, sampling, rule=rule, device=device)


def made(actor: Actor) -> list[int]:
    """Decisions that each slot's episode has."""
    return [len(episode.decisions) if episode else 0 for episode in actor.slots.episodes]


def is_at_work(actor: Actor) -> bool:
    """Whether the device still works on the newest launch."""
    (decision,) = actor._busy_stages[-1].in_flight
    return not decision.done.passed


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_works_on_one_stage_while_the_device_draws_the_other(kind: str, tmp_path: Path) -> None:
    began = time.monotonic()
    torch.cuda._sleep(CYCLES)
    torch.cuda.synchronize()
    drawing = time.monotonic() - began
    models = models_on(torch.device("cuda"), kind, tmp_path / "world")
    actor, *_ = actor_with(models, tmp_path, slots=2 * HALF, stages=2, decisions=DECISIONS, groups=8)
    actor.telemetry._interval = float("inf")  # A report would take the seconds that are read here.
    # Whole episodes first: a launch that asks for memory, or uses a kernel for the first time, may wait.
    for _ in range(2 * DECISIONS + 3):
        actor.step(0.0)
    torch.cuda.synchronize()
    assert made(actor) == [1] * 2 * HALF

    began = time.monotonic()
    actor.step(0.0)
    assert time.monotonic() - began < drawing / 2, "it launched the second half, and the first was done"
    assert made(actor) == [2] * HALF + [1] * HALF
    assert is_at_work(actor), "it waited for the second half"
    actor.step(0.0)
    assert made(actor) == [2] * 2 * HALF
    assert is_at_work(actor), "it collected the second half before it launched the first again"
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", KINDS)
def test_opening_picking_and_writing_slots_make_no_call_that_waits(kind: str, tmp_path: Path) -> None:
    world = models_on(torch.device("cuda"), kind, tmp_path / "world").world
    states = [start(0), start(1), start(1)]
    opened = world.start(states, decisions=DECISIONS)  # lets libraries choose their kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        opened = world.start(states, decisions=DECISIONS)
        opened = opened.write_rows([0], opened.select([2]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert opened.finite.all()
    assert len(opened) == len(states)

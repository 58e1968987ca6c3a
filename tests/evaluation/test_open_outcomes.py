"""Outcomes of siblings from start states: counted as a loop would count them, one episode at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.evaluation.audit import Models
from asyncrl.evaluation.reimagine import open_starts
from asyncrl.policies.interface import ActResult, SamplingParams
from asyncrl.records import ActionSpec, StartState
from asyncrl.seeds import episode_seed, noise_seed

LONGEST, SIBLINGS, SIZE = 4, 5, 2


class NoisyWorld:
    """Its frames are as bright as the noise says, and brighter from a start state that says so."""

    version, image_size, action_spec, device = 0, SIZE, ActionSpec(), torch.device("cpu")

    def start(self, states: Sequence[StartState], *, decisions: int) -> Any:
        assert decisions == LONGEST
        return np.array([int(state.name) for state in states])

    def imagine(self, state: Any, actions: Tensor, noise_seeds: Sequence[int]) -> Any:
        bright = [brightness(seed, more) for seed, more in zip(noise_seeds, state, strict=True)]
        frames = torch.tensor(bright, dtype=torch.uint8)[:, None, None, None, None]
        return frames.expand(-1, 8, SIZE, SIZE, 3), state


def brightness(seed: int, more: int) -> int:
    return seed % 100 + more


class Judge:
    image_size = 0

    def score(self, frames: Tensor, tasks: Sequence[str]) -> Tensor:
        return (frames[..., 0, 0, 0] >= 100).float()


class Policy:
    action_spec = ActionSpec()

    def preprocess(self, frames: np.ndarray, tasks: Sequence[str]) -> np.ndarray:
        self.shown = frames
        return frames

    def act(self, inputs: np.ndarray, sampling: SamplingParams, seeds: Sequence[int]) -> ActResult:
        nothing = torch.zeros(())
        actions = torch.zeros(len(inputs), 8, 7)
        return ActResult(actions=actions, sample={}, logprob=nothing, value=None, entropy=nothing)


def models() -> Models:
    parts: dict[str, Any] = {"policy": Policy(), "world": NoisyWorld(), "reward": Judge()}
    return Models(
        **parts,
        sampling=SamplingParams(temperature=1.0),
        max_decisions=LONGEST,
        threshold=0.7,
        success_frames=1,
    )


def start(more: int, elapsed: int) -> StartState:
    return StartState(
        name=str(more),
        task="lift",
        frame=np.zeros((SIZE, SIZE, 3), np.uint8),
        context_frames=np.full((4, SIZE, SIZE, 3), 7, np.uint8),
        context_actions=np.zeros((4, 7), np.float32),
        elapsed=elapsed,
    )


STARTS = [start(0, 1), start(40, 3), start(20, 1), start(100, 2), start(30, 0)]


def slow_share(number: int) -> float:
    """Imagine decision by decision, as many as are left."""
    one, solved = STARTS[number], 0
    for member in range(SIBLINGS):
        seed = episode_seed(9, number, member)
        left = range(LONGEST - one.elapsed)
        solved += any(brightness(noise_seed(seed, decision), int(one.name)) >= 100 for decision in left)
    return solved / SIBLINGS


@pytest.mark.parametrize("rows", [1, 3, 8, 64])
def test_open_starts_are_those_of_episodes_one_by_one_whatever_is_imagined_together(rows: int) -> None:
    counted: list[int] = []
    found = open_starts(models(), STARTS, siblings=SIBLINGS, rows=rows, seed=9, progress=counted.append)
    shares = [slow_share(number) for number in range(len(STARTS))]
    assert found == [one for one, share in zip(STARTS, shares, strict=True) if 1 / 8 <= share <= 7 / 8]
    assert (shares[0], shares[3]) == (0.0, 1.0)
    assert len(found) == 3
    assert sum(counted) == len(STARTS) * SIBLINGS


def test_the_policy_sees_the_frame_that_leads_there() -> None:
    one = models()
    one.imagine([start(100, 0)], [3])
    assert (one.policy.shown == 7).all()

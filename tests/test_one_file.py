"""examples/one_file.py makes the updates of the learner."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings, CriticSettings
from asyncrl.config.sections import OptimizerSettings
from asyncrl.learner.batches import Batch, build_batch
from asyncrl.learner.update import Update
from asyncrl.observability import metrics_training as m
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from asyncrl.records import Episode
from support.tiny_models import SIZE, start_state

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import one_file

SETTINGS = one_file.Settings(
    groups=3, group_size=4, max_decisions=2, learning_rate=3e-3, micro_batch=5, trust_region=0.001
)


class World:
    """Draws frames that follow from the state's frames, the actions and the noise."""

    class State:
        def __init__(self, seen: np.ndarray) -> None:
            self.seen = seen

        def select(self, rows: list[int]) -> World.State:
            return World.State(self.seen[rows])

    def start(self, starts: list, decisions: int) -> World.State:
        return World.State(np.stack([start.present_frame for start in starts]))

    def imagine(self, state, actions, noise):
        drawn = [np.random.default_rng(seed).integers(0, 40, (8, SIZE, SIZE, 3)) for seed in noise]
        pushed = (actions[:, :, :1, None, None].numpy() * 20).astype(int)
        frames = (state.seen[:, None] // 2 + np.stack(drawn) + pushed).clip(0, 255).astype(np.uint8)
        return torch.from_numpy(frames), World.State(frames[:, -1])


class Reward:
    """Scores a frame by its noise: about a third of the episodes succeed, at any of their steps."""

    def score(self, frames, tasks):
        return 0.6 + (frames.sum(dim=(2, 3, 4)) % 17 == 0).float() * 0.3


def record(episode: one_file.Imagination, group: int, member: int, version: int) -> Episode:
    """Write down what an actor would: the whole decision in which the episode succeeds."""
    decisions, (chunk, dim) = len(episode.frames), episode.tokens[0].shape
    rewards = np.zeros((decisions, chunk), np.float32)
    if episode.success:
        rewards.flat[episode.steps - 1] = 1.0
    return Episode(
        episode_id=f"{group:016x}{member:016x}",
        group_id=str(group),
        member=member,
        group_size=SETTINGS.group_size,
        actor="actor-0",
        task=episode.start.task,
        start_state=episode.start.name,
        world_version=0,
        seed=episode.seed,
        temperature=1.0,
        top_k=0,
        end_reason="success" if episode.success else "truncated",
        frames=np.stack(episode.frames),
        sample={"tokens": torch.stack(episode.tokens).numpy().astype(np.int32)},
        logprobs=torch.stack(episode.logprobs).numpy(),
        values=np.full(decisions, np.nan, np.float32),
        actions=np.zeros((decisions, chunk, dim), np.float32),
        rewards=rewards,
        success_scores=rewards,
        policy_versions=np.full(decisions, version),
        noise_seeds=np.zeros(decisions, np.int64),
        final_frame=episode.frame,
        video=np.empty((0, SIZE, SIZE, 3), np.uint8),
    )


def learner_of(policy: OpenVLAOFTPolicy) -> Update:
    algorithm = AlgorithmSettings(
        groups_per_update=SETTINGS.groups, group_size=SETTINGS.group_size, micro_batch=SETTINGS.micro_batch
    )
    return Update(
        policy,
        algorithm,
        CorrectionSettings(),
        CriticSettings(),
        OptimizerSettings(learning_rate=SETTINGS.learning_rate),
        updates=2,
        max_decisions=SETTINGS.max_decisions,
        trust_region=SETTINGS.trust_region,
    )


def batch_of(episodes: list[one_file.Imagination], update: int) -> Batch:
    groups = [
        [
            record(episode, group, member, max(update - 1, 0))
            for member, episode in enumerate(episodes[first : first + SETTINGS.group_size])
        ]
        for group, first in enumerate(range(0, len(episodes), SETTINGS.group_size))
    ]
    return build_batch(groups, version=update)


def test_two_updates_are_those_of_the_learner() -> None:
    torch.manual_seed(0)
    mine = OpenVLAOFTPolicy(replace(OpenVLAOFTConfig.tiny(), image_size=SIZE)).eval()
    theirs, actor = copy.deepcopy(mine), copy.deepcopy(mine)
    optimizer, update = one_file.optimizer_of(mine, SETTINGS), learner_of(theirs)
    for number in range(2):
        starts = [start_state(10 * number + group, SIZE) for group in range(SETTINGS.groups)]
        episodes = one_file.imagine(actor, World(), Reward(), starts, number, SETTINGS)
        outcomes = [episode.success for episode in episodes]
        assert any(outcomes)
        assert not all(outcomes)
        actor.load_state_dict(mine.state_dict())

        decisions = one_file.Decisions.of(episodes, SETTINGS.group_size)
        batch = batch_of(episodes, number)
        assert torch.equal(decisions.mask, batch.mask)
        loss = one_file.learn(mine, optimizer, decisions, SETTINGS)
        metrics = update(batch, version=number)

        assert loss == pytest.approx(metrics[m.LOSS], rel=1e-5, abs=1e-7)
        for name, parameter in mine.named_parameters():
            other = theirs.get_parameter(name)
            if parameter.grad is None:
                assert other.grad is None or not other.grad.any(), name
                continue
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-7, msg=name)
            torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-5, msg=name)
    assert metrics[m.OUTSIDE_TRUST_REGION] > 0, "a token of this test lies outside the trust region"
    assert metrics[m.IMPORTANCE_ESS] < 1, "weights of this test differ from 1"

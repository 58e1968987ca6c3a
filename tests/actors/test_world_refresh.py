"""An actor whose world changes while it imagines: every decision is drawn by one world, which it names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.actors.imagination import Imagination
from asyncrl.config.actor import ActorSettings
from asyncrl.config.pace import PaceSettings
from asyncrl.config.run import TrainConfig
from asyncrl.episode_layout import problem_with
from asyncrl.launch.idle_offload import actor_offload
from asyncrl.launch.refits import refreshed_tensors
from asyncrl.records import Episode
from asyncrl.weights.interface import Publisher
from asyncrl.weights.transports.in_process import build_in_process
from support.tiny_actor import GROUP, actor_with

CONFIG = TrainConfig(pace=PaceSettings(every=1))
DECISIONS = 3


@pytest.fixture
def models(imagination: Imagination) -> Iterator[Imagination]:
    """The shared models; afterwards they are as they were."""
    tensors = refreshed_tensors(CONFIG, imagination.world, imagination.reward)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    yield imagination
    fill(imagination, before, 5)


def fill(models: Imagination, weights: dict[str, Tensor], version: int) -> None:
    with torch.no_grad():
        for name, tensor in refreshed_tensors(CONFIG, models.world, models.reward).items():
            tensor.copy_(weights[name])
    models.world.version = version


def weights_of(models: Imagination, version: int) -> dict[str, Tensor]:
    """Of a version from 5 on: 5 is what there is, later ones draw and judge quite differently."""
    rng = torch.Generator().manual_seed(version)
    tensors = refreshed_tensors(CONFIG, models.world, models.reward)
    if version == 5:
        return {name: tensor.clone() for name, tensor in tensors.items()}
    return {
        name: (tensor * (1 + torch.rand(tensor.shape, generator=rng))).to(tensor.dtype)
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(("slots", "stages"), [(4, 1), (4, 2), (3, 1)])
def test_every_decision_was_drawn_by_the_world_that_it_names(
    models: Imagination, tmp_path: Path, slots: int, stages: int
) -> None:
    worlds = {version: weights_of(models, version) for version in (5, 6)}
    publisher, receiver = build_in_process()
    actor, replay, learner = actor_with(
        models,
        tmp_path,
        slots=slots,
        stages=stages,
        decisions=DECISIONS,
        groups=2,
        worlds=receiver,
        refreshed=refreshed_tensors(CONFIG, models.world, models.reward),
    )
    rounds = 0

    def imagine() -> bool:
        nonlocal rounds
        rounds += 1
        if rounds == 2:
            publisher.publish(worlds[6], 6)
        return actor.round(0.0)

    learner._imagine = imagine
    groups = learner.sample(groups=2, version=0, timeout=60.0)
    episodes = [episode for group in groups for episode in group]
    assert len(episodes) == 2 * GROUP
    versions = {tuple(versions_of(episode)) for episode in episodes}
    assert any(len(set(found)) > 1 for found in versions), versions
    for episode in episodes:
        assert problem_with(episode) is None
        found = versions_of(episode)
        assert found == sorted(found)
        assert (episode.world_version, episode.newest_world_version) == (found[0], found[-1])
        frames, scores = imagined_again(models, worlds, episode, actor.starts[int(episode.group_id)])
        difference = np.abs(frames.astype(int) - episode.video.astype(int))
        assert difference.max() <= 1, found
        np.testing.assert_allclose(scores, episode.success_scores, atol=1e-3)
    replay.close()


def versions_of(episode: Episode) -> list[int]:
    assert episode.world_versions is not None
    return episode.world_versions.tolist()


@torch.inference_mode()
def imagined_again(
    models: Imagination, worlds: dict[int, dict[str, Tensor]], episode: Episode, start: Any
) -> tuple[np.ndarray, np.ndarray]:
    state, frames, scores = models.world.start([start], decisions=DECISIONS), [], []
    for n, version in enumerate(versions_of(episode)):
        fill(models, worlds[version], version)
        actions = torch.from_numpy(episode.actions[n])[None]
        drawn, state = models.world.imagine(state, actions, [int(episode.noise_seeds[n])])
        frames.append(drawn[0].numpy())
        scores.append(models.reward.score(drawn, [episode.task])[0].numpy())
    return np.concatenate(frames), np.stack(scores)


def test_without_refits_episodes_say_nothing_new(models: Imagination, tmp_path: Path) -> None:
    actor, replay, learner = actor_with(models, tmp_path, slots=GROUP)
    assert actor.round(wait=0.0)
    ((first, _),) = learner.sample(groups=1, version=0, timeout=0.0)
    assert (first.world_versions, first.world_version) == (None, 5)
    replay.close()


def test_a_world_that_came_while_the_models_were_in_host_memory_stays(
    models: Imagination, tmp_path: Path
) -> None:
    """Storages that count as frozen are copied to the host once, and would come back old."""
    worlds = {version: weights_of(models, version) for version in (5, 6, 7)}
    publisher, receiver = build_in_process()
    tensors = refreshed_tensors(CONFIG, models.world, models.reward)
    actor, replay, _ = actor_with(models, tmp_path, slots=GROUP, worlds=receiver, refreshed=tensors)
    config = replace(CONFIG, actor=ActorSettings(offload=True))
    actor.offload = actor_offload(config, models_of(actor))
    moved: Any = actor.offload._tensors

    def held() -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def check(version: int) -> None:
        for name, tensor in held().items():
            assert tensor.equal(worlds[version][name]), (version, name)

    moved.offload()
    moved.restore()
    check(5)
    moved.offload()
    take(publisher, actor, worlds, 6)
    moved.restore()
    check(6)
    take(publisher, actor, worlds, 7)
    moved.offload()
    moved.restore()
    check(7)
    assert actor.acting.version == 7
    replay.close()


def models_of(actor: Any) -> Imagination:
    return actor.acting


def take(publisher: Publisher, actor: Any, worlds: dict[int, dict[str, Tensor]], version: int) -> None:
    publisher.publish(worlds[version], version)
    actor._refresh_world()

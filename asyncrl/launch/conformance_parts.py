"""Tries simulators, corrections, advantages and objectives for `asyncrl check`; see `conformance`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from asyncrl.errors import ConfigError
from asyncrl.launch.conformance import Reporter
from asyncrl.learner.batches import Batch, build_batch
from asyncrl.learner.interface import OldPolicy, describe_tensor
from asyncrl.learner.levels import valid_units
from asyncrl.learner.losses import log_ratio
from asyncrl.learner.ranks import SingleRank
from asyncrl.learner.recipe import Recipe
from asyncrl.records import Episode
from asyncrl.simulators.interface import Observation, Simulator


def check_simulator(simulator: Simulator, action_dim: int) -> Iterator[str]:
    """Check all that `evaluate` and `collect` need of a simulator; yields a line for everything that holds.

    Args:
        simulator: Just built.
        action_dim: Numbers of an action.

    Raises:
        ConfigError: Something does not.
    """
    report = Reporter("simulator", simulator)
    report.require(bool(simulator.tasks), "tasks", simulator.tasks, "at least one instruction")
    report.require(simulator.max_steps >= 1, "max_steps", simulator.max_steps, "at least 1")
    actions = np.random.default_rng(0).uniform(-1, 1, (8, action_dim)).astype(np.float32)

    def play(seed: int) -> list[Observation]:
        return [simulator.reset(seed), *map(simulator.step, actions)]

    first, other, again = play(1), play(2), play(1)
    for method, seen in zip(["reset", *["step"] * len(actions)], first, strict=True):
        report.require(isinstance(seen, Observation), method, type(seen).__name__, "an Observation")
        size, image = simulator.image_size, seen.image
        fits = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape == (size, size, 3)
        came = f"{image.dtype}{list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        report.require(fits, f"{method}().image", came, f"uint8[{size}, {size}, 3]")
        report.require(seen.task in simulator.tasks, f"{method}().task", seen.task, "one of tasks")
        report.require(isinstance(seen.success, bool), f"{method}().success", seen.success, "a bool")
    yield f"reset, step: pictures of {simulator.image_size} pixels, {len(simulator.tasks)} tasks"
    same = all(np.array_equal(a.image, b.image) for a, b in zip(first, again, strict=True))
    report.require(same, "reset", "another episode for the same seed and actions", "the same")
    differs = any(not np.array_equal(a.image, b.image) for a, b in zip(first, other, strict=True))
    report.require(differs, "reset", "the same episode for two seeds", "one that follows from the seed")
    yield "reset: everything follows from the seed"


def check_recipe(recipe: Recipe) -> Iterator[str]:
    """Check what an update asks of a recipe's parts, on a stale batch of two groups of four episodes.

    Raises:
        ConfigError: Something has another type, shape or dtype than `learner.interface` says.
    """
    batch, level = _stale_batch(), recipe.algorithm.level
    rng = torch.Generator().manual_seed(1)
    old_logprob = batch.logprob_behaviour + 0.1 * torch.randn(batch.mask.shape, generator=rng)
    critic = torch.randn(len(batch.tasks), 1, generator=rng) if recipe.trains_critic else None
    old = OldPolicy(old_logprob, critic, torch.zeros(len(batch.returns)))
    estimates = recipe.estimate(batch, old, SingleRank())
    advantages = estimates.advantages
    yield f"estimate: advantages {describe_tensor(advantages)}, mean {advantages.mean():.3g}"
    logprob = (old_logprob + 0.01).where(batch.mask, 0.0).requires_grad_()
    behaviour = batch.logprob_behaviour.where(batch.mask, 0.0)
    proximal = recipe.proximal(logprob, old_logprob.where(batch.mask, 0.0), behaviour, batch.lag)
    weights = recipe.weights(log_ratio(proximal, behaviour), batch.mask, batch.episode)
    found = "none" if weights is None else f"from {weights.min():.3g} to {weights.max():.3g}"
    yield f"weights: {found}, at --algorithm.level {level}"
    loss = recipe.unit_loss(logprob, proximal, batch.mask, advantages).loss
    loss = loss if weights is None else loss * weights
    loss.where(valid_units(batch.mask, level), 0.0).sum().backward()
    gradient = logprob.grad
    if gradient is None or not bool(gradient.isfinite().all()):
        raise ConfigError(
            f"The loss of {type(recipe.objective).__name__} with {type(recipe.correction).__name__} has "
            f"{'no' if gradient is None else 'a gradient that is not finite'}, expected a finite gradient."
        )
    yield f"loss: finite, with gradient (norm {gradient.norm():.3g})"


def _stale_batch() -> Batch:
    rng = np.random.default_rng(0)

    def episode(group: int, member: int) -> Episode:
        solved = (group + member) % 3 == 0
        rewards = np.zeros((3, 8), np.float32)
        rewards[-1, 4] = float(solved)
        frames = rng.integers(0, 256, (3, 4, 4, 3), np.uint8)
        return Episode(
            episode_id=f"{group:016x}{member:016x}",
            group_id=f"{group:08d}",
            member=member,
            group_size=4,
            actor="actor-0",
            task="lift the red block",
            start_state=f"start-{group}",
            world_version=0,
            seed=member,
            temperature=1.0,
            top_k=0,
            end_reason="success" if solved else "truncated",
            frames=frames,
            sample={"tokens": rng.integers(0, 256, (3, 8, 7)).astype(np.int32)},
            logprobs=rng.uniform(-6, -0.5, (3, 8, 7)).astype(np.float32),
            values=np.full(3, np.nan, np.float32),
            actions=rng.uniform(-1, 1, (3, 8, 7)).astype(np.float32),
            rewards=rewards,
            success_scores=rewards,
            policy_versions=np.array([0, 1, 1]),
            noise_seeds=np.arange(3),
            final_frame=frames[-1],
            video=frames[:0],
        )

    return build_batch([[episode(group, member) for member in range(4)] for group in range(2)], version=2)

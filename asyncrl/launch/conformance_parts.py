"""Tries simulators, corrections, advantages and objectives for `asyncrl check`; see `conformance`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.launch.reporter import Reporter
from asyncrl.learner.batches import Batch, build_batch
from asyncrl.learner.interface import OldPolicy, describe_tensor
from asyncrl.learner.losses import log_ratio, valid_units
from asyncrl.learner.ranks import SingleRank
from asyncrl.learner.recipe import Recipe
from asyncrl.records import POSE_DIM, Episode
from asyncrl.simulators.interface import (
    Seen,
    Simulator,
    SimulatorSpec,
    Stepped,
    random_start,
    stored_start,
)


def check_simulator(simulator: Simulator) -> Iterator[str]:
    """Check all that `evaluate` and `collect` need of a simulator; yields a line for everything that holds.

    Raises:
        ConfigError: Something does not.
    """
    report, spec = Reporter("simulator", simulator), simulator.spec
    report.require(isinstance(spec, SimulatorSpec), "spec", type(spec).__name__, "a SimulatorSpec")
    report.require(spec.max_steps >= 1, "spec.max_steps", spec.max_steps, "at least 1")
    report.require(spec.places >= 1, "spec.places", spec.places, "at least 1")
    widths = {len(spec.action_low), len(spec.action_high), len(spec.idle)}
    report.require(len(widths) == 1, "spec", "action_low, action_high and idle", "of one length")
    low, high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
    steps = min(8, spec.max_steps)
    actions = np.random.default_rng(0).uniform(low, high, (steps, len(low))).astype(np.float32)

    (first, stepped), (other, _), (again, _) = (_play(simulator, number, actions) for number in (1, 2, 1))
    for method, seen in zip(["reset", *["step"] * len(stepped)], first, strict=True):
        _check_seen(report, spec, method, seen)
    for one in stepped:
        for name, kind in (("rewards", "f"), ("success", "b"), ("terminated", "b"), ("truncated", "b")):
            array = getattr(one, name)
            fits = isinstance(array, np.ndarray) and (array.shape, array.dtype.kind) == ((spec.places,), kind)
            report.require(fits, f"step().{name}", repr(array)[:80], f"[{spec.places}] of kind {kind!r}")
    tasks = first[0].tasks
    known = len(tasks) == spec.places and all(not spec.tasks or task in spec.tasks for task in tasks)
    report.require(known, "reset().tasks", tasks, "one instruction per place, each of spec.tasks")
    yield f"reset, step: {len(spec.cameras)} pictures of {spec.image_size} pixels, {len(spec.tasks)} tasks"
    same = all(np.array_equal(a.images, b.images) for a, b in zip(first, again, strict=True))
    report.require(same, "reset", "another episode for the same start and actions", "the same")
    alike = all((seen.images == seen.images[:1]).all() for seen in first)
    report.require(alike, "reset", "another episode in another place", "the same")
    differs = any(not np.array_equal(a.images, b.images) for a, b in zip(first, other, strict=False))
    report.require(differs, "reset", "the same episode for two starts", "one that follows from the start")
    yield f"reset: everything follows from the start, in all {spec.places} places"


def _play(
    simulator: Simulator, number: int, actions: NDArray[np.float32]
) -> tuple[list[Seen], list[Stepped]]:
    """Play one start in all places at once, by the same actions ``[S, A]``."""
    spec = simulator.spec
    places = list(range(spec.places))
    start = stored_start(spec, 0, number % spec.trials) if spec.trials else random_start(spec, number)
    seen, done = [simulator.reset(places, [start] * len(places))], []
    for action in actions:
        stepped = simulator.step(places, np.repeat(action[None], len(places), axis=0), draw=True)
        if stepped.seen is None:
            raise ConfigError("step(draw=True) shows nothing, expected pictures.")
        seen.append(stepped.seen)
        done.append(stepped)
        if bool((stepped.terminated | stepped.truncated).any()):
            break
    return seen, done


def _check_seen(report: Reporter, spec: SimulatorSpec, method: str, seen: Seen) -> None:
    size = spec.image_size
    for name, array, dtype, shape in (
        ("images", seen.images, np.uint8, (len(spec.cameras), size, size, 3)),
        ("states", seen.states, np.float32, (spec.state_dim,)),
    ):
        fits = isinstance(array, np.ndarray) and array.dtype == dtype
        fits = fits and array.shape == (spec.places, *shape)
        came = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        wanted = f"{np.dtype(dtype)}{[spec.places, *shape]}"
        report.require(fits, f"{method}().{name}", came, wanted)
    _check_poses(report, spec, method, seen)


def _check_poses(report: Reporter, spec: SimulatorSpec, method: str, seen: Seen) -> None:
    """Check where the hands are said to be."""
    if not spec.poses:
        report.require(seen.poses is None, f"{method}().poses", "there", "None, as spec.poses is False")
        return
    poses, wanted = seen.poses, f"float32[{spec.places}, {POSE_DIM}]"
    if poses is None:
        raise report.refused(f"{method}().poses", "None", wanted)
    fits = poses.dtype == np.float32 and poses.shape == (spec.places, POSE_DIM)
    report.require(fits, f"{method}().poses", f"{poses.dtype}{list(poses.shape)}", wanted)
    lengths = np.linalg.norm(poses[:, 3:7], axis=1)
    unit = bool(np.isfinite(poses).all() and (np.abs(lengths - 1) < 1e-3).all())
    report.require(unit, f"{method}().poses", poses.tolist(), "finite, with quaternions of length 1")
    gripper = bool((np.abs(poses[:, 7]) <= 1).all())
    report.require(gripper, f"{method}().poses", poses[:, 7].tolist(), "a gripper from -1 (open) to 1")


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

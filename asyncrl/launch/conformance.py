"""Checks of parts other than worlds on small inputs, for `asyncrl check`; the first fault is a ConfigError.

A run tries a class of the user's once: `try_policy` where it is loaded, `try_environment` in every actor.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.episode_layout import SAMPLE_DTYPES, sample_specs
from asyncrl.errors import ConfigError
from asyncrl.launch.world_conformance import SEEDS, Reporter, Trial
from asyncrl.learner.interface import describe_tensor
from asyncrl.policies.interface import ActResult, Policy, SamplingParams
from asyncrl.records import POSE_DIM, StartState
from asyncrl.rewards.interface import RewardModel
from asyncrl.simulators.interface import Seen, Simulator, SimulatorSpec, Stepped, random_start, stored_start
from asyncrl.worlds.interface import World

SAMPLING: Final = SamplingParams(temperature=1.0)
LOGPROB_TOLERANCE: Final = 0.05
"""Nats by which `evaluate` may differ from `act` at equal weights: bfloat16 rounds."""


def check_simulator(simulator: Simulator) -> Iterator[str]:
    """Check what `evaluate` and `collect` need of a simulator; yields a line for everything that holds."""
    report, spec = Reporter("simulator", simulator), simulator.spec
    require = report.require
    widths = {len(spec.action_low), len(spec.action_high), len(spec.idle)}
    require(len(widths) == 1, "spec", "action_low, action_high and idle", "of one length")
    low, high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
    steps = min(8, spec.max_steps)
    actions = np.random.default_rng(0).uniform(low, high, (steps, len(low))).astype(np.float32)

    (first, stepped), (other, _), (again, _) = (_play(simulator, number, actions) for number in (1, 2, 1))
    for method, seen in zip(["reset", *["step"] * len(stepped)], first, strict=True):
        _check_seen(report, spec, f"{method}()", seen)
    for one in stepped:
        for name in ("rewards", "success", "terminated", "truncated"):
            dtype = "float32" if name == "rewards" else "bool"
            report.array(f"step().{name}", getattr(one, name), dtype, (spec.places,), np.ndarray)
    tasks = first[0].tasks
    known = len(tasks) == spec.places and all(not spec.tasks or task in spec.tasks for task in tasks)
    require(known, "reset().tasks", tasks, "one instruction per place, each of spec.tasks")
    yield f"reset, step: {len(spec.cameras)} pictures of {spec.image_size} pixels, {len(spec.tasks)} tasks"
    same = all(np.array_equal(a.images, b.images) for a, b in zip(first, again, strict=True))
    require(same, "reset", "another episode for the same start and actions", "the same")
    alike = all((seen.images == seen.images[:1]).all() for seen in first)
    require(alike, "reset", "another episode in another place", "the same")
    differs = any(not np.array_equal(a.images, b.images) for a, b in zip(first, other, strict=False))
    require(differs, "reset", "the same episode for two starts", "one that follows from the start")
    yield f"reset: everything follows from the start, in all {spec.places} places"


def _play(
    simulator: Simulator, number: int, actions: NDArray[np.float32]
) -> tuple[list[Seen], list[Stepped]]:
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
    pictures = (spec.places, len(spec.cameras), spec.image_size, spec.image_size, 3)
    report.array(f"{method}.images", seen.images, "uint8", pictures, np.ndarray)
    report.array(f"{method}.states", seen.states, "float32", (spec.places, spec.state_dim), np.ndarray)
    name = f"{method}.poses"
    if not spec.poses:
        report.require(seen.poses is None, name, "there", "None, as spec.poses is False")
        return
    poses = report.array(name, seen.poses, "float32", (spec.places, POSE_DIM), np.ndarray)
    unit = np.isfinite(poses).all() and (np.abs(np.linalg.norm(poses[:, 3:7], axis=1) - 1) < 1e-3).all()
    report.require(bool(unit), name, poses.tolist(), "finite, with quaternions of length 1")
    gripper = bool((np.abs(poses[:, 7]) <= 1).all())
    report.require(gripper, name, poses[:, 7].tolist(), "a gripper from -1 (open) to 1")


def try_policy(policy: Policy, starts: Sequence[StartState]) -> None:
    """Let a policy make one decision and evaluate it."""
    frames, tasks = np.stack([starts[0].frame, starts[-1].frame]), [starts[0].task, starts[-1].task]
    with torch.no_grad():
        acted = _decide(policy, frames, tasks, SEEDS)
    _evaluate(policy, frames, tasks, acted)


def check_policy(policy: Policy, image_size: int) -> Iterator[str]:
    """Check all that a run needs of a policy; yields a line for everything that holds."""
    require, expected = Reporter("policy", policy).require, f"at most {LOGPROB_TOLERANCE}"
    frames = np.random.default_rng(0).integers(0, 256, (2, image_size, image_size, 3), np.uint8)
    tasks = ["pick up the red block", "open the drawer"]
    with torch.no_grad():
        acted, spec = _decide(policy, frames, tasks, SEEDS), policy.action_spec
        listed = ", ".join(f"{name} {describe_tensor(values)}" for name, values in acted.sample.items())
        yield f"act: {spec.chunk} steps of {spec.dim} numbers, sample {listed}"
        again = _decide(policy, frames, tasks, SEEDS)
        same = all(torch.equal(values, again.sample[name]) for name, values in acted.sample.items())
        require(same, "act", "another decision for the same seeds", "the same one")
        alone = _decide(policy, frames[1:], tasks[1:], SEEDS[1:])
        gap = _gap(alone.logprob, acted.logprob[1:])
        require(gap <= LOGPROB_TOLERANCE, "act", f"{gap:.3g} nats off when a row is alone", expected)
    yield "act: seeds decide, neighbours do not"
    gap = _gap(_evaluate(policy, frames, tasks, acted), acted.logprob)
    require(gap <= LOGPROB_TOLERANCE, "evaluate", f"{gap:.3g} nats from act", expected)
    yield f"evaluate: log-probs of act within {gap:.1g} nats, with gradient"
    yield _check_parameters(policy)
    with tempfile.TemporaryDirectory() as folder:
        policy.save(Path(folder) / "policy", dict(policy.saved_tensors()))
        loaded = type(policy).load(Path(folder) / "policy", policy.device)
        saved, read = dict(policy.saved_tensors()), dict(loaded.saved_tensors())
    same = saved.keys() == read.keys() and all(torch.equal(saved[name], read[name]) for name in saved)
    require(same, "load", "other weights than save wrote", "the same")
    yield f"save, load: {len(saved)} tensors come back bit for bit"
    if hasattr(policy, "add_critic"):
        yield _check_critic(policy, frames, tasks)


def _decide(
    policy: Policy, frames: NDArray[np.uint8], tasks: Sequence[str], seeds: Sequence[int]
) -> ActResult:
    report, rows = Reporter("policy", policy), len(seeds)
    spec, arrays = policy.action_spec, policy.sample_arrays
    try:
        sample_specs((name, array.dtype, ("N", *array.shape[1:])) for name, array in arrays.items())
    except ValueError as error:
        expected = f"names of arrays of {', '.join(SAMPLE_DTYPES)}"
        report.require(False, "sample_arrays", f"not usable ({error})", expected)
    acted = policy.act(policy.preprocess(frames, tasks), SAMPLING, seeds)
    shape = (rows, spec.chunk, spec.dim)
    report.array("act().actions", acted.actions, "float32", shape)
    report.array("act().logprob", acted.logprob, "float32", shape)
    if acted.value is not None:
        report.array("act().value", acted.value, "float32", (rows, "V"))
    wanted, found = sorted(arrays), sorted(acted.sample)
    report.require(wanted == found, "act().sample", found, f"the arrays of sample_arrays, {wanted}")
    letters: dict[object, int] = {"C": spec.chunk, "A": spec.dim}
    for name, array in arrays.items():
        sizes = [letters.get(size, size) for size in array.shape[1:]]
        report.array(f"act().sample[{name!r}]", acted.sample[name], array.dtype, (rows, *sizes))
    finite = bool(acted.actions.isfinite().all() and acted.logprob.isfinite().all())
    report.require(finite, "act", "not finite everywhere", "finite actions and log-probs")
    return acted


def _evaluate(policy: Policy, frames: NDArray[np.uint8], tasks: Sequence[str], acted: ActResult) -> Tensor:
    report = Reporter("policy", policy)
    sample = {name: values.clone() for name, values in acted.sample.items()}
    result = policy.evaluate(policy.preprocess(frames, tasks), sample, SAMPLING)
    logprob = report.array("evaluate().logprob", result.logprob, "float32", acted.logprob.shape)
    report.array("evaluate().entropy", result.entropy, "float32", acted.logprob.shape)
    report.require(logprob.requires_grad, "evaluate().logprob", "without gradient", "one with gradient")
    return logprob


def _check_parameters(policy: Policy) -> str:
    require, trainable = Reporter("policy", policy).require, policy.trainable_parameters()
    tensors = policy.trainable_tensors()
    same = tensors.keys() == trainable.keys() and all(
        tensor.data_ptr() == trainable[name].data_ptr() for name, tensor in tensors.items()
    )
    require(same, "trainable_tensors", "something else", "the memory of trainable_parameters, by name")
    extra = sorted(policy.acting_tensors().keys() - trainable.keys())
    require(not extra, "acting_tensors", extra, "names of trainable_parameters only")
    grouped = [id(p) for group in policy.parameter_groups(1e-4, 1e-3) for p in group["params"]]
    each = sorted(grouped) == sorted(map(id, trainable.values()))
    require(each, "parameter_groups", f"{len(grouped)} tensors", "each trainable parameter once")
    count = sum(p.numel() for p in trainable.values())
    return f"parameters: {count / 1e6:.2f} M trainable, {len(policy.acting_tensors())} tensors for actors"


def _check_critic(policy: Any, frames: NDArray[np.uint8], tasks: Sequence[str]) -> str:
    report, inputs = Reporter("policy", policy), policy.preprocess(frames, tasks)
    for level, width in (("action", policy.action_spec.chunk), ("decision", 1)):
        policy.add_critic(level)
        values = report.array("values", policy.values(inputs), "float32", (len(frames), width))
        report.require(values.requires_grad, "values", "without gradient", "values with gradient")
    policy.drop_critic()
    return "critic: one value per decision or per step"


def try_environment(world: World[Any], reward: RewardModel, starts: Sequence[StartState]) -> None:
    """Let a world imagine one decision of two slots, and the reward model score it."""
    trial = Trial(world, starts)
    frames, _ = trial.imagine(trial.start(trial.two, decisions=1))
    _score(reward, frames, [state.task for state in trial.two])


def check_reward(reward: RewardModel, tasks: Sequence[str], image_size: int) -> Iterator[str]:
    """Check all that a run needs of a reward model; yields a line for everything that holds."""
    require, size = Reporter("reward", reward).require, reward.image_size or image_size
    device = next((p.device for m in reward.modules().values() for p in m.parameters()), torch.device("cpu"))
    drawn = np.random.default_rng(0).integers(0, 256, (2, 4, size, size, 3), np.uint8)
    frames, two = torch.from_numpy(drawn).to(device), [tasks[0], tasks[-1]]
    scores = _score(reward, frames, two)
    yield f"score: {describe_tensor(scores)} in [0, 1]"
    gap = _gap(_score(reward, frames[1:], two[1:]), scores[1:])
    require(gap < 0.01, "score", f"{gap:.3g} off when a row is alone", "less than 0.01")
    yield "score: neighbours do not matter"


def _score(reward: RewardModel, frames: Tensor, tasks: Sequence[str]) -> Tensor:
    report = Reporter("reward", reward)
    with torch.inference_mode():
        scores = report.array("score", reward.score(frames, tasks), "float32", tuple(frames.shape[:2]))
    inside = bool(((scores >= 0) & (scores <= 1)).all())
    report.require(inside, "score", (scores.min().item(), scores.max().item()), "probabilities in [0, 1]")
    return scores


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one.detach() - other.detach()).abs().max())

"""Checks of parts on small inputs, for `asyncrl check` and the doctor; the first fault is a ConfigError.

A run tries a user's class once: `try_policy` when it is loaded, `try_environment` in every actor.
Worlds are checked by frames and states alone, so that `CHECKS` hold for any; docs/worlds.md has the reasons.
Dimension letters: B slots, C steps per decision, A numbers per action, H/W pixels.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.devices.offload import OffloadedTensors
from asyncrl.devices.tensors import all_finite
from asyncrl.episode_layout import sample_specs
from asyncrl.errors import ConfigError
from asyncrl.facts import check_instructions, check_pictures
from asyncrl.launch.simulated import sample_format
from asyncrl.learner.interface import describe_tensor
from asyncrl.policies.interface import ActResult, Policy, SamplingParams
from asyncrl.records import POSE_DIM, StartState
from asyncrl.registry import FLAGS
from asyncrl.rewards.interface import RewardModel
from asyncrl.simulators.interface import Seen, Simulator, random_start, stored_start
from asyncrl.worlds.interface import World

DECISIONS: Final = 3  # most per slot in a check
SEEDS: Final = (11, 22)
SAMPLING: Final = SamplingParams(temperature=1.0)
LEVELS: Final = 1
"""Most grey levels by which other rows may change a frame; with weights shorter than float32, whose rounding
shows in single pixels, on average."""
ROUNDED_FRAMES: Final = 0.5
"""Frames by which the first action may seem to act later than the last, where short weights round."""
LOGPROB_TOLERANCE: Final = 0.05  # Nats between `evaluate` and `act` at equal weights: bfloat16 rounds


class Reporter:
    """Rejects a part that breaks its protocol, with a message of one sentence."""

    def __init__(self, kind: str, part: object) -> None:
        self.name = f"{FLAGS[kind]} names {type(part).__module__}:{type(part).__qualname__}"

    def require(self, fits: bool, method: str, came: object, expected: str) -> None:
        """Raise unless `fits`."""
        if not fits:
            raise ConfigError(f"{self.name}, whose {method} is {came!s:.200}, expected {expected}.")

    def array(self, method: str, found: Any, dtype: str, shape: Sequence[int], kind: type = Tensor) -> Any:
        """Return a tensor or array of this dtype and shape; else raise."""
        came, expected = type(found).__name__, f"{dtype}{list(shape)}"
        if isinstance(found, kind):
            came = f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)}"
        self.require(came == expected, method, came, expected)
        return found


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one.detach() - other.detach()).abs().max())


class Trial:
    """A world under check, and two slots of it with their first two decisions."""

    def __init__(self, world: World[Any], starts: Sequence[StartState]) -> None:
        self.world, self.two = world, [starts[0], starts[-1]]
        self.report = Reporter("world", world)
        modules = world.modules().values()
        self.weights = [x for module in modules for x in (*module.parameters(), *module.buffers())]
        self.rounds = any(tensor.is_floating_point() and tensor.itemsize < 4 for tensor in self.weights)

    opened = cached_property(lambda self: self.start(self.two))
    first = cached_property(lambda self: self.imagine(self.opened))  # frames [2, C, H, W, 3] and state
    second = cached_property(lambda self: self.imagine(self.first[1]))

    def actions(self, rows: int) -> Tensor:
        """Return ``[rows, C, A]`` float32 on the world's device; row i does not depend on `rows`."""
        spec = self.world.action_spec
        drawn = [np.random.default_rng(i).uniform(-0.5, 0.5, (spec.chunk, spec.dim)) for i in range(rows)]
        return torch.from_numpy(np.stack(drawn).astype(np.float32)).to(self.world.device)

    def start(self, states: Sequence[StartState], *, decisions: int = DECISIONS) -> Any:
        """Open slots, and check the state."""
        require, size, rows = self.report.require, self.world.image_size, len(states)
        wrong = [state.frame.shape for state in states if state.frame.shape != (size, size, 3)]
        require(not wrong, "image_size", size, f"that of the start states, {wrong}")
        state = self.world.start(states, decisions=decisions)
        require(len(state) == rows, "start", f"a state of {len(state)} rows", f"{rows} rows")
        finite = self.report.array("start().finite", state.finite, "bool", (rows,))
        require(bool(finite.all()), "start().finite", finite.tolist(), "True everywhere")
        return state

    def imagine(
        self, state: Any, actions: Tensor | None = None, seeds: Sequence[int] = SEEDS, poisoned: bool = False
    ) -> tuple[Tensor, Any]:
        """Imagine a decision, by default of the two slots, and check frames and state."""
        report, spec, size = self.report, self.world.action_spec, self.world.image_size
        with torch.inference_mode():
            found = self.world.imagine(state, self.actions(2) if actions is None else actions, seeds)
        pair = isinstance(found, tuple) and len(found) == 2
        report.require(pair, "imagine", type(found).__name__, "(frames, state)")
        (frames, after), rows = found, len(seeds)
        report.array("imagine()[0]", frames, "uint8", (rows, spec.chunk, size, size, 3))
        report.require(len(after) == rows, "imagine()[1]", len(after), f"a state of {rows} rows")
        finite = report.array("imagine()[1].finite", after.finite, "bool", (rows,))
        wanted = "True everywhere: its weights may hold NaN"
        report.require(poisoned or all_finite(finite), "imagine()[1].finite", finite.tolist(), wanted)
        return frames, after

    def alike(self, one: Tensor, other: Tensor, method: str, said: str, most: float = LEVELS) -> None:
        """Check that frames differ by at most `most` grey levels; 0: bit-equal."""
        gap = (one.int() - other.int()).abs().float()
        found = float(gap.mean() if self.rounds and most else gap.max())
        expected = f"at most {most}" + " in the mean" * self.rounds if most else "the same bits"
        self.report.require(found <= most, method, f"{found:.3g} grey levels off {said}", expected)


def check_world(world: World[Any], starts: Sequence[StartState]) -> Iterator[str]:
    """Make all checks of a world; yields a line for everything that holds."""
    trial = Trial(world, starts)
    yield f"imagine: frames {describe_tensor(trial.first[0])} on {world.device}"
    for name, check in CHECKS.items():
        check(trial)
        yield name
    named = {name: type(module).__name__ for name, module in world.modules().items()}
    yield f"modules: {named or 'none'}"


def _seeds(trial: Trial) -> None:
    again, _ = trial.imagine(trial.opened)
    trial.alike(trial.first[0], again, "imagine", "in another film from the same state", 0)
    trial.second  # noqa: B018  # The state after a decision is none the worse for another one from it.
    longer, _ = trial.imagine(trial.first[1])
    trial.alike(trial.second[0], longer, "imagine", "in another film from the same later state", 0)


def _neighbours(trial: Trial) -> None:
    frames, actions = trial.first[0], trial.actions(2)
    for rows, said in (([1], "when a row is alone"), ([1, 0, 0], "between other neighbours")):
        found, _ = trial.imagine(trial.opened.select(rows), actions[rows], [SEEDS[row] for row in rows])
        trial.alike(found, frames[rows], "imagine", said)


def _siblings(trial: Trial) -> None:
    state = trial.start(trial.two[:1] * 2)
    actions, seeds = trial.actions(1).expand(2, -1, -1), SEEDS[:1] * 2
    frames, _ = trial.imagine(state, actions, seeds)
    trial.alike(frames[0], frames[1], "start", "between two slots that begin alike")
    trial.alike(frames[:1], trial.first[0][:1], "start", "when another slot begins next to it")
    state.write_rows([0], trial.start(trial.two[1:]))
    again, _ = trial.imagine(state, actions, seeds)
    trial.alike(again[1], frames[1], "start", "in a slot whose sibling was written over")


def _actions(trial: Trial) -> None:
    # The first action is changed in row 0, the last in row 1, by half of its range, and none in row 2.
    last = trial.world.action_spec.chunk - 1
    changed = trial.actions(1).repeat(3, 1, 1)
    changed[[0, 1], [0, last]] -= changed[[0, 1], [0, last]].sign()
    frames, _ = trial.imagine(trial.start(trial.two[:1] * 3), changed, SEEDS[:1] * 3)
    gap = (frames[:2].int() - frames[2:].int()).abs().float().flatten(2).mean(dim=2).cpu()  # [action, frame]
    for step, row in zip((0, last), gap, strict=True):
        seen = bool(row.max() > 0)
        trial.report.require(seen, "imagine", f"blind to action {step}", "frames that follow from it")
    early, late = ((gap * torch.arange(last + 1)).sum(dim=1) / gap.sum(dim=1)).tolist()
    came = f"changed by the first action at frame {early:.1f} and by the last at frame {late:.1f}"
    ordered = not last or early < late + ROUNDED_FRAMES * trial.rounds
    trial.report.require(ordered, "imagine", f"{came}, in the mean", "action i to make frame i")


def _put_back(trial: Trial) -> None:
    expected, state = trial.second[0], trial.first[1]
    saved, replaced = state.select([0]), state.select([0, 1])
    trial.report.require(len(saved) == 1, "select", len(saved), "a state of 1 row")
    replaced.write_rows([0], trial.opened.select([1]))
    again, _ = trial.imagine(state)
    trial.alike(again, expected, "select", "once its copy is written over", 0)
    found, _ = trial.imagine(replaced.write_rows([0], saved))
    trial.alike(found, expected, "write_rows", "once a row is put back", 0)
    frames, _ = trial.imagine(replaced.write_rows([0], trial.opened.select([0])))
    trial.alike(frames[:1], trial.first[0][:1], "imagine", "next to an older episode")
    trial.alike(frames[1:], expected[1:], "imagine", "next to a younger episode")


def _parked(trial: Trial) -> None:
    world, expected = trial.world, trial.second[0]
    moved = getattr(world, "weights_moved", lambda: None)
    parked = OffloadedTensors(lambda: trial.weights, lambda: [], {world.device}, on_offload=moved)
    parked.offload()
    parked.restore()
    frames, _ = trial.imagine(trial.first[1])
    trial.alike(frames, expected, "modules", "after its weights were parked and back", 0)


def _not_finite(trial: Trial) -> None:
    actions, require = trial.actions(2), trial.report.require
    poisoned = actions.clone()
    poisoned[0] = float("nan")
    state: Any = trial.opened
    for given, expected in ((poisoned, trial.first[0]), (actions, trial.second[0])):
        frames, state = trial.imagine(state, given, poisoned=True)
        found = state.finite.tolist()
        require(found == [False, True], "imagine()[1].finite", found, "[False, True] after NaN in row 0")
        trial.alike(frames[1:], expected[1:], "imagine", "next to a row of NaN")
    found = state.write_rows([0], trial.opened.select([0])).finite.tolist()
    require(found == [True, True], "write_rows().finite", found, "True for a row that was written again")


_ALL = (_seeds, _neighbours, _siblings, _actions, _put_back, _parked, _not_finite)
CHECKS: Final = MappingProxyType({check.__name__[1:].replace("_", " "): check for check in _ALL})
"""Checks of one property each: `ConfigError` if the world lacks it."""


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
    tensors, trainable = policy.trainable_tensors(), policy.trainable_parameters()
    same = tensors.keys() == trainable.keys()
    same = same and all(x.data_ptr() == trainable[name].data_ptr() for name, x in tensors.items())
    require(same, "trainable_tensors", "something else", "the memory of trainable_parameters, by name")
    extra = sorted(policy.acting_tensors().keys() - trainable.keys())
    require(not extra, "acting_tensors", extra, "names of trainable_parameters only")
    yield f"parameters: {sum(p.numel() for p in trainable.values()) / 1e6:.2f} M trainable"
    with tempfile.TemporaryDirectory() as folder:
        saved = dict(policy.saved_tensors())
        policy.save(Path(folder) / "policy", saved)
        read = dict(type(policy).load(Path(folder) / "policy", policy.device).saved_tensors())
    same = saved.keys() == read.keys() and all(torch.equal(saved[name], read[name]) for name in saved)
    require(same, "load", "other weights than save wrote", "the same")
    yield f"save, load: {len(saved)} tensors come back bit for bit"


def _decide(policy: Policy, frames: NDArray[Any], tasks: Sequence[str], seeds: Sequence[int]) -> ActResult:
    report, rows, arrays = Reporter("policy", policy), len(seeds), policy.sample_arrays
    try:
        sample_specs((name, array.dtype, ("N", *array.shape[1:])) for name, array in arrays.items())
    except ValueError as error:
        raise ConfigError(f"{report.name}, whose sample_arrays cannot be used: {error}.") from None
    acted = policy.act(policy.preprocess(frames, tasks), SAMPLING, seeds)
    shape = (rows, policy.action_spec.chunk, policy.action_spec.dim)
    report.array("act().actions", acted.actions, "float32", shape)
    report.array("act().logprob", acted.logprob, "float32", shape)
    if acted.value is not None:
        report.array("act().value", acted.value, "float32", (rows, acted.value.shape[-1]))
    wanted, found = sorted(arrays), sorted(acted.sample)
    report.require(wanted == found, "act().sample", found, f"the arrays of sample_arrays, {wanted}")
    for name, (dtype, sizes) in sample_format(policy).items():
        report.array(f"act().sample[{name!r}]", acted.sample[name], dtype, (rows, *sizes))
    numbers = [x for x in (acted.actions, acted.logprob, acted.entropy, acted.value) if x is not None]
    wanted = "finite actions, log-probs, entropies and values: its weights may hold NaN"
    report.require(all(map(all_finite, numbers)), "act", "not finite everywhere", wanted)
    return acted


def _evaluate(policy: Policy, frames: NDArray[np.uint8], tasks: Sequence[str], acted: ActResult) -> Tensor:
    report = Reporter("policy", policy)
    sample = {name: values.clone() for name, values in acted.sample.items()}
    result = policy.evaluate(policy.preprocess(frames, tasks), sample, SAMPLING)
    logprob = report.array("evaluate().logprob", result.logprob, "float32", acted.logprob.shape)
    report.array("evaluate().entropy", result.entropy, "float32", acted.logprob.shape)
    report.require(logprob.requires_grad, "evaluate().logprob", "without gradient", "one with gradient")
    return logprob


def check_simulator(simulator: Simulator) -> Iterator[str]:
    """Check that `evaluate` and `collect` can use a simulator; yields a line per check that passes."""
    report, spec = Reporter("simulator", simulator), simulator.spec
    first, other, again = (_play(report, simulator, number) for number in (1, 2, 1))
    tasks = check_instructions(first[0].tasks, report.name + ", reset().tasks", spec.places)
    known = all(not spec.tasks or task in spec.tasks for task in tasks)
    report.require(known, "reset().tasks", tasks, "one instruction per place, each of spec.tasks")
    yield f"reset, step: {len(spec.cameras)} pictures of {spec.image_size} pixels, {len(spec.tasks)} tasks"
    one, two, three = (np.stack([seen.images for seen in play]) for play in (first, other, again))
    follows = np.array_equal(one, three) and (one == one[:, :1]).all() and not np.array_equal(one, two)
    report.require(
        follows, "reset", "not the same for one start, or not another for two", "both, in all places"
    )
    yield f"reset: everything follows from the start, in all {spec.places} places"


def _play(report: Reporter, simulator: Simulator, number: int) -> list[Seen]:
    # A few actions, in all places from one start.
    spec, places = simulator.spec, list(range(simulator.spec.places))
    low, high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
    start = stored_start(spec, 0, number % spec.trials) if spec.trials else random_start(spec, number)
    shown = [simulator.reset(places, [start] * len(places))]
    for action in np.random.default_rng(0).uniform(low, high, (min(8, spec.max_steps), len(low))):
        stepped = simulator.step(places, np.tile(action.astype(np.float32), (len(places), 1)), draw=True)
        for name in ("rewards", "success", "terminated", "truncated"):
            dtype = "float32" if name == "rewards" else "bool"
            report.array(f"step().{name}", getattr(stepped, name), dtype, (spec.places,), np.ndarray)
        finite = bool(np.isfinite(stepped.rewards).all())
        report.require(finite, "step().rewards", stepped.rewards.tolist(), "finite numbers")
        report.require(stepped.seen is not None, "step(draw=True)", "without pictures", "with them")
        shown += [stepped.seen] if stepped.seen else []
        if bool((stepped.terminated | stepped.truncated).any()):
            break
    for seen in shown:
        size = (spec.places, len(spec.cameras), spec.image_size, spec.image_size, 3)
        check_pictures(seen.images, size, f"{report.name}, whose seen.images")
        report.array("seen.states", seen.states, "float32", (spec.places, spec.state_dim), np.ndarray)
        if spec.poses:
            report.array("seen.poses", seen.poses, "float32", (spec.places, POSE_DIM), np.ndarray)
    return shown

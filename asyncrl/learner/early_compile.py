"""Compiles the learner's passes before its first batch is there, while the actors imagine it.

consumes   dummy decisions           waits for: nothing; with several ranks each other, in each pass
produces   compiled layers           ended by: its last pass; a batch that is ready, or a stop request, both
                                     seen between two passes

A pass is made of every kind that updates make, until the first batch is there. Where passes are of fixed
sizes (`PolicyForward.fix_sizes`) these are few: with gradient, and those without that the recipe needs. Else
there are passes of a full micro-batch and of another size (the compiler then makes graphs for any size), with
one length of prompts and with several (a mask). Gradients, random states, optimizer, metrics and counters are
as before. Dummy decisions have the run's shapes and dtypes; pictures are black and samples zeros.

Dimension letters used in this file:
    D  decisions      C  steps per decision      A  numbers per step      H, W  image size in pixels
    V  cameras beside the first                  Q  numbers of state
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.episode_layout import ArraySpec
from asyncrl.learner.batches import Batch
from asyncrl.learner.update import FEWEST_ROWS, Update, reads_movement_in_passes, rows_of_movement
from asyncrl.observability import metrics_system as m
from asyncrl.observability import process_status
from asyncrl.observability.metrics import Metric
from asyncrl.observability.process_status import activity
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.replay.interface import EpisodeFormat


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What decisions of a run look at. Rank 0 knows it and tells the other learner ranks."""

    image_size: int
    """Height and width of all pictures in pixels."""
    tasks: tuple[str, ...]
    """All instructions, each once."""
    more_cameras: int = 0
    """``V``."""
    state_dim: int = 0
    """``Q``; 0: the policy is shown none."""

    def to_json(self) -> str:
        """Write it as the text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self | None:
        """Read what `to_json` wrote; an empty text: it is not known."""
        if not text:
            return None
        plain = json.loads(text)
        return cls(**{**plain, "tasks": tuple(plain["tasks"])})


def shown_of(episodes: EpisodeFormat) -> Shown | None:
    """Return what decisions of such episodes look at; None where pictures or instructions are not known."""
    simulator = episodes.simulator
    named = (
        simulator.tasks if simulator is not None else [t for some in episodes.tasks.values() for t in some]
    )
    if not episodes.image_size or not named:
        return None
    return Shown(
        image_size=episodes.image_size,
        tasks=tuple(sorted(set(named))),
        more_cameras=simulator.more_cameras if simulator is not None else 0,
        state_dim=simulator.state_dim if simulator is not None else 0,
    )


def has_known_sizes(policy: Policy) -> bool:
    """Tell whether all arrays of the policy's samples have sizes that it says before anything is decided."""
    return all(
        isinstance(size, int) or size in ("C", "A")
        for spec in policy.sample_arrays.values()
        for size in spec.shape[1:]
    )


def placeholder_batch(policy: Policy, shown: Shown, tasks: Sequence[str], sampling: SamplingParams) -> Batch:
    """Make a batch of one decision per instruction.

    Args:
        tasks: ``D`` instructions; each decision is an episode of its own.

    Returns:
        ``D`` decisions, with shapes and types as in `build_batch`.
    """
    decisions, spec = len(tasks), policy.action_spec
    frames = np.zeros((decisions, shown.image_size, shown.image_size, 3), np.uint8)
    more = np.repeat(frames[:, None], shown.more_cameras, axis=1) if shown.more_cameras else None
    states = np.zeros((decisions, shown.state_dim), np.float32) if shown.state_dim else None
    rows_D = torch.arange(decisions)
    return Batch(
        frames=frames,
        tasks=tuple(tasks),
        sample=_samples(policy.sample_arrays, decisions, {"C": spec.chunk, "A": spec.dim}),
        logprob_behaviour=torch.zeros(decisions, spec.chunk, spec.dim),
        mask=torch.ones(decisions, spec.chunk, spec.dim, dtype=torch.bool),
        rewards=torch.zeros(decisions, spec.chunk),
        lag=torch.zeros_like(rows_D),
        episode=rows_D,
        decision_index=torch.zeros_like(rows_D),
        returns=torch.zeros(decisions),
        lengths=torch.full_like(rows_D, spec.chunk),
        terminated=torch.zeros(decisions, dtype=torch.bool),
        final_frames=frames,
        more_frames=more,
        states=states,
        final_more_frames=more,
        final_states=states,
        group_size=1,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
    )


def _samples(specs: Mapping[str, ArraySpec], decisions: int, letters: Mapping[str, int]) -> dict[str, Tensor]:
    """Name -> zeros ``[D, ...]``; integers as int64, as `build_batch` gives them."""
    return {
        name: torch.zeros(
            decisions,
            *(size if isinstance(size, int) else letters[size] for size in spec.shape[1:]),
            dtype=torch.float32 if spec.dtype.startswith("float") else torch.int64,
        )
        for name, spec in specs.items()
    }


_log = logging.getLogger(__name__)


class Pass(NamedTuple):
    """One pass over placeholder decisions."""

    tasks: tuple[str, ...]
    """One per decision."""
    gradient: bool
    small: bool = False
    """See `PolicyForward.evaluate`."""


class EarlyCompile:
    """Makes the passes once. Every learner rank has one and calls it at the same time."""

    def __init__(
        self,
        update: Update,
        shown: Shown,
        sampling: SamplingParams,
        stop_requested: Callable[[], bool] = lambda: False,
        *,
        batch_ready: Callable[[], bool] = lambda: False,
        hang_timeout: float = 0.0,
    ) -> None:
        """Choose the passes.

        Args:
            hang_timeout: Seconds that a pass may take; 0: any.
        """
        self.update, self.shown, self.sampling = update, shown, sampling
        self.stop_requested, self.batch_ready, self.hang_timeout = stop_requested, batch_ready, hang_timeout
        self.passes = passes_of(update, shown)

    def __call__(self, version: int) -> dict[Metric, float]:
        """Make the passes of an update from `version`; collective.

        Returns:
            The seconds that it took.
        """
        began = time.monotonic()
        with unchanged(self.update), activity("compiling", self.hang_timeout):
            for number, each in enumerate(self.passes):
                if self._stops(number):
                    break
                process_status.describe(f"compiling: pass {number + 1} of {len(self.passes)}")
                self._make(each, version)
                process_status.progress()
        seconds = time.monotonic() - began
        _log.info("compiled for %.1f s before the first batch", seconds)
        return {m.COMPILE_SECONDS: seconds}

    def _stops(self, made: int) -> bool:
        """Tell whether any rank shall stop: none may make a pass that another one does not."""
        enough = self.stop_requested() or (made > 0 and self.batch_ready())
        return bool(self.update.ranks.max(torch.tensor([float(enough)]))[0])

    def _make(self, each: Pass, version: int) -> None:
        batch = placeholder_batch(self.update.policy, self.shown, each.tasks, self.sampling)
        rows_D = torch.arange(len(each.tasks))
        if not each.gradient:
            self._without_gradient(batch, small=each.small)
            return
        update = self.update
        learns = version >= update.stepper.critic_warmup
        critic = update.recipe.trains_critic
        through = critic and update.recipe.critic.through_policy and learns
        now = update.forward.evaluate(batch, rows_D, through=through)
        if update.reference is not None:
            update.forward.reference(update.reference, batch, rows_D)
        loss = now.logprob.sum() + now.entropy.sum() if learns else now.logprob.new_zeros(())
        if critic and now.value is not None:
            loss = loss + now.value.sum()
        loss.backward()

    @torch.no_grad()
    def _without_gradient(self, batch: Batch, *, small: bool) -> None:
        update, rows_D = self.update, torch.arange(len(batch.tasks))
        update.forward.evaluate(batch, rows_D, small=small)
        if update.recipe.trains_critic and update.recipe.critic.truncation == "bootstrap":
            update.forward.values_at_end(batch, batch.tasks.__getitem__, rows_D)


def fix_sizes(update: Update) -> None:
    """Let all passes of updates be of one size, and small ones of another (`PolicyForward.fix_sizes`).

    With gradient they have the decisions of a micro-batch, or of a minibatch where these are fewer. The small
    one after a single step is as large as others where it may be half of one.
    """
    size = pass_size(update)
    few = rows_of_movement(_episodes(update) * update.max_decisions, size)
    update.forward.fix_sizes(size, size if 2 * few >= size else FEWEST_ROWS)


def pass_size(update: Update) -> int:
    """Return the most decisions that a pass with gradient has."""
    chosen = update.recipe.algorithm
    episodes = max(1, -(-_episodes(update) // chosen.minibatches))
    return min(chosen.micro_batch, episodes * update.max_decisions)


def _episodes(update: Update) -> int:
    """Count the episodes of a rank's part of a batch."""
    chosen = update.recipe.algorithm
    return chosen.groups_per_update // update.ranks.size * chosen.group_size


def passes_of(update: Update, shown: Shown) -> list[Pass]:
    """List the passes that compile what updates need, the same on all ranks; what all need comes first."""
    return _of_fixed_sizes(update, shown) if update.forward.fixed else _of_any_size(update, shown)


def _of_fixed_sizes(update: Update, shown: Shown) -> list[Pass]:
    """List one pass for each kind."""
    size, few, task = update.forward.micro_batch, update.forward.few, shown.tasks[0]
    passes, moves = [Pass((task,) * size, gradient=True)], not reads_movement_in_passes(update.recipe)
    if update.recipe.needs_old_policy_pass or (moves and few == size):
        passes.append(Pass((task,) * size, gradient=False))
    if moves and few < size:
        passes.append(Pass((task,) * few, gradient=False, small=True))
    return passes


def _of_any_size(update: Update, shown: Shown) -> list[Pass]:
    """List passes of two sizes."""
    full = pass_size(update)
    by_length = _one_task_per_length(update, shown)
    longest, other = by_length[0], by_length[-1]
    sizes = [full] if full < 3 else [full, full - 1]
    alike = [(task,) * size for size, task in zip(sizes, (longest, other), strict=False)]
    mixed = [(longest, *(other,) * (size - 1)) for size in sizes if size > 1 and other != longest]
    alone = [(longest,)] if update.ranks.size > 1 and full > 1 else []
    return [
        Pass(tasks, gradient)
        for batches in (alike, mixed, alone)
        # With gradient first: once sizes are variable, one size is enough for the passes without.
        for tasks, gradient in [(tasks, True) for tasks in batches]
        + [(tasks, False) for tasks in batches[:1]]
    ]


def _one_task_per_length(update: Update, shown: Shown) -> list[str]:
    """Return one instruction for every length of prompts, the longest first."""
    lengths = update.forward.prompt_lengths(shown.tasks).tolist()
    by_length = dict(zip(lengths, shown.tasks, strict=True))
    return [by_length[length] for length in sorted(by_length, reverse=True)]


@contextmanager
def unchanged(update: Update) -> Iterator[None]:
    """Leave gradients, random states and the mode of the policy behind as they were found.

    Weights, optimizer and counters are not touched by passes, which count nothing and do not step.
    """
    parameters = list(update.policy.trainable_parameters().values())
    gradients = [parameter.grad for parameter in parameters]
    module = update.policy if isinstance(update.policy, nn.Module) else None
    training = module is not None and module.training
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch.random.fork_rng([update.device] if update.device.type == "cuda" else []):
            if module is not None:
                module.eval()
            yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if module is not None:
            module.train(training)

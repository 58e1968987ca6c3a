"""Compiles the learner's passes before its first batch is there, while the actors imagine it.

consumes   dummy decisions           waits for: nothing; with several ranks each other, in each pass
produces   compiled layers           ended by: its last pass; a batch that is ready, or a stop request, both
                                     seen between two passes

Gradients, random states, optimizer, metrics and counters stay as they were.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.learner.batches import Batch
from asyncrl.learner.update import KL_ROWS_MIN, Update, reads_kl_in_passes, rows_for_kl
from asyncrl.observability import metrics_system as m
from asyncrl.observability import process_status
from asyncrl.observability.metrics import Metric
from asyncrl.observability.process_status import activity
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.replay.interface import EpisodeFormat

_log = logging.getLogger(__name__)


class ObservationShapes(NamedTuple):
    """Shapes of the observations of a run, sent by rank 0 to the other learner ranks as JSON."""

    image_size: int  # Height and width of all pictures in pixels
    tasks: Sequence[str]  # All instructions, each once
    more_cameras: int = 0
    state_dim: int = 0  # 0 if the policy sees no state


def observation_shapes(episodes: EpisodeFormat) -> ObservationShapes | None:
    """Return the shapes of episodes' observations; None if pictures or instructions are unknown."""
    simulator = episodes.simulator
    tasks = (
        simulator.tasks if simulator is not None else [t for some in episodes.tasks.values() for t in some]
    )
    if not episodes.image_size or not tasks:
        return None
    return ObservationShapes(
        image_size=episodes.image_size,
        tasks=sorted(set(tasks)),
        more_cameras=simulator.more_cameras if simulator is not None else 0,
        state_dim=simulator.state_dim if simulator is not None else 0,
    )


def has_known_sizes(policy: Policy) -> bool:
    """Return True if all arrays of the policy's samples have sizes that are known in advance."""
    return all(
        isinstance(size, int) or size in ("C", "A")
        for spec in policy.sample_arrays.values()
        for size in spec.shape[1:]
    )


def dummy_batch(
    policy: Policy, shapes: ObservationShapes, tasks: Sequence[str], sampling: SamplingParams
) -> Batch:
    """Return a batch with one decision, an episode of its own, per instruction."""
    decisions, spec = len(tasks), policy.action_spec
    letters = {"C": spec.chunk, "A": spec.dim}
    frames = np.zeros((decisions, shapes.image_size, shapes.image_size, 3), np.uint8)
    more = np.repeat(frames[:, None], shapes.more_cameras, axis=1) if shapes.more_cameras else None
    states = np.zeros((decisions, shapes.state_dim), np.float32) if shapes.state_dim else None
    rows_D = torch.arange(decisions)

    def zeros(shape: Sequence[int | str], dtype: str) -> Tensor:
        sizes = [size if isinstance(size, int) else letters[size] for size in shape[1:]]
        return torch.zeros(decisions, *sizes, dtype=torch.float32 if dtype[0] == "f" else torch.int64)

    return Batch(
        frames=frames,
        tasks=tuple(tasks),
        sample={name: zeros(array.shape, array.dtype) for name, array in policy.sample_arrays.items()},
        behaviour_logprob=torch.zeros(decisions, spec.chunk, spec.dim),
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


class Pass(NamedTuple):
    """One pass over dummy decisions; `small` as in `PolicyForward.evaluate`."""

    size: int
    gradient: bool
    small: bool = False


class EarlyCompile:
    """Makes the passes once. Every learner rank has one and calls it at the same time."""

    def __init__(
        self,
        update: Update,
        shapes: ObservationShapes,
        sampling: SamplingParams,
        stop_requested: Callable[[], bool] = lambda: False,
        *,
        batch_ready: Callable[[], bool] = lambda: False,
        hang_timeout: float = 0.0,
    ) -> None:
        self.update, self.shapes, self.sampling = update, shapes, sampling
        self.stop_requested, self.batch_ready, self.hang_timeout = stop_requested, batch_ready, hang_timeout
        self.passes = passes_of(update)

    def __call__(self, version: int) -> dict[Metric, float]:
        """Make the passes of an update from `version`; returns the seconds it took; collective."""
        began = time.monotonic()
        with unchanged(self.update), activity("compiling", self.hang_timeout):
            for number, each in enumerate(self.passes):
                stop = self.stop_requested() or (number > 0 and self.batch_ready())
                if self.update.ranks.max(torch.tensor([float(stop)]))[0]:
                    break  # All ranks together: a pass is collective.
                process_status.describe(f"compiling: pass {number + 1} of {len(self.passes)}")
                self._make(each, version)
                process_status.progress()
        seconds = time.monotonic() - began
        _log.info("compiled for %.1f s before the first batch", seconds)
        return {m.COMPILE_SECONDS: seconds}

    def _make(self, each: Pass, version: int) -> None:
        update, critic = self.update, self.update.recipe.trains_critic
        batch = dummy_batch(update.policy, self.shapes, [self.shapes.tasks[0]] * each.size, self.sampling)
        rows_D = torch.arange(each.size)
        if not each.gradient:
            with torch.no_grad():
                update.forward.evaluate(batch, rows_D, small=each.small)
                if critic and update.recipe.critic.truncation == "bootstrap":
                    update.forward.values_at_end(batch, rows_D)
            return
        learns = version >= update.stepper.critic_warmup
        current = update.forward.evaluate(batch, rows_D)
        if update.reference is not None:
            update.forward.reference(update.reference, batch, rows_D)
        loss = current.logprob.sum() + current.entropy.sum() if learns else current.logprob.new_zeros(())
        if critic and current.value is not None:
            loss = loss + current.value.sum()
        loss.backward()


def fix_sizes(update: Update) -> None:
    """Fix the sizes of an update's passes; the small one's is that of others from half of it on."""
    settings = update.recipe.algorithm
    episodes = settings.groups_per_update // update.ranks.size * settings.group_size
    per_minibatch = max(1, -(-episodes // settings.minibatches))
    size = min(settings.micro_batch, per_minibatch * update.max_decisions)
    small = rows_for_kl(episodes * update.max_decisions, size)
    update.forward.micro_batch = size
    update.forward.small_size = size if 2 * small >= size else KL_ROWS_MIN


def passes_of(update: Update) -> list[Pass]:
    """Return the passes that compile all that updates need, the same on all ranks."""
    size, small = update.forward.micro_batch, update.forward.small_size
    passes, kl_pass = [Pass(size, gradient=True)], not reads_kl_in_passes(update.recipe)
    if update.recipe.needs_old_policy_pass or (kl_pass and small == size):
        passes.append(Pass(size, gradient=False))
    if kl_pass and small < size:
        passes.append(Pass(small, gradient=False, small=True))
    return passes


@contextmanager
def unchanged(update: Update) -> Iterator[None]:
    """Restore gradients, random states and mode of the policy after the block."""
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

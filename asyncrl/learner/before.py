"""A batch and the policy before the update in, all that the update must know of that moment out.

Dimension letters used in this file:
    D  decisions of the batch      C  steps per decision (8)      A  action dimensions (7)
    U, V  units of a decision (`levels`)      K  values of a decision: 1 or 8
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.config.run import TrainConfig
from asyncrl.learner.batches import Batch
from asyncrl.learner.corrections import WEIGHTED, whole_episodes
from asyncrl.learner.estimation import Opinion, Teaching, critic_teaching, relative_teaching
from asyncrl.learner.objective import Objective
from asyncrl.learner.passes import Passes
from asyncrl.learner.tally import Tally


@dataclass(kw_only=True)
class Before:
    """What was known before the first step."""

    teaching: Teaching
    start: Tensor | None = None
    """``[D, C, A]`` float32 log-probs on the policy's device; None: the first epoch finds them."""
    weights: Tensor | None = None
    """``[D, U, V]`` importance weights; None: computed per micro-batch."""
    values: Tensor | None = None
    """``[D, K]`` float32, on the CPU; None without a critic."""
    first: Tensor
    """``[D, C, A]`` float32 log-probs when a decision was first evaluated in this update."""
    seen: Tensor
    """``[D]`` bool, on the CPU: which decisions were evaluated."""

    def note(self, rows: Tensor, logprob: Tensor) -> None:
        """Remember the log-probs ``[M, C, A]`` of decisions that are evaluated for the first time."""
        if not self.seen[rows].all():
            self.first[rows.to(self.first.device)] = logprob.detach()
            self.seen[rows] = True

    def value_mask(self, batch: Batch) -> Tensor:
        """``[D, K]`` bool: which values are of a valid place; ``[D, 1]`` without a critic."""
        steps_DC = batch.mask.any(dim=2)
        wide = self.values is not None and self.values.shape[1] > 1
        return steps_DC if wide else steps_DC.any(dim=1, keepdim=True)


def needs_a_look(config: TrainConfig) -> bool:
    """Whether the whole batch must be evaluated before the first step.

    In the first pass over a whole minibatch the policy is still the one before that step. With one minibatch
    this is the policy before the update, and what the pass found serves the later epochs.
    """
    chosen, correction = config.algorithm, config.correction
    several = chosen.minibatches > 1
    anchored = correction.kind in ("none", "vtrace") or (
        correction.kind in WEIGHTED and correction.proximal == "recomputed"
    )
    return chosen.kind == "ppo" or whole_episodes(correction) or (several and anchored)


def look(batch: Batch, config: TrainConfig, passes: Passes, objective: Objective, tally: Tally) -> Before:
    """Evaluate the batch where later stages need it as it was, and decide what it teaches."""
    decisions = len(batch.tasks)
    if not needs_a_look(config):
        return Before(
            teaching=relative_teaching(batch, config, passes.group),
            first=torch.zeros(batch.mask.shape, device=passes.device),
            seen=torch.zeros(decisions, dtype=torch.bool),
        )
    start, values = passes.evaluate_all(batch)
    if config.algorithm.kind == "ppo":
        assert values is not None, "ppo needs a policy with a value head"
        values, ends = values.cpu(), torch.zeros(len(batch.returns))
        if config.critic.truncation == "bootstrap":
            ends = passes.final_values(batch).cpu()
        teaching = critic_teaching(batch, Opinion(values, ends), start.cpu(), config, passes.group)
    else:
        teaching, values = relative_teaching(batch, config, passes.group), None
    seen = torch.ones(decisions, dtype=torch.bool)
    weights = _weights(batch, start, objective, tally)
    if config.correction.proximal == "log_linear":
        weights = None  # The proximal policy moves with the current one.
    return Before(
        teaching=teaching, start=start, weights=weights, values=values, first=start.clone(), seen=seen
    )


def _weights(batch: Batch, start: Tensor, objective: Objective, tally: Tally) -> Tensor:
    """Importance weights ``[D, U, V]`` of the whole batch; also reads how stale it is."""
    device = start.device
    behaviour, episode = batch.logprob_behaviour.to(device), batch.episode.to(device)
    mask = batch.mask.to(device) & ~torch.isneginf(start)
    start, behaviour = (torch.where(mask, x, 0.0) for x in (start, behaviour))
    proximal = objective.proximal(start, start, behaviour, batch.lag.to(device))
    weights = objective.weights(proximal, behaviour, mask, episode)
    objective.read_staleness(start, behaviour, mask, weights, episode, tally)
    return weights

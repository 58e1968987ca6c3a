"""Protocols of the learner's parts that are chosen by name: correction, advantage, objective.

    --correction.kind        `Correction`   Class(settings: CorrectionSettings, **own)
    --algorithm.advantage    `Advantage`    Class(algorithm: AlgorithmSettings, critic: CriticSettings, **own)
    --algorithm.objective    `Objective`    Class(settings: AlgorithmSettings, **own)

A name is a built-in one or the user's `package.module:Class`; `own` are the key=value texts of
--correction.settings and --algorithm.settings. Log-probs are in nats; tensors without a dtype are float32.

D decisions, C steps per decision, A numbers per step, U, V units of a decision, each with one probability
ratio (`losses`), B episodes, T time steps of the longest episode, K values of a decision: 1, or C.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from asyncrl.config.algorithm import Level
from asyncrl.learner.batches import Batch
from asyncrl.learner.ranks import LearnerRanks

Need = Literal["behaviour", "critic", "whole_episodes", "old_policy"]
"""Requirement of a correction or an advantage:

behaviour        log-probs of the policy that sampled; a batch without them is refused
critic           a critic that is trained: --algorithm.kind ppo
whole_episodes   log-probs of all decisions of an episode at once, before the first step; a correction
                 sees only the episodes with an advantage
old_policy       log-probs of the policy before the update, also with several minibatches
"""


class Estimates(NamedTuple):
    """Advantages and value targets with a critic, each ``[B, T]``, detached, 0 where the mask is False."""

    advantages: Tensor
    targets: Tensor


class AdvantagesAndTargets(NamedTuple):
    """Advantages and value targets of the decisions of a batch. Detached, on the CPU."""

    advantages: Tensor
    """``[D, 1, 1]`` or ``[D, C, 1]``. A decision whose advantages are all 0 may be left out."""
    targets: Tensor | None
    """``[D, K]`` for the critic; None without one."""


class OldPolicy(NamedTuple):
    """Evaluation of a batch by the policy before the update. On the CPU."""

    logprob: Tensor
    """``[D, C, A]``."""
    values: Tensor | None
    """``[D, K]`` of the critic; None without one."""
    final_values: Tensor
    """``[B]`` value of the final observation of episodes that ran out of time; 0 for all others."""


class UnitLoss(NamedTuple):
    """A loss per unit, each ``[D, U, V]``."""

    loss: Tensor
    """With gradient."""
    clipped: Tensor
    """bool, True where the clip removed the gradient (cispo: where it cut the weight)."""
    dual_clipped: Tensor
    """bool, True where the dual clip removed the gradient."""
    clipped_ratio: Tensor
    """Current / proximal probability after clipping, detached."""


class Correction(Protocol):
    """Corrects for samples of older policies."""

    needs: frozenset[str]

    def weights(self, log_ratios: Tensor, mask: Tensor, episode: Tensor, level: Level) -> Tensor | None:
        """Compute detached importance weights, which broadcast to the units ``[D, U, V]``; None: all 1.

        Args:
            log_ratios: ``[D, C, A]`` log proximal - log behaviour within plus and minus 20; 0 where masked.
            mask: ``[D, C, A]`` bool, valid numbers.
            episode: ``[D]`` int64, episode of each decision; episodes are whole only with `whole_episodes`.
        """
        ...


@runtime_checkable
class ChoosesProximal(Protocol):
    """A correction that chooses the proximal policy, by default the learner's before the update.

    It may follow the current policy, unless the correction needs `old_policy` or `whole_episodes`.
    """

    def proximal(self, logprob: Tensor, old_logprob: Tensor, behaviour: Tensor, lag: Tensor) -> Tensor:
        """Return the log-probs of the proximal policy; all are ``[D, C, A]`` and detached.

        `lag`: ``[D]`` int64, learner's version minus the version that sampled the decision.
        """
        ...


@runtime_checkable
class CorrectsAdvantages(Protocol):
    """A correction of the advantages and value targets themselves, in place of GAE."""

    def estimates(
        self,
        rewards: Tensor,
        values: Tensor,
        final_values: Tensor,
        mask: Tensor,
        terminated: Tensor,
        log_ratios: Tensor,
        *,
        gamma: float,
        lam: float,
    ) -> Estimates:
        """Compute advantages and targets from ``[B, T]``, as `advantages.vtrace`.

        Args:
            values: Critic's values of observations before each time step.
            final_values: ``[B]`` value of the observation after the last time step.
            terminated: ``[B]`` bool, True: the task ended (success). False: time ran out.
            log_ratios: Log-probs before the update minus the behaviour's.
        """
        ...


class Advantage(Protocol):
    """Estimates how much better than expected each decision was."""

    needs: frozenset[str]

    def estimate(
        self, batch: Batch, old: OldPolicy | None, correction: Correction, ranks: LearnerRanks
    ) -> AdvantagesAndTargets:
        """Compute advantages ``[D, 1, 1]`` or ``[D, C, 1]``, and a critic's targets ``[D, K]``; detached.

        Args:
            batch: This rank's shard, on the CPU.
            old: None unless a need (also `critic`) or a correction of advantages requires it.
        """
        ...


class Objective(Protocol):
    """The loss of each unit, before importance weights and aggregation."""

    def loss(self, logprob: Tensor, proximal: Tensor, mask: Tensor, advantages: Tensor) -> UnitLoss:
        """Compute the loss of each unit ``[D, U, V]``.

        Log-probs are ``[D, C, A]``, 0 where masked, `logprob` with gradient; advantages ``[D, 1 or C, 1]``.
        """
        ...


def describe_tensor(value: Any) -> str:
    """Describe a value that should have been a tensor."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    gradient = " with gradient" if value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{gradient}"

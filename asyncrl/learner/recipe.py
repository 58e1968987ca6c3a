"""Builds the correction, advantage and objective that the settings name, and checks their results.

D decisions, C steps per decision, A numbers per step, U, V units of a decision (`losses`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, get_args

import torch
from torch import Tensor

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings, CriticSettings
from asyncrl.errors import ConfigError
from asyncrl.learner import interface
from asyncrl.learner.batches import Batch
from asyncrl.learner.interface import AdvantagesAndTargets, UnitLoss, describe_tensor
from asyncrl.learner.losses import valid_units
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.registry import FLAGS, keywords, names_code, resolve

AUTO_ADVANTAGE = {"grpo": "group_relative", "ppo": "gae"}  # --algorithm.kind -> --algorithm.advantage auto


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of an update, and the parts that they name."""

    algorithm: AlgorithmSettings
    correction_settings: CorrectionSettings
    critic: CriticSettings
    correction: interface.Correction
    advantage: interface.Advantage
    objective: interface.Objective

    @property
    def trains_critic(self) -> bool:
        """Return True if a critic learns."""
        return self.algorithm.kind == "ppo"

    @property
    def needs(self) -> frozenset[str]:
        """Return the needs of correction and advantage, and `old_policy` if the ratio is taken against it."""
        needs = frozenset(self.correction.needs) | frozenset(self.advantage.needs)
        return needs if isinstance(self.correction, interface.ChoosesProximal) else needs | {"old_policy"}

    @property
    def needs_old_policy_pass(self) -> bool:
        """Return True if decisions must be evaluated once before the first step."""
        several = self.algorithm.minibatches > 1 and "old_policy" in self.needs
        return self.advantages_need_old_policy or "whole_episodes" in self.needs or several

    @property
    def advantages_need_old_policy(self) -> bool:
        """Return True if the advantages depend on the old policy; its pass then covers every decision."""
        reads = bool({"old_policy", "whole_episodes"} & set(self.advantage.needs))
        return self.trains_critic or reads or isinstance(self.correction, interface.CorrectsAdvantages)

    @property
    def importance_weights_move(self) -> bool:
        """Return True if the importance weights may follow the current policy."""
        fixed = {"old_policy", "whole_episodes"} & set(self.correction.needs)
        return isinstance(self.correction, interface.ChoosesProximal) and not fixed

    def check_batch(self, batch: Batch) -> None:
        """Raise ConfigError if the behaviour policy's log-probs are needed but not finite."""
        if "behaviour" in self.needs and not bool(batch.behaviour_logprob.isfinite().all()):
            raise ConfigError(
                f"--correction.kind is {self.correction_settings.kind}, but the episodes hold no log-probs "
                "of the policy that sampled them (NaN). Imagine them again with this version, or use "
                "--correction.kind none."
            )

    def estimate(
        self, batch: Batch, old: interface.OldPolicy | None, ranks: LearnerRanks
    ) -> AdvantagesAndTargets:
        """Compute advantages and targets of the batch."""
        found = self.advantage.estimate(batch, old, self.correction, ranks)
        decisions, steps = batch.mask.shape[:2]
        shapes = [[decisions, n, 1] for n in ([1] if self.algorithm.level == "decision" else [1, steps])]
        values = old.values if old is not None and self.trains_critic else None
        fits = isinstance(found, AdvantagesAndTargets) and _is_constant(found.advantages, *shapes)
        if fits and (found.targets is None if values is None else _is_constant(found.targets, values.shape)):
            return found
        wanted = f"{' or '.join(f'float32{shape}' for shape in shapes)}, {describe_tensor(values)}"
        raise _refusal(
            "advantage", self.advantage, "estimate", found, f"AdvantagesAndTargets({wanted}), detached"
        )

    def proximal(self, logprob: Tensor, old_logprob: Tensor, behaviour: Tensor, lag: Tensor) -> Tensor:
        """Return the log-probs of the proximal policy."""
        if not isinstance(self.correction, interface.ChoosesProximal):
            return old_logprob
        found = self.correction.proximal(logprob.detach(), old_logprob, behaviour, lag)
        if _is_constant(found, logprob.shape):
            return found
        wanted = f"float32{list(logprob.shape)}, detached"
        raise _refusal("correction", self.correction, "proximal", found, wanted)

    def importance_weights(self, log_ratios: Tensor, mask: Tensor, episode: Tensor) -> Tensor | None:
        """Compute importance weights with ``D`` rows, or None."""
        found = self.correction.weights(log_ratios, mask, episode, self.algorithm.level)
        units = valid_units(mask, self.algorithm.level).shape
        if found is None:
            return None
        if _is_constant(found, *itertools.product(*((1, size) for size in units))):
            return found.expand(units[0], -1, -1)
        wanted = f"None, or float32 that broadcasts to {list(units)}, detached"
        raise _refusal("correction", self.correction, "weights", found, wanted)

    def unit_loss(self, logprob: Tensor, proximal: Tensor, mask: Tensor, advantages: Tensor) -> UnitLoss:
        """Compute the loss of each unit."""
        found = self.objective.loss(logprob, proximal, mask, advantages)
        units = valid_units(mask, self.algorithm.level).shape
        if isinstance(found, UnitLoss) and all(isinstance(x, Tensor) and x.shape == units for x in found):
            return found
        wanted = f"UnitLoss of four tensors {list(units)}"
        raise _refusal("objective", self.objective, "loss", found, wanted)


def build_recipe(
    algorithm: AlgorithmSettings, correction: CorrectionSettings, critic: CriticSettings
) -> Recipe:
    """Build the parts that the settings name, or raise ConfigError."""
    advantage = algorithm.advantage if algorithm.advantage != "auto" else AUTO_ADVANTAGE[algorithm.kind]
    own = ("--algorithm.settings", algorithm.settings)
    recipe = Recipe(
        algorithm=algorithm,
        correction_settings=correction,
        critic=critic,
        correction=_build(
            "correction", correction.kind, [correction], "--correction.settings", correction.settings
        ),
        advantage=_build("advantage", advantage, [algorithm, critic], *own),
        objective=_build("objective", algorithm.objective, [algorithm], *own),
    )
    if "critic" in recipe.correction.needs and not recipe.trains_critic:
        raise ConfigError(
            f"--correction.kind is {correction.kind}, but the policy has no critic whose values it could "
            "correct. Use --algorithm.kind ppo, or --correction.kind tis."
        )
    if ("critic" in recipe.advantage.needs) != recipe.trains_critic:
        has = "needs a critic" if "critic" in recipe.advantage.needs else "has no targets for a critic"
        other = "grpo" if recipe.trains_critic else "ppo"
        raise ConfigError(
            f"--algorithm.advantage is {advantage}, which {has}, but --algorithm.kind is {algorithm.kind}. "
            f"Use --algorithm.kind {other}."
        )
    if (
        isinstance(recipe.correction, interface.CorrectsAdvantages)
        and advantage != "gae"
        and not names_code(advantage)
    ):
        raise ConfigError(
            f"--correction.kind is {correction.kind}, which corrects the advantages of gae, but "
            f"--algorithm.advantage is {advantage}. Use --algorithm.advantage gae."
        )
    return recipe


def _build(kind: str, name: str, arguments: Iterable[Any], flag: str, texts: Iterable[str]) -> Any:
    type_, own = resolve(kind, name), keywords(flag, texts) if names_code(name) else {}
    try:
        part = type_(*arguments, **own)
    except TypeError as error:
        raise ConfigError(
            f"{FLAGS[kind]} names {type_.__module__}:{type_.__qualname__}, which cannot be made of its "
            f"settings and {flag} {sorted(own)}: {error}."
        ) from error
    needs: Any = frozenset() if kind == "objective" else getattr(part, "needs", None)
    if not isinstance(needs, set | frozenset) or not needs <= set(get_args(interface.Need)):
        raise ConfigError(
            f"{FLAGS[kind]} names {type_.__module__}:{type_.__qualname__}, whose `needs` is {needs!r}, "
            f"expected a frozenset of some of {', '.join(get_args(interface.Need))}."
        )
    return part


def _refusal(kind: str, part: object, method: str, found: object, wanted: str) -> ConfigError:
    fields = ", ".join(map(describe_tensor, found)) if isinstance(found, tuple) else ""
    returned = f"{type(found).__name__}({fields})" if fields else describe_tensor(found)
    name = f"{type(part).__module__}:{type(part).__qualname__}"
    return ConfigError(
        f"{FLAGS[kind]} names {name}, whose method {method} returned {returned}, expected {wanted}."
    )


def _is_constant(value: object, *shapes: Sequence[int]) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.requires_grad:
        return False
    return any(tuple(value.shape) == tuple(shape) for shape in shapes)

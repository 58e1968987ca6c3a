"""Builds the correction, advantage and objective that the settings name, and checks their results.

D decisions, C steps per decision, A numbers per step, U, V units of a decision (`losses`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings, CriticSettings
from asyncrl.errors import ConfigError
from asyncrl.learner.batches import Batch
from asyncrl.learner.interface import (
    Advantage,
    AdvantagesAndTargets,
    ChoosesProximal,
    Correction,
    CorrectsAdvantages,
    Need,
    Objective,
    OldPolicy,
    UnitLoss,
    describe_tensor,
)
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
    correction: Correction
    advantage: Advantage
    objective: Objective

    @property
    def trains_critic(self) -> bool:
        """Return True if a critic learns."""
        return self.algorithm.kind == "ppo"

    @property
    def needs(self) -> frozenset[str]:
        """Return the needs of correction and advantage, and `old_policy` if the ratio is taken against it."""
        needs = frozenset(self.correction.needs) | frozenset(self.advantage.needs)
        return needs if isinstance(self.correction, ChoosesProximal) else needs | {"old_policy"}

    @property
    def needs_old_policy_pass(self) -> bool:
        """Return True if decisions must be evaluated once before the first step."""
        several = self.algorithm.minibatches > 1 and "old_policy" in self.needs
        return self.advantages_need_old_policy or "whole_episodes" in self.needs or several

    @property
    def advantages_need_old_policy(self) -> bool:
        """Return True if the advantages depend on the old policy, whose pass then skips no decision."""
        reads = bool({"old_policy", "whole_episodes"} & set(self.advantage.needs))
        return self.trains_critic or reads or isinstance(self.correction, CorrectsAdvantages)

    @property
    def importance_weights_move(self) -> bool:
        """Return True if the importance weights may follow the current policy."""
        fixed = {"old_policy", "whole_episodes"} & set(self.correction.needs)
        return isinstance(self.correction, ChoosesProximal) and not fixed

    def check_batch(self, batch: Batch) -> None:
        """Raise ConfigError if the behaviour policy's log-probs are needed but not finite."""
        if "behaviour" in self.needs and not bool(batch.behaviour_logprob.isfinite().all()):
            raise ConfigError(
                f"--correction.kind is {self.correction_settings.kind}, but the episodes hold no log-probs "
                "of the policy that sampled them (NaN). Imagine them again with this version, or use "
                "--correction.kind none."
            )

    def estimate(self, batch: Batch, old: OldPolicy | None, ranks: LearnerRanks) -> AdvantagesAndTargets:
        """Compute advantages and targets of the batch."""
        result = self.advantage.estimate(batch, old, self.correction, ranks)
        decisions, steps = batch.mask.shape[:2]
        units = [1] if self.algorithm.level == "decision" else [1, steps]
        values = old.values if old is not None and self.trains_critic else None
        if isinstance(result, AdvantagesAndTargets):
            advantages, targets = result
            valid = _is_constant(advantages) and advantages.shape in [(decisions, n, 1) for n in units]
            if values is None:
                valid &= targets is None
            else:
                valid &= _is_constant(targets) and targets is not None and targets.shape == values.shape
            if valid:
                return result
        wanted = " or ".join(f"float32{[decisions, n, 1]}" for n in units)
        raise _refusal(
            "advantage",
            self.advantage,
            "estimate",
            _describe_all(result),
            f"AdvantagesAndTargets({wanted}, {describe_tensor(values)}), detached",
        )

    def proximal(self, logprob: Tensor, old_logprob: Tensor, behaviour: Tensor, lag: Tensor) -> Tensor:
        """Return the log-probs of the proximal policy."""
        if not isinstance(self.correction, ChoosesProximal):
            return old_logprob
        result = self.correction.proximal(logprob.detach(), old_logprob, behaviour, lag)
        if _is_constant(result) and result.shape == logprob.shape:
            return result
        wanted = f"float32{list(logprob.shape)}, detached"
        raise _refusal("correction", self.correction, "proximal", describe_tensor(result), wanted)

    def importance_weights(self, log_ratios: Tensor, mask: Tensor, episode: Tensor) -> Tensor | None:
        """Compute importance weights with ``D`` rows, or None."""
        result = self.correction.weights(log_ratios, mask, episode, self.algorithm.level)
        units = valid_units(mask, self.algorithm.level).shape
        if result is None:
            return None
        if _is_constant(result) and result.ndim == len(units):
            fits = [size in (1, unit_size) for size, unit_size in zip(result.shape, units, strict=True)]
            if all(fits):
                return result.expand(units[0], -1, -1)
        wanted = f"None, or float32 that broadcasts to {list(units)}, detached"
        raise _refusal("correction", self.correction, "weights", describe_tensor(result), wanted)

    def unit_loss(self, logprob: Tensor, proximal: Tensor, mask: Tensor, advantages: Tensor) -> UnitLoss:
        """Compute the loss of each unit."""
        result = self.objective.loss(logprob, proximal, mask, advantages)
        units = valid_units(mask, self.algorithm.level).shape
        if isinstance(result, UnitLoss) and all(isinstance(x, Tensor) and x.shape == units for x in result):
            return result
        wanted = f"UnitLoss of four tensors {list(units)}"
        raise _refusal("objective", self.objective, "loss", _describe_all(result), wanted)


def build_recipe(
    algorithm: AlgorithmSettings, correction: CorrectionSettings, critic: CriticSettings
) -> Recipe:
    """Build the parts that the settings name, or raise ConfigError."""
    advantage = algorithm.advantage if algorithm.advantage != "auto" else AUTO_ADVANTAGE[algorithm.kind]
    own = ("--algorithm.settings", algorithm.settings)
    own_correction = ("--correction.settings", correction.settings)
    recipe = Recipe(
        algorithm=algorithm,
        correction_settings=correction,
        critic=critic,
        correction=_build("correction", correction.kind, [correction], *own_correction),
        advantage=_build("advantage", advantage, [algorithm, critic], *own),
        objective=_build("objective", algorithm.objective, [algorithm], *own),
    )
    for kind, part in (("correction", recipe.correction), ("advantage", recipe.advantage)):
        _check_needs(kind, part)
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
    if isinstance(recipe.correction, CorrectsAdvantages) and advantage != "gae" and not names_code(advantage):
        raise ConfigError(
            f"--correction.kind is {correction.kind}, which corrects the advantages of gae, but "
            f"--algorithm.advantage is {advantage}. Use --algorithm.advantage gae."
        )
    return recipe


def _build(kind: str, name: str, arguments: Iterable[Any], flag: str, texts: Iterable[str]) -> Any:
    part = resolve(kind, name)
    own = keywords(flag, texts) if names_code(name) else {}
    try:
        return part(*arguments, **own)
    except TypeError as error:
        raise ConfigError(
            f"{FLAGS[kind]} names {_name_of(part)}, which cannot be made of its settings and "
            f"{flag} {sorted(own)}: {error}."
        ) from error


def _check_needs(kind: str, part: Correction | Advantage) -> None:
    needs: Any = getattr(part, "needs", None)
    if not isinstance(needs, set | frozenset) or not needs <= set(get_args(Need)):
        raise ConfigError(
            f"{FLAGS[kind]} names {_name_of(type(part))}, whose `needs` is {needs!r}, expected a frozenset "
            f"of some of {', '.join(get_args(Need))}."
        )


def _refusal(kind: str, part: object, method: str, result: str, wanted: str) -> ConfigError:
    return ConfigError(
        f"{FLAGS[kind]} names {_name_of(type(part))}, whose method {method} returned {result}, "
        f"expected {wanted}."
    )


def _describe_all(result: object) -> str:
    fields = ", ".join(describe_tensor(field) for field in result) if isinstance(result, tuple) else ""
    return f"{type(result).__name__}({fields})" if fields else describe_tensor(result)


def _name_of(part: type) -> str:
    return f"{part.__module__}:{part.__qualname__}"


def _is_constant(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32 and not value.requires_grad

"""Builds the correction, advantage and objective that the settings name, and checks what they give back.

What a class of the user's gets wrong is answered with one sentence: class, method, what came, what was
expected.

Dimension letters used in this file:
    D  decisions      C  steps per decision      A  numbers per step      U, V  units of a decision (`losses`)
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

ADVANTAGE_OF = {"grpo": "group_relative", "ppo": "gae"}
"""What --algorithm.advantage auto stands for."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What an update learns by: the settings, and what they name."""

    algorithm: AlgorithmSettings
    correction_settings: CorrectionSettings
    critic: CriticSettings
    correction: Correction
    advantage: Advantage
    objective: Objective

    @property
    def trains_critic(self) -> bool:
        """Tell whether there is a critic that learns."""
        return self.algorithm.kind == "ppo"

    @property
    def needs(self) -> frozenset[str]:
        """Return what correction and advantage need, and `old_policy` where the ratio is taken against it."""
        needs = frozenset(self.correction.needs) | frozenset(self.advantage.needs)
        return needs if isinstance(self.correction, ChoosesProximal) else needs | {"old_policy"}

    @property
    def needs_old_policy_pass(self) -> bool:
        """Tell whether decisions must be evaluated once before the first step.

        In the first pass over a whole minibatch the policy is still the one before that step. With one
        minibatch this is the policy before the update, and what the pass found serves the later epochs.
        """
        several = self.algorithm.minibatches > 1 and "old_policy" in self.needs
        return self.estimates_look_back or "whole_episodes" in self.needs or several

    @property
    def estimates_look_back(self) -> bool:
        """Tell whether the advantages themselves come from what the old policy said.

        Otherwise they are known before that pass, which leaves out what has none.
        """
        reads = bool({"old_policy", "whole_episodes"} & set(self.advantage.needs))
        return self.trains_critic or reads or isinstance(self.correction, CorrectsAdvantages)

    @property
    def weights_move(self) -> bool:
        """Tell whether the proximal policy, and so the importance weights, may follow the current policy."""
        fixed = {"old_policy", "whole_episodes"} & set(self.correction.needs)
        return isinstance(self.correction, ChoosesProximal) and not fixed

    def check_batch(self, batch: Batch) -> None:
        """Refuse a batch without log-probs of the policy that sampled it, where they are needed.

        Raises:
            ConfigError: They are not finite.
        """
        if "behaviour" in self.needs and not bool(batch.logprob_behaviour.isfinite().all()):
            raise ConfigError(
                f"--correction.kind is {self.correction_settings.kind}, but the episodes hold no log-probs "
                "of the policy that sampled them (NaN). Imagine them again with this version, or use "
                "--correction.kind none."
            )

    def estimate(self, batch: Batch, old: OldPolicy | None, ranks: LearnerRanks) -> AdvantagesAndTargets:
        """Compute advantages and targets of the batch. See `Advantage.estimate`."""
        found = self.advantage.estimate(batch, old, self.correction, ranks)
        decisions, steps = batch.mask.shape[:2]
        units = [1] if self.algorithm.level == "decision" else [1, steps]
        values = old.values if old is not None and self.trains_critic else None
        if isinstance(found, AdvantagesAndTargets):
            advantages, targets = found
            fits = _is_constant(advantages) and advantages.shape in [(decisions, n, 1) for n in units]
            if values is None:
                fits &= targets is None
            else:
                fits &= _is_constant(targets) and targets is not None and targets.shape == values.shape
            if fits:
                return found
        wanted = " or ".join(f"float32{[decisions, n, 1]}" for n in units)
        raise _refused(
            "advantage",
            self.advantage,
            "estimate",
            _describe_all(found),
            f"AdvantagesAndTargets({wanted}, {describe_tensor(values)}), detached",
        )

    def proximal(self, logprob: Tensor, old_logprob: Tensor, behaviour: Tensor, lag: Tensor) -> Tensor:
        """Return the log-probs that the clipped ratio is taken against. See `ChoosesProximal.proximal`."""
        if not isinstance(self.correction, ChoosesProximal):
            return old_logprob
        found = self.correction.proximal(logprob.detach(), old_logprob, behaviour, lag)
        if _is_constant(found) and found.shape == logprob.shape:
            return found
        wanted = f"float32{list(logprob.shape)}, detached"
        raise _refused("correction", self.correction, "proximal", describe_tensor(found), wanted)

    def weights(self, log_ratios: Tensor, mask: Tensor, episode: Tensor) -> Tensor | None:
        """Compute the importance weights. See `Correction.weights`.

        Returns:
            None, or float32 with ``D`` rows, which broadcasts to ``[D, U, V]``.
        """
        found = self.correction.weights(log_ratios, mask, episode, self.algorithm.level)
        units = valid_units(mask, self.algorithm.level).shape
        if found is None:
            return None
        if _is_constant(found) and _broadcasts(found.shape, units):
            return found.expand(units[0], -1, -1)
        wanted = f"None, or float32 that broadcasts to {list(units)}, detached"
        raise _refused("correction", self.correction, "weights", describe_tensor(found), wanted)

    def unit_loss(self, logprob: Tensor, proximal: Tensor, mask: Tensor, advantages: Tensor) -> UnitLoss:
        """Compute the loss of each unit. See `Objective.loss`."""
        found = self.objective.loss(logprob, proximal, mask, advantages)
        units = valid_units(mask, self.algorithm.level).shape
        if isinstance(found, UnitLoss) and all(isinstance(x, Tensor) and x.shape == units for x in found):
            return found
        wanted = f"UnitLoss of four tensors {list(units)}"
        raise _refused("objective", self.objective, "loss", _describe_all(found), wanted)


def build_recipe(
    algorithm: AlgorithmSettings, correction: CorrectionSettings, critic: CriticSettings
) -> Recipe:
    """Find and build what the settings name.

    Raises:
        ConfigError: There is no such class, it lacks something, or needs something that is not there.
    """
    advantage = algorithm.advantage if algorithm.advantage != "auto" else ADVANTAGE_OF[algorithm.kind]
    own = ("--algorithm.settings", algorithm.settings)
    recipe = Recipe(
        algorithm=algorithm,
        correction_settings=correction,
        critic=critic,
        correction=_build(
            "correction",
            correction.kind,
            [correction],
            "--correction.settings",
            correction.settings,
        ),
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


def _build(kind: str, name: str, arguments: Iterable[Any], flag: str, own: Iterable[str]) -> Any:
    found = resolve(kind, name)
    mine = keywords(flag, own) if names_code(name) else {}
    try:
        return found(*arguments, **mine)
    except TypeError as error:
        raise ConfigError(
            f"{FLAGS[kind]} names {_name_of(found)}, which cannot be made of its settings and "
            f"{flag} {sorted(mine)}: {error}."
        ) from error


def _check_needs(kind: str, part: Correction | Advantage) -> None:
    needs: Any = getattr(part, "needs", None)
    if not isinstance(needs, set | frozenset) or not needs <= set(get_args(Need)):
        raise ConfigError(
            f"{FLAGS[kind]} names {_name_of(type(part))}, whose `needs` is {needs!r}, expected a frozenset "
            f"of some of {', '.join(get_args(Need))}."
        )


def _refused(kind: str, part: object, method: str, came: str, wanted: str) -> ConfigError:
    return ConfigError(
        f"{FLAGS[kind]} names {_name_of(type(part))}, whose method {method} returned {came}, "
        f"expected {wanted}."
    )


def _describe_all(found: object) -> str:
    parts = ", ".join(describe_tensor(part) for part in found) if isinstance(found, tuple) else ""
    return f"{type(found).__name__}({parts})" if parts else describe_tensor(found)


def _name_of(found: type) -> str:
    return f"{found.__module__}:{found.__qualname__}"


def _is_constant(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32 and not value.requires_grad


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) == len(to) and all(a in (1, b) for a, b in zip(shape, to, strict=True))

"""A package of the user's: a correction, an advantage, an objective, and some that are wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings, CriticSettings
from asyncrl.learner.interface import AdvantagesAndTargets, UnitLoss


class Softened:
    """Weights ``1 / (1 + |log ratio|)``, and 0 for an action that has become less likely by `tolerance`."""

    needs = frozenset({"behaviour"})

    def __init__(self, settings: CorrectionSettings, *, tolerance: float = 1.0) -> None:
        self.tolerance = tolerance

    def weights(self, log_ratios: Tensor, mask: Tensor, episode: Tensor, level: str) -> Tensor:
        action_DC1 = log_ratios.sum(dim=2, keepdim=True)
        return torch.where(action_DC1 < -self.tolerance, 0.0, 1 / (1 + action_DC1.abs()))


class ByLag(Softened):
    """Takes the ratio against a policy that is nearer to the one that sampled the older the sample is."""

    def proximal(self, logprob: Tensor, old_logprob: Tensor, behaviour: Tensor, lag: Tensor) -> Tensor:
        share_D11 = 1 / (1 + lag.float())[:, None, None]
        return behaviour + share_D11 * (old_logprob - behaviour)


class Centred:
    """The return of an episode minus a constant."""

    needs: frozenset[str] = frozenset()

    def __init__(self, algorithm: AlgorithmSettings, critic: CriticSettings, *, expected: float) -> None:
        self.expected = expected

    def estimate(self, batch: Any, old: Any, correction: Any, ranks: Any) -> AdvantagesAndTargets:
        return AdvantagesAndTargets((batch.returns - self.expected)[batch.episode][:, None, None], None)


class PolicyGradient:
    """REINFORCE: no ratio, no clip."""

    def __init__(self, settings: AlgorithmSettings, **own: Any) -> None:
        self.settings = settings

    def loss(self, logprob: Tensor, proximal: Tensor, mask: Tensor, advantages: Tensor) -> UnitLoss:
        nothing = torch.zeros_like(mask)
        return UnitLoss(-advantages * logprob, nothing, nothing, torch.ones_like(logprob))


class WithoutMethod:
    needs = frozenset({"behaviour"})

    def __init__(self, settings: CorrectionSettings) -> None:
        pass


class UnknownNeed(Softened):
    needs = frozenset({"behaviour", "luck"})


class WrongShape(Softened):
    def weights(self, log_ratios: Tensor, mask: Tensor, episode: Tensor, level: str) -> Tensor:
        return torch.ones(3, 5)


class WithGradient(ByLag):
    def weights(self, log_ratios: Tensor, mask: Tensor, episode: Tensor, level: str) -> Tensor:
        return torch.ones_like(log_ratios, requires_grad=True)


class WrongProximal(ByLag):
    def proximal(self, logprob: Tensor, old_logprob: Tensor, behaviour: Tensor, lag: Tensor) -> Tensor:
        return behaviour.double()


class WrongAdvantage(Centred):
    def estimate(self, batch: Any, old: Any, correction: Any, ranks: Any) -> AdvantagesAndTargets:
        return AdvantagesAndTargets(batch.returns, None)


class WrongLoss(PolicyGradient):
    def loss(self, logprob: Tensor, proximal: Tensor, mask: Tensor, advantages: Tensor) -> Any:
        return (-advantages * logprob).sum()

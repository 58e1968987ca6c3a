"""Corrections, advantages and objectives of the user's: they train as they say, or are refused plainly."""

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings, CriticSettings
from asyncrl.errors import ConfigError
from asyncrl.launch.build import build_update
from asyncrl.learner.batches import Batch
from asyncrl.learner.interface import AdvantagesAndTargets, UnitLoss
from asyncrl.learner.recipe import build_recipe
from asyncrl.observability import metrics_training as m
from support.slow_update import PLACES, Table, decisions_of, group_advantages, recipe, stale_batch, valid
from support.table_policy import TablePolicy


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


OWN = f"{__name__}:"


def a_batch() -> Batch:
    """Decisions of lag 2 and 1 whose behaviour policy was near the table's."""
    return stale_batch([[10, -1, -1], [2, 15, -1]], versions=(0, 1))


def slow_loss(batch: Batch, table: Table, before: Table, *, by_lag: bool, tolerance: float) -> Tensor:
    """PPO's clipped loss, token by token, with the weights of `Softened` or `ByLag`."""
    config = recipe()
    now, old = table.logprobs(batch)[0], before.logprobs(batch)[0].detach()
    behaviour = batch.behaviour_logprob.double()
    share = 1 / (1 + batch.lag.double())[:, None, None] if by_lag else 1.0
    proximal = behaviour + share * (old - behaviour)
    advantages = group_advantages(config, batch)
    tokens = sum(int(batch.mask[d].sum()) for e in range(len(batch.returns)) for d in decisions_of(batch, e))
    loss = torch.zeros((), dtype=torch.float64)
    for d in range(len(batch.tasks)):
        for c, a in valid(batch, d, PLACES):
            gap = sum(float(proximal[d, c, k] - behaviour[d, c, k]) for k in range(7))
            weight = 0.0 if gap < -tolerance else 1 / (1 + abs(gap))
            ratio = (now[d, c, a] - proximal[d, c, a]).exp()
            clipped = ratio.clamp(1 - config.algorithm.clip_low, 1 + config.algorithm.clip_high)
            score = advantages[d, c]
            loss = loss + weight * torch.maximum(-score * ratio, -score * clipped) / tokens
    return loss


@pytest.mark.parametrize(("name", "tolerance"), [("Softened", 0.5), ("ByLag", 1.0)])
def test_a_correction_of_the_users_trains_two_updates_like_a_slow_loop(name: str, tolerance: float) -> None:
    config = recipe(
        correction__kind=OWN + name,
        correction__settings=(f"tolerance={tolerance}",),
        algorithm__micro_batch=4,
        optimizer__learning_rate=0.1,
    )
    policy, batch, slow = (TablePolicy(rows=8), a_batch(), Table.of(TablePolicy(rows=8)))
    policy.scale.requires_grad_(False)
    update = build_update(config, policy)
    for version in (2, 3):
        before = Table(slow.logits.detach().clone(), None)
        loss = slow_loss(batch, slow, before, by_lag=name == "ByLag", tolerance=tolerance)
        slow.logits.grad = None
        loss.backward()
        values = update(batch, version)
        assert values[m.LOSS] == pytest.approx(float(loss.detach()), abs=2e-5, rel=1e-4)
        assert 0 < values[m.IMPORTANCE_MEAN] < 1
        assert policy.logits.grad is not None
        assert slow.logits.grad is not None
        assert slow.logits.grad.abs().max() > 1e-4
        torch.testing.assert_close(policy.logits.grad.double(), slow.logits.grad, atol=2e-5, rtol=1e-3)
        with torch.no_grad():
            slow.logits.copy_(policy.logits)


def test_an_advantage_and_an_objective_of_the_users_train_as_by_hand() -> None:
    config = recipe(
        algorithm__advantage=OWN + "Centred",
        algorithm__objective=OWN + "PolicyGradient",
        algorithm__settings=("expected=0.25",),
        correction__kind="none",
    )
    policy, batch, slow = (TablePolicy(rows=8), a_batch(), Table.of(TablePolicy(rows=8)))
    score = (batch.returns - 0.25)[batch.episode][:, None, None]
    loss = -(torch.where(batch.mask, score * slow.logprobs(batch)[0], 0.0)).sum() / batch.mask.sum()
    loss.backward()
    assert build_update(config, policy)(batch)[m.LOSS] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert policy.logits.grad is not None
    assert slow.logits.grad is not None
    torch.testing.assert_close(policy.logits.grad.double(), slow.logits.grad, atol=2e-6, rtol=1e-3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"correction__kind": "WithoutMethod"}, r"--correction.kind.*WithoutMethod.*lacks weights"),
        ({"correction__kind": "UnknownNeed"}, r"UnknownNeed.*`needs` is .*luck.*expected.*old_policy"),
        (
            {"correction__kind": "Softened", "correction__settings": ("hardness=2",)},
            r"Softened.*cannot be made.*hardness",
        ),
        ({"algorithm__advantage": "Centred"}, r"--algorithm.advantage.*Centred.*cannot be made.*expected"),
        (
            {
                "algorithm__kind": "ppo",
                "algorithm__advantage": "Centred",
                "algorithm__settings": ("expected=0",),
            },
            r"Centred, which has no targets for a critic.*Use --algorithm.kind grpo",
        ),
        ({"correction__kind": "Absent"}, r"test_recipe' has no attribute 'Absent'"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_before_anything_starts(changes, says) -> None:
    named = {
        k: OWN + v if k.endswith(("kind", "advantage")) and v != "ppo" else v for k, v in changes.items()
    }
    config = recipe(**named)
    with pytest.raises(ConfigError, match=says):
        build_recipe(config.algorithm, config.correction, config.critic)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"correction__kind": "WrongShape"}, r"WrongShape, whose method weights returned float32\[3, 5\]"),
        ({"correction__kind": "WithGradient"}, r"method weights returned float32.* with gradient, expected"),
        ({"correction__kind": "WrongProximal"}, r"method proximal returned float64\[11, 8, 7\], expected"),
        (
            {"algorithm__advantage": "WrongAdvantage", "algorithm__settings": ("expected=0",)},
            r"estimate returned AdvantagesAndTargets\(float32\[6\], NoneType\), expected .*\[12, 8, 1\]",
        ),
        ({"algorithm__objective": "WrongLoss"}, r"method loss returned float32\[\] with gradient, expected"),
    ],
)
def test_what_a_class_gets_wrong_is_said_with_class_method_and_shapes(changes, says) -> None:
    named = {k: OWN + v if isinstance(v, str) else v for k, v in changes.items()}
    with pytest.raises(ConfigError, match=says):
        build_update(recipe(**{"algorithm__micro_batch": 1000, **named}), TablePolicy(rows=8))(a_batch())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": "tsi"}, r"--correction.kind is 'tsi'.*Perhaps you meant 'tis'"),
        ({"settings": ("a=1",)}, r"--correction.settings is a=1, but --correction.kind tis is set by"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_one(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        recipe(**{f"correction__{key}": value for key, value in settings.items()})

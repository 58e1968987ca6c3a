"""Losses per unit: by hand, against loops and the divergences they estimate; the reference stays."""

import math

import pytest
import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.learner.corrections import k3
from asyncrl.learner.forward import Reference
from asyncrl.learner.losses import aggregation_weights, cispo_loss, clipped_loss, kl_penalty, value_loss
from asyncrl.policies.interface import SamplingParams
from asyncrl.policies.lora import add_lora
from support.adapters import ALPHA, RANK, move_adapters, small, some_inputs, some_tokens

LOW, HIGH = 0.2, 0.28


def one(value: float, grad: bool = False) -> Tensor:
    return torch.full((1, 1, 1), value, dtype=torch.float64, requires_grad=grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "gradient", "removed"),
    [
        (1.0, 2.0, 0.0, -2.0, -2.0, 0),  # on-policy: the plain policy gradient
        (1.2, 2.0, 0.0, -2.4, -2.4, 0),  # inside the region
        (1.5, 2.0, 0.0, -2.56, 0.0, 1),  # gained enough: 2 * 1.28
        (0.5, 2.0, 0.0, -1.0, -1.0, 0),  # a good token became unlikely: never clipped
        (0.9, -2.0, 0.0, 1.8, 1.8, 0),
        (0.5, -2.0, 0.0, 1.6, 0.0, 1),  # lost enough: 2 * 0.8
        (1.5, -2.0, 0.0, 3.0, 3.0, 0),  # a bad token became likely: never clipped
        (1.5, 0.0, 0.0, 0.0, 0.0, 0),  # no advantage, no gradient to remove
        (4.0, -2.0, 3.0, 6.0, 0.0, 2),  # dual clip: at most 3 * 2
        (2.0, -2.0, 3.0, 4.0, 4.0, 0),
        (4.0, 2.0, 3.0, -2.56, 0.0, 1),  # the dual clip is for negative advantages only
    ],
)
def test_the_clipped_loss_of_one_unit_by_hand(ratio, advantage, dual, loss, gradient, removed) -> None:
    log_ratio = one(math.log(ratio), grad=True)
    result = clipped_loss(log_ratio, one(advantage), clip_low=LOW, clip_high=HIGH, dual_clip=dual)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss)
    assert log_ratio.grad is not None
    assert log_ratio.grad.item() == pytest.approx(gradient)  # d ratio / d log ratio = ratio
    assert (result.clipped.item(), result.dual_clipped.item()) == (removed == 1, removed == 2)
    assert result.clipped_ratio.item() == pytest.approx(min(max(ratio, 1 - LOW), 1 + HIGH))


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"), [(1.1, 2.0, 1.1), (5.0, 2.0, 1.28), (5.0, -2.0, 1.28), (0.1, 1.0, 0.8)]
)
def test_cispo_clips_the_weight_and_keeps_every_gradient(ratio, advantage, weight) -> None:
    logprob = one(-1.5, grad=True)
    result = cispo_loss(logprob, one(math.log(ratio)), one(advantage), clip_low=LOW, clip_high=HIGH)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(weight * advantage * 1.5)
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(-weight * advantage)
    assert result.clipped.item() == (weight != ratio)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_absurd_ratio_leaves_a_finite_gradient(advantage: float) -> None:
    log_ratio = torch.full((1, 1, 1), 1000.0, requires_grad=True)
    clipped_loss(log_ratio, torch.full((1, 1, 1), advantage), clip_low=LOW, clip_high=HIGH).loss.backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.item() == 0.0


def test_a_ratio_that_is_not_a_number_is_not_hidden() -> None:
    assert math.isnan(clipped_loss(one(math.nan), one(1.0), clip_low=LOW, clip_high=HIGH).loss.item())


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "huber", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, 3.0, 0.0, 10.0, 2.0, -2.0, False),  # (1 - 3)^2 / 2
        (1.0, 1.0, 31.0, 0.0, 10.0, 250.0, -10.0, False),  # 10 (30 - 5)
        (2.0, 1.0, 3.0, 0.5, 10.0, 1.125, 0.0, True),  # near 1.5: (1.5 - 3)^2 / 2 > (2 - 3)^2 / 2
        (0.0, 1.0, 3.0, 0.5, 10.0, 4.5, -3.0, False),  # moved away: the plain loss is larger
        (1.2, 1.0, 3.0, 0.5, 10.0, 1.62, -1.8, False),  # inside the clip
    ],
)
def test_the_value_loss_by_hand(value, old, target, clip, huber, loss, gradient, clipped) -> None:
    v = torch.tensor([[value]], requires_grad=True)
    losses, cut = value_loss(v, torch.tensor([[old]]), torch.tensor([[target]]), clip=clip, huber=huber)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss)
    assert v.grad is not None
    assert v.grad.item() == pytest.approx(gradient)
    assert cut.item() is clipped


def test_the_kl_penalty_has_the_gradient_of_the_divergence() -> None:
    assert kl_penalty(one(0.5), one(0.0)).item() == pytest.approx(0.125)
    logits = torch.tensor([0.3, -0.5, 1.0, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.9, 0.2, -0.4, 0.0], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    penalty = kl_penalty(logp, reference)
    (gradient,) = torch.autograd.grad((logp.detach().exp() * penalty).sum(), logits, retain_graph=True)
    (true,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits)
    torch.testing.assert_close(gradient, true)


@pytest.mark.parametrize("nats", [-100.0, -30.0, -20.0, -10.0, -1.0, 0.0, 1.0, 10.0, 20.0, 30.0, 100.0])
def test_far_policies_have_a_bounded_divergence_whose_gradient_does_not_vanish(nats: float) -> None:
    far = abs(nats)
    x = torch.tensor(nats, requires_grad=True)
    k2 = kl_penalty(x, torch.tensor(0.0))
    (gradient,) = torch.autograd.grad(k2, x)
    assert k2.item() == pytest.approx(nats**2 / 2 if far <= 20 else 20 * far - 200)
    assert gradient.item() == max(-20.0, min(20.0, nats))
    value = k3(x)
    (gradient,) = torch.autograd.grad(value, x)
    slope = math.expm1(min(nats, 20.0))
    assert value.item() == pytest.approx(slope - min(nats, 20.0) + max(0.0, nats - 20.0) * slope, rel=1e-5)
    assert gradient.item() == pytest.approx(slope, rel=1e-5)


def test_in_the_ordinary_range_both_divergences_are_their_formulas_bit_for_bit() -> None:
    x = torch.linspace(-20, 20, 4001).requires_grad_()
    weights = torch.rand(4001, generator=torch.Generator().manual_seed(0))
    for function, formula in (
        (lambda x: kl_penalty(x, torch.zeros_like(x)), lambda x: x.square() / 2),
        (k3, lambda x: torch.expm1(x) - x),
    ):
        assert function(x).equal(formula(x))
    (found,), (expected,) = (
        torch.autograd.grad((weights * y).sum(), x)
        for y in (kl_penalty(x, torch.zeros_like(x)), x.square() / 2)
    )
    assert found.equal(expected)


MASK = torch.tensor([[[1, 1]], [[1, 0]], [[1, 1]]]).bool()
"""Episode 0 has three units in two decisions, episode 1 two in one."""
EPISODE = torch.tensor([0, 0, 1])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 5, 1 / 5, 1 / 5, 0, 1 / 5, 1 / 5]),
        ("length_normalised", [1 / 6, 1 / 6, 1 / 6, 0, 1 / 4, 1 / 4]),
        ("constant", [1 / 8, 1 / 8, 1 / 8, 0, 1 / 8, 1 / 8]),
    ],
)
def test_aggregation_weights_by_hand(aggregation: str, expected: list[float]) -> None:
    weights = aggregation_weights(MASK, EPISODE, aggregation, units=5, episodes=2, max_units=4)  # pyright: ignore
    torch.testing.assert_close(weights.flatten(), torch.tensor(expected))


def test_a_rank_without_an_episode_counts_nothing() -> None:
    mask, episode = torch.zeros(0, 8, 7, dtype=torch.bool), torch.zeros(0, dtype=torch.int64)
    weights = aggregation_weights(mask, episode, "length_normalised", units=56, episodes=1, max_units=56)
    assert weights.shape == (0, 8, 7)


SAMPLING = SamplingParams(temperature=1.6)


@pytest.mark.parametrize("lora", [False, True])
def test_the_reference_is_the_policy_of_the_start(lora: bool) -> None:
    policy = small(value_head="chunk")
    inputs, tokens = some_inputs(policy), some_tokens()
    start = policy.evaluate(inputs, {"tokens": tokens}, SAMPLING).logprob.detach()
    if lora:
        add_lora(policy, RANK, ALPHA)
    reference = Reference(policy if lora else small(value_head="chunk"), without_adapters=lora)
    if lora:
        move_adapters(policy)
    else:
        optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
        policy.evaluate(inputs, {"tokens": tokens}, SAMPLING).logprob.mean().backward()
        optimizer.step()
    found = reference.logprob(inputs, {"tokens": tokens}, SAMPLING)
    moved = policy.evaluate(inputs, {"tokens": tokens}, SAMPLING).logprob
    assert torch.equal(found, start)
    assert (found.dtype, tuple(found.shape), found.requires_grad) == (torch.float32, (2, 8, 7), False)
    assert (moved - start).abs().max() > 1e-3
    assert moved.requires_grad


def test_a_frozen_reference_cannot_learn() -> None:
    policy = small()
    Reference(policy)
    assert policy.trainable_parameters() == {}


def test_a_policy_without_adapters_is_no_reference_to_itself() -> None:
    with pytest.raises(ConfigError, match=r"--lora\.rank"):
        Reference(small(), without_adapters=True)

"""The clipped loss: values and gradients against a loop over single tokens and against literals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.learner.losses import PolicyLoss, clipped_policy_loss

LOW, HIGH = 0.2, 0.28


def loss_of(logprob: Tensor, proximal: Tensor, advantages: Tensor, **changes: Tensor | float) -> PolicyLoss:
    given_ = {
        "weights": torch.ones_like(logprob),
        "mask": torch.ones_like(logprob, dtype=torch.bool),
        "clip_low": LOW,
        "clip_high": HIGH,
        "denominator": logprob.numel(),
    } | changes
    return clipped_policy_loss(logprob, proximal, advantages, **given_)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "removed"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),  # on-policy: the plain policy gradient
        (1.2, 2.0, -2.4, -2.4, 0),  # inside the region
        (1.5, 2.0, -2.56, 0.0, 1),  # gained enough: 2 * 1.28
        (0.5, 2.0, -1.0, -1.0, 0),  # a good token became unlikely: never clipped
        (0.9, -2.0, 1.8, 1.8, 0),
        (0.5, -2.0, 1.6, 0.0, 1),  # lost enough: 2 * 0.8
        (1.5, -2.0, 3.0, 3.0, 0),  # a bad token became likely: never clipped
        (1.5, 0.0, 0.0, 0.0, 0),  # no advantage, no gradient to remove
    ],
)
def test_one_token_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float, removed: int
) -> None:
    proximal = torch.full((1, 1, 1), math.log(0.3))
    logprob = (proximal + math.log(ratio)).requires_grad_()
    result = loss_of(logprob, proximal, torch.tensor([[[advantage]]]))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(loss, abs=1e-5)
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(gradient, abs=1e-5)  # d ratio / d logprob = ratio
    assert result.clip_fraction.item() == removed
    assert result.clipped_ratio.item() == pytest.approx(min(max(ratio, 1 - LOW), 1 + HIGH))


def random_tokens(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    proximal = -4 * torch.rand(5, 8, 7, generator=g, dtype=torch.float64)
    return {
        "logprob": proximal + 0.5 * torch.randn(5, 8, 7, generator=g, dtype=torch.float64),
        "proximal": proximal,
        "advantages": torch.randn(5, 1, 1, generator=g, dtype=torch.float64),
        "weights": 2 * torch.rand(5, 8, 7, generator=g, dtype=torch.float64),
        "mask": torch.rand(5, 8, 7, generator=g) < 0.7,
    }


def token_by_token(t: dict[str, Tensor], denominator: float) -> tuple[float, Tensor, float, float]:
    """Loss, its gradient, clip fraction and clipped ratio, one token after the other."""
    loss, removed, ratios, gradient = 0.0, 0, 0.0, torch.zeros(5, 8, 7, dtype=torch.float64)
    for place in torch.nonzero(t["mask"]).tolist():
        at = tuple(place)
        a, w = t["advantages"][at[0], 0, 0].item(), t["weights"][at].item()
        r = math.exp(t["logprob"][at].item() - t["proximal"][at].item())
        if a > 0 and r > 1 + HIGH:
            loss, removed = loss - w * a * (1 + HIGH), removed + 1
        elif a < 0 and r < 1 - LOW:
            loss, removed = loss - w * a * (1 - LOW), removed + 1
        else:
            loss -= w * a * r
            gradient[at] = -w * a * r / denominator
        ratios += min(max(r, 1 - LOW), 1 + HIGH)
    return loss / denominator, gradient, removed / denominator, ratios / denominator


@pytest.mark.parametrize("seed", range(3))
def test_loss_gradient_and_shares_match_a_loop_over_tokens(seed: int) -> None:
    t = random_tokens(seed)
    logprob = t["logprob"].requires_grad_()
    result = loss_of(
        logprob, t["proximal"], t["advantages"], weights=t["weights"], mask=t["mask"], denominator=123.0
    )
    result.loss.backward()
    loss, gradient, removed, ratios = token_by_token(t, 123.0)
    assert removed > 0
    assert result.loss.item() == pytest.approx(loss)
    assert logprob.grad is not None
    torch.testing.assert_close(logprob.grad, gradient)
    assert result.clip_fraction.item() == pytest.approx(removed)
    assert result.clipped_ratio.item() == pytest.approx(ratios)


@given(cut=st.integers(0, 5))
def test_losses_of_micro_batches_add_up_to_the_loss_of_the_batch(cut: int) -> None:
    t = random_tokens(7)
    tokens = float(t["mask"].sum())

    def part(rows: slice) -> PolicyLoss:
        return loss_of(
            t["logprob"][rows],
            t["proximal"][rows],
            t["advantages"][rows],
            weights=t["weights"][rows],
            mask=t["mask"][rows],
            denominator=tokens,
        )

    whole, first, second = part(slice(None)), part(slice(cut)), part(slice(cut, None))
    for total, a, b in zip(whole, first, second, strict=True):
        torch.testing.assert_close(a + b, total, atol=1e-12, rtol=0, check_dtype=False)


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf])
def test_masked_tokens_may_hold_anything(nonsense: float) -> None:
    logprob = torch.tensor([[[-1.0, nonsense]]], requires_grad=True)
    other = torch.tensor([[[-1.0, nonsense]]])
    result = loss_of(
        logprob,
        other,
        torch.ones(1, 1, 1),
        weights=torch.tensor([[[1.0, nonsense]]]),
        mask=torch.tensor([[[True, False]]]),
        denominator=1.0,
    )
    result.loss.backward()
    assert result.loss.item() == -1.0
    assert logprob.grad is not None
    assert logprob.grad.tolist() == [[[-1.0, 0.0]]]


def test_a_token_outside_the_top_k_contributes_nothing() -> None:
    logprob = torch.tensor([[[-1.0, -math.inf]]], requires_grad=True)
    result = loss_of(logprob, logprob, torch.ones(1, 1, 1))
    result.loss.backward()
    assert logprob.grad is not None
    assert logprob.grad.tolist() == [[[-0.5, 0.0]]]


def test_a_valid_token_that_is_not_a_number_is_not_hidden() -> None:
    logprob = torch.full((1, 1, 1), math.nan, requires_grad=True)
    assert math.isnan(loss_of(logprob, torch.zeros(1, 1, 1), torch.ones(1, 1, 1)).loss.item())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_absurd_ratio_leaves_a_finite_gradient(advantage: float) -> None:
    logprob = torch.zeros(1, 1, 1, requires_grad=True)
    loss_of(logprob, torch.full((1, 1, 1), -1000.0), torch.full((1, 1, 1), advantage)).loss.backward()
    assert logprob.grad is not None
    assert logprob.grad.item() == 0.0

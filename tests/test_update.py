"""One update: its gradient against the policy-gradient formula written out, its steps against a slow loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_fixtures import TablePolicy, episode, groups_of
from torch import Tensor

from asyncrl import metrics as m
from asyncrl.config import AlgorithmSettings
from asyncrl.errors import RunError
from asyncrl.learner.batches import Batch, build_batch
from asyncrl.learner.update import Update

OUTCOMES = [[10, -1, -1], [-1, -1, -1], [2, 15, -1]]
"""Steps of success of three groups; the middle one carries no signal."""


def plain(**changes: float | str) -> AlgorithmSettings:
    """Settings that leave the gradient as it is."""
    given_ = {"group_size": 3, "clip_grad": 1e9, "learning_rate": 0.01} | changes
    return AlgorithmSettings(**given_)  # pyright: ignore[reportArgumentType]


def batch_of(outcomes: list[list[int]] = OUTCOMES, **changes: float) -> Batch:
    groups = groups_of(outcomes, **changes)
    return build_batch(groups, version=0)


def on_policy(policy: TablePolicy, batch: Batch) -> Batch:
    """The same batch, as if this very policy had sampled it."""
    values = vars(batch) | {"logprob_behaviour": torch.from_numpy(table_logprobs(policy, batch)).float()}
    return Batch(**values)


def table_logprobs(policy: TablePolicy, batch: Batch) -> np.ndarray:
    """``[D, 8, 7]`` in float64, without the policy's own code."""
    logits = policy.scale.detach().double().numpy() * policy.logits.detach().double().numpy()
    logits /= batch.temperature
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows = batch.frames[:, 0, 0, 0].astype(int)
    return np.take_along_axis(logp[rows], batch.tokens.numpy()[..., None], -1)[..., 0]


def policy_gradient(policy: TablePolicy, batch: Batch, cap: float) -> np.ndarray:
    """Gradient of ``-sum w A log pi / tokens`` for the table, decision by decision: one-hot minus softmax."""
    logits = policy.logits.detach().double().numpy()
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    logp, tokens = table_logprobs(policy, batch), float(batch.mask.sum())
    out = np.zeros_like(logits)
    for d in range(len(batch.tasks)):
        row = int(batch.frames[d, 0, 0, 0])
        for c, a in np.argwhere(batch.mask[d].numpy()):
            weight = min(math.exp(logp[d, c, a] - float(batch.logprob_behaviour[d, c, a])), cap)
            one_hot = np.arange(256) == int(batch.tokens[d, c, a])
            out[row, c, a] -= weight * float(batch.advantages[d]) * (one_hot - probs[row, c, a]) / tokens
    return out


def gradient_of(batch: Batch, **changes: float | str) -> Tensor:
    policy = TablePolicy()
    Update(policy, plain(**changes))(batch)
    assert policy.logits.grad is not None
    return policy.logits.grad


@pytest.mark.parametrize(("correction", "cap"), [("tis", 2.0), ("tis", 1.1), ("none", 1.0)])
def test_the_gradient_is_the_importance_weighted_policy_gradient(correction: str, cap: float) -> None:
    batch = batch_of()
    if correction == "none":
        expected = policy_gradient(TablePolicy(), on_policy(TablePolicy(), batch), 1.0)  # every weight is 1
    else:
        expected = policy_gradient(TablePolicy(), batch, cap)
    actual = gradient_of(batch, correction=correction, correction_cap=cap)
    assert np.abs(expected).max() > 1e-3
    torch.testing.assert_close(actual.double(), torch.from_numpy(expected), atol=1e-6, rtol=1e-4)


@settings(max_examples=12, deadline=None)
@given(micro_batch=st.integers(1, 20))
def test_micro_batches_do_not_change_the_gradient(micro_batch: int) -> None:
    batch = batch_of()
    whole = gradient_of(batch, micro_batch=1000)
    torch.testing.assert_close(gradient_of(batch, micro_batch=micro_batch), whole, atol=1e-6, rtol=0)


@settings(max_examples=6, deadline=None)
@given(order=st.permutations(range(3)))
def test_the_order_of_the_groups_does_not_change_the_gradient(order: list[int]) -> None:
    groups = groups_of(OUTCOMES)
    shuffled = build_batch([groups[g] for g in order], version=0)
    torch.testing.assert_close(gradient_of(shuffled), gradient_of(batch_of()), atol=1e-6, rtol=0)


def test_decisions_without_signal_are_not_evaluated_but_stay_in_the_denominator() -> None:
    policy, batch = TablePolicy(), batch_of()
    update = Update(policy, plain(micro_batch=1000))
    update(batch)
    # Of 18 decisions, the 6 of the constant group and the one that came after the success at step 2 rest.
    assert policy.evaluated[0] == 11
    assert policy.logits.grad is not None
    skipped = policy.logits.grad.clone()

    class EverythingEvaluated(Batch):
        @property
        def with_signal(self) -> Tensor:
            return torch.arange(len(self.tasks))

    policy = TablePolicy()
    Update(policy, plain(micro_batch=1000))(EverythingEvaluated(**vars(batch)))
    assert policy.evaluated[0] == 18
    assert policy.logits.grad is not None
    torch.testing.assert_close(skipped, policy.logits.grad, atol=1e-9, rtol=0)


def slow_epochs(policy: TablePolicy, batch: Batch, epochs: int, chosen: AlgorithmSettings) -> list[float]:
    """The decoupled objective over the whole batch at once, token sums spelled out; returns the losses."""
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=chosen.learning_rate, betas=(chosen.beta1, chosen.beta2), weight_decay=0.0
    )
    rows = torch.from_numpy(batch.frames[:, 0, 0, 0].astype(np.int64))
    advantage, losses = batch.advantages[:, None, None], []

    def logprobs() -> Tensor:
        table = (policy.scale * policy.logits).log_softmax(-1)
        return table[rows].gather(-1, batch.tokens[..., None])[..., 0]

    proximal = logprobs().detach()
    weight = (proximal - batch.logprob_behaviour).exp().clamp(max=chosen.correction_cap)
    for _ in range(epochs):
        optimizer.zero_grad()
        ratio = (logprobs() - proximal).exp()
        clipped = ratio.clamp(1 - chosen.clip_low, 1 + chosen.clip_high)
        loss = (weight * torch.maximum(-advantage * ratio, -advantage * clipped))[batch.mask].sum()
        loss = loss / batch.mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), chosen.clip_grad)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("epochs", [1, 3])
def test_parameters_after_several_epochs_match_a_slow_loop(epochs: int) -> None:
    batch, chosen = batch_of(), plain(epochs=epochs, micro_batch=4, clip_grad=0.05, learning_rate=0.1)
    policy, slow = TablePolicy(), TablePolicy()
    values = Update(policy, chosen)(batch)
    losses = slow_epochs(slow, batch, epochs, chosen)
    torch.testing.assert_close(policy.logits, slow.logits, atol=1e-4, rtol=0)
    assert values[m.LOSS] == values[m.POLICY_LOSS] == pytest.approx(np.mean(losses), abs=1e-5)
    assert (values[m.CLIP_FRACTION] > 0) == (epochs > 1)


def test_an_update_makes_what_won_likelier_and_what_lost_less_likely() -> None:
    policy = TablePolicy()
    groups = [[episode(member=0, rows=(0,), success_at=7), episode(member=1, rows=(1,))]]
    batch = on_policy(policy, build_batch(groups, version=0))
    before = table_logprobs(policy, batch)
    Update(policy, plain())(batch)
    after = table_logprobs(policy, batch)
    assert after[0].sum() > before[0].sum()
    assert after[1].sum() < before[1].sum()


def test_fresh_samples_have_weight_one_and_no_mismatch() -> None:
    policy = TablePolicy()
    values = Update(policy, plain())(on_policy(policy, batch_of()))
    assert values[m.IMPORTANCE_MEAN] == pytest.approx(1.0, abs=1e-5)
    assert values[m.ESS] == pytest.approx(1.0, abs=1e-5)
    assert values[m.MISMATCH_KL] == pytest.approx(0.0, abs=1e-6)
    assert values[m.CLIPPED_RATIO] == pytest.approx(1.0)


def test_tokens_are_evaluated_at_the_temperature_they_were_sampled_with() -> None:
    policy = TablePolicy()
    batch = on_policy(policy, batch_of(temperature=1.6))
    values = Update(policy, plain(temperature=0.7))(batch)  # what the settings say does not matter here
    assert values[m.MISMATCH_KL] == pytest.approx(0.0, abs=1e-6)


def test_staleness_readings_cover_the_valid_tokens_of_the_evaluated_decisions() -> None:
    batch, policy = batch_of(), TablePolicy()
    delta = (table_logprobs(policy, batch) - batch.logprob_behaviour.double().numpy())[
        batch.mask.numpy() & (batch.advantages != 0).numpy()[:, None, None]
    ]
    raw, weight = np.exp(delta), np.minimum(np.exp(delta), 2.0)
    values = Update(policy, plain(micro_batch=3))(batch)
    assert values[m.IMPORTANCE_MEAN] == pytest.approx(weight.mean(), rel=1e-4)
    assert values[m.IMPORTANCE_MAX] == pytest.approx(raw.max(), rel=1e-4)
    assert values[m.IMPORTANCE_CAPPED] == pytest.approx((raw > 2).mean(), rel=1e-4)
    assert values[m.ESS] == pytest.approx(weight.sum() ** 2 / (weight.size * (weight**2).sum()), rel=1e-4)
    assert values[m.MISMATCH_KL] == pytest.approx((raw - 1 - delta).mean(), rel=1e-4)


def test_entropy_and_kl_are_means_over_valid_tokens() -> None:
    batch, policy = batch_of(), TablePolicy()
    chosen = batch.mask.numpy() & (batch.advantages != 0).numpy()[:, None, None]
    rows = batch.frames[:, 0, 0, 0].astype(int)
    logp = policy.logits.detach().double().log_softmax(-1).numpy()
    entropy = -(np.exp(logp) * logp).sum(-1)[rows][chosen].mean()
    before = table_logprobs(policy, batch)
    values = Update(policy, plain(micro_batch=1000))(batch)
    moved = (table_logprobs(policy, batch) - before)[chosen]
    assert values[m.ENTROPY_LOSS] == pytest.approx(entropy, rel=1e-5)
    assert values[m.APPROX_KL] == pytest.approx((np.exp(moved) - 1 - moved).mean(), rel=1e-3)
    assert values[m.APPROX_KL] > 0


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_batch_without_signal_leaves_a_fresh_policy_as_it_is(epochs: int) -> None:
    policy = TablePolicy()
    before = policy.logits.detach().clone()
    values = Update(policy, plain(epochs=epochs))(batch_of([[-1, -1, -1]]))
    assert torch.equal(policy.logits, before)
    assert policy.evaluated == []
    assert values[m.GRAD_NORM] == values[m.LOSS] == 0.0


def test_a_batch_without_signal_still_decays_the_momentum_of_the_one_before() -> None:
    policy = TablePolicy()
    update = Update(policy, plain())
    update(batch_of())
    before = update.optimizer.state[policy.logits]["exp_avg"].clone()
    update(batch_of([[-1, -1, -1]]))
    torch.testing.assert_close(update.optimizer.state[policy.logits]["exp_avg"], 0.9 * before)


def test_the_gradient_norm_is_reported_before_clipping() -> None:
    batch = batch_of()
    whole = Update(TablePolicy(), plain())(batch)[m.GRAD_NORM]
    policy = TablePolicy()
    assert Update(policy, plain(clip_grad=whole / 10))(batch)[m.GRAD_NORM] == pytest.approx(whole)
    total = math.sqrt(sum(float(p.grad.square().sum()) for p in policy.parameters() if p.grad is not None))
    assert total == pytest.approx(whole / 10, rel=1e-3)


def test_a_gradient_that_is_not_finite_is_skipped_and_ends_the_run_when_it_stays() -> None:
    policy = TablePolicy()
    update = Update(policy, plain(max_bad_updates=2))
    update(batch_of())
    state, healthy = policy.logits.detach().clone(), policy.scale.detach().clone()
    with torch.no_grad():
        policy.scale.fill_(math.nan)
    values = update(batch_of())
    assert values[m.BAD_UPDATES] == 1
    assert torch.equal(policy.logits, state)
    assert all(math.isfinite(value) for value in values.values())
    with torch.no_grad():
        policy.scale.copy_(healthy)
    update(batch_of())  # a good one in between: the count in a row starts again
    with torch.no_grad():
        policy.scale.fill_(math.nan)
    update(batch_of())
    with pytest.raises(RunError, match=r"2 updates in a row.*--algorithm\.learning-rate"):
        update(batch_of())
    assert update.bad_updates == 3


def test_the_update_evaluates_without_dropout() -> None:
    policy = TablePolicy()
    policy.train()
    Update(policy, plain())(batch_of())
    assert not policy.training

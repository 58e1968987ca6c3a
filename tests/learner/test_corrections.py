"""Importance weights: literal numbers, and expectations summed over every token of a small alphabet."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings, CriticSettings
from asyncrl.errors import ConfigError
from asyncrl.learner.batches import build_batch
from asyncrl.learner.corrections import beyond_trust_region
from asyncrl.learner.interface import Correction
from asyncrl.learner.recipe import Recipe, build_recipe
from support.table_policy import groups_of


def recipe_of(algorithm: str = "grpo", **changes: Any) -> Recipe:
    return build_recipe(
        AlgorithmSettings(kind=algorithm),  # pyright: ignore
        CorrectionSettings(**changes),
        CriticSettings(),
    )


def correction_of(**changes: Any) -> Correction:
    return recipe_of("ppo", **changes).correction


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Log-ratios, mask and episodes of three decisions; episode 0 has two. Masked tokens hold nonsense."""
    g = torch.Generator().manual_seed(3)
    mask = torch.rand(3, 8, 7, generator=g) < 0.7
    ratios = torch.where(mask, torch.randn(3, 8, 7, generator=g) * 0.2, 50.0)
    return ratios, mask, torch.tensor([0, 0, 1])


def by_loop(level: str, mean: bool) -> Tensor:
    """Each token's unit found by name, its valid members added up one by one."""
    ratios, mask, episode = tokens()
    names = {
        "token": lambda d, c, a: (d, c, a),
        "action": lambda d, c, a: (d, c),
        "decision": lambda d, c, a: d,
        "episode": lambda d, c, a: int(episode[d]),
    }
    sums: dict[object, list[float]] = {}
    places = [(d, c, a) for d in range(3) for c in range(8) for a in range(7)]
    for place in places:
        if mask[place]:
            sums.setdefault(names[level](*place), []).append(ratios[place].item())
    out = torch.zeros(3, 8, 7)
    for place in places:
        found = sums.get(names[level](*place), [0.0])
        out[place] = math.fsum(found) / (len(found) if mean else 1)
    return out


@pytest.mark.parametrize("kind", ["tis", "mis", "decoupled"])
@pytest.mark.parametrize("level", ["token", "action", "decision", "episode"])
@pytest.mark.parametrize("geometric", [False, True])
def test_weights_of_every_kind_and_level_match_a_loop(kind: str, level: str, geometric: bool) -> None:
    ratios, mask, episode = tokens()
    correction = correction_of(kind=kind, level=level, geometric=geometric, min_weight=0.7, max_weight=1.4)
    weights = correction.weights(ratios, mask, episode, "token")
    assert weights is not None
    actual = weights.expand(3, 8, 7)
    for place in torch.nonzero(mask).tolist():
        raw = math.exp(by_loop(level, geometric)[tuple(place)].item())
        low = 0.0 if kind == "decoupled" else 0.7
        inside = low <= raw <= 1.4
        expected = min(max(raw, low), 1.4) if kind == "tis" else raw if inside else 0.0
        assert actual[tuple(place)].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["tis", "mis", "decoupled"])
def test_a_ratio_that_is_not_a_number_is_hidden_by_no_kind(kind: str) -> None:
    correction = correction_of(kind=kind, level="token", min_weight=0.5, max_weight=2.0)
    ratios = torch.tensor([[[math.nan, 0.0, 100.0, -100.0]]])
    weights = correction.weights(
        ratios, torch.ones(1, 1, 4, dtype=torch.bool), torch.zeros(1).long(), "token"
    )
    assert weights is not None
    assert torch.isnan(weights).flatten().tolist() == [True, False, False, False]


def test_a_correction_without_what_it_needs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vtrace.*no critic.*--algorithm.kind ppo"):
        recipe_of(kind="vtrace")
    known = build_batch(groups_of([[3, -1]]), version=0)
    unknown = dataclasses.replace(known, behaviour_logprob=torch.full_like(known.behaviour_logprob, math.nan))
    for kind in ("naive", "tis", "mis", "decoupled", "vtrace"):
        recipe_of("ppo", kind=kind).check_batch(known)
        with pytest.raises(ConfigError, match=r"no log-probs of the policy that"):
            recipe_of("ppo", kind=kind).check_batch(unknown)
    recipe_of(kind="none").check_batch(unknown)


def test_of_several_tokens_the_trust_region_looks_at_the_geometric_mean() -> None:
    now = torch.tensor([[[0.9, 0.4]]]).log()
    then = torch.tensor([[[0.3, 0.3]]]).log()
    one = torch.ones(1, 1, 1)
    mean_now, mean_then = math.sqrt(0.9 * 0.4), 0.3
    for bound in (mean_now - mean_then - 0.01, mean_now - mean_then + 0.01):
        found = beyond_trust_region(now, then, torch.ones_like(now).bool(), one, "action", bound)
        assert found.item() is (bound < mean_now - mean_then)

"""The registry of metrics: folding rules, names, advice, and the generated page."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest

from asyncrl.config.run import TrainConfig
from asyncrl.observability import metrics_system as r
from asyncrl.observability import metrics_training as m
from asyncrl.observability import waits
from asyncrl.observability.metrics import REGISTRY, SECTIONS, Metric, as_markdown, reduce, section_of
from support import ROOT

PAGE = ROOT / "docs" / "metrics.md"


@pytest.mark.parametrize(
    ("reduction", "expected"), [("mean", 3.0), ("sum", 9.0), ("max", 6.0), ("min", 1.0), ("last", 2.0)]
)
def test_each_rule_folds_its_own_way(reduction: str, expected: float) -> None:
    metric = Metric("x", reduction, "1", "", "")
    assert reduce([{metric: 6.0}, {metric: 1.0}, {metric: 2.0}]) == {metric: expected}


def test_a_reading_that_is_absent_from_a_row_does_not_count() -> None:
    assert reduce([{m.LOSS: 4.0}, {}, {m.LOSS: 2.0, r.LAG_MAX: 7.0}]) == {m.LOSS: 3.0, r.LAG_MAX: 7.0}


def test_the_names_others_rely_on_are_there() -> None:
    names = (
        "train/actor/approx_kl train/actor/clip_fraction train/actor/clipped_ratio train/actor/grad_norm "
        "train/actor/lr train/actor/policy_loss train/critic/value_loss train/critic/value_clip_ratio "
        "train/critic/explained_variance train/entropy_loss train/loss rollout/advantages_max "
        "rollout/advantages_mean rollout/advantages_min rollout/rewards env/episode_len env/return "
        "env/reward env/success_once"
    )
    assert set(names.split()) <= REGISTRY.keys()


def test_the_page_in_docs_is_current() -> None:
    assert PAGE.read_text() == as_markdown(), "run: python -m asyncrl metrics > docs/metrics.md"


def test_every_metric_has_advice() -> None:
    assert [name for name, metric in REGISTRY.items() if not metric.advice.endswith(".")] == []


@pytest.mark.parametrize("metric", REGISTRY.values(), ids=lambda metric: metric.name)
def test_advice_names_only_metrics_and_flags_that_exist(metric: Metric) -> None:
    assert set(re.findall(r"`([a-z]+/[a-z_/0-9]+)`", metric.advice)) <= REGISTRY.keys()
    assert set(re.findall(r"--[a-z][a-z.-]*[a-z]", metric.advice)) <= set(flags_of(TrainConfig()))


def test_a_flag_that_does_not_exist_would_be_noticed() -> None:
    assert {"--replay.max-lag", "--log-with"} <= set(flags_of(TrainConfig()))
    assert "--replay.max-policy-lag" not in set(flags_of(TrainConfig()))


def test_every_metric_is_in_one_section_of_the_page() -> None:
    assert {section_of(name) for name in REGISTRY} == SECTIONS.keys()
    others = ("wait/", *(name[:-1] for name in REGISTRY if name.endswith("lag_0")))
    rows = [name for name in REGISTRY if not name.startswith(others) and not name.endswith("_decisions")]
    assert all(as_markdown().count(f"| `{name}` |") == 1 for name in rows)
    assert all(f"`{name}` |" in waits.as_markdown() for name in REGISTRY if name.startswith("wait/"))


def flags_of(config: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from flags_of(value, f"{name}.")
        else:
            yield f"--{name}"


def test_the_page_of_waits_is_current() -> None:
    page = PAGE.with_name("waits.md").read_text()
    assert page == waits.as_markdown(), "run: python -m asyncrl metrics --waits > docs/waits.md"

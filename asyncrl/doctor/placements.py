"""Compares ways to give a run's ranks their roles, by the cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from asyncrl.config.run import TrainConfig
from asyncrl.doctor.cost import Prediction, predict
from asyncrl.doctor.findings import Sizes
from asyncrl.doctor.rates import DeviceRate
from asyncrl.doctor.work import RunWork
from asyncrl.launch.placement import parse_placement
from asyncrl.launch.simulated import simulator_named

WORTH_SAYING: Final = 1.1
"""Ratio of paces from which another placement is named: the model is within 16 % of what was measured."""


def quickest(
    config: TrainConfig, work: RunWork, sizes: Sizes, device: DeviceRate, ranks: int
) -> tuple[str, Prediction] | None:
    """Return the flags of the quickest placement that fits, and what it is expected to take.

    None: none of those that are tried fits.

    Args:
        config: Of the run; its --placement and --actor.pipeline-stages are not looked at.
        work: What it computes.
        sizes: Of its models.
        device: Every rank has one of its own.
        ranks: Of the run, on one host.
    """
    found = []
    for flags, changed, text in _tried(config, ranks):
        expected = predict(changed, work, sizes, device, parse_placement(text, ranks, 0))
        if expected.fits(device):
            found.append((flags, expected))
    return max(found, key=lambda pair: pair[1].steps_per_hour, default=None)


def advice(
    config: TrainConfig, work: RunWork, sizes: Sizes, device: DeviceRate, ranks: int, now: Prediction
) -> str:
    """Say `quickest` as the end of a line; empty: `now` is about as quick, or nothing fits."""
    found = quickest(config, work, sizes, device, ranks)
    if found is None:
        return ""
    flags, expected = found
    ratio = expected.steps_per_hour / now.steps_per_hour
    if ratio < WORTH_SAYING:
        return ""
    return f"; {flags} is expected to be {ratio:.2f} times as quick"


def _tried(config: TrainConfig, ranks: int) -> Iterator[tuple[str, TrainConfig, str]]:
    """Yield flags, the run with them, and the placement: sides apart, together, and the world alone."""
    single = replace(config, actor=replace(config.actor, pipeline_stages=1))
    yield "--placement collocated", single, "collocated"
    for learners in range(1, min(ranks, config.algorithm.groups_per_update + 1)):
        text = f"learner={_span(0, learners)},actor={_span(learners, ranks)}"
        yield f"--placement {text}", single, text
    if ranks % 2 or config.actor.slots < 2 or simulator_named(config.world):
        return
    staged = replace(config, actor=replace(config.actor, pipeline_stages=2))
    half = ranks // 2
    for learners in {half, ranks}:
        if learners <= config.algorithm.groups_per_update:
            text = f"learner={_span(0, learners)},policy={_span(0, half)},world={_span(half, ranks)}"
            yield f"--placement {text} --actor.pipeline-stages 2", staged, text


def _span(first: int, end: int) -> str:
    """Write ranks from `first` to before `end`.

    >>> _span(0, 1), _span(2, 4)
    ('0', '2-3')
    """
    return str(first) if end - first == 1 else f"{first}-{end - 1}"

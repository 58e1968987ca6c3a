"""Compares ways to give a run's ranks their roles, by the cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Literal

from asyncrl.config.run import TrainConfig
from asyncrl.doctor.cost import Prediction, predict
from asyncrl.doctor.findings import Sizes
from asyncrl.doctor.rates import DeviceRate
from asyncrl.doctor.work import RunWork
from asyncrl.launch.placement import parse_placement
from asyncrl.launch.placement_text import span
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
    for text, stages in _tried(config, ranks):
        placement = parse_placement(text, ranks, 0)
        if len(placement.learners) > config.algorithm.groups_per_update:
            continue  # Each needs a group: a run refuses it.
        chosen = replace(config, actor=replace(config.actor, pipeline_stages=stages))
        expected = predict(chosen, work, sizes, device, placement)
        if expected.fits(device):
            flags = f"--placement {text}" + (f" --actor.pipeline-stages {stages}" if stages > 1 else "")
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


def _tried(config: TrainConfig, ranks: int) -> Iterator[tuple[str, Literal[1, 2]]]:
    """Yield placements and --actor.pipeline-stages: sides together, apart, worlds on GPUs of their own."""
    yield "collocated", 1
    for learners in range(1, ranks):
        yield f"learner={span(0, learners)},actor={span(learners, ranks - learners)}", 1
    if ranks % 2 or config.actor.slots < 2 or simulator_named(config.world):
        return
    half = ranks // 2
    for learners in (half, ranks):
        yield f"learner={span(0, learners)},policy={span(0, half)},world={span(half, half)}", 2

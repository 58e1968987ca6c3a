"""Finds how few of the learner's layers need to compute their activations again on a kind of device."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from asyncrl.config.run import TrainConfig
from asyncrl.doctor.cost import Prediction, predict
from asyncrl.doctor.findings import Sizes
from asyncrl.doctor.host import GIB
from asyncrl.doctor.rates import DeviceRate
from asyncrl.doctor.work import RunWork
from asyncrl.launch.placement import Placement

TRIED: Final = (8, 4, 2)
"""Values of --learner.gradient-checkpointing-every, the fastest first."""


def with_fewer(
    config: TrainConfig, work: RunWork, sizes: Sizes, device: DeviceRate, placement: Placement
) -> tuple[int, Prediction] | None:
    """Return the fastest --learner.gradient-checkpointing-every that fits, and what it is expected to take.

    None: it is in use, nothing is computed again, or the policy does not say what layers keep.

    Args:
        config: Of the run.
        work: What it computes.
        sizes: Of its models, with these settings.
        device: Every rank has one of its own.
        placement: Who does what.
    """
    now = config.learner
    if not now.gradient_checkpointing or not sizes.kept:
        return None
    saved = (sizes.kept - sizes.learning) * now.gradient_checkpointing_every
    for every in TRIED:
        if every <= now.gradient_checkpointing_every:
            return None
        chosen = replace(config, learner=replace(now, gradient_checkpointing_every=every))
        there = replace(sizes, learning=sizes.kept - saved // every)
        found = predict(chosen, work, there, device, placement)
        if found.fits(device):
            return every, found
    return None


def advice(config: TrainConfig, work: RunWork, sizes: Sizes, device: DeviceRate, placement: Placement) -> str:
    """Say `with_fewer` as the end of a line; empty: there is nothing to say."""
    found = with_fewer(config, work, sizes, device, placement)
    if found is None:
        return ""
    every, expected = found
    return (
        f"; a learner has room for --learner.gradient-checkpointing-every {every}: "
        f"{expected.learner_bytes / GIB:.0f} of {device.memory / GIB:.0f} GiB, and "
        f"{expected.learner.update:.1f} s for an update"
    )

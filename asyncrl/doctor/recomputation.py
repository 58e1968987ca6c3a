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

TRIED: Final = (0, 8, 4, 2)
"""One layer in so many computes again, the fastest first; 0: none."""


def with_fewer(
    config: TrainConfig, work: RunWork, sizes: Sizes, device: DeviceRate, placement: Placement
) -> tuple[int, Prediction] | None:
    """Return in how many layers one may compute again (0: none), the fastest that fits, and what it takes.

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
        if 0 < every <= now.gradient_checkpointing_every:
            return None
        learner = replace(now, gradient_checkpointing=every > 0, gradient_checkpointing_every=every or 1)
        chosen = replace(config, learner=learner)
        there = replace(sizes, learning=sizes.kept - (saved // every if every else 0))
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
    flag = f"--learner.gradient-checkpointing-every {every}"
    if not every:
        set_before = config.learner.gradient_checkpointing_every > 1
        flag = "--learner.no-gradient-checkpointing" + (
            " --learner.gradient-checkpointing-every 1" if set_before else ""
        )
    return (
        f"; a learner has room for {flag}: "
        f"{expected.learner_bytes / GIB:.0f} of {device.memory / GIB:.0f} GiB, and "
        f"{expected.learner.update:.1f} s for an update"
    )

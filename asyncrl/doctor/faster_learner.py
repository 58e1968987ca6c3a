"""Finds the settings of a learner that spend a kind of device's memory on time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from asyncrl.config.algorithm import LearnerSettings
from asyncrl.config.run import TrainConfig
from asyncrl.doctor.cost import Prediction, predict
from asyncrl.doctor.findings import Sizes
from asyncrl.doctor.host import GIB
from asyncrl.doctor.rates import DeviceRate
from asyncrl.doctor.work import RunWork
from asyncrl.launch.placement import Placement

TRIED: Final = (8, 4, 2)
"""One layer in so many computes its activations again."""


def faster_learner(
    config: TrainConfig, work: RunWork, sizes: Sizes, device: DeviceRate, placement: Placement
) -> tuple[LearnerSettings, Prediction] | None:
    """Return the settings with which an update is fastest and everything fits, and what it takes.

    None: they are in use, or the policy does not say what layers keep.

    Args:
        config: Of the run.
        work: What it computes.
        sizes: Of its models, with these settings.
        device: Every rank has one of its own.
        placement: Who does what.
    """
    now = config.learner
    divided = len(placement.learners) > 1 and not sizes.unsharded
    best: tuple[LearnerSettings, Prediction] | None = None
    fastest = predict(config, work, sizes, device, placement).learner.update
    for learner in _candidates(now, divided=divided) if sizes.kept else ():
        there = replace(sizes, learning=_learning(now, learner, sizes))
        found = predict(replace(config, learner=learner), work, there, device, placement)
        if found.fits(device) and found.learner.update < fastest:
            best, fastest = (learner, found), found.learner.update
    return best


def _candidates(now: LearnerSettings, *, divided: bool) -> Iterator[LearnerSettings]:
    """Yield what takes more memory than `now`: no more layers compute again, weights are freed no sooner."""
    fewer = [now]
    if now.gradient_checkpointing:
        fewer.append(replace(now, gradient_checkpointing=False, gradient_checkpointing_every=1))
        more = [every for every in TRIED if every > now.gradient_checkpointing_every]
        fewer += [replace(now, gradient_checkpointing_every=every) for every in more]
    yield from fewer
    if divided:
        yield from (replace(learner, reshard_after="step") for learner in fewer)


def _learning(now: LearnerSettings, other: LearnerSettings, sizes: Sizes) -> int:
    """Bytes that a decision's activations take with `other`, from those with `now`."""
    if not now.gradient_checkpointing:
        return sizes.learning
    saved = (sizes.kept - sizes.learning) / now.recomputed
    return sizes.kept - int(saved * other.recomputed)


def advice(config: TrainConfig, work: RunWork, sizes: Sizes, device: DeviceRate, placement: Placement) -> str:
    """Say `faster_learner` as the end of a line; empty: there is nothing to say."""
    found = faster_learner(config, work, sizes, device, placement)
    if found is None:
        return ""
    learner, expected = found
    return (
        f"; a learner has room for {' '.join(_flags(config.learner, learner))}: "
        f"{expected.learner_bytes / GIB:.0f} of {device.memory / GIB:.0f} GiB, and "
        f"{expected.learner.update:.1f} s for an update"
    )


def _flags(now: LearnerSettings, other: LearnerSettings) -> Iterator[str]:
    if now.gradient_checkpointing != other.gradient_checkpointing:
        yield "--learner.no-gradient-checkpointing"
    if now.gradient_checkpointing_every != other.gradient_checkpointing_every:
        yield f"--learner.gradient-checkpointing-every {other.gradient_checkpointing_every}"
    if now.reshard_after != other.reshard_after:
        yield f"--learner.reshard-after {other.reshard_after}"

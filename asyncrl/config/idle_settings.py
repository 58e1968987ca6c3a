"""Finds settings of learning that were changed but can do nothing in the chosen recipe. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Final

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings, CriticSettings
from asyncrl.registry import BUILT_IN, names_code

_WEIGHING: Final = ("geometric", "max_weight", "veto", "proximal", "reject", "reject_low", "reject_high")
ACTING: Final = {
    "none": (),
    "naive": (),
    "tis": (*_WEIGHING, "level", "min_weight"),
    "mis": (*_WEIGHING, "level", "min_weight"),
    "decoupled": (*_WEIGHING, "level"),
    "gipo": (*(name for name in _WEIGHING if name != "max_weight"), "level", "sigma"),
    "vtrace": ("rho_cap", "trace_cap"),
}
"""Kind of correction -> its settings that do something; kind, settings and trust_region always may."""
assert ACTING.keys() == BUILT_IN["correction"].keys()


def idle_settings(
    algorithm: AlgorithmSettings, correction: CorrectionSettings, critic: CriticSettings
) -> list[str]:
    """Say of every setting that differs from its default, but changes nothing, why that is so.

    Returns:
        Lines for people.
    """
    found = [*_of_correction(correction), *_of_algorithm(algorithm, correction)]
    if algorithm.kind == "grpo":
        found += [(f"critic.{name}", "--algorithm.kind grpo has no critic") for name in _changed(critic)]
    lines = [f"--{name.replace('_', '-')} has no effect: {why}" for name, why in found]
    if correction.kind == "mis" and correction.min_weight == 0:
        lines.append(
            "--correction.kind mis without a lower limit is the same as decoupled; IcePop has "
            "--correction.min-weight 0.5"
        )
    return lines


def _of_correction(correction: CorrectionSettings) -> Iterator[tuple[str, str]]:
    if names_code(correction.kind):
        return
    acting = {*ACTING[correction.kind], "kind", "settings", "trust_region"}
    for name in _changed(correction):
        if name not in acting:
            yield f"correction.{name}", f"--correction.kind is {correction.kind}"
        elif name in ("reject_low", "reject_high") and correction.reject == "none":
            yield f"correction.{name}", "--correction.reject is none"


def _of_algorithm(algorithm: AlgorithmSettings, correction: CorrectionSettings) -> Iterator[tuple[str, str]]:
    changed = _changed(algorithm)
    one_step = algorithm.epochs * algorithm.minibatches == 1
    fresh = correction.kind in ("none", "vtrace") or (
        correction.kind in ACTING and correction.kind != "naive" and correction.proximal == "recomputed"
    )
    if one_step and fresh and not names_code(algorithm.objective):
        why = (
            "with one step per batch the ratio to the proximal policy is 1. --correction.trust-region bounds "
            "the policy against the one that sampled"
        )
        yield from ((f"algorithm.{name}", why) for name in ("clip_low", "clip_high") if name in changed)
        if "dual_clip" in changed:
            yield "algorithm.dual_clip", why
    elif algorithm.objective == "cispo" and "dual_clip" in changed:
        yield "algorithm.dual_clip", "cispo has no clipped loss to limit"
    if "kl_estimator" in changed and not algorithm.kl_coef:
        yield "algorithm.kl_estimator", "--algorithm.kl-coef is 0"
    if "max_filtered_batches" in changed and not algorithm.filter_groups:
        yield "algorithm.max_filtered_batches", "--algorithm.filter-groups is not set"
    if algorithm.kind == "ppo" and algorithm.advantage in ("auto", "gae"):
        for name in ("baseline", "advantage_scale"):
            if name in changed:
                yield f"algorithm.{name}", "--algorithm.kind ppo compares with the critic, not with siblings"


def _changed(settings: Any) -> list[str]:
    """Names of the settings that are not as by default."""
    default = type(settings)()
    return [
        field.name
        for field in fields(settings)
        if getattr(settings, field.name) != getattr(default, field.name)
    ]

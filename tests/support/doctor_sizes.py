"""Sizes of a run's models for the doctor's tests."""

from typing import Any

from asyncrl.doctor.checks import Sizes
from asyncrl.records import ActionSpec


def sizes(default: int = 1, **changes: Any) -> Sizes:
    """Return sizes of `default` bytes each, but for `changes`; nothing is the same on every learner rank."""
    names = ("policy", "parameters", "trained", "float32_masters", "version", "environment", "frame")
    plain: dict[str, Any] = dict.fromkeys(names, default) | {"unsharded": 0, "action_spec": ActionSpec()}
    return Sizes(**(plain | changes))

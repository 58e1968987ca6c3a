"""Policy version in, learning rate out: a pure function, so that a resumed run goes on where it was."""

from __future__ import annotations

import math

from asyncrl.config.algorithm import OptimizerSettings


def learning_rate_share(settings: OptimizerSettings, version: int, updates: int) -> float:
    """Return the share of the full learning rate for the update from `version` to `version + 1`.

    Args:
        settings: Schedule, warm-up, end and final share.
        version: Updates made so far.
        updates: Updates of the whole run; the end of the decay unless `decay_updates` says otherwise.

    Example:
        >>> settings = OptimizerSettings(schedule="linear", warmup_updates=2)
        >>> [learning_rate_share(settings, version, updates=6) for version in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if version < settings.warmup_updates:
        return (version + 1) / settings.warmup_updates
    if settings.schedule == "constant":
        return 1.0
    end = settings.decay_updates or updates
    done = (version - settings.warmup_updates) / max(1, end - settings.warmup_updates)
    left = 1.0 - min(1.0, done)
    if settings.schedule == "cosine":
        left = (1.0 - math.cos(math.pi * left)) / 2
    return settings.final_share + (1.0 - settings.final_share) * left

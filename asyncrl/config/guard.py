"""Settings of --guard: which imagined successes count. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from asyncrl.config.bounds import Bounded


@dataclass(frozen=True, kw_only=True)
class GuardSettings(Bounded):
    """Which imagined successes count, since some of them are false."""

    SECTION: ClassVar[str] = "guard."

    kind: Literal["none", "lasting"] = "none"
    """none: a reward of 1 at the first frame whose score reaches --actor.success-threshold. lasting: only
    where the last frame of a decision reaches it, as --actor.success-frames last: a success that is gone
    again at the end of its decision does not count."""

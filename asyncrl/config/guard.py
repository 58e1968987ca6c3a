"""Settings of --guard: what a success is worth that only the reward model has seen. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from asyncrl.config.bounds import Bounded


@dataclass(frozen=True, kw_only=True)
class GuardSettings(Bounded):
    """What an imagined success is worth, since some of them are none."""

    SECTION: ClassVar[str] = "guard."

    kind: Literal["none", "lasting", "probability"] = "none"
    """none: a reward of 1 at the first frame whose score reaches --actor.success-threshold. lasting: only
    where the last frame of a decision does, as --actor.success-frames last: what was gone again at its end
    does not count. probability: the score itself in place of 1. docs/pace.md says what each tells."""

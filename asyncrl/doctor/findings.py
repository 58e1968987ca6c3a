"""The records of `asyncrl doctor`: what is examined, and what was found. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from asyncrl.config.run import TrainConfig
from asyncrl.observability.console import hanging
from asyncrl.records import ActionSpec, SlotBytes, StartState


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a run's models in bytes, unless a field says otherwise."""

    policy: int
    """As its file and an actor hold it."""
    parameters: int
    """Count, frozen ones included."""
    trained: int
    """Count of trained parameters."""
    float32_masters: int
    """The policy as the learner holds it: float32 if --learner.precision is."""
    unsharded: int
    """Share of `float32_masters` that every learner rank holds: frozen weights below adapters."""
    rounded: int = 0
    """8-bit copies of frozen weights on every learner rank (--learner.frozen-precision)."""
    version: int
    """The tensors that actors get after an update."""
    environment: int
    """World and reward model."""
    frame: int
    action_spec: ActionSpec
    """Of the policy."""
    block: int = 0
    """The policy's largest block, as passes gather it."""
    acting: int = 0
    """Activations per decision of a forward pass; 0: unknown."""
    learning: int = 0
    """Activations per decision of a micro-batch; 0: unknown."""
    slot: SlotBytes = field(default_factory=SlotBytes)

    @property
    def training(self) -> int:
        """Gradient and AdamW's two moments, float32."""
        return 12 * self.trained

    @property
    def checkpoint(self) -> int:
        """The policy, and float32 weights and moments of the trained parameters."""
        return self.policy + 12 * self.trained


NAME_WIDTH: Final = 14


@dataclass(kw_only=True)
class Examination:
    """The settings under examination, and the sizes that the check of the models adds."""

    config: TrainConfig
    """With the world's defaults once the models were loaded."""
    where: str = "the defaults"
    """Source of the settings, for the report."""
    host: int = 0
    """Number of this host in --placement (ROLE=RANKS@HOST)."""
    sizes: Sizes | None = None
    starts: Sequence[StartState] = ()


class Verdict(Enum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "BROKEN"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    name: str
    verdict: Verdict
    seen: str
    advice: str = ""
    """The remedy; empty if none is needed, or if `seen` is an error that contains it."""


def ok(name: str, seen: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(name=name, verdict=Verdict.OK, seen=seen)


def warning(name: str, seen: str, advice: str = "") -> Finding:
    """Return a finding that a run may survive."""
    return Finding(name=name, verdict=Verdict.WARNING, seen=seen, advice=advice)


def broken(name: str, seen: str, advice: str = "") -> Finding:
    """Return a finding that prevents a run."""
    return Finding(name=name, verdict=Verdict.BROKEN, seen=seen, advice=advice)


def render(finding: Finding) -> str:
    """Format a finding, wrapped to the terminal."""
    text = f"{finding.seen} {finding.advice}".rstrip()
    return hanging(f"{finding.name:<{NAME_WIDTH - 1}} {finding.verdict.value:<9}", text)


def one_line(error: object) -> str:
    """Shorten an error to a line of at most 400 characters."""
    return " ".join(str(error).split())[:400]


def numbers(version: str) -> tuple[int, ...]:
    """Parse the leading numbers of a version; '2.13.0+cpu' is (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()

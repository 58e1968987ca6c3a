"""Turn a check into a `Finding`, whatever the check does: crash, hang, or take long. No torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from asyncrl.config.run import TrainConfig
from asyncrl.errors import AsyncRLError
from asyncrl.observability.console import hanging
from asyncrl.observability.signals import BlockingThread
from asyncrl.records import ActionSpec, SlotBytes, StartState


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the models of a run. Bytes, unless a field says otherwise."""

    policy: int
    """Policy as its file and an actor hold it."""
    parameters: int
    """Numbers in the policy, also those that are not trained."""
    trained: int
    """Numbers that an update changes."""
    float32_masters: int
    """Policy as the learner holds it: float32 where --learner.precision wants it."""
    unsharded: int
    """Part of `float32_masters` that is not spread over learner ranks: frozen weights beside adapters."""
    rounded: int = 0
    """Rounded copies of frozen weights, which every learner rank has whole (--learner.frozen-precision)."""
    version: int
    """What actors get after an update."""
    environment: int
    """World and reward model."""
    frame: int
    """One picture."""
    action_spec: ActionSpec
    """Of the policy; no bytes."""
    block: int = 0
    """Largest block of the policy, as passes gather it."""
    acting: int = 0
    """Activations of the policy per decision made; 0: not known."""
    learning: int = 0
    """Activations of the policy per decision of a micro-batch; 0: not known."""
    kept: int = 0
    """The same if no layer computed any again."""
    slot: SlotBytes = field(default_factory=SlotBytes)
    """What slots of the world take."""

    @property
    def training(self) -> int:
        """Gradient and AdamW's two moments, float32."""
        return 12 * self.trained

    @property
    def checkpoint(self) -> int:
        """The policy, and float32 weights and moments of what is trained."""
        return self.policy + 12 * self.trained


@dataclass(kw_only=True)
class Examination:
    """One examination."""

    config: TrainConfig
    """Once the models were loaded, with what the world says where the user said nothing."""
    where: str = "the defaults"
    """Where the settings come from, for people."""
    host: int = 0
    """Number of this host, of those that --placement names (ROLE=RANKS@HOST); 0 where it names none."""
    sizes: Sizes | None = None
    """Known once the models were loaded."""
    starts: Sequence[StartState] = ()
    """Where imagined episodes begin; likewise."""


NAME_WIDTH: Final = 14
PROGRESS_AFTER: Final = 2.0
"""Seconds after which a check that still runs is named on stderr."""


class Verdict(Enum):
    """What a finding means for training."""

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
    """What to do; empty when all is well, or when `seen` is an error that says it."""


def ok(name: str, seen: str) -> Finding:
    """Return a finding of something that works."""
    return Finding(name=name, verdict=Verdict.OK, seen=seen)


def warning(name: str, seen: str, advice: str = "") -> Finding:
    """Return a finding that a run may survive."""
    return Finding(name=name, verdict=Verdict.WARNING, seen=seen, advice=advice)


def broken(name: str, seen: str, advice: str = "") -> Finding:
    """Return a finding that no run survives."""
    return Finding(name=name, verdict=Verdict.BROKEN, seen=seen, advice=advice)


def render(finding: Finding) -> str:
    """Write one line of the report, broken where a terminal ends."""
    text = f"{finding.seen} {finding.advice}".rstrip()
    return hanging(f"{finding.name:<{NAME_WIDTH - 1}} {finding.verdict.value:<9}", text)


def one_line(error: object) -> str:
    """Shorten an error to a line of at most 400 characters."""
    return " ".join(str(error).split())[:400]


def run_check(name: str, check: Callable[[], Finding | None], deadline: float) -> Finding | None:
    """Run a check. This is the boundary: whatever goes wrong in one check, the others are still made.

    The check runs on a thread, because a file system or a driver that hangs cannot be interrupted; such a
    thread is left behind and ends with the program.

    Args:
        name: Of the finding, when the check itself has none to give.
        check: Returns its finding, or None where there is nothing to say.
        deadline: Seconds.
    """
    found: list[Finding | None] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.append(check())
        except AsyncRLError as error:
            found.append(broken(name, one_line(error)))
        except (Exception, SystemExit) as error:
            found.append(broken(name, f"cannot be checked: {type(error).__name__}: {one_line(error)}"))
        finally:
            done.set()

    BlockingThread(run, f"check of {name}").start()
    if not done.wait(min(PROGRESS_AFTER, deadline)):
        print(f"{name}: still looking, for at most {deadline:g} s", file=sys.stderr, flush=True)
        done.wait(deadline - PROGRESS_AFTER)
    if found:
        return found[0]
    return broken(
        name,
        f"the check did not end within {deadline:g} s.",
        "A disk, a network file system or a driver hangs; see `dmesg`.",
    )

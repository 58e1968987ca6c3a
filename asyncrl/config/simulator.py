"""Settings of --simulator: the one that --world names. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from asyncrl.config.bounds import THREADS, AtLeast, Bounded


@dataclass(frozen=True, kw_only=True)
class SimulatorSettings(Bounded):
    """The simulator that --world names."""

    SECTION: ClassVar[str] = "simulator."

    workers: Annotated[
        int, AtLeast(0, "it counts processes.", "Use 0 for the actor's own.", highest=THREADS)
    ] = 0
    """Processes of each actor that simulate; --actor.slots are shared out to them. 0: the actor's own process
    does, and the policy waits meanwhile. LIBERO can have one slot in each."""
    starts: Literal["random", "stored", "evaluation"] = "random"
    """Where episodes begin. random: at starts that are drawn below the seeds of evaluations. stored: at those
    stored starts that no evaluation plays, from the 50th of each task on. evaluation: at all stored starts,
    also those that `asyncrl evaluate` plays, so that its numbers say nothing of new ones."""
    horizon: Annotated[int, AtLeast(0, "it counts steps.", "Use 0 for the simulator's.", highest=100_000)] = 0
    """Steps until an episode is truncated; 0: the simulator's own."""
    image_size: Annotated[
        int, AtLeast(0, "it counts pixels.", "Use 0 for the simulator's.", highest=4096)
    ] = 0
    """Height and width of the pictures in pixels; 0: the simulator's own, where it has none the policy's."""

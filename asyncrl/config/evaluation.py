"""Settings of --evaluation: the true success, measured beside the training. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from asyncrl.config.bounds import THREADS, AtLeast, Bounded


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Bounded):
    """How --evaluate-every measures the true success of the run's policy, in a process that nobody waits for.

    With the run's own temperature and top-k, from starts that nothing is trained on, the same ones each time.
    """

    SECTION: ClassVar[str] = "evaluation."

    episodes: Annotated[int, AtLeast(1, "it counts episodes.", "Use 64.", highest=100_000)] = 64
    """Episodes that are played of each version. More make the interval narrower, and take longer."""
    simulator: str = ""
    """Simulator to play in; empty: the run's own, the one whose tasks the start states are of. Or
    package.module:make."""
    simulator_settings: tuple[str, ...] = ()
    """Keywords of the simulator's class: key=value ..."""
    workers: Annotated[
        int, AtLeast(0, "it counts processes.", "Use 1, or 0 for none of its own.", highest=THREADS)
    ] = 1
    """Processes that simulate. LIBERO has one episode in each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy plays, and world and reward model draw; auto: on the learner's device, beside it."""
    movies: Annotated[int, AtLeast(0, "it counts episodes.", "Use 6, or 0 for none.", highest=64)] = 6
    """Episodes of each version that are drawn into RUN/videos: the truth beside what the run's world model
    imagines of the same actions, and both verdicts."""

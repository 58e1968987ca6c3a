"""Settings of --actor: how episodes are made. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from asyncrl.config.bounds import THREADS, AtLeast, Bounded, Within

SuccessFrames = int | Literal["last"]
"""See `ActorSettings.success_frames`."""


@dataclass(frozen=True, kw_only=True)
class ActorSettings(Bounded):
    """How an actor makes episodes."""

    SECTION: ClassVar[str] = "actor."

    slots: Annotated[int, AtLeast(1, "an actor imagines at least one episode.", "Use 16.", highest=4096)] = 16
    """Episodes imagined at the same time by one actor."""
    pipeline_stages: Literal[1, 2] = 1
    """2: the slots decide in two halves in turns, so that the host works on one half while the GPU works on
    the other, and policy and world on two GPUs work at the same time (RLinf: pipeline_stage_num)."""
    offload: bool = False
    """Keep policy, world and reward model in pinned host memory while there is nothing to imagine. Without
    effect under --inline."""
    max_decisions: Annotated[
        int, AtLeast(0, "an episode has a decision.", "Use 6, or 0 for what the world says.", highest=10_000)
    ] = 0
    """An episode is cut after this many decisions (of 8 steps each). 0: what the world says; 32 in a
    published folder, in a simulator what its horizon has room for, else 6."""
    success_threshold: Annotated[float, Within(0, 1, "it is a probability.", "Use 0.7.", open_below=True)] = (
        0.7
    )
    """The reward model's probability from which a step counts as success."""
    success_frames: SuccessFrames = 1
    """Which frames at --actor.success-threshold or above make a success. A number k: the first k in a row; 1:
    the first of all. last: the last frame of a decision, so that what was gone again at its end does not
    count. docs/worlds.md says what each rule gets wrong."""
    threads: Annotated[
        int, AtLeast(0, "it counts threads.", "Use 0 to let asyncrl choose.", highest=THREADS)
    ] = 0
    """CPU threads of an actor process. 0: two where every actor has two cores, else one."""
    max_respawns: int = 5
    """An actor that dies comes back this often; one death more ends the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.success_frames != "last":
            AtLeast(1, "it counts scoring frames in a row.", "Use 1, or the word last.").check(
                "actor.success-frames", self.success_frames
            )
        AtLeast(self.pipeline_stages, "each of --actor.pipeline-stages needs one.", "Use 16.").check(
            "actor.slots", self.slots
        )

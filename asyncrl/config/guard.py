"""Settings of --guard: what a success is worth that only the reward model has seen. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from asyncrl.config.bounds import Bounded, check_path
from asyncrl.errors import ConfigError
from asyncrl.registry import names_code


@dataclass(frozen=True, kw_only=True)
class GuardSettings(Bounded):
    """What an imagined success is worth, since some of them are none."""

    SECTION: ClassVar[str] = "guard."

    kind: Literal["none", "lasting", "probability", "second"] = "none"
    """none: a reward of 1 at the first frame whose score reaches --actor.success-threshold. lasting: only
    where the last frame of a decision does, as --actor.success-frames last: what was gone again at its end
    does not count. probability: the score itself in place of 1. second: a success is imagined again, from the
    same start with the same actions and other noise; an episode that does not succeed twice is not learned
    from. docs/pace.md says what each tells, and what it costs."""
    world: str = ""
    """Folder of another world of the same kind, whose network draws what --guard.kind second imagines again.
    Empty: that of --world draws it, with other noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path("guard.world", self.world)
        if self.world and self.kind != "second":
            raise ConfigError(
                f"--guard.world is {self.world}, but --guard.kind is {self.kind}: nothing is imagined again "
                "that it could draw. Add --guard.kind second, or leave it out."
            )
        if names_code(self.world):
            raise ConfigError(
                f"--guard.world is {self.world}, which names a class, but the class is that of --world. Give "
                "a folder alone: what stands behind the @."
            )

    @property
    def repeats(self) -> bool:
        """Whether successes are imagined again, so that episodes have weights."""
        return self.kind == "second"

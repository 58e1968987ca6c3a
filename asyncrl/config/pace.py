"""Settings of --pace: the world that is refitted while the policy learns in it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

from asyncrl.config.bounds import AtLeast, Bounded, Within, check_path
from asyncrl.errors import ConfigError

MOST_EXAMPLES = 65_536
"""Examples of a step."""
FITTER: Final = "fitter"
"""Role of the rank that refits the world, in --placement."""


@dataclass(frozen=True, kw_only=True)
class PaceSettings(Bounded):
    """Refit the world on true episodes of the policy that it trains (PACE of WoVR); docs/pace.md."""

    SECTION: ClassVar[str] = "pace."

    every: Annotated[int, AtLeast(0, "it counts updates.", "Use 6, or 0 for never.")] = 0
    """Updates between two rounds: true episodes of the newest policy, a refit of world and reward model, an
    audit that decides whether the actors go on with it. Nobody waits for a round. 0: never."""
    episodes: Annotated[
        int, AtLeast(8, "some are fitted and others decide.", "Use 256.", highest=1_000_000)
    ] = 256
    """True episodes of a round."""
    budget: Annotated[int, AtLeast(0, "it counts episodes.", "Use 1024, or 0 for no bound.")] = 0
    """True episodes of all rounds together, after which there are no more rounds. 0: no bound."""
    held_out: Annotated[
        float,
        Within(0, 1, "it is a share.", "Use 0.25.", open_below=True, open_above=True),
    ] = 0.25
    """Share of a round's episodes on which worlds are judged, and which are not fitted in that round."""
    simulator: str = ""
    """Where true episodes are played, as --evaluation.simulator. Empty: the built-in one with the tasks
    of the start states."""
    simulator_settings: tuple[str, ...] = ()
    """Keywords of the simulator's class: key=value ..."""
    workers: Annotated[int, AtLeast(0, "it counts processes.", "Use 1.", highest=4096)] = 1
    """Processes that simulate. 0: the fitter itself does."""
    recordings: str = ""
    """Instead of a simulator: folder in which a robot's recordings of the run's policy arrive as part-*.h5
    (docs/recordings.md). A round begins when there are --pace.episodes new episodes."""
    base: tuple[str, ...] = ()
    """Folders of recordings that the world was fitted on: as many of their episodes are mixed in as
    --pace.fresh leaves room for. Without any, only the run's own true episodes are fitted."""
    fresh: Annotated[float, Within(0, 1, "it is a share.", "Use 0.33.", open_below=True)] = 0.33
    """Share of the run's own true episodes among those that are fitted; the others are of --pace.base."""
    world_steps: Annotated[int, AtLeast(0, "it counts steps.", "Use 60, or 0.")] = 60
    """Optimizer steps of a round on what draws latents. 0: it stays as it is."""
    reward_steps: Annotated[int, AtLeast(0, "it counts steps.", "Use 200, or 0.")] = 200
    """Optimizer steps of a round on the reward model. 0: it stays as it is."""
    batch: Annotated[
        int, AtLeast(4, "a step has examples of both kinds.", "Use 32.", highest=MOST_EXAMPLES)
    ] = 32
    """Windows, or frames, of a step."""
    learning_rate: Annotated[float, Within(0, 1, "a learning rate lies in 0..1.", "Use 3e-5.")] = 3e-5
    """Peak learning rate of both refits."""
    own_memory: Annotated[float, Within(0, 1, "it is a share.", "Use 0.5, or 0.")] = 0.0
    """Share of the windows whose memory the world draws itself, as it does when it imagines: against drift.
    Of worlds of kind wan."""
    context_sigma: Annotated[float, Within(0, 1000, "it is a width.", "Use 0.05.")] = 0.05
    """Noise on the memory while it is refitted: that of the world's own fit, which was 0.05 for the shipped
    one. A few steps under more noise make worse what it draws without. Of worlds of kind wan; others have a
    published one."""
    keyframes: Annotated[
        int, AtLeast(0, "it counts start states.", "Use 32, or 0 for those of --start-states.", highest=4096)
    ] = 32
    """With --keyframe-share above 0: key frames that a round takes from its true episodes, at which groups of
    that share begin from then on. They travel with the world. 0: those of --start-states stay."""
    siblings: Annotated[int, AtLeast(0, "it counts episodes.", "Use 8, or 0.", highest=1024)] = 8
    """Episodes imagined from each candidate for a key frame: it becomes one only where between 1/8 and 7/8 of
    them succeed, since a group that ends alike teaches nothing. 0: all candidates do."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the fitter's models are. auto: on the device of its rank, which is 0 unless --placement says
    another one (fitter=2)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("simulator", "recordings"):
            check_path(f"pace.{name}", getattr(self, name))
        if self.simulator and self.recordings:
            raise ConfigError(
                f"--pace.simulator is {self.simulator} and --pace.recordings {self.recordings}, but true "
                "episodes come from one of them. Leave one out."
            )
        if self.every and not (self.world_steps or self.reward_steps):
            raise ConfigError(
                "--pace.world-steps and --pace.reward-steps are 0, so that a round would refit nothing. Set "
                "one of them, or leave --pace.every out; --evaluate-every only measures."
            )
        if 0 < self.budget < self.episodes:
            raise ConfigError(
                f"--pace.budget is {self.budget}, but a round has {self.episodes} episodes (--pace.episodes)."
                " There would be none: use a larger budget, or smaller rounds."
            )

    @property
    def audited(self) -> int:
        """Episodes of a round that are held out; at least 1, and as many are left to be fitted."""
        return min(max(1, round(self.episodes * self.held_out)), self.episodes - 1)


def names_fitter(placement: str) -> bool:
    """Whether --placement gives the fitter a rank, as far as can be told without reading all of it.

    >>> names_fitter("learner=0,actor=0, fitter=1"), names_fitter("auto")
    (True, False)
    """
    return any(item.strip().startswith(FITTER) for item in placement.split(","))

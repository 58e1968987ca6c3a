"""Interfaces of the replay: `ActorPort` and `LearnerPort`, and the facts about a run that it needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol, get_args

from asyncrl.errors import AsyncRLError, ReplayError
from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import Metric
from asyncrl.records import ActionSpec, Episode

ReceiptStatus = Literal[
    "held",
    "stored",
    "duplicate",
    "dropped_lag",
    "dropped_deadline",
    "dropped_invalid",
    "dropped_resume",
    "dropped_poisoned",
    "dropped_outdated",
    "dropped_unusable",
]
"""Fate of an episode. Only `held` is not final: its group is incomplete, so the actor keeps it.
`dropped_lag`: its policy is older than --replay.max-lag allows.
`dropped_outdated`: its group was given up and granted again, and that grant goes on.
`dropped_unusable`: its stored group is set aside, because the learner cannot use it.
"""

Cause = Literal["policy", "world", "reward", "raised", "quarantined"]
"""Why a group cannot be imagined: a model returned a number that is not finite, an exception was raised, or
the group was not begun because its start state failed too often."""
RefusalCause = Literal["content", "settings", "version", "grant"]
"""Why an episode is refused: it contradicts itself or holds impossible numbers; its settings or models are
not the run's; an unpublished version made it; its group was not granted to its sender.
"""
CAUSES: Final = get_args(Cause)

REPORTED: Final = {
    metric.name: metric
    for metric in (
        *(m.ACTORS_WAITING, m.LIVE_SLOTS, m.USEFUL_STEPS, m.ACTOR_POLICY, m.ACTOR_WORLD, m.ACTOR_REWARD),
        *(m.ACTOR_SIMULATORS, m.ACTOR_HOST, m.ACTOR_OFFLOAD, m.ACTOR_MEMORY, m.ACTOR_OFFLOADED),
        *(m.ACTOR_DECISIONS, m.ACTOR_RESTARTED),
    )
}
ENDLESS: Final = 2**31  # `GroupFailure.left` where starts are drawn for ever


class RunStopped(AsyncRLError):
    """The learner ended the run. Not a failure: the actor leaves its loop."""


class NothingToLearn(AsyncRLError):
    """The filter removed so many groups that the run ends. Not a failure: the learner saves and leaves."""


class GroupLost(ReplayError):
    """A group of the batch cannot be read any more: its file is gone or damaged since it was chosen."""


@dataclass(frozen=True, kw_only=True)
class BatchDescription:
    """The groups of an update, or the part of them that one learner rank gets."""

    request: str
    numbers: tuple[int, ...]

    def part(self, rank: int, ranks: int) -> BatchDescription:
        """Return the part of learner rank `rank` of `ranks`: group n goes to rank ``n % ranks``."""
        return replace(self, numbers=self.numbers[rank::ranks])


@dataclass(frozen=True, kw_only=True)
class Filling:
    """Progress of the next batch."""

    groups: int
    """Complete groups that wait to be used."""
    episodes: int
    """Episodes of these groups, of incomplete ones, and of those that were filtered since the last batch."""
    decisions: int
    """Decisions that actors reported since this process of the replay began, also of unfinished episodes."""


@dataclass(frozen=True, kw_only=True)
class GroupGrant:
    """Permission to imagine one group."""

    number: int
    """0, 1, 2 ... in the order of granting; decides start state and seeds. A resume repeats those it lost."""
    min_version: int
    """Oldest policy version that may sample the group's first decision."""
    keep_video: bool

    @property
    def group_id(self) -> str:
        """Return `Episode.group_id` of the group's members."""
        return f"{self.number:08d}"


@dataclass(frozen=True, kw_only=True)
class GroupFailure:
    """A granted group that cannot be imagined."""

    number: int
    member: int
    """The first member that failed; -1 when the group was not begun."""
    cause: Cause
    start_state: str
    reason: str
    left: int
    """The actor's start states that are not quarantined, or `ENDLESS`; 0 ends the run."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Fate of one episode."""

    episode_id: str
    status: ReceiptStatus
    reason: str = ""
    """Why the episode was dropped, for the actor's log; else empty."""
    cause: RefusalCause | None = None
    """Cause of `dropped_invalid`, for metrics; not sent."""


@dataclass(frozen=True, kw_only=True)
class SimulatorFormat:
    """Common properties of episodes that are played in a simulator."""

    name: str
    """Prefix of the names of its starts."""
    tasks: tuple[str, ...] = ()
    """Instructions; empty: any."""
    more_cameras: int = 0
    """Cameras that the policy sees besides the first."""
    state_dim: int = 0
    reward: Literal["success", "dense"] = "success"
    """success: 1 in the step that fulfils the task, else 0. dense: any numbers."""


@dataclass(frozen=True, kw_only=True)
class EpisodeFormat:
    """Common properties of a run's episodes, from its models and start states."""

    image_size: int = 0
    """Height and width of all pictures in pixels; 0: unknown, any."""
    action_spec: ActionSpec | None = None
    """Steps per decision and numbers per step; None: unknown, any."""
    sample: Mapping[str, tuple[str, tuple[int | str, ...]]] = field(default_factory=dict)
    """Array of the sample -> its dtype, and its shape in one decision, where a letter stands for any size;
    empty: unknown, any."""
    max_decisions: int = 0
    """Most decisions of an episode; 0: unknown, any."""
    tasks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of start states -> their instruction, or several; empty: unknown, any."""
    world_version: int | None = None
    """-1: a simulator; None: unknown, any."""
    simulator: SimulatorFormat | None = None
    """None: a world model, or unknown."""


ANY_FORMAT: Final = EpisodeFormat()


class ActorPort(Protocol):
    """The actor's side of the replay. Used by one thread."""

    def acquire_groups(self, groups: int, timeout: float) -> list[GroupGrant]:
        """Ask for up to `groups` >= 1 more groups; empty without credit within `timeout` seconds.

        Returns as soon as there is one. Raises `RunStopped` if the learner ended the run.
        """
        ...

    def push(self, episode: Episode) -> None:
        """Keep and resend an episode until it is durable. Never blocks."""

    def fail(self, failure: GroupFailure) -> None:
        """Give a granted group up; resent until it is durable. Never blocks."""

    @property
    def quarantined(self) -> Collection[str]:
        """Return the names of quarantined start states, as of the last grant."""
        ...

    def pop_dropped(self) -> set[int]:
        """Return and forget the groups of this actor that were given up."""
        ...

    def serve(self) -> None:
        """Exchange receipts, heartbeats and the stop notice. Never blocks; call it once per step."""

    def report(self, metrics: Mapping[Metric, float]) -> None:
        """Report some of `REPORTED`. May be lost; never blocks."""

    @property
    def stopped(self) -> bool:
        """True if the learner ended the run."""
        ...

    def close(self, timeout: float) -> None:
        """Deliver unacknowledged episodes within `timeout` seconds, then leave."""


class LearnerPort(Protocol):
    """The learner's side of the replay. Used by one thread."""

    def choose(self, *, groups: int, version: int, timeout: float) -> BatchDescription:
        """Wait for a batch: `groups` complete groups, no decision older than the lag bound at `version`.

        From then on they count as used. Raises `SampleTimeout` without a batch within `timeout` seconds,
        `NothingToLearn`, or a `ReplayError` if nothing can be imagined.
        """
        ...

    def fetch(
        self, wanted: BatchDescription, *, timeout: float, while_waiting: Callable[[], object]
    ) -> list[list[Episode]]:
        """Fetch the groups of a batch, or of a part of it, in its order, on any learner rank.

        `while_waiting` is called about once a second. Raises a `ReplayError` if nothing came for `timeout`
        seconds, `GroupLost` if a group cannot be read any more.
        """
        ...

    def report_version(self, version: int) -> None:
        """Report the learner's newest policy version: credit follows from it."""

    def status(self) -> dict[Metric, float]:
        """Return `replay/*`, `wire/*` and the actors' readings (`REPORTED`)."""
        ...

    def stop(self) -> None:
        """End the run for the actors and the replay."""

    def close(self) -> None:
        """Close the connection."""

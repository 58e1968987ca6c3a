"""Settings of --replay: what is kept between actors and learner, and how long. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from asyncrl.config.bounds import SECONDS, AtLeast, Bounded
from asyncrl.errors import ConfigError

ReplaySampler = Literal["oldest", "newest", "uniform", "prioritized"]


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Bounded):
    """The HDF5 replay between the actors and the learner."""

    SECTION: ClassVar[str] = "replay."

    max_lag: Annotated[
        int, AtLeast(0, "a lag cannot be negative.", "Use 2, or --synchronous for 0.", highest=100_000)
    ] = 2
    """No decision older than this many policy versions is trained on; checked at admission and sampling."""
    group_timeout: Annotated[
        float, AtLeast(1, "imagining a group takes time.", "Use 300.", highest=SECONDS)
    ] = 300.0
    """Seconds without a decision of its actor until an incomplete group is given up and counted."""
    heartbeat_timeout: Annotated[
        float, AtLeast(3, "actors say every second that they are there.", "Use 30.", highest=SECONDS)
    ] = 30.0
    """Seconds without any sign of life after which an actor's open groups are given up."""
    keep_video_every: Annotated[int, AtLeast(0, "it counts groups.", "Use 0 for never.")] = 16
    """Keep every imagined frame of each n-th group, for movies and for data sets with one sample per step
    (`asyncrl replay export`); 0 = never."""
    max_gigabytes: Annotated[float, AtLeast(0.01, "the run must fit.", "Use 8.")] = 8.0
    """Oldest groups that were already used are deleted beyond this size."""
    read_ahead_gigabytes: Annotated[float, AtLeast(0, "memory cannot be negative.", "Use 8.")] = 8.0
    """Memory of the replay for complete groups that it reads before the learner asks for them. What does not
    fit is checked, and read again when a learner rank fetches it. Without effect under --inline."""
    listen: str = ""
    """Address the replay listens on, like tcp://10.0.0.5:5555; beyond loopback it needs --replay.keys. Empty:
    a private socket on this host. Without effect under --inline."""
    keys: str = ""
    """Folder of key files from `asyncrl keys`: traffic is encrypted, and only listed clients are admitted."""
    compact_at_end: bool = False
    """When the run has made all its updates, compress the pictures of groups that are no longer needed, as
    `asyncrl replay compact` does."""
    max_age_versions: Annotated[int, AtLeast(0, "it counts versions.", "Use 0 for never.")] = 0
    """Groups that were already used are deleted when their newest decision is older than this. 0: never."""
    quarantine_after: Annotated[int, AtLeast(1, "it counts failures.", "Use 2.")] = 2
    """A start state is not used any more after this many groups of it could not be imagined: something was
    not finite, or raised an error."""
    max_reuse: Annotated[int, AtLeast(1, "a group is used at least once.", "Use 1.")] = 1
    """A group is trained on in up to this many updates, as long as the lag bound lets it."""
    sampler: ReplaySampler = "oldest"
    """Which groups an update gets. prioritized: by chance, in proportion to the spread of their returns,
    which changes what is maximised (docs/staleness.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys and not self.listen:
            raise ConfigError(
                f"--replay.keys is {self.keys}, but the replay's private socket takes no keys. "
                "Set --replay.listen tcp://ADDRESS:PORT too, or leave the keys out."
            )

"""What the replay knows of a group on its way: granted and open, then complete and ready."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from asyncrl.records import Episode
from asyncrl.replay.ports import GroupGrant
from asyncrl.replay.schema import Shard


@dataclass(kw_only=True)
class OpenGroup:
    """A granted group that is not complete."""

    grant: GroupGrant
    actor: str
    turn: int
    """The actor's count of acquisitions; a repeated question gets the same grant."""
    granted_at: float
    first_at: float | None = None
    """When its first episode came, in seconds of the limiter's clock."""
    members: dict[int, Episode] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReadyGroup:
    """A complete group that can be used."""

    oldest_version: int
    newest_version: int
    spread: float = 0.0
    """Standard deviation of the episodes' returns (1: success, 0: none)."""


@dataclass(frozen=True, kw_only=True)
class FilteredGroup:
    """A complete group whose episodes all had the same return."""

    newest_version: int
    successes: int
    """Episodes that succeeded."""


def ready_group(shard: Shard) -> ReadyGroup:
    """Return what the limiter has to know of a sealed group."""
    share = shard.attributes["successes"] / shard.attributes["group_size"]
    return ReadyGroup(
        oldest_version=shard.oldest_version,
        newest_version=shard.newest_version,
        spread=math.sqrt(share * (1 - share)),
    )


def misfit(group: OpenGroup, episode: Episode, group_size: int) -> str | None:
    """Say why an episode does not belong to a group, or None when it does."""
    if episode.group_size != group_size:
        return f"group size {episode.group_size}, this run has {group_size}"
    if episode.member in group.members:
        return f"member {episode.member} came twice, with different ids"
    for sibling in group.members.values():
        if sibling.final_frame.shape != episode.final_frame.shape:
            return f"images of {episode.final_frame.shape}, its siblings have {sibling.final_frame.shape}"
        if (sibling.task, sibling.start_state) != (episode.task, episode.start_state):
            return "its siblings have another task or start state"
    return None


def number_of(group_id: str) -> int:
    """Return the number in a `GroupGrant.group_id`, or -1 when it is none."""
    return int(group_id) if len(group_id) == 8 and group_id.isascii() and group_id.isdecimal() else -1

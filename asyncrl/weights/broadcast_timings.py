"""Say how long the stages of one broadcast of weights took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class BroadcastTimings:
    """What is known of the last broadcast. Seconds of its stages, one after another."""

    version: int = -1
    members: int = 0
    packing: float = 0.0
    """From the call of `publish`: gathering, casting and packing."""
    summing: float = 0.0
    """The checksum, unless the actors copy meanwhile (`SharesBuffers`)."""
    announcing: float = 0.0
    broadcasting: float = 0.0
    """Until it is over on the learner's side."""
    receipts: float = 0.0
    """Until every member told that it has the version, and that its checksum is right."""

    @property
    def seconds(self) -> float:
        """Duration of the broadcast itself, from the announcement to the last receipt."""
        return self.announcing + self.broadcasting + self.receipts


def timings_of(version: int, members: int, times: Sequence[float]) -> BroadcastTimings:
    """Make the durations of the stages.

    Args:
        version: What was broadcast.
        members: To how many.
        times: When packing began and each of the five stages ended, in seconds of one clock.
    """
    packing, summing, announcing, broadcasting, receipts = (b - a for a, b in pairwise(times))
    return BroadcastTimings(
        version=version,
        members=members,
        packing=packing,
        summing=summing,
        announcing=announcing,
        broadcasting=broadcasting,
        receipts=receipts,
    )

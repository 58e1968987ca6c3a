"""What came out of complete groups: returns in, whether they teach anything, and the share of successes."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.records import Episode


def constant(group: Sequence[Episode]) -> bool:
    """Whether all episodes have the same return (sum of rewards): compared with siblings, none is better."""
    return len({float(episode.rewards.sum()) for episode in group}) == 1


class SuccessWindow:
    """Share of successful episodes among the groups completed at one version of the learner."""

    def __init__(self) -> None:
        """Nothing was completed yet."""
        self.last: float | None = None
        """Share at the version before the current one, in [0, 1]; None when no group became complete then."""
        self._successes, self._episodes = 0, 0

    def add(self, successes: int, episodes: int) -> None:
        """Count a complete group."""
        self._successes += successes
        self._episodes += episodes

    def close(self) -> None:
        """The learner's version rose: what was counted becomes the last share."""
        self.last = self._successes / self._episodes if self._episodes else None
        self._successes, self._episodes = 0, 0

    def restart(self) -> None:
        """Forget everything, before the groups of the current version are counted again."""
        self.close()
        self.last = None

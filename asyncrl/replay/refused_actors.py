"""Notice that nothing which the actors imagine is admitted (`admission`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class RefusedActors:
    """Notices when nothing that the actors imagine is admitted: such a run would go on for ever.

    A hostile actor cannot end a run with it as long as another one's groups are complete.
    """

    def __init__(self, after: int = 8) -> None:
        """Nobody was refused yet; `after` groups in a row without a complete one, an actor is hopeless."""
        self._after = after
        self._refused: Counter[str] = Counter()
        """Actor -> its groups that were refused since it completed one."""
        self._last: dict[str, str] = {}

    def note_refused(self, actor: str, number: int, reason: str) -> None:
        """Note a group that was given up because an episode of it was refused."""
        self._refused[actor] += 1
        self._last[actor] = f"group {number} of {actor!r}: {reason}"

    def forget(self, actor: str) -> None:
        """Note that an actor completed a group, began anew or left."""
        self._refused.pop(actor, None)
        self._last.pop(actor, None)

    def exhausted(self, actors: Sequence[str]) -> str:
        """Say why none of the `actors` that are there will complete a group; empty while there is hope."""
        if not actors or any(self._refused[actor] < self._after for actor in actors):
            return ""
        return (
            f"Nothing that the actors imagine is admitted: of each of {len(actors)} actors {self._after} "
            f"groups in a row were refused (replay/refused_*), last {self._last[actors[-1]][:500]}. Actors "
            "and learner have other settings, models or code: start all with the run's config.json and files."
        )

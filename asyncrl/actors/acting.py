"""The interface of what an actor acts in: a world model (`Imagination`) or a simulator (`Play`).

Both decide for the slots of a stage with the policy, and find out what becomes of the decision; the actor
refills the slots, hands over the episodes that end, and knows no difference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncrl.actors.failures import RowFailure
from asyncrl.actors.pipeline import Stage
from asyncrl.actors.slots import Ending, EpisodeInProgress, Slots, Start
from asyncrl.observability.metrics import Metric
from asyncrl.policies.interface import SamplingParams


class Starts(Protocol):
    """Where episodes begin: element n of an endless stream, a pure function of its settings and n."""

    def __getitem__(self, n: int) -> Start:
        """Return where the episodes of grant `n` begin."""
        ...

    def left(self, quarantined: Collection[str]) -> int:
        """Count the starts that are not quarantined; `replay.interface.ENDLESS`: there are always others."""
        ...


class ActingPolicy(Protocol):
    """What the actor itself needs of a policy."""

    def acting_tensors(self) -> Mapping[str, Tensor]:
        """Return the weights that an update changes, by name."""
        ...


class Acting(Protocol):
    """Decides with the policy of an actor, and finds out what becomes of it."""

    @property
    def policy(self) -> ActingPolicy:
        """Return what decides."""
        ...

    @property
    def sampling(self) -> SamplingParams:
        """Return how decisions are sampled."""
        ...

    @property
    def version(self) -> int:
        """Return `Episode.world_version`."""
        ...

    @property
    def devices(self) -> Collection[torch.device]:
        """Return where the models are."""
        ...

    @property
    def counts(self) -> Mapping[Metric, int]:
        """Return what was counted since the actor began: `ACTOR_DECISIONS`, and others."""
        ...

    def suits(self, index: int, start: Start) -> bool:
        """Tell whether an episode from `start` costs no more in the slot `index` than in any other."""
        ...

    def begin(self, slots: Slots, stage: Stage[Any], indices: list[int]) -> list[RowFailure]:
        """Begin the episodes that were just put into slots of a stage that is not in flight.

        Returns:
            Slots that cannot be begun: they must be cleared.
        """
        ...

    def launch(
        self, slots: Slots, stage: Stage[Any], indices: list[int], policy_version: int
    ) -> list[RowFailure]:
        """Begin one decision in `indices`: the slots of the stage that have an episode.

        Returns:
            Slots that cannot decide: they must be cleared.
        """
        ...

    def collect(self, slots: Slots, stage: Stage[Any], deadline: float) -> tuple[list[RowFailure], float]:
        """Wait for decisions of the stage and append them to their episodes.

        Returns:
            Slots that failed: they made no decision and must be cleared. And the seconds waited that are not
            in `pop_device_seconds`.

        Raises:
            RunError: Nothing came within `deadline` seconds.
        """
        ...

    def release(self, slots: Slots, stage: Stage[Any]) -> None:
        """Forget what is kept for episodes of the stage, which has none."""
        ...

    def ending(self, episode: EpisodeInProgress) -> Ending | None:
        """Say how an episode ended that has just made a decision; None while it goes on."""
        ...

    def close(self) -> None:
        """End the processes it has started. May be called again."""
        ...

    def pop_device_seconds(self) -> dict[Metric, float]:
        """Return the seconds that policy and others were busy, by metric, since this was asked."""
        ...

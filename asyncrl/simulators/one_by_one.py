"""A simulator made of environments that play one episode each, stepped one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.simulators.interface import Seen, SimStart, SimulatorSpec, Stepped


class Outcome(NamedTuple):
    """Result of one step."""

    success: bool
    reward: float | None = None  # None: 1 with success, else 0.
    terminated: bool = False


class Place(Protocol):
    """An environment that plays one episode at a time. Letters as in `interface`.

    It may have ``close()``. With `SimulatorSpec.poses` it needs ``pose()``: ``[8]`` of `interface.hand_pose`.
    """

    def reset(self, start: SimStart) -> str:
        """Begin the episode that belongs to a start; return its instruction."""
        ...

    def step(self, action: NDArray[np.float32]) -> Outcome:
        """Carry out ``[A]`` float32."""
        ...

    def look(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return pictures ``[K, H, W, 3]`` uint8 and state ``[Q]`` float32."""
        ...


SomePlace = TypeVar("SomePlace", bound=Place)


class OneByOne(Generic[SomePlace]):
    """A `Simulator` of independent places. Counts steps, and truncates at `SimulatorSpec.max_steps`."""

    def __init__(self, spec: SimulatorSpec, places: Sequence[SomePlace]) -> None:
        assert len(places) == spec.places
        self.spec = spec
        self.places = list(places)
        self._steps = [0] * len(places)

    def reset(self, places: Sequence[int], starts: Sequence[SimStart]) -> Seen:
        """Begin one episode in each of n places."""
        tasks = []
        for place, start in zip(places, starts, strict=True):
            tasks.append(self.places[place].reset(start))
            self._steps[place] = 0
        return self.look(places)._replace(tasks=tuple(tasks))

    def step(self, places: Sequence[int], actions: NDArray[np.float32], *, draw: bool) -> Stepped:
        """Carry out one action in each of n places."""
        low, high = self.spec.action_low, self.spec.action_high
        outcomes = []
        for place, action in zip(places, np.clip(actions, low, high), strict=True):
            outcomes.append(self.places[place].step(action.astype(np.float32)))
            self._steps[place] += 1
        rewards = [float(o.success) if o.reward is None else o.reward for o in outcomes]
        return Stepped(
            seen=self.look(places) if draw else None,
            rewards=np.array(rewards, np.float32),
            success=np.array([outcome.success for outcome in outcomes]),
            terminated=np.array([outcome.terminated for outcome in outcomes]),
            truncated=np.array([self._steps[place] >= self.spec.max_steps for place in places]),
        )

    def look(self, places: Sequence[int]) -> Seen:
        """Return the observations of n places."""
        images, states = zip(*(self.places[place].look() for place in places), strict=True)
        seen = Seen(np.stack(images), np.stack(states))
        if not self.spec.poses:
            return seen
        posed: list[Any] = [self.places[place] for place in places]
        return seen._replace(poses=np.stack([place.pose() for place in posed]))

    def close(self) -> None:
        """Close the places that have ``close``."""
        for place in self.places:
            getattr(place, "close", lambda: None)()

"""A simulator made of environments that play one episode each, stepped one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.facts import check_array, check_verdicts
from asyncrl.simulators.interface import Seen, SimStart, SimulatorSpec, Stepped, check_step


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
        """Carry out an action ``[A]`` float32."""
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
        self._steps = np.zeros(len(places), np.int64)
        self._playing = np.zeros(len(places), np.bool_)

    def reset(self, places: Sequence[int], starts: Sequence[SimStart]) -> Seen:
        """Begin one episode in each of n places."""
        rows = list(places)
        tasks = [self.places[place].reset(start) for place, start in zip(rows, starts, strict=True)]
        self._steps[rows], self._playing[rows] = 0, True
        return self.look(rows)._replace(tasks=tuple(tasks))

    def step(self, places: Sequence[int], actions: NDArray[np.float32], *, draw: bool) -> Stepped:
        """Carry out one action in each of n places."""
        rows = list(places)
        check_step(rows, actions, self.spec.action_dim, self._playing)
        clipped = np.clip(actions, self.spec.action_low, self.spec.action_high).astype(np.float32)
        outcomes = [self.places[place].step(action) for place, action in zip(rows, clipped, strict=True)]
        self._steps[rows] += 1
        where, shape = f"Outcome of the simulator {self.spec.name}:", (len(rows),)
        success = check_verdicts([one.success for one in outcomes], shape, f"{where} success")
        terminated = check_verdicts([one.terminated for one in outcomes], shape, f"{where} terminated")
        paid = [ok if one.reward is None else one.reward for ok, one in zip(success, outcomes, strict=True)]
        rewards = check_array(paid, shape, f"{where} rewards").astype(np.float32)
        truncated = self._steps[rows] >= self.spec.max_steps
        self._playing[rows] = ~(terminated | truncated)
        seen = self.look(rows) if draw else None
        return Stepped(seen, rewards, success, terminated, truncated)

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

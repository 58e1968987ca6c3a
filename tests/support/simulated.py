"""A simulator that only counts, and episodes of simulators."""

import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.simulators.interface import SimStart, SimulatorSpec
from asyncrl.simulators.one_by_one import OneByOne, Outcome
from asyncrl.simulators.rollout import SimulatedEpisode
from asyncrl.simulators.tabletop.simulator import Tabletop

TASKS = ("put a on b", "put c on d")
COUNTING = "support.simulated:Counting"


class RowsState(np.ndarray):
    """Numbers that are the state of a world model's slots."""

    @property
    def finite(self) -> Any:
        import torch  # Workers of simulators, which import this module, have no use for it.

        return torch.ones(len(self), dtype=torch.bool)


class CountingPlace:
    """Seed s has task s mod 2 and is solved at step s mod 100 (never when 0); pixels hold the steps made.

    Seeds 541 to 564 cannot go on after as many steps as they are beyond 540.
    """

    def __init__(self, accident: str) -> None:
        self.accident = accident
        self.seed = self.steps = 0

    def reset(self, start: SimStart) -> str:
        self.seed, self.steps = start.seed, 0
        return start.task or TASKS[start.seed % 2]

    def step(self, action: np.ndarray) -> Outcome:
        self.steps += 1
        self._have_accident()
        return Outcome(success=self.steps == self.seed % 100, terminated=self.seed % 1000 == self.steps + 540)

    def look(self) -> tuple[np.ndarray, np.ndarray]:
        return np.full((2, 2, 2, 3), self.steps, np.uint8), np.array([self.seed % 7, self.steps], np.float32)

    def _have_accident(self) -> None:
        """Die, hang or raise, once: `accident` is its kind and a file that is made then, 'kill@path'."""
        kind, _, path = self.accident.partition("@")
        if not kind or self.steps != 5 or Path(path).exists():
            return
        Path(path).touch()
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "hang":
            time.sleep(600)
        raise RuntimeError("the robot fell over")


class Counting(OneByOne[CountingPlace]):
    """Two cameras, two numbers of state; with `trials` its starts are stored."""

    def __init__(
        self,
        places: int = 1,
        image_size: int = 0,
        horizon: int = 0,
        trials: int = 0,
        accident: str = "",
        seconds: float = 0.0,
        lockstep: bool = False,
    ) -> None:
        """`seconds` is how long it takes to be built; `lockstep`: its places only step together."""
        time.sleep(seconds)
        spec = SimulatorSpec(
            name="counting",
            tasks=TASKS,
            trials=trials,
            max_steps=horizon or 24,
            image_size=image_size or 2,
            cameras=("front", "wrist"),
            state_dim=2,
            places=places,
            lockstep=lockstep,
        )
        super().__init__(spec, [CountingPlace(accident) for _ in range(places)])


def untold_tabletop(**settings: Any) -> Tabletop:
    """The tabletop, which does not say what tasks it has."""
    made = Tabletop(**settings)
    made.spec = dataclasses.replace(made.spec, tasks=())
    return made


def simulated_episode(
    seed: int,
    frames: np.ndarray,
    actions: np.ndarray,
    success: np.ndarray,
    task: str = TASKS[0],
    poses: np.ndarray | None = None,
    simulator: str = "counting",
    task_id: int = -1,
) -> SimulatedEpisode:
    """An episode of one camera without states, of which this is known."""
    count = len(frames)
    return SimulatedEpisode(
        start=SimStart(name=f"{simulator}/seed-{seed}", task=task, task_id=task_id, seed=seed),
        repeat=0,
        task=task,
        frames=frames,
        more_frames=np.zeros((count, 0, *frames.shape[1:]), np.uint8),
        states=np.zeros((count, 0), np.float32),
        poses=np.zeros((count, 0), np.float32) if poses is None else poses,
        actions=actions,
        rewards=success.astype(np.float32),
        success=success,
        terminated=False,
        truncated=not success.any(),
        seconds=1.0,
    )


def no_simulator(places: int, image_size: int) -> SimStart:
    """What a user's function may make by mistake."""
    return SimStart(name="x", task="")

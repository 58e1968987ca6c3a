"""Episodes as LeRobot and robomimic keep them: an observation, then the action that it led to."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

TOP, WRIST = "observation.images.top", "observation.images.wrist"
TOWEL = "Fold the towel."


def smooth_pictures(seed: int, steps: int, height: int = 48, width: int = 48) -> np.ndarray:
    """Pictures that a codec keeps: a slowly moving bright square on a colour, ``[T, H, W, 3]`` uint8."""
    rng = np.random.default_rng(seed)
    pictures = np.empty((steps, height, width, 3), np.uint8)
    pictures[:] = rng.integers(40, 200, 3)
    for step in range(steps):
        at = 4 + step % (width // 2)
        pictures[step, height // 4 : height // 2, at : at + 12] = 230
    return pictures


@dataclass(kw_only=True)
class Sampled:
    """One episode as other programs keep it: observation t was seen before action t."""

    task: str = TOWEL
    actions: np.ndarray
    states: np.ndarray
    rewards: np.ndarray
    success: np.ndarray
    pictures: dict[str, np.ndarray] = field(default_factory=dict)


def sampled(
    seed: int, steps: int, *, numbers: int = 14, task: str = TOWEL, cameras: Sequence[str] = (TOP,)
) -> Sampled:
    """An episode whose numbers are all different; every second one is solved by its last action."""
    rng = np.random.default_rng(seed)
    solved = np.arange(steps) == steps - 1 if seed % 2 else np.zeros(steps, bool)
    return Sampled(
        task=task,
        actions=rng.uniform(-100, 100, (steps, numbers)).astype(np.float32),
        states=rng.uniform(-3, 3, (steps, 5)).astype(np.float32),
        rewards=rng.uniform(0, 1, steps).astype(np.float32) if seed % 2 else np.zeros(steps, np.float32),
        success=solved,
        pictures={key: smooth_pictures(seed + 100 * i, steps) for i, key in enumerate(cameras)},
    )

"""Measure a policy's success rates in the true simulator, with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.simulators.rollout import Act, Pool, SimulatedEpisode, rollout

if TYPE_CHECKING:
    from asyncrl.policies.interface import Policy, SamplingParams

HELD_OUT = 1_000_000
"""Simulator seeds from here on are never used for recordings or start states."""
SEEDS_PER_EVALUATION = 100_000


@dataclass(frozen=True, kw_only=True)
class SuccessRate:
    """A share of successes with its 95 % Wilson score interval, all in [0, 1]."""

    successes: int
    episodes: int
    rate: float
    low: float
    high: float

    @classmethod
    def of(cls, successes: int, episodes: int) -> SuccessRate:
        """Compute the shares from which the observation is less than 1.96 sigma away (Wilson, 1927).

        Example:
            >>> SuccessRate.of(8, 10).low.__round__(3), SuccessRate.of(8, 10).high.__round__(3)
            (0.49, 0.943)
        """
        if episodes == 0:
            return cls(successes=0, episodes=0, rate=math.nan, low=0.0, high=1.0)
        z, n, p = 1.959964, episodes, successes / episodes
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return cls(
            successes=successes, episodes=n, rate=p, low=max(0.0, centre - half), high=min(1.0, centre + half)
        )

    def __str__(self) -> str:
        return f"{self.rate:6.1%}  [{self.low:.1%}, {self.high:.1%}]  {self.successes}/{self.episodes}"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Success in the true simulator."""

    overall: SuccessRate
    by_task: dict[str, SuccessRate]
    mean_steps: float
    """Steps until success, over the successful episodes."""

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return asdict(self)


def evaluation_seeds(seed: int, episodes: int) -> list[int]:
    """Return the simulator seeds of evaluation number `seed`, which nothing else ever uses.

    Raises:
        ConfigError: more episodes were asked for than one evaluation owns, or the seed is negative.
    """
    if seed < 0 or not 0 < episodes <= SEEDS_PER_EVALUATION:
        raise ConfigError(
            f"--seed {seed} with --episodes {episodes}: the seed must be 0 or more and the episodes 1 to "
            f"{SEEDS_PER_EVALUATION}. Use --seed 0 --episodes 256."
        )
    return [HELD_OUT + seed * SEEDS_PER_EVALUATION + i for i in range(episodes)]


def summarise(episodes: Sequence[SimulatedEpisode]) -> Evaluation:
    """Compute success rates over all episodes and by task."""
    solved = [bool(e.success.any()) for e in episodes]
    tasks = sorted({e.task for e in episodes})
    by_task = {
        task: SuccessRate.of(
            sum(s for s, e in zip(solved, episodes, strict=True) if e.task == task),
            sum(e.task == task for e in episodes),
        )
        for task in tasks
    }
    steps = [int(e.success.argmax()) for e, s in zip(episodes, solved, strict=True) if s]
    return Evaluation(
        overall=SuccessRate.of(sum(solved), len(episodes)),
        by_task=by_task,
        mean_steps=float(np.mean(steps)) if steps else math.nan,
    )


def acting(policy: Policy, sampling: SamplingParams) -> Act:
    """Turn a policy into the function that a rollout calls."""
    import torch

    @torch.inference_mode()
    def act(frames: np.ndarray, tasks: list[str], seeds: list[int]) -> np.ndarray:
        acted = policy.act(policy.preprocess(frames, tasks), sampling, seeds)
        return acted.actions.float().cpu().numpy()

    return act


def evaluate(
    pool: Pool, act: Act, *, episodes: int, seed: int, max_decisions: int
) -> tuple[Evaluation, list[SimulatedEpisode]]:
    """Play `episodes` held-out start states and count; shows a progress bar."""
    from tqdm import tqdm

    seeds = evaluation_seeds(seed, episodes)
    played: list[SimulatedEpisode] = []
    solved = 0
    with tqdm(total=episodes, desc="evaluate", unit="episode", mininterval=1.0) as bar:
        for episode in rollout(pool, act, seeds, max_decisions=max_decisions):
            played.append(episode)
            solved += bool(episode.success.any())
            bar.update(1)
            bar.set_postfix(success=f"{solved / len(played):.1%}")
    played.sort(key=lambda e: e.seed)
    return summarise(played), played

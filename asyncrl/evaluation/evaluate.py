"""Measure success rates in true simulators, with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.simulators.interface import Demonstrator, SimulatorSpec
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import Act, Observations, Play, SimulatedEpisode, rollout

if TYPE_CHECKING:
    from asyncrl.policies.interface import Policy, SamplingParams


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
    """Steps until success, over the successful episodes; not a number when there are none."""

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for JSON: None where there is no number."""
        values: dict[str, object] = asdict(self)
        return values | {"mean_steps": None if math.isnan(self.mean_steps) else self.mean_steps}


def summarise(episodes: Sequence[SimulatedEpisode]) -> Evaluation:
    """Compute success rates over all episodes and by task."""
    by_task = {
        task: SuccessRate.of(
            sum(e.solved for e in episodes if e.task == task), sum(e.task == task for e in episodes)
        )
        for task in sorted({e.task for e in episodes})
    }
    steps = [e.steps for e in episodes if e.solved]
    return Evaluation(
        overall=SuccessRate.of(sum(e.solved for e in episodes), len(episodes)),
        by_task=by_task,
        mean_steps=float(np.mean(steps)) if steps else math.nan,
    )


def episode_row(episode: SimulatedEpisode) -> dict[str, object]:
    """Return what is written of an episode: where it began, what became of it, and how long it took."""
    start = episode.start
    where = {"seed": start.seed} if start.trial < 0 else {"task_id": start.task_id, "trial": start.trial}
    return {
        "start": start.name,
        "task": episode.task,
        **where,
        "repeat": episode.repeat,
        "success": episode.solved,
        "steps": episode.steps,
        "end": "success" if episode.solved else "terminated" if episode.terminated else "truncated",
        "seconds": round(episode.seconds, 3),
    }


def acting(policy: Policy, sampling: SamplingParams, rows: int) -> Act:
    """Turn a policy into the function that a rollout calls.

    Args:
        rows: Of every pass. Fewer are filled up with copies of the first: what is computed of a row depends,
            in the last digits, on how many there are, and that must not depend on who answered first.
    """
    import torch

    @torch.inference_mode()
    def act_alike(shown: Observations) -> NDArray[np.float32]:
        states = shown.states if shown.states.shape[1] else None
        inputs = policy.preprocess(pictures(shown.images), shown.tasks, states)
        return policy.act(inputs, sampling, shown.seeds).actions.float().cpu().numpy()

    def act(shown: Observations) -> NDArray[np.float32]:
        parts = []
        for first in range(0, len(shown.tasks), rows):
            real = range(first, min(first + rows, len(shown.tasks)))
            filled = [*real, *[first] * (rows - len(real))]
            parts.append(act_alike(_rows(shown, filled))[: len(real)])
        return np.concatenate(parts)

    return act


def pictures(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return ``[B, K, H, W, 3]`` as policies take it: of one camera ``[B, H, W, 3]``."""
    return images[:, 0] if images.shape[1] == 1 else images


def _rows(shown: Observations, rows: Sequence[int]) -> Observations:
    return Observations(
        images=shown.images[rows],
        states=shown.states[rows],
        tasks=[shown.tasks[row] for row in rows],
        seeds=[shown.seeds[row] for row in rows],
        plays=[shown.plays[row] for row in rows],
        decisions=[shown.decisions[row] for row in rows],
    )


def check_fits(policy: Policy, spec: SimulatorSpec) -> None:
    """Refuse a policy that cannot play in a simulator, before an episode is begun.

    Raises:
        ConfigError: Its actions have another width, or it needs a camera or a state that is not there.
    """
    if policy.action_spec.dim != spec.action_dim:
        raise ConfigError(
            f"--policy makes {policy.action_spec.dim} numbers per step, but --simulator {spec.name} takes "
            f"{spec.action_dim}. Choose a policy and a simulator that belong together."
        )
    images = np.zeros((1, len(spec.cameras), spec.image_size, spec.image_size, 3), np.uint8)
    states = np.zeros((1, spec.state_dim), np.float32) if spec.state_dim else None
    for task in spec.tasks or ("",):  # All of them: a policy must be able to tell them apart.
        try:
            policy.preprocess(pictures(images), [task], states)
        except ConfigError as error:
            raise ConfigError(
                f"--policy cannot play in --simulator {spec.name}, which shows {len(spec.cameras)} pictures "
                f"({', '.join(spec.cameras)}) and {spec.state_dim} numbers of state: {error}"
            ) from error


def evaluate(
    pool: SimulatorPool,
    act: Act | Demonstrator,
    plays: Sequence[Play],
    *,
    on_frames: Callable[[SimulatedEpisode], None] | None = None,
    keep_frames: int = 0,
) -> tuple[Evaluation, list[SimulatedEpisode]]:
    """Play every episode once and count; shows a progress bar.

    Returns:
        Success rates, and the episodes in the order of `plays`.
    """
    from tqdm import tqdm

    order = {play.key: place for place, play in enumerate(plays)}
    played: list[SimulatedEpisode] = []
    solved = 0
    with tqdm(total=len(plays), desc="evaluate", unit="episode", mininterval=1.0) as bar:
        for episode in rollout(pool, act, plays, keep_frames=bool(on_frames or keep_frames)):
            if on_frames is not None:
                on_frames(episode)
            if order[episode.start.name, episode.repeat] >= keep_frames:
                episode.drop_frames()
            played.append(episode)
            solved += episode.solved
            bar.update(1)
            bar.set_postfix(
                success=f"{solved / len(played):.1%}", refresh=False
            )  # A line a second in a file.
    played.sort(key=lambda e: order[e.start.name, e.repeat])
    return summarise(played), played

"""Measure success rates in true simulators, with 95 % intervals."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.facts import plain_task
from asyncrl.observability.terminal import progress
from asyncrl.simulators.libero.tasks import INSTRUCTIONS
from asyncrl.simulators.tabletop.scene import TASKS

if TYPE_CHECKING:
    from asyncrl.policies.interface import Policy, SamplingParams
    from asyncrl.simulators.interface import Demonstrator, SimulatorSpec
    from asyncrl.simulators.pool import SimulatorPool
    from asyncrl.simulators.rollout import Act, Observations, Play, SimulatedEpisode

_TASKS = {"tabletop": frozenset(TASKS), **{suite: frozenset(tasks) for suite, tasks in INSTRUCTIONS.items()}}


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
        """Compute rate and interval: all rates less than 1.96 sigma from the observation (Wilson, 1927)."""
        if episodes == 0:
            return cls(successes=0, episodes=0, rate=math.nan, low=0.0, high=1.0)
        z, n, p = 1.959964, episodes, successes / episodes
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return cls(
            successes=successes, episodes=n, rate=p, low=max(0.0, centre - half), high=min(1.0, centre + half)
        )

    def __str__(self) -> str:
        rate = f"{self.rate:6.1%}" if self.episodes else f"{'-':>6}"
        return f"{rate}  [{self.low:.1%}, {self.high:.1%}]  {self.successes}/{self.episodes}"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Success in the true simulator."""

    overall: SuccessRate
    by_task: dict[str, SuccessRate]
    mean_steps: float  # Until success, over the successful episodes; nan without any.

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for JSON: None where there is no number."""
        values: dict[str, object] = asdict(self)
        return values | {"mean_steps": None if math.isnan(self.mean_steps) else self.mean_steps}


def summarise(episodes: Sequence[SimulatedEpisode]) -> Evaluation:
    """Compute success rates over all episodes and by task."""
    tasks = {task: [e for e in episodes if e.task == task] for task in sorted({e.task for e in episodes})}
    by_task = {task: SuccessRate.of(sum(e.solved for e in own), len(own)) for task, own in tasks.items()}
    steps = [e.steps for e in episodes if e.solved]
    return Evaluation(
        overall=SuccessRate.of(sum(e.solved for e in episodes), len(episodes)),
        by_task=by_task,
        mean_steps=float(np.mean(steps)) if steps else math.nan,
    )


def episode_row(episode: SimulatedEpisode) -> dict[str, object]:
    """Return the JSON row of an episode: its start, its outcome and its duration."""
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


def acting(policy: Policy, sampling: SamplingParams, rows: int, name: str = "policy") -> Act:
    """Turn a policy into an `Act` of rollouts; a RunError calls it `name` if its outputs are not finite."""
    # Passes are filled up to `rows`: a row's last digits depend on their number, and must not on timing.
    import torch

    from asyncrl.devices.tensors import require_finite

    @torch.inference_mode()
    def act(shown: Observations) -> NDArray[np.float32]:
        parts = []
        for first in range(0, len(shown.tasks), rows):
            real = range(first, min(first + rows, len(shown.tasks)))
            filled = [*real, *[first] * (rows - len(real))]
            lists = {name: getattr(shown, name) for name in ("tasks", "seeds", "plays", "decisions")}
            chosen = {name: [values[row] for row in filled] for name, values in lists.items()}
            some = replace(shown, images=shown.images[filled], states=shown.states[filled], **chosen)
            states = some.states if some.states.shape[1] else None
            inputs = policy.preprocess(pictures(some.images), some.tasks, states)
            acted = policy.act(inputs, sampling, some.seeds)
            require_finite(name, actions=acted.actions, log_probs=acted.logprob)
            parts.append(acted.actions.float().cpu().numpy()[: len(real)])
        return np.concatenate(parts)

    return act


def pictures(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return ``[B, K, H, W, 3]`` as policies take it: with one camera ``[B, H, W, 3]``."""
    return images[:, 0] if images.shape[1] == 1 else images


def check_fits(policy: Policy, spec: SimulatorSpec, tasks: Iterable[str] = ()) -> None:
    """Refuse a policy that cannot play `tasks` (none: all) in a simulator, before an episode is begun."""
    if policy.action_spec.dim != spec.action_dim:
        raise ConfigError(
            f"the policy makes {policy.action_spec.dim} numbers per step, but {spec.name} takes "
            f"{spec.action_dim}. Choose a policy and a simulator that belong together."
        )
    images = np.zeros((1, len(spec.cameras), spec.image_size, spec.image_size, 3), np.uint8)
    states = np.zeros((1, spec.state_dim), np.float32) if spec.state_dim else None
    for task in sorted({*tasks} - {""}) or spec.tasks or ("take action",):
        try:
            policy.preprocess(pictures(images), [task], states)
        except ConfigError as error:
            raise ConfigError(
                f"the policy cannot play in {spec.name}, which shows {len(spec.cameras)} pictures "
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
    """Play every episode with a progress bar; return success rates, and episodes in the order of `plays`."""
    from asyncrl.simulators.rollout import rollout

    order = {play.key: place for place, play in enumerate(plays)}
    played: list[SimulatedEpisode] = []
    solved = 0
    try:
        with progress(total=len(plays), desc="evaluate", unit="episode") as bar:
            for episode in rollout(pool, act, plays, keep_frames=bool(on_frames or keep_frames)):
                if on_frames is not None:
                    on_frames(episode)
                if order[episode.start.name, episode.repeat] >= keep_frames:  # All would not fit into memory.
                    for name in ("frames", "more_frames", "states", "poses"):
                        setattr(episode, name, getattr(episode, name)[:1].copy())
                played.append(episode)
                solved += episode.solved
                bar.update(1)
                # Not refreshed: a line a second in a file.
                bar.set_postfix(success=f"{solved / len(played):.1%}", refresh=False)
    except KeyboardInterrupt as ended:
        if played:
            ended.add_note(f"{solved} of {len(played)} episodes succeeded; failures take longest")
        raise
    played.sort(key=lambda e: order[e.start.name, e.repeat])
    return summarise(played), played


def simulator_of_tasks(tasks: Collection[str]) -> str:
    """Return the built-in simulator that has all `tasks`; empty if there is none, or no task."""
    wanted = {plain_task(task) for task in tasks}
    return next((name for name, known in _TASKS.items() if wanted and wanted <= known), "")


def refuse_foreign_tasks(tasks: Collection[str], known: Sequence[str], simulator: str, remedy: str) -> None:
    """Refuse a simulator that does not have the tasks a policy was trained on."""
    foreign = sorted(set(map(plain_task, tasks)) - set(map(plain_task, known)))
    if not known or not foreign:
        return
    near = difflib.get_close_matches(foreign[0], known, n=1, cutoff=0.0)[0]
    right = simulator_of_tasks(tasks)
    raise ConfigError(
        f"the run's policy was trained on {foreign[0]!r}, which is no task of {simulator} (the nearest "
        f"of its {len(known)} is {near!r}). {f'{right} has them. ' if right else ''}{remedy}"
    )

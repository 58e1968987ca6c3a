"""Which frames should make a success? True roll-outs, scored by the shipped reward model, under every rule.

    python benchmarks/success_rule.py --episodes 256

A policy plays the true simulator, which goes on after a success, as an imagined episode does until the rule
sees it. The simulator says in which frames the task is solved, the reward model scores the same frames, and
each rule of `--actor.success-frames` decides from the scores. Frames are true, so what a world model draws
wrong is not in the table.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from asyncrl.config.actor import SuccessFrames
from asyncrl.evaluation.evaluate import acting
from asyncrl.policies.interface import SamplingParams
from asyncrl.policies.openvla.policy import load_policy
from asyncrl.records import CHUNK
from asyncrl.rewards.model import load_reward
from asyncrl.rewards.success_rule import deciding_step
from asyncrl.simulators.build import SimulatorSource
from asyncrl.simulators.interface import random_start
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import Play, rollout
from asyncrl.simulators.starts import evaluation_seeds
from asyncrl.storage.asset_paths import policy_folder, world_folder
from asyncrl.storage.atomic import write_json

RULES: tuple[SuccessFrames, ...] = (1, 2, 3, 4, "last")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare rules that turn scores into success."""

    policy: str = "tabletop"
    """Policy that plays."""
    world: str = "tabletop"
    """Folder of the reward model."""
    episodes: int = 256
    """Episodes, from start states of an evaluation."""
    seed: int = 2
    """Which start states; see `asyncrl evaluate --seed`."""
    decisions: int = 6
    """Decisions of 8 steps per episode."""
    thresholds: tuple[float, ...] = (0.7, 0.9)
    """Success thresholds."""
    temperature: float = 1.0
    """At which the policy is sampled."""
    workers: int = os.cpu_count() or 1
    """Simulator processes."""
    json: str = ""
    """Also write the rows here."""


def play(settings: Settings) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """Play and score: truth ``[E, N, C]`` bool and scores ``[E, N, C]`` float32."""
    policy = load_policy(policy_folder(settings.policy))
    reward = load_reward(world_folder(settings.world))
    act = acting(policy, SamplingParams(temperature=settings.temperature, top_k=0), rows=16)
    source = SimulatorSource(
        name="tabletop", places=16, image_size=policy.image_size, horizon=settings.decisions * CHUNK
    )
    plays = [
        Play(start=random_start(source.spec(), s)) for s in evaluation_seeds(settings.seed, settings.episodes)
    ]
    truth, scores = [], []
    with SimulatorPool(source, workers=settings.workers) as pool:
        # No episode ends with its success.
        for episode in rollout(pool, act, plays, keep_frames=True, extra_decisions=settings.decisions):
            truth.append(episode.success[1:].reshape(-1, CHUNK))
            frames = torch.from_numpy(episode.frames[1:]).unflatten(0, (-1, CHUNK))
            scores.append(reward.score(frames, [episode.task] * len(frames)).numpy())
    return np.stack(truth), np.stack(scores)


def judge(
    truth: NDArray[np.bool_], scores: NDArray[np.float32], threshold: float, rule: SuccessFrames
) -> dict[str, float | str]:
    """Compare one rule's verdicts with the truth."""
    solved = np.asarray(truth.any((1, 2)))
    found = [deciding_step(one, threshold, rule) for one in scores]
    paid = np.array([step is not None for step in found])
    first = truth.reshape(len(truth), -1).argmax(1)
    delays = [
        step[0] * CHUNK + step[1] - begin
        for step, begin, true in zip(found, first, solved, strict=True)
        if step is not None and true
    ]
    return {
        "threshold": threshold,
        "rule": str(rule),
        "failing_paid": float(paid[~solved].mean()),
        "succeeding_unpaid": float((~paid)[solved].mean()),
        "wrong": float((paid != solved).mean()),
        "delay_steps": float(np.mean(delays)),
        "early": float(np.mean([delay < 0 for delay in delays])),
    }


def main() -> None:
    """Play, judge, print."""
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(1)
    truth, scores = play(settings)
    solved = truth.any((1, 2))
    false_frames = (scores[~solved] >= settings.thresholds[0]).mean()
    print(f"{len(truth)} episodes, {solved.sum()} solved; {false_frames:.2%} of the others' frames score")
    print("threshold  rule  failing paid  succeeding not paid  wrong  mean delay  paid too early")
    rows = [judge(truth, scores, threshold, rule) for threshold in settings.thresholds for rule in RULES]
    for row in rows:
        print(
            f"{row['threshold']:>9}  {row['rule']:>4}  {row['failing_paid']:>12.1%}  "
            f"{row['succeeding_unpaid']:>19.1%}  {row['wrong']:>5.1%}  {row['delay_steps']:>10.2f}  "
            f"{row['early']:>14.1%}"
        )
    if settings.json:
        write_json(Path(settings.json), {"rows": rows})


if __name__ == "__main__":
    main()

"""What the learner costs beside the model: seconds of whole updates in, the share outside the passes out.

    python benchmarks/learner_overhead.py --updates 10

Whole: batch, masks, advantages, corrections, losses, clipping, AdamW, readings and their row in the log, for
batches of the default size. Passes: the time inside `preprocess`, `evaluate`, `values` and `backward` of the
same updates (backward includes the few operations of the loss). The rest is what the learner adds; AdamW is a
part of it. Publishing and checkpoints are not included.

Frames are noise, tokens are the policy's own. Success, and when, is drawn like in the first batches of a run
of the shipped files (64 % of 256 episodes, at steps 21, 25 and 30 for 10, 50 and 90 % of them).
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from measuring import commit

from asyncrl.config.actor import ActorSettings
from asyncrl.config.run import TrainConfig
from asyncrl.launch.build_learner import build_update
from asyncrl.launch.placement import pick_device
from asyncrl.launch.policies import build_learning_policy
from asyncrl.learner.batches import build_batch
from asyncrl.learner.fsdp import make_float32_masters
from asyncrl.learner.outcomes import batch_metrics, outcome_of
from asyncrl.learner.update import Update
from asyncrl.observability.metrics_logger import MetricsLogger
from asyncrl.policies.interface import SamplingParams
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from asyncrl.records import CHUNK, Episode

PASSES = ("preprocess", "evaluate", "values")
TASK = "put the red cube on the plate"
SUCCESS_STEPS = (16, 24, 36)
"""Earliest, most likely and latest step of a success: a triangular distribution."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time the learner's updates."""

    algorithms: tuple[Literal["grpo", "ppo"], ...] = ("grpo", "ppo")
    """Each in turn; everything else as `asyncrl train` has it."""
    updates: int = 10
    """Updates that are timed, after one that is not."""
    repeats: int = 1
    """Times the whole measurement, to see how much other processes disturb it."""
    success: float = 0.65
    """Mean success rate of the start states; that of one is uniform, as far around it as possible."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy learns."""
    threads: int = 1
    """CPU threads, like --learner.threads."""
    seed: int = 0
    json: str = ""
    """Also write the numbers here."""


class Stopwatch:
    """Adds up the seconds inside some calls, by name. Waits for the device before and after each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    def now(self) -> float:
        """Seconds, once the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed as `name`."""

        @wraps(call)
        def timed(*arguments: Any, **more: Any) -> Any:
            began = self.now()
            try:
                return call(*arguments, **more)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - began

        return timed


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one update."""

    whole: float
    passes: float
    adamw: float

    @property
    def rest(self) -> float:
        """What is not the model's."""
        return self.whole - self.passes


def make_groups(policy: OpenVLAOFTPolicy, config: TrainConfig, settings: Settings) -> list[list[Episode]]:
    """Groups of one update, with noise for frames and what the policy says to it."""
    rng = np.random.default_rng(settings.seed)
    width = min(settings.success, 1 - settings.success)
    groups = []
    for number in range(config.algorithm.groups_per_update):
        chance = rng.uniform(settings.success - width, settings.success + width)
        members = range(config.algorithm.group_size)
        groups.append([_episode(policy, config, rng, number, member, chance) for member in members])
    return groups


def _episode(
    policy: OpenVLAOFTPolicy,
    config: TrainConfig,
    rng: np.random.Generator,
    group: int,
    member: int,
    chance: float,
) -> Episode:
    success = int(rng.triangular(*SUCCESS_STEPS)) if rng.random() < chance else -1
    decisions = config.actor.max_decisions if success < 0 else success // CHUNK + 1
    size = policy.config.image_size
    frames = rng.integers(0, 256, (decisions, size, size, 3), dtype=np.uint8)
    sampling = SamplingParams(temperature=config.algorithm.temperature, top_k=config.algorithm.top_k)
    seeds = rng.integers(0, 1 << 31, decisions).tolist()
    act = policy.act(policy.preprocess(frames, [TASK] * decisions), sampling, seeds)
    rewards = np.zeros((decisions, CHUNK), np.float32)
    if success >= 0:
        rewards.reshape(-1)[success] = 1
    return Episode(
        episode_id=uuid.UUID(int=(group << 32) + member).hex, group_id=f"{group:08d}", member=member,
        group_size=config.algorithm.group_size, actor="actor-0", task=TASK, start_state="noise",
        world_version=0, seed=0, temperature=sampling.temperature, top_k=sampling.top_k,
        end_reason="truncated" if success < 0 else "success", frames=frames,
        sample={"tokens": act.sample["tokens"].cpu().numpy()}, logprobs=act.logprob.cpu().numpy(),
        values=np.full(decisions, np.nan, np.float32), actions=act.actions.cpu().numpy(), rewards=rewards,
        success_scores=rewards.copy(), policy_versions=np.zeros(decisions, np.int64),
        noise_seeds=np.arange(decisions), final_frame=frames[-1], video=frames[:0],
    )  # fmt: skip


def time_updates(
    update: Update, groups: Sequence[Sequence[Episode]], settings: Settings, watch: Stopwatch
) -> list[Timing]:
    """Make the updates, with their rows in the log; the first one is not timed."""
    timings = []
    with tempfile.TemporaryDirectory() as folder:
        log = MetricsLogger(Path(folder), updates=settings.updates + 1, stream=StringIO())
        for version in range(settings.updates + 1):
            watch.seconds.clear()
            began = watch.now()
            values = update(build_batch(groups, version=version), version)
            outcomes = [outcome_of(group) for group in groups]
            log.write(version + 1, values | batch_metrics(outcomes, version=version))
            whole = watch.now() - began
            spent = watch.seconds
            passes = sum(spent.get(name, 0.0) for name in (*PASSES, "backward"))
            timings.append(Timing(whole=whole, passes=passes, adamw=spent.get("adamw", 0.0)))
        log.close()
    return timings[1:]


def measure(algorithm: Literal["grpo", "ppo"], settings: Settings) -> tuple[int, list[Timing]]:
    """Decisions of the batch, and the seconds of each update."""
    config = replace(TrainConfig(), updates=settings.updates + 1, actor=ActorSettings(max_decisions=6))
    config = replace(config, algorithm=replace(config.algorithm, kind=algorithm))
    torch.manual_seed(settings.seed)
    device = pick_device(settings.device)
    policy = build_learning_policy(config, device)
    assert isinstance(policy, OpenVLAOFTPolicy)  # The shipped one is.
    make_float32_masters(policy, config.learner.precision)
    groups = make_groups(policy, config, settings)
    update, watch = build_update(config, policy), Stopwatch(device)
    for name in PASSES:
        setattr(policy, name, watch.around(name, getattr(policy, name)))
    update.optimizer.step = watch.around("adamw", update.optimizer.step)  # type: ignore[method-assign]
    plain = torch.Tensor.backward
    torch.Tensor.backward = watch.around("backward", plain)  # type: ignore[method-assign]
    try:
        timings = time_updates(update, groups, settings, watch)
    finally:
        torch.Tensor.backward = plain  # type: ignore[method-assign]
    return sum(len(e.frames) for group in groups for e in group), timings


def row(algorithm: str, decisions: int, timings: list[Timing]) -> dict[str, Any]:
    """Medians over the updates; shares are of single updates."""
    shares = sorted(t.rest / t.whole for t in timings)
    return {
        **{"algorithm": algorithm, "decisions": decisions},
        **{
            name: statistics.median(getattr(t, name) for t in timings) for name in ("whole", "passes", "rest")
        },
        "share": statistics.median(shares),
        **{"lowest": shares[0], "highest": shares[-1]},
        "adamw": statistics.median(t.adamw for t in timings),
    }


def main() -> None:
    """Measure, print."""
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(settings.threads)
    where = pick_device(settings.device)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else f"CPU, {settings.threads} thread(s)"
    print(f"python {shlex.join(sys.argv)}\ncommit {commit()}, torch {torch.__version__}, {name}, "
          f"load {os.getloadavg()[0]:.1f}, median of {settings.updates} updates, seconds\n")  # fmt: skip
    titles = (
        "algorithm",
        "decisions",
        "whole",
        "passes",
        "rest",
        "rest / whole",
        "lowest - highest",
        "AdamW",
    )
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    rows = []
    for _ in range(settings.repeats):
        for algorithm in settings.algorithms:
            found = row(algorithm, *measure(algorithm, settings))
            rows.append(found)
            print(
                "| {algorithm} | {decisions} | {whole:.3f} | {passes:.3f} | {rest:.3f} | {share:.1%} | "
                "{lowest:.1%} - {highest:.1%} | {adamw:.3f} |".format(**found),
                flush=True,
            )
    if settings.json:
        Path(settings.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

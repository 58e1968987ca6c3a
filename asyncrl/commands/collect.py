"""`asyncrl collect`: record the simulator, played by a scripted expert or a policy."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from asyncrl.config.bounds import PIXELS, SEEDS, THREADS, AtLeast, Bounded, Within
from asyncrl.errors import ConfigError
from asyncrl.evaluation.evaluate import HELD_OUT, acting
from asyncrl.fitting.collect import record_expert, record_policy
from asyncrl.launch.placement import pick_device
from asyncrl.simulators.interface import Demonstrator


@dataclass(frozen=True, kw_only=True)
class CollectConfig(Bounded):
    """Record episodes of the true simulator as HDF5: from a scripted expert, or from a policy."""

    out: Path
    """Folder for the recordings; must not hold any yet."""
    simulator: str = "tabletop"
    """Simulator to record: a built-in one, or package.module:Class."""
    simulator_settings: tuple[str, ...] = ()
    """Keywords of the simulator's class: key=value ..."""
    episodes: Annotated[int, AtLeast(1, "there is something to record.", "Use 256.", highest=HELD_OUT)] = 256
    """Episodes to record."""
    seed: Annotated[int, AtLeast(0, "seeds are numbered from 0.", "Use 0.", highest=SEEDS)] = 0
    """First simulator seed. Below 1000000, which is where the seeds of `asyncrl evaluate` begin."""
    policy: str = ""
    """Record this policy (folder, run, shipped name, package.module:Class@FOLDER) instead of the expert."""
    policy_settings: tuple[str, ...] = ()
    """Keywords of the policy's class: key=value ..."""
    temperature: Annotated[float, Within(0, 1000, "it must lie in 0..1000.", "Use 1.0, or 0 for greedy.")] = (
        1.0
    )
    """Sampling temperature of the policy."""
    expert: Demonstrator = field(default_factory=Demonstrator)
    """How good the expert is."""
    max_decisions: Annotated[int, AtLeast(1, "an episode has a decision.", "Use 6.", highest=10_000)] = 6
    """Longest episode, in decisions of 8 steps."""
    image_size: Annotated[int, AtLeast(8, "something has to be seen.", "Use 64.", highest=PIXELS)] = 64
    """Height and width of the pictures."""
    workers: Annotated[int, AtLeast(1, "somebody has to play.", "Use 8.", highest=THREADS)] = (
        os.cpu_count() or 1
    )
    """Simulator processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.seed <= self.seed + self.episodes <= HELD_OUT:
            raise ConfigError(
                f"--seed {self.seed} with --episodes {self.episodes} reaches the held-out seeds from "
                f"{HELD_OUT}. Use smaller ones."
            )


def main(arguments: list[str]) -> int:
    """Record, with a progress bar."""
    config = tyro.cli(CollectConfig, args=arguments, prog="asyncrl collect")
    written = _record_policy(config) if config.policy else _record_expert(config)
    print(f"{written} episodes in {config.out}. Next: asyncrl fit policy --data {config.out} --out POLICY")
    return 0


def _record_expert(config: CollectConfig) -> int:
    return record_expert(
        config.out,
        config.expert,
        episodes=config.episodes,
        first_seed=config.seed,
        max_decisions=config.max_decisions,
        workers=config.workers,
        image_size=config.image_size,
        simulator=config.simulator,
        settings=config.simulator_settings,
    )


def _record_policy(config: CollectConfig) -> int:
    from asyncrl.launch.named_models import named_policy
    from asyncrl.policies.interface import SamplingParams
    from asyncrl.simulators.pool import SimulatorPool

    named = named_policy(config.policy, config.policy_settings)
    policy = named.kind.load(named.folder, pick_device("auto"), **named.settings)
    sampling = SamplingParams(temperature=config.temperature, top_k=0)
    with SimulatorPool(
        config.simulator,
        workers=config.workers,
        envs_per_worker=8,
        image_size=config.image_size,
        settings=config.simulator_settings,
        action_spec=policy.action_spec,
    ) as pool:
        return record_policy(
            config.out,
            pool,
            acting(policy, sampling),
            episodes=config.episodes,
            first_seed=config.seed,
            max_decisions=config.max_decisions,
            about={"policy": config.policy, "temperature": config.temperature},
        )

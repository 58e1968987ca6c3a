"""`asyncrl collect`: record the simulator, played by a scripted expert or a policy."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Final

import tyro

from asyncrl.config.bounds import PIXELS, SEEDS, THREADS, AtLeast, Bounded, Within
from asyncrl.config.help import COLLECT, answer_help
from asyncrl.errors import ConfigError
from asyncrl.evaluation.evaluate import acting, check_fits
from asyncrl.fitting.collect import must_be_new, record, training_starts
from asyncrl.launch.own_device import take_device
from asyncrl.simulators.build import SimulatorSource
from asyncrl.simulators.interface import Demonstrator, SimStart
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import HELD_OUT


@dataclass(frozen=True, kw_only=True)
class CollectConfig(Bounded):
    """Record episodes of a true simulator as HDF5: from a scripted expert, or from a policy."""

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
    tasks: tuple[str, ...] = ()
    """Tasks to record, as numbers or instructions, of simulators with stored starts; none: all in turn."""
    stored: bool = False
    """Record from the stored starts, trial by trial. They are what `asyncrl evaluate` plays: --force too."""
    force: bool = False
    """Record stored starts although a policy that is fitted on them is not evaluated fairly any more."""
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
    horizon: Annotated[int, AtLeast(0, "it counts steps.", "Use 0.", highest=1_000_000)] = 0
    """Steps until an episode is given up; 0: what the simulator's protocol says."""
    image_size: Annotated[int, AtLeast(0, "it counts pixels.", "Use 0.", highest=PIXELS)] = 0
    """Height and width of the pictures; 0: the simulator's own."""
    workers: Annotated[int, AtLeast(1, "somebody has to play.", "Use 8.", highest=THREADS)] = min(
        8, os.cpu_count() or 1
    )
    """Simulator processes."""
    places: Annotated[int, AtLeast(0, "it counts episodes.", "Use 0.", highest=65536)] = 0
    """Episodes that each process plays at once; 0: as many as the simulator likes, at most 8."""
    device: str = "auto"
    """Where --policy runs: cpu, cuda, or auto."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stored and not self.force:
            raise ConfigError(
                "--stored records the starts that `asyncrl evaluate` plays: what is fitted on them would be "
                "evaluated on what it has seen. Leave it out for random starts, or add --force."
            )
        if self.seed + self.episodes > HELD_OUT:  # `training_starts` knows of tasks too.
            raise ConfigError(
                f"--seed {self.seed} with --episodes {self.episodes} reaches the held-out seeds from "
                f"{HELD_OUT}. Use smaller ones."
            )


ARGUMENTS: Final = CollectConfig
"""What the command takes; tab completion reads it too."""


def main(arguments: list[str]) -> int:
    """Record, with a progress bar."""
    arguments = answer_help(arguments, lambda: COLLECT.text(CollectConfig(out=Path())))
    config = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl collect")
    source = SimulatorSource(
        name=config.simulator,
        settings=config.simulator_settings,
        image_size=config.image_size,
        horizon=config.horizon,
    )
    most = min(8, source.usual_places(), -(-config.episodes // config.workers))
    source = source.with_(places=config.places or max(1, most))
    if not config.policy and not source.may_have_expert():
        raise ConfigError(
            f"--simulator {config.simulator} has no expert to record. Record a policy in it with --policy, "
            "or add the method `expert`: docs/extending.md."
        )
    must_be_new(config.out)
    written = _record_policy(config, source) if config.policy else _record_expert(config, source)
    print(f"{written} episodes in {config.out}. Next: asyncrl fit policy --data {config.out} --out POLICY")
    return 0


def _record_expert(config: CollectConfig, source: SimulatorSource) -> int:
    with SimulatorPool(source, workers=config.workers) as pool:
        return record(
            config.out,
            pool,
            config.expert,
            _starts(config, pool),
            extra_decisions=config.expert.extra_decisions,
            about={"demonstrator": asdict(config.expert), "source": asdict(source)},
        )


def _record_policy(config: CollectConfig, source: SimulatorSource) -> int:
    from asyncrl.launch.named_models import named_policy
    from asyncrl.policies.interface import SamplingParams

    named = named_policy(config.policy, config.policy_settings)
    policy = named.kind.load(named.folder, take_device(config.device), **named.settings)
    sampling = SamplingParams(temperature=config.temperature, top_k=0)
    with SimulatorPool(source, workers=config.workers, steps=policy.action_spec.chunk) as pool:
        check_fits(policy, pool.spec)
        return record(
            config.out,
            pool,
            acting(policy, sampling, rows=8),
            _starts(config, pool),
            extra_decisions=0,
            about={
                "policy": config.policy,
                "temperature": config.temperature,
                "source": asdict(source),
            },
        )


def _starts(config: CollectConfig, pool: SimulatorPool) -> list[SimStart]:
    return training_starts(
        pool.spec,
        episodes=config.episodes,
        seed=config.seed,
        tasks=config.tasks,
        stored=config.stored,
    )

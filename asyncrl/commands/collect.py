"""`asyncrl collect`: record the simulator, played by a scripted expert or a policy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Final

import tyro

from asyncrl.commands.evaluate import PlayConfig
from asyncrl.config.bounds import PIXELS, SEEDS, AtLeast
from asyncrl.config.help import COLLECT, answer_help
from asyncrl.errors import ConfigError
from asyncrl.evaluation.evaluate import acting, check_fits
from asyncrl.fitting.collect import must_be_new, record, training_starts
from asyncrl.launch.own_device import take_device
from asyncrl.records import CHUNK
from asyncrl.simulators.build import SimulatorSource
from asyncrl.simulators.interface import Demonstrator
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import HELD_OUT, Act


@dataclass(frozen=True, kw_only=True)
class CollectConfig(PlayConfig):
    """Record episodes of a true simulator as HDF5: from a scripted expert, or from a policy."""

    out: Path
    """Folder for the recordings; must not hold any yet."""
    episodes: Annotated[int, AtLeast(1, "there is something to record.", "Use 256.", highest=HELD_OUT)] = 256
    """Episodes to record."""
    seed: Annotated[int, AtLeast(0, "seeds are numbered from 0.", "Use 0.", highest=SEEDS)] = 0
    """First simulator seed. Below 1000000, which is where the seeds of `asyncrl evaluate` begin."""
    stored: bool = False
    """Record from the stored starts, trial by trial. They are what `asyncrl evaluate` plays: --force too."""
    force: bool = False
    """Record stored starts although a policy that is fitted on them is not evaluated fairly any more."""
    policy: str = ""
    """Record this policy (folder, run, shipped name, package.module:Class@FOLDER) instead of the expert."""
    expert: Demonstrator = field(default_factory=Demonstrator)
    """How good the expert is."""
    horizon: Annotated[int, AtLeast(0, "it counts steps.", "Use 0.", highest=1_000_000)] = 0
    """Steps until an episode is given up; 0: as in the simulator's protocol."""
    image_size: Annotated[int, AtLeast(0, "it counts pixels.", "Use 0.", highest=PIXELS)] = 0
    """Height and width of the pictures; 0: the simulator's own."""
    places: Annotated[int, AtLeast(0, "it counts episodes.", "Use 0.", highest=65536)] = 0
    """Episodes that each process plays at once; 0: as many as the simulator likes, at most 8."""

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
    written = _record(config, source)
    print(f"{written} episodes in {config.out}. Next: asyncrl fit policy --data {config.out} --out POLICY")
    return 0


def _record(config: CollectConfig, source: SimulatorSource) -> int:
    policy, steps, extra = None, CHUNK, config.expert.extra_decisions
    act: Act | Demonstrator = config.expert
    about: dict[str, object] = {"demonstrator": asdict(config.expert)}
    if config.policy:
        from asyncrl.launch.named_models import named_policy
        from asyncrl.policies.interface import SamplingParams

        named = named_policy(config.policy, config.policy_settings)
        policy = named.kind.load(named.folder, take_device(config.device), **named.settings)
        act = acting(policy, SamplingParams(temperature=config.temperature, top_k=0), rows=8)
        about = {"policy": config.policy, "temperature": config.temperature}
        steps, extra = policy.action_spec.chunk, 0
    with SimulatorPool(source, workers=config.workers, steps=steps) as pool:
        if policy is not None:
            check_fits(policy, pool.spec)
        starts = training_starts(
            pool.spec, episodes=config.episodes, seed=config.seed, tasks=config.tasks, stored=config.stored
        )
        about |= {"source": asdict(source)}
        return record(config.out, pool, act, starts, extra_decisions=extra, about=about)

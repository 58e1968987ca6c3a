"""`asyncrl doctor [CONFIG.toml ...] [--flags]`: check everything a run needs on this host, or a simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Final

import tyro

from asyncrl import registry
from asyncrl.config.bounds import PIXELS, AtLeast, Bounded
from asyncrl.config.help import MODELS, PROCESSES, ShortHelp
from asyncrl.config.run import TrainConfig
from asyncrl.doctor.checks import Examination, examine, report

SIMULATOR: Final = "--simulator"
HELP: Final = ShortHelp(
    command="asyncrl doctor",
    usage="[CONFIG.toml ...] [--flags]",
    about="Check everything that `asyncrl train` with the same settings needs on this host; nothing is "
    "started. Exit code 1 when it cannot run.",
    groups={"The report": "--json --simulator --host", "Models": MODELS, "Processes": PROCESSES},
    own={
        "--json": "A JSON list: name, verdict, seen, advice",
        f"{SIMULATOR} NAME": "Check a simulator instead",
        "--host N": "Number of this host, of --placement ...@HOST",
    },
    examples=[
        "asyncrl doctor configs/tabletop_ppo.toml --placement learner=0,actor=1-3",
        "asyncrl doctor --simulator NAME --help",
    ],
)


@dataclass(frozen=True, kw_only=True)
class DoctorFlags(Bounded):
    """Flags that are no settings of a run."""

    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the findings as a JSON list."""
    host: Annotated[int, AtLeast(0, "hosts are numbered from 0.", "Use 0.", highest=9999)] = 0
    """Number of this host, of --placement ROLE=RANKS@HOST."""


@dataclass(frozen=True, kw_only=True)
class SimulatorConfig(Bounded):
    """Check whether a simulator can be played in on this host, and how fast: one worker process plays."""

    simulator: str
    """A built-in one, one of an installed package, or package.module:Class (or a function that makes one)."""
    simulator_settings: tuple[str, ...] = ()
    """Keywords of the simulator's class: key=value ..."""
    places: Annotated[int, AtLeast(1, "somebody has to play.", "Use 1.", highest=65536)] = 1
    """Episodes that the process plays at once."""
    image_size: Annotated[int, AtLeast(0, "it counts pixels.", "Use 0.", highest=PIXELS)] = 0
    """Side of the pictures; 0: the simulator's own."""
    horizon: Annotated[int, AtLeast(0, "it counts steps.", "Use 0.", highest=1_000_000)] = 0
    """Steps until an episode is given up; 0: the simulator's own."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the findings as a JSON list."""


ARGUMENTS: Final = TrainConfig


def main(arguments: list[str]) -> int:
    """Print the findings; exit code 1 if something needed is missing."""
    if any(argument.partition("=")[0] == SIMULATOR for argument in arguments):
        return _check_simulator(tyro.cli(SimulatorConfig, args=arguments, prog="asyncrl doctor"))
    own, arguments = tyro.cli(DoctorFlags, args=arguments, return_unknown_args=True, add_help=False)
    examination = Examination(config=TrainConfig(), host=own.host)
    if arguments:  # Without, an incomplete installation will do.
        from asyncrl.commands.train import read_settings

        examination = replace(examination, config=read_settings(arguments, HELP), where=" ".join(arguments))
    findings = examine(examination)
    return report(findings, own.json, "Training can run: asyncrl train", "Training cannot run")


def _check_simulator(config: SimulatorConfig) -> int:
    from asyncrl.doctor.simulators import examine_simulator
    from asyncrl.simulators.build import SimulatorSource

    registry.check_name("simulator", config.simulator)
    registry.keywords("--simulator-settings", config.simulator_settings)
    sizes = {name: getattr(config, name) for name in ("places", "image_size", "horizon")}
    source = SimulatorSource(name=config.simulator, settings=config.simulator_settings, **sizes)
    works = f"It can be played in: asyncrl evaluate CHECKPOINT --simulator {source.name}"
    return report(examine_simulator(source), config.json, works, f"{source.name} cannot be played in")

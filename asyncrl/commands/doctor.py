"""`asyncrl doctor [CONFIG.toml ...] [--flags]`: check everything a run needs on this host, or a simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

from asyncrl.config.bounds import PIXELS, AtLeast, Bounded
from asyncrl.config.help import MODELS, PROCESSES, ShortHelp
from asyncrl.config.run import TrainConfig
from asyncrl.doctor.checks import Examination, examine, report
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.simulators.build import SimulatorSource

JSON = "--json"
SIMULATOR = "--simulator"
HOST = "--host"
HELP: Final = ShortHelp(
    command="asyncrl doctor",
    usage="[CONFIG.toml ...] [--flags]",
    about="Check everything that `asyncrl train` with the same settings needs on this host; nothing is "
    "started. Exit code 1 when it cannot run.",
    groups={"The report": "--json --simulator --host", "Models": MODELS, "Processes": PROCESSES},
    own={
        JSON: "A JSON list: name, verdict, seen, advice",
        f"{SIMULATOR} NAME": "Check a simulator instead",
        f"{HOST} N": "Number of this host, of --placement ...@HOST",
    },
    examples=[
        "asyncrl doctor configs/tabletop_ppo.toml --placement learner=0,actor=1-3",
        "asyncrl doctor --simulator NAME --help",
    ],
)


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


ARGUMENTS: Final = TrainConfig


def main(arguments: list[str]) -> int:
    """Print the findings; exit code 1 if something needed is missing."""
    as_json = JSON in arguments
    arguments = [argument for argument in arguments if argument != JSON]
    if any(argument.partition("=")[0] == SIMULATOR for argument in arguments):
        from asyncrl.doctor.simulators import examine_simulator

        source = _read_simulator(arguments)
        works = f"It can be played in: asyncrl evaluate CHECKPOINT --simulator {source.name}"
        return report(examine_simulator(source), as_json, works, f"{source.name} cannot be played in")
    host, arguments = _take_host(arguments)
    examination = _read(arguments) if arguments else Examination(config=TrainConfig())
    findings = examine(replace(examination, host=host))
    return report(findings, as_json, "Training can run: asyncrl train", "Training cannot run")


def _take_host(arguments: list[str]) -> tuple[int, list[str]]:
    """Return the number of `--host N` or `--host=N`, 0 without, and the other arguments."""
    left, number, found = list[str](), 0, iter(arguments)
    for argument in found:
        flag, _, text = argument.partition("=")
        if flag != HOST:
            left.append(argument)
            continue
        text = text or next(found, "")
        if not (text.isdecimal() and len(text) < 5):
            raise ConfigError(f"{HOST} is {text!r}, expected the number of this host: 0, 1 ...")
        number = int(text)
    return number, left


def _read(arguments: list[str]) -> Examination:
    """Read the settings as `train` does. Without arguments an incomplete installation will do."""
    from asyncrl.commands.train import read_settings

    config = read_settings(arguments, HELP)
    return Examination(config=config, where=" ".join(arguments))


def _read_simulator(arguments: list[str]) -> SimulatorSource:
    """Read the settings of a simulator; an unknown name is refused."""
    import tyro

    from asyncrl import registry
    from asyncrl.simulators.build import SimulatorSource

    config = tyro.cli(SimulatorConfig, args=arguments, prog=f"asyncrl doctor [{JSON}]")
    registry.check_name("simulator", config.simulator)
    source = SimulatorSource(
        name=config.simulator,
        settings=config.simulator_settings,
        places=config.places,
        image_size=config.image_size,
        horizon=config.horizon,
    )
    registry.keywords("--simulator-settings", source.settings)
    return source

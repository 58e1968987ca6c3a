"""Check a run's requirements before it begins.

`asyncrl doctor [CONFIG.toml ...] [--flags]`: check everything a run needs on this host, or a simulator.
`asyncrl check KIND NAME`: try whether a class of yours keeps the protocol of its kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import tyro

from asyncrl import registry
from asyncrl.config.bounds import PIXELS, AtLeast, Bounded
from asyncrl.config.help import MODELS, PROCESSES, ShortHelp
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ImaginationSettings
from asyncrl.doctor.checks import CHECKS, Examination, examine, report
from asyncrl.errors import ConfigError
from asyncrl.facts import check_instruction
from asyncrl.records import StartState

SIMULATOR: Final = "--simulator"
HELP: Final = ShortHelp(
    command="asyncrl doctor",
    usage="[CONFIG.toml ...] [--flags]",
    about="Check everything that `asyncrl train` with the same settings needs on this host; nothing is "
    "started. Exit code 1 when it cannot run.",
    groups={"The report": "--json --long --simulator --host", "Models": MODELS, "Processes": PROCESSES},
    own={
        "--json": "A JSON list: name, verdict, seen, advice",
        "--long": "Also the world, disk, links and slow checks",
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
    long: tyro.conf.FlagCreatePairsOff[bool] = False
    """Also try the world, measure disk and links, and wait for checks of more than 10 s."""
    host: Annotated[int, AtLeast(0, "hosts are numbered from 0.", "Use 0.", highest=9999)] = 0
    """Number of this host, of --placement ROLE=RANKS@HOST."""


@dataclass(frozen=True, kw_only=True)
class SimulatorConfig(Bounded):
    """Check that a simulator works on this host, and its speed, in one worker process."""

    simulator: str
    """A built-in one, one of an installed package, or package.module:Class (or a function that makes one)."""
    simulator_settings: tuple[str, ...] = ()
    """Keywords of the simulator's class: key=value ..."""
    places: Annotated[int, AtLeast(1, "somebody has to play.", "Use 1.", highest=65536)] = 1
    """Episodes that the process plays at once."""
    image_size: Annotated[int, AtLeast(0, "it counts pixels.", "Use 0.", highest=PIXELS)] = 0
    """Side of the pictures; 0: the simulator's own."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the findings as a JSON list."""


@dataclass(frozen=True, kw_only=True)
class CheckConfig(Bounded):
    """Test a part on small inputs against its protocol (docs/extending.md)."""

    kind: Annotated[
        Literal["policy", "world", "reward", "simulator"], tyro.conf.Positional, tyro.conf.arg(metavar="KIND")
    ]
    """Kind of part: policy, world, reward or simulator."""
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """As on the command line of a run: package.module:Class@FOLDER, a folder, or a built-in name."""
    settings: tuple[str, ...] = ()
    """Keywords of the class: key=value ..."""
    start_states: str = "tabletop"
    """Starts of a world's episodes: those in its own folder, or a file that you name."""
    task: str = "put the red cube on the white plate"
    """An instruction that a reward model knows."""
    device: str = "cpu"
    """Device of the test: cpu, cuda, or auto."""


def main(arguments: list[str]) -> int:
    """Print the findings; exit code 1 if something needed is missing."""
    if any(argument.partition("=")[0] == SIMULATOR for argument in arguments):
        return _check_simulator(tyro.cli(SimulatorConfig, args=arguments, prog="asyncrl doctor"))
    own, arguments = tyro.cli(DoctorFlags, args=arguments, return_unknown_args=True, add_help=False)
    examination = Examination(config=TrainConfig(), host=own.host)
    if arguments:  # Without, an incomplete installation will do.
        from asyncrl.commands.train import read_settings

        examination = replace(examination, config=read_settings(arguments, HELP), where=" ".join(arguments))
    left_out = (
        "" if own.long else f"Not tried: {', '.join(one.name for one in CHECKS if one.long)} (--long).\n"
    )
    works = f"{left_out}Training can run: asyncrl train"
    return report(examine(examination, quick=not own.long), own.json, works, "Training cannot run")


def _check_simulator(config: SimulatorConfig) -> int:
    from asyncrl.doctor.simulators import examine_simulator
    from asyncrl.simulators.interface import SimulatorSource

    registry.check_name("simulator", config.simulator)
    registry.keywords("--simulator-settings", config.simulator_settings)
    sizes = {"places": config.places, "image_size": config.image_size}
    source = SimulatorSource(name=config.simulator, settings=config.simulator_settings, **sizes)
    works = f"It can be played in: asyncrl evaluate CHECKPOINT --simulator {source.name}"
    return report(examine_simulator(source), config.json, works, f"{source.name} cannot be played in")


def check(arguments: list[str]) -> int:
    """Print a line for each check that passes; the first failure ends with code 2."""
    config = tyro.cli(CheckConfig, args=arguments, prog="asyncrl check")
    for line in _simulator(config) if config.kind == "simulator" else _model(config):
        print(f"ok  {line}", flush=True)
    print(f"{config.name} keeps the protocol of its kind, {config.kind}")
    return 0


def _model(config: CheckConfig) -> Iterator[str]:
    from asyncrl.devices.tensors import take_device
    from asyncrl.launch.conformance import check_policy, check_reward, check_world
    from asyncrl.launch.named_models import named_policy, named_reward, named_world

    tasks = [check_instruction(config.task, "--task")]
    device, imagination = take_device(config.device), ImaginationSettings()
    if config.kind == "policy":
        policy: Any = named_policy(config.name, config.settings).load(device)
        yield "load"
        yield from check_policy(policy, policy.image_size)
    elif config.kind == "reward":
        named = named_reward(config.name, Path(), config.settings)
        summary = named.check(tasks)
        yield f"check: {summary.nbytes} bytes, {summary.image_size or 'any number of'} pixels"
        reward = named.load(device, tasks)
        yield "load"
        yield from check_reward(reward, tasks, summary.image_size or 64)
    else:
        named = named_world(config.name, config.settings)
        summary = named.check(imagination)
        yield f"check: {summary.nbytes} bytes, {summary.image_size} pixels"
        world = named.load(device, imagination)
        if (world.image_size, world.action_spec) != (summary.image_size, summary.action_spec):
            raise ConfigError(
                f"--world names {config.name}, whose check reports {summary.image_size} pixels and "
                f"{summary.action_spec}, but once loaded it has {world.image_size} and {world.action_spec}."
            )
        yield "load"
        yield from check_world(world, _starts(config, world.image_size))


def _starts(config: CheckConfig, size: int) -> list[StartState]:
    from asyncrl.launch.named_models import folder_part
    from asyncrl.storage.assets import DEFAULT, is_shipped_world, start_states_path
    from asyncrl.worlds.start_states import load_start_states

    own = config.start_states != DEFAULT or (Path(folder_part(config.name)) / "dataset").is_dir()
    if own or is_shipped_world(config.name):
        path = start_states_path(config.start_states, folder_part(config.name))
        return load_start_states(path, image_size=size)
    rng = np.random.default_rng(0)
    return [
        StartState(
            name=f"random-{n}",
            task=config.task,
            frame=rng.integers(0, 256, (size, size, 3), np.uint8),
            context_frames=np.zeros((0, size, size, 3), np.uint8),
            context_actions=np.zeros((0, 7), np.float32),
            ee_pose=np.array([0.5, 0.0, 0.2, 1.0, 0.0, 0.0, 0.0, -1.0], np.float32),  # Pointing down.
        )
        for n in range(2)
    ]


def _simulator(config: CheckConfig) -> Iterator[str]:
    from asyncrl.launch.conformance import check_simulator
    from asyncrl.simulators.interface import SimulatorSource

    source = SimulatorSource(name=config.name, settings=config.settings)
    simulator = source.with_(places=min(2, source.usual_places())).build()
    try:
        yield "built"
        yield from check_simulator(simulator)
    finally:
        simulator.close()

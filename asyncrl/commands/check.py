"""`asyncrl check KIND NAME`: try whether a class of yours keeps the protocol of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import tyro

from asyncrl.config.bounds import PIXELS, AtLeast, Bounded
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.records import StartState

Kind = Literal["policy", "world", "reward", "simulator"]


@dataclass(frozen=True, kw_only=True)
class CheckConfig(Bounded):
    """Try a part on small inputs and say what it does not do as its protocol wants it (docs/extending.md)."""

    kind: Annotated[Kind, tyro.conf.Positional, tyro.conf.arg(metavar="KIND")]
    """What it is: policy, world, reward or simulator."""
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """As on the command line of a run: package.module:Class@FOLDER, a folder, or a built-in name."""
    settings: tuple[str, ...] = ()
    """Keywords of the class: key=value ..."""
    start_states: str = "tabletop"
    """Where a world's episodes begin; a world folder of its own brings them, or name a file."""
    task: str = "put the red cube on the white plate"
    """An instruction that a reward model knows."""
    image_size: Annotated[int, AtLeast(0, "it counts pixels.", "Use 64.", highest=PIXELS)] = 0
    """Height and width of the pictures that it is shown; 0: its own size, else 64."""
    device: str = "cpu"
    """Where it is tried: cpu, cuda, or auto."""


ARGUMENTS: Final = CheckConfig


def main(arguments: list[str]) -> int:
    """Print a line for each check that holds; the first that does not ends it with code 2."""
    config = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl check")
    for line in _simulator(config) if config.kind == "simulator" else _model(config):
        print(f"ok  {line}", flush=True)
    print(f"{config.name} keeps the protocol of its kind, {config.kind}")
    return 0


def _model(config: CheckConfig) -> Iterator[str]:
    from asyncrl.config.sections import ImaginationSettings
    from asyncrl.devices.tensors import take_device
    from asyncrl.launch.conformance import check_policy, check_reward
    from asyncrl.launch.named_models import named_policy, named_reward, named_world
    from asyncrl.launch.world_conformance import check_world

    device, tasks, imagination = take_device(config.device), [config.task], ImaginationSettings()
    if config.kind == "policy":
        policy: Any = named_policy(config.name, config.settings).load(device)
        yield "load"
        yield from check_policy(policy, config.image_size or policy.image_size)
    elif config.kind == "reward":
        named = named_reward(config.name, Path(), config.settings)
        summary = named.check(tasks)
        yield f"check: {summary.nbytes} bytes, {summary.image_size or 'any number of'} pixels"
        reward = named.load(device, tasks)
        yield "load"
        yield from check_reward(reward, tasks, config.image_size or 64)
    else:
        named = named_world(config.name, config.settings)
        summary = named.check(imagination)
        yield f"check: {summary.nbytes} bytes, {summary.image_size} pixels"
        world = named.load(device, imagination)
        if (world.image_size, world.action_spec) != (summary.image_size, summary.action_spec):
            raise ConfigError(
                f"--world names {config.name}, whose check says {summary.image_size} pixels and "
                f"{summary.action_spec}, but once loaded it has {world.image_size} and {world.action_spec}."
            )
        yield "load"
        yield from check_world(world, _starts(config, world.image_size))


def _starts(config: CheckConfig, size: int) -> list[StartState]:
    """Return start states of the given size: those of --start-states or the shipped ones, else noise."""
    import numpy as np

    from asyncrl.launch.named_models import folder_part
    from asyncrl.records import StartState
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
    from asyncrl.simulators.build import SimulatorSource

    source = SimulatorSource(name=config.name, settings=config.settings, image_size=config.image_size)
    simulator = source.with_(places=min(2, source.usual_places())).build()
    try:
        yield "built"
        yield from check_simulator(simulator)
    finally:
        simulator.close()

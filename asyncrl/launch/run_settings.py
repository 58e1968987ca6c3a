"""What a run's folder says about how its policy is evaluated: its simulator, temperature, top-k, horizon.

A folder names no code: where the run trained in a class of the user's, the simulator must be named anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl import registry
from asyncrl.config.loading import load_file
from asyncrl.config.run import TrainConfig
from asyncrl.errors import AsyncRLError
from asyncrl.evaluation.evaluate import simulator_of_tasks
from asyncrl.launch.named_models import folder_part
from asyncrl.storage import assets, checkpoint
from asyncrl.storage.assets import simulator_named
from asyncrl.worlds.start_states import load_start_states


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a run that its evaluation shares."""

    config: TrainConfig
    tasks: tuple[str, ...]
    """Instructions of its start states; none: they are not known here, or the run trained in a simulator."""
    simulator: str
    """Built-in simulator that has these tasks, or that it trained in; empty: none is known."""
    simulator_settings: tuple[str, ...]


def run_of(text: str) -> Path | None:
    """Return the run's folder that a policy's name leads to: the folder itself, or that of a checkpoint."""
    path = Path(folder_part(text))
    for folder in (path, path.parent.parent):
        if (folder / "config.json").is_file() and (folder / checkpoint.FOLDER).is_dir():
            return folder
    return None


def settings_of_run(run_dir: Path) -> RunSettings:
    """Read how the policy of a run is evaluated.

    Raises:
        ConfigError: Its config.json cannot be read.
    """
    config = load_file(run_dir / "config.json")
    if registry.names_code(config.world):
        return RunSettings(config=config, tasks=(), simulator="", simulator_settings=())
    if own := simulator_named(config.world):
        settings = without_code(config.world_settings)
        return RunSettings(config=config, tasks=(), simulator=own, simulator_settings=settings)
    tasks = _tasks(config)
    own = config.evaluation.simulator
    known = "" if registry.names_code(own) else own
    return RunSettings(
        config=config,
        tasks=tasks,
        simulator=known or simulator_of_tasks(tasks),
        simulator_settings=without_code(config.evaluation.simulator_settings) if known else (),
    )


def without_code(settings: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out what names a module: a folder names no code; whoever wants it says it again."""
    return tuple(text for text in settings if not registry.names_module(text))


def _tasks(config: TrainConfig) -> tuple[str, ...]:
    try:
        path = assets.start_states_path(config.start_states, folder_part(config.world))
        starts = load_start_states(path, keyframes=config.keyframes)
    except (AsyncRLError, OSError):  # A run can be evaluated where its start states are not.
        return ()
    return tuple(sorted({state.task for state in starts}))

"""`asyncrl doctor [CONFIG.toml] [--flags]`: check everything a run needs on this host."""

from __future__ import annotations

from asyncrl.config.run import TrainConfig
from asyncrl.doctor.checks import doctor
from asyncrl.doctor.findings import Examination

JSON = "--json"
ABOUT = (
    "Check everything that `asyncrl train` with the same settings needs on this host; nothing is started. "
    f"Exit code 1 when it cannot run. {JSON}: print the findings as a JSON list, each with name, verdict "
    "(ok, warning or BROKEN), seen and advice."
)


def main(arguments: list[str]) -> int:
    """Print what works and what is missing; exit code 1 when training cannot run."""
    as_json = JSON in arguments
    arguments = [argument for argument in arguments if argument != JSON]
    examination = _read(arguments) if arguments else Examination(config=TrainConfig())
    return doctor(examination, as_json=as_json)


def _read(arguments: list[str]) -> Examination:
    """Read the settings as `train` does. Only now: without arguments an incomplete installation will do."""
    from asyncrl.commands.train import read_settings

    config = read_settings(arguments, f"asyncrl doctor [{JSON}]", ABOUT)
    return Examination(config=config, where=" ".join(arguments))

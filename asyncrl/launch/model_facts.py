"""Collect what a run's folder says about one version of its policy, for the model card of an export.

consumes   RUN/config.json, metrics.jsonl, evaluations.jsonl, provenance.json; state.json of the checkpoint
produces   TrainedPolicy, which `model_card` writes down
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from asyncrl import registry
from asyncrl.config.loading import load_file
from asyncrl.config.run import TrainConfig
from asyncrl.errors import CheckpointError, ConfigError, first_line
from asyncrl.evaluation import evaluations_file
from asyncrl.evaluation.evaluations_file import EvaluatedVersion
from asyncrl.launch.run_settings import run_of
from asyncrl.launch.simulated import simulator_named
from asyncrl.observability import metrics_training as m
from asyncrl.storage import provenance
from asyncrl.storage.atomic import read_json
from asyncrl.storage.best_checkpoint import BEST
from asyncrl.storage.bounded_json import read_rows

T = TypeVar("T")
METRICS: Final = "metrics.jsonl"
LAST_UPDATES: Final = 10
"""Updates that the success in imagination is the mean of, at most: one update alone says little."""


@dataclass(frozen=True, kw_only=True)
class TrainedPolicy:
    """How a version of a policy was trained, and what was measured of it."""

    version: int
    """Updates it had."""
    from_best: bool
    """Whether it comes from the folder of the version that succeeded most often."""
    settings: TrainConfig | None
    """Of the run; None: they cannot be read."""
    simulator: str
    """That it was trained in; empty: none that is known."""
    imagined: bool
    """Whether it was trained in a world model. False with an empty `simulator`: it is not known."""
    evaluations: tuple[EvaluatedVersion, ...]
    """Of all versions that were measured, each once, in their order."""
    successes: tuple[float, ...]
    """Share of successful episodes in the last updates up to this version, oldest first: of training."""
    starts: tuple[provenance.Start, ...]
    """Of the run, in the order of time."""
    notes: tuple[str, ...]
    """What cannot be read, and why."""

    @property
    def measured(self) -> EvaluatedVersion | None:
        """What was measured of this version."""
        return next((row for row in self.evaluations if row.version == self.version), None)


def trained_policy(folder: Path) -> TrainedPolicy | None:
    """Read what the run of a checkpoint says; None for any other folder.

    Raises:
        CheckpointError: The checkpoint does not say which version it is.
    """
    run_dir = run_of(str(folder))
    if run_dir is None or not (folder / "state.json").is_file():
        return None
    version, notes = _version(folder), list[str]()
    settings = None
    try:
        settings = load_file(run_dir / "config.json")
    except ConfigError as error:
        notes.append(f"config.json of the run cannot be read: {first_line(error)}")
    starts, _ = _read(provenance.NAME, lambda: provenance.read(run_dir), ([], 0), notes)
    measured = _read(evaluations_file.NAME, lambda: evaluations_file.read(run_dir), [], notes)
    successes = _read(METRICS, lambda: _successes(run_dir / METRICS, version), (), notes)
    rows = {row.version: row for row in measured}
    known = settings is not None and not registry.names_code(settings.world)
    simulator = simulator_named(settings.world) if settings is not None and known else ""
    return TrainedPolicy(
        version=version,
        from_best=folder.name == BEST,
        settings=settings,
        simulator=simulator,
        imagined=known and not simulator,
        evaluations=tuple(rows[number] for number in sorted(rows)),
        successes=successes,
        starts=tuple(starts),
        notes=tuple(notes),
    )


def _read(name: str, read: Callable[[], T], nothing: T, notes: list[str]) -> T:
    """Read a file of the run; one that is damaged is noted, and counts as not there."""
    try:
        return read()
    except (OSError, ValueError) as error:
        notes.append(f"{name} of the run cannot be read: {first_line(error)}")
        return nothing


def _version(folder: Path) -> int:
    progress = read_json(folder / "state.json").get("progress")
    version = progress.get("version") if isinstance(progress, dict) else None
    if type(version) is not int:
        raise CheckpointError(f"{folder / 'state.json'} does not say which version it is. Copy it again.")
    return version


def _successes(path: Path, version: int) -> tuple[float, ...]:
    """Return the success of the episodes of the last updates up to a version; of an update the newest row."""
    if not path.is_file():
        return ()
    found: dict[int, float] = {}
    for _, row in read_rows(path):
        step, rate = (row or {}).get("step"), (row or {}).get(m.SUCCESS_ONCE.name)
        if isinstance(step, int) and isinstance(rate, int | float) and step <= version:
            found[step] = float(rate)
    return tuple(found[step] for step in sorted(found)[-LAST_UPDATES:])

"""What goes on beside the learner of a run: evaluations, refits of the world, their reports, refitted worlds.

poll (learner's thread)   consumes   what evaluator, fitter and rounds left since the last call
                          produces   lines for the console, rows of metrics
                          waits for  nobody

Nobody waits for any of it but the end of the run, for a last evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.run import TrainConfig
from asyncrl.launch import rendezvous
from asyncrl.launch.children import log_errors
from asyncrl.launch.evaluator import EvaluatorProcess
from asyncrl.launch.fitter import FitterProcess, RoundReports
from asyncrl.launch.placement import Placement
from asyncrl.launch.world_channel import TRANSPORT, WorldChannel

if TYPE_CHECKING:
    from asyncrl.launch.learner_start import LearnerStart
    from asyncrl.observability.metrics_logger import MetricsLogger
    from asyncrl.weights.pull_server import PullSettings


class SideTasks:
    """Starts what goes on beside the learner, and looks after it. Used by one thread of rank 0."""

    def __init__(
        self,
        config: TrainConfig,
        placement: Placement,
        start: LearnerStart,
        log: MetricsLogger,
        channel: tuple[Path, PullSettings],
    ) -> None:
        """Start what the settings ask for.

        Args:
            config: Of the run, with the world's defaults put in.
            placement: Of the run.
            start: Folder of the run and the version that it goes on from.
            log: Gets rows and lines.
            channel: Folder to make for the channel of refitted worlds, and where actors that join, or are on
                other hosts, fetch them.

        Raises:
            ConfigError: The channel's address is taken.
        """
        run_dir, here = start.run_dir, rendezvous.local_rank()
        self._log = log
        self._worlds = _world_channel(config, run_dir, *channel) if config.pace.every else None
        self._evaluator = EvaluatorProcess(config, run_dir, start.version, log.write_evaluation, here)
        self._reports = RoundReports(config, run_dir, log.note, version=start.version)
        self._fitter = FitterProcess(config, placement, run_dir, rendezvous.rank(), here)

    @property
    def worlds_endpoint(self) -> str:
        """Where the run's own actors find refitted worlds; empty: the world stays as it is."""
        return self._worlds.endpoint if self._worlds else ""

    @property
    def worlds_pull_endpoint(self) -> str:
        """Where other actors find them; empty as above."""
        return self._worlds.pull_endpoint if self._worlds else ""

    def poll(self) -> list[str]:
        """Return lines about what happened since the last call.

        Raises:
            RunError: A refitted world cannot be sent.
        """
        if self._worlds is not None:
            self._log.note(self._worlds.status())
        return [*self._evaluator.poll(), *self._fitter.poll(), *self._reports.poll()]

    def finish(self, version: int, poll: Callable[[], bool]) -> None:
        """Wait, at the end of a run that was not stopped, for the evaluation of its last version.

        Args:
            version: The last one.
            poll: Asked meanwhile whether to stop waiting, see `EvaluatorProcess.finish`.
        """
        if why := self._evaluator.finish(version, poll):
            self._log.banner(why)

    def close(self) -> None:
        """End all of it; what one of them raises is told, and the others end."""
        tell = self._log.banner
        log_errors(self._evaluator.close, tell)
        log_errors(self._fitter.close, tell)
        log_errors(partial(_tell_all, self._reports, tell), tell)
        if self._worlds is not None:
            log_errors(self._worlds.close, tell)


def _tell_all(reports: RoundReports, tell: Callable[[str], object]) -> None:
    for line in reports.close():
        tell(line)


def _world_channel(config: TrainConfig, run_dir: Path, folder: Path, pulls: PullSettings) -> WorldChannel:
    """Open the channel of refitted worlds."""
    from asyncrl.weights.publisher import build_publisher

    publisher = build_publisher(TRANSPORT, folder, deadline=config.weights.timeout, pulls=pulls)
    return WorldChannel(config, run_dir, publisher)

"""The fitter of a run with --pace.every: a process that refits the world, and rank 0's view of its rounds.

    learner ──checkpoints──► fitter ──pace.jsonl──► rank 0: rows, curves
                               └──► true episodes, worlds ──► world channel ──► actors

fitter      consumes   checkpoints, every LOOK_EVERY seconds    ended by: its rank, with the run
            produces   a line, recordings and perhaps a world per round   waited for by: nobody

It is a process of rank 0, or of the rank that --placement names, and has nothing to do with the others but
through the run's folder. When it dies too often, training goes on with the last world.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from asyncrl.config.loading import overlay, to_json
from asyncrl.config.pace import FITTER
from asyncrl.config.run import TrainConfig
from asyncrl.errors import RunError
from asyncrl.launch.own_device import make_current
from asyncrl.launch.placement import Placement, fitter_device
from asyncrl.launch.supervisor import Supervisor
from asyncrl.observability import metrics_pace as m
from asyncrl.observability import metrics_system as s
from asyncrl.observability import process_status
from asyncrl.observability.metrics import Metric
from asyncrl.pace import rounds
from asyncrl.pace.rounds import Round
from asyncrl.storage.atomic import write_text
from asyncrl.storage.best_checkpoint import FOLDER, forget_best_after, keep_as_best
from asyncrl.storage.regular_files import read_bytes, remove

ROLE: Final = FITTER
LOOK_EVERY: Final = 0.5
"""Seconds between two looks, for a checkpoint and for a round."""
RESPAWNS: Final = 2
"""How often in a row it comes back when it dies."""
NICENESS: Final = 10
"""Of the fitter and its simulators on a CPU, where its rank has another role: what trains goes first, and a
round still comes to its end."""
HELD: Final = "refitting"
"""The checkpoint, below the others, that a round is about: a copy, which the run does not delete."""
LOST: Final = f"logs/{ROLE}_lost.txt"
"""In the run's folder: what a rank other than 0 says when its fitter does not come back."""
MOST_SAID: Final = 100_000
"""Characters of it."""
_log = logging.getLogger(__name__)


def fitter_main(config_json: str, run_dir_text: str, local_rank: str, niceness: str) -> None:
    """Make the run's rounds as they become due, until the rank that started this process ends it."""
    import json
    import multiprocessing

    import torch

    from asyncrl.launch import refits, rendezvous
    from asyncrl.launch.environment import check_world_model
    from asyncrl.launch.policies import load_policy_version
    from asyncrl.observability import descriptors
    from asyncrl.storage import checkpoint, run_lock
    from asyncrl.storage.checkpoint_copy import keep_copy

    descriptors.raise_limit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config: TrainConfig = overlay(TrainConfig(), json.loads(config_json), "the run's settings")
    run_dir = Path(run_dir_text)
    lock = run_lock.join(run_dir)
    multiprocessing.current_process().daemon = False  # So that it may have workers, which end with it.
    process_status.publish_as(rendezvous.status_folder(run_dir), ROLE)
    process_status.set_activity("loading models", config.startup_timeout)
    device = fitter_device(config, int(local_rank))
    make_current(device)
    if device.type == "cpu":
        os.nice(int(niceness))
        torch.set_num_threads(1)
    held = run_dir / FOLDER / HELD
    with ExitStack() as stack:
        stack.callback(lock.release)
        fitter = refits.open_fitter(config, check_world_model(config), run_dir, device, stack)
        while True:
            due = [version for version in checkpoint.kept(run_dir) if fitter.due(version)]
            if not due:
                process_status.set_activity("waiting for a version whose round is due")
                time.sleep(LOOK_EVERY)
                continue
            version = max(due)
            try:
                keep_copy(checkpoint.kept(run_dir)[version], held)
            except (FileNotFoundError, KeyError):  # Deleted since: a newer one is there.
                continue
            try:
                row = fitter.round(version, load_policy_version(config, held, device))
                _log.info("%s", row)
                if not config.evaluate_every and is_best(row, rounds.read(run_dir)):
                    keep_as_best(held)
            finally:
                remove(held)


def is_best(row: Round, made: Sequence[Round]) -> bool:
    """Tell whether no policy version before had more true success: it is then the one to keep."""
    return all(row.success >= other.success for other in made if other.version < row.version)


class FitterProcess:
    """The fitter, on the rank that looks after it. Create and use it on one thread that outlives it."""

    def __init__(
        self, config: TrainConfig, placement: Placement, run_dir: Path, rank: int, local_rank: int
    ) -> None:
        """Start the fitter, where this rank has it and --pace.every is not 0.

        Args:
            config: Of the run, with the world's defaults put in.
            placement: Of the run.
            run_dir: Of the run; `RoundReports` has prepared it.
            rank: This one.
            local_rank: Its number on its host, whose device the fitter gets.
        """
        self._run_dir = run_dir
        self._child: Supervisor | None = None
        self._looked_at, self._lost = -LOOK_EVERY, False
        if config.pace.every and placement.refits(rank):
            niceness = 0 if placement.only_refits(rank) else NICENESS
            self._child = Supervisor(
                ROLE,
                "asyncrl.launch.fitter:fitter_main",
                (to_json(config), str(run_dir), str(local_rank), str(niceness)),
                run_dir / "logs" / f"{ROLE}.log",
                RESPAWNS,
            )

    def poll(self) -> list[str]:
        """Respawn the fitter when it died; returns, once, the line that says that it does not come back."""
        if self._child is None or self._lost or time.monotonic() - self._looked_at < LOOK_EVERY:
            return []
        self._looked_at = time.monotonic()
        try:
            self._child.poll()
        except RunError as error:
            self._lost = True
            return [f"the world is not refitted any more, the training goes on: {error}"]
        return []

    def poll_for_rank_0(self) -> list[str]:
        """`poll` of another rank: the line is left in the run's folder, where `RoundReports` finds it.

        Returns:
            The line, where that was not possible.
        """
        lines = self.poll()
        try:
            for line in lines:
                write_text(self._run_dir / LOST, line[:MOST_SAID])
        except OSError as error:
            return [*lines, f"rank 0 could not be told: {error}"]
        return []

    def close(self) -> None:
        """End the fitter, and put away the round that it was making. May be called twice."""
        if self._child is not None:
            self._child.stop(1.0)
            self._child = None
            rounds.put_away_unfinished(self._run_dir)
            remove(self._run_dir / FOLDER / HELD)


class RoundReports:
    """Rank 0's view of the rounds, whichever rank has the fitter."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        report: Callable[[dict[Metric, float]], None],
        *,
        version: int,
    ) -> None:
        """Prepare the run's folder for the fitter, which is not there yet, unless --pace.every is 0.

        Args:
            config: Of the run.
            run_dir: Of the run; the best version of what comes later than `version` is forgotten.
            report: Given what the newest round found, which holds until the next one.
            version: That the run goes on from.
        """
        self._run_dir, self._report = run_dir, report
        self._refits = bool(config.pace.every)
        self._looked_at = -LOOK_EVERY
        self._told = 0
        """Rounds that were reported."""
        self._heard = False
        """Whether the end of another rank's fitter was told."""
        if self._refits:
            forget_best_after(run_dir, version)
            remove(run_dir / LOST)

    def poll(self) -> list[str]:
        """Report new rounds; returns lines for the console, also about a fitter of another rank."""
        if not self._refits or time.monotonic() - self._looked_at < LOOK_EVERY:
            return []
        self._looked_at = time.monotonic()
        return [*self._report_new(), *self._lost()]

    def close(self) -> list[str]:
        """Report what was done since; returns lines for the console."""
        return [*self._report_new(), *self._lost()] if self._refits else []

    def _report_new(self) -> list[str]:
        rows = rounds.read(self._run_dir)
        new, self._told = rows[self._told :], len(rows)
        if new:
            self._report(metrics_of(rows[-1], sum(row.episodes for row in rows)))
        return [f"refit: {row}" for row in new]

    def _lost(self) -> list[str]:
        if self._heard:
            return []
        try:
            line = read_bytes(self._run_dir / LOST).decode(errors="replace")
        except OSError:  # Mostly it is not there. What cannot be read now is read at a later look.
            return []
        self._heard = True
        return [line]


def metrics_of(row: Round, spent: int) -> dict[Metric, float]:
    """Return what curves and rows say of a round; `spent`: true episodes of the run so far."""
    found = {
        m.ROUND_VERSION: float(row.version),
        m.TRUE_SUCCESS: row.success,
        m.TRUE_LOW: row.low,
        m.TRUE_HIGH: row.high,
        m.TRUE_EPISODES: float(spent),
        m.GAP: (row.judged - row.solved) / row.audited,
        m.VERDICT_WRONG: row.wrong / row.audited,
        m.VERDICT_WRONG_AFTER: row.wrong_after / row.audited,
        m.ACCEPTED: float(row.accepted),
        s.PACE_COLLECT_SECONDS: row.collect_seconds,
        s.PACE_FIT_SECONDS: row.fit_seconds,
    }
    if row.judged:
        found[m.FALSE_SUCCESS] = row.false / row.judged
    if row.keyframes:
        found[m.KEYFRAMES] = float(row.keyframes)
    return found

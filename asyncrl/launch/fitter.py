"""The fitter of a run with --pace.every: a process that refits the world, and rank 0's view of it.

    learner ──checkpoints──► fitter ──pace.jsonl──► rank 0: rows, curves
                               └──► true episodes, worlds ──► world channel ──► actors

fitter      consumes   checkpoints, every LOOK_EVERY seconds    ended by: rank 0, with the run
            produces   a line, recordings and perhaps a world per round   waited for by: nobody

When it dies too often, training goes on with the last world.
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
from asyncrl.config.run import TrainConfig
from asyncrl.errors import RunError
from asyncrl.launch.supervisor import Supervisor
from asyncrl.observability import metrics_pace as m
from asyncrl.observability import metrics_system as s
from asyncrl.observability import process_status
from asyncrl.observability.metrics import Metric
from asyncrl.pace import rounds
from asyncrl.pace.rounds import Round
from asyncrl.storage.best_checkpoint import FOLDER, forget_best_after, keep_as_best
from asyncrl.storage.regular_files import remove

ROLE: Final = "fitter"
LOOK_EVERY: Final = 0.5
"""Seconds between two looks, for a checkpoint and for a round."""
RESPAWNS: Final = 2
"""How often in a row it comes back when it dies."""
NICENESS: Final = 5
"""Of the fitter and its simulators on a CPU: what trains goes first, and a round still comes to its end."""
HELD: Final = "refitting"
"""The checkpoint, below the others, that a round is about: a copy, which the run does not delete."""
_log = logging.getLogger(__name__)


def fitter_main(config_json: str, run_dir_text: str, local_rank: str) -> None:
    """Make the run's rounds as they become due, until rank 0 ends this process."""
    import json
    import multiprocessing

    import torch

    from asyncrl.launch import refits
    from asyncrl.launch.environment import check_world_model
    from asyncrl.launch.placement import pick_device
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
    process_status.publish_as(run_dir, ROLE)
    process_status.set_activity("loading models", config.startup_timeout)
    chosen = config.pace.device
    device = pick_device(config.device if chosen == "auto" else chosen, int(local_rank))
    if device.type == "cpu":
        os.nice(NICENESS)
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
    """Rank 0's view of the fitter. Create and use it on one thread that outlives it."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        report: Callable[[dict[Metric, float]], None],
        local_rank: int,
        *,
        version: int,
    ) -> None:
        """Start the fitter, unless --pace.every is 0. What the run has of rounds is reported first.

        Args:
            config: Of the run, with the world's defaults put in.
            run_dir: Of the run; rounds that a resumed run makes anew are forgotten.
            report: Given what the newest round found, which holds until the next one.
            local_rank: Of this rank, whose device it shares.
            version: That the run goes on from.
        """
        self._config, self._run_dir, self._report = config, run_dir, report
        self._child: Supervisor | None = None
        self._looked_at, self._lost = -LOOK_EVERY, False
        self._told = 0
        """Rounds that were reported."""
        if config.pace.every:
            forget_best_after(run_dir, version)
            self._child = Supervisor(
                ROLE,
                "asyncrl.launch.fitter:fitter_main",
                (to_json(config), str(run_dir), str(local_rank)),
                run_dir / "logs" / f"{ROLE}.log",
                RESPAWNS,
            )

    def poll(self) -> list[str]:
        """Report new rounds, respawn the fitter when it died; return lines for the console."""
        if self._child is None or time.monotonic() - self._looked_at < LOOK_EVERY:
            return []
        self._looked_at = time.monotonic()
        lines = self._report_new()
        if not self._lost:
            try:
                self._child.poll()
            except RunError as error:
                self._lost = True
                lines.append(f"the world is not refitted any more, the training goes on: {error}")
        return lines

    def close(self) -> None:
        """End the fitter, report what it had done, and put away the round that it was making."""
        if self._child is not None:
            self._child.stop(1.0)
            self._report_new()
            rounds.put_away_unfinished(self._run_dir)
            remove(self._run_dir / FOLDER / HELD)

    def _report_new(self) -> list[str]:
        rows = rounds.read(self._run_dir)
        new, self._told = rows[self._told :], len(rows)
        if new:
            self._report(metrics_of(rows[-1], sum(row.episodes for row in rows)))
        return [f"refit: {row}" for row in new]


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

"""Opens all that hears of a run's numbers: files, console, trackers, monitor, provenance."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncrl.config.run import TrainConfig
from asyncrl.errors import AsyncRLError
from asyncrl.launch import rendezvous
from asyncrl.observability import monitor_address, process_status, trackers
from asyncrl.observability.logger import MetricsLogger, flat, start_command
from asyncrl.storage import provenance, run_lock
from asyncrl.storage.run_folder import REPLAY

if TYPE_CHECKING:
    from asyncrl.launch.learner_start import LearnerStart

LEAVE_POLL: Final = 0.5
"""Seconds between two attempts to own the folder of a run whose other ranks are ending."""


def check(config: TrainConfig) -> None:
    """Check before anything starts that the trackers are installed and the monitor can listen."""
    trackers.check_installed(config.log_with)
    monitor_address.check_free(config.monitor.listen)


@contextmanager
def opened(config: TrainConfig, start: LearnerStart) -> Iterator[MetricsLogger]:
    """Open the log of a run, and all that reads its rows, for the length of the block."""
    command = start_command()
    log = MetricsLogger(
        start.run_dir,
        updates=config.updates,
        resume_step=start.version,
        log_every=config.log_every,
        evaluates=config.evaluate_every > 0,
        settings=flat(dataclasses.asdict(config)),
        command=command,
    )
    with ExitStack() as stack:
        sent = trackers.Trackers(config.log_with, start.run_dir, log.banner, command=command)
        stack.enter_context(sent)  # Ended last: it reads what the log wrote.
        stack.enter_context(log)
        begun = provenance.this_start(
            attempt=start.identity.attempt,
            command=command,
            from_update=start.version,
            ranks=rendezvous.world_size(),
            gpus=start.policy.device.type == "cuda",
        )
        kept = provenance.Provenance(start.run_dir, begun, updates=config.updates, tell=log.banner)
        log.readers += [sent, stack.enter_context(kept)]
        if config.monitor.listen:
            from asyncrl.observability.monitor import Monitor

            address = monitor_address.parse_address(config.monitor.listen)
            there = Monitor(address, start.run_dir, updates=config.updates, resume_step=start.version)
            log.readers.append(stack.enter_context(there))
        yield log


def compact_at_end(
    config: TrainConfig,
    run_dir: Path,
    version: int,
    *,
    stop_requested: Callable[[], bool],
    tell: Callable[[str], None] = print,
) -> None:
    """Compress the replay of a run that made all its updates, where --replay.compact-at-end says so.

    Whatever goes wrong is told and changes nothing of how the run ended; a group that is not compressed is as
    it was.
    """
    if not config.replay.compact_at_end or version < config.updates or stop_requested():
        return
    from asyncrl.replay_tools.cleanup import compact_folder

    until = time.monotonic() + run_lock.LEAVE_DEADLINE
    while True:
        try:
            with process_status.activity("compressing the replay"):
                tell(compact_folder(run_dir / REPLAY, stop_requested=stop_requested).text)
            return
        except run_lock.FolderInUse as error:  # Other ranks of the run are still ending.
            if time.monotonic() > until or stop_requested():
                tell(_not_compacted(run_dir, error))
                return
            time.sleep(LEAVE_POLL)
        except (AsyncRLError, OSError) as error:
            tell(_not_compacted(run_dir, error))
            return


def _not_compacted(run_dir: Path, error: Exception) -> str:
    return (
        f"--replay.compact-at-end: the replay is not compressed ({error}). The run ended well all the same; "
        f"later: asyncrl replay compact {run_dir}"
    )

"""End a process of a run that hangs, after dumping the stacks of all.

watchdog's thread (rank 0)   consumes   activities, once a second     ended by: `close`
                             produces   run/processes/*.stacks, and SIGKILL for a child or SIGABRT for itself

An ended child is respawned like one that died. An ended learner is a failed rank: torchrun restarts the job
(`--max-restarts`) or ends it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from asyncrl.observability import process_status

POLL_INTERVAL: Final = 1.0
STACKS_SECONDS: Final = 2.0
"""Time for processes to write their stacks before one of them is ended."""


class Watchdog:
    """Ends the overdue processes of a run on this host."""

    def __init__(self, run_dir: Path, tell: Callable[[str], None]) -> None:
        """Start checking; `tell` receives a line per hang."""
        self.run_dir, self._tell = run_dir, tell
        self.hangs = 0
        """Ended processes."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """End overdue processes."""
        for process in process_status.read(self.run_dir):
            late = next((activity for activity in process.activities if activity.overdue), None)
            if process.alive and late is not None:
                self._end(process, late)

    def close(self) -> None:
        """Stop checking."""
        self._closing.set()
        self._thread.join(POLL_INTERVAL + 2 * STACKS_SECONDS)

    def _run(self) -> None:
        while not self._closing.wait(POLL_INTERVAL):
            self.check()

    def _end(self, process: process_status.Process, late: process_status.ThreadActivity) -> None:
        process_status.dump_stacks(self.run_dir)
        self._tell(
            f"{process.role} (process {process.pid}) hangs: {late.what!r} takes {late.seconds:.0f} s, "
            f"its deadline was at {late.allowed:.0f} s (--hang-timeout, or the wait's own, after the last "
            "sign of progress). It is ended; the stacks of all processes are in "
            f"{self.run_dir / process_status.FOLDER}"
        )
        self.hangs += 1
        time.sleep(STACKS_SECONDS)
        me = process.pid == os.getpid()
        os.kill(process.pid, signal.SIGABRT if me else signal.SIGKILL)

"""Show in a terminal's last line what a run is doing until its next row.

    0:00:41  [########----]  learner-0: waiting for a batch: 5 of 8 groups, 43 of 64 episodes  actor-0: ...

What it says is what the processes of this host publish (`process_status`). A console that is no terminal
never sees it: there, a run says as much as it always did.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from asyncrl.observability import process_status
from asyncrl.observability.metrics_logger import duration

EVERY: Final = 0.5
"""Seconds between two looks."""
MAIN_THREAD: Final = "MainThread"
BAR: Final = 12
"""Parts of the bar."""
_COUNTED: Final = re.compile(r"(\d+) of (\d+)")
SILENT: Final = ("replay", "tracker-")
"""Begins of roles that serve the others and have nothing to tell."""


class StatusLine:
    """Keeps the line up to date from a thread of its own; `close` takes it away."""

    def __init__(self, run_dir: Path, show: Callable[[str], None]) -> None:
        """Begin.

        Args:
            run_dir: Of the run.
            show: Draws the line over the last one; empty: there is none.
        """
        self._run_dir, self._show = run_dir, show
        self._began = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status line", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop and remove the line. May be called again."""
        self._closing.set()
        self._thread.join(2 * EVERY)
        self._show("")

    def _run(self) -> None:
        while not self._closing.wait(EVERY):
            width = shutil.get_terminal_size().columns
            self._show(line(process_status.read(self._run_dir), time.monotonic() - self._began, width))


def line(processes: Sequence[process_status.Process], seconds: float, width: int) -> str:
    """Say in one line what the processes of a run do, the learner first.

    Args:
        processes: Of the run on this host.
        seconds: Since it began.
        width: Columns of the terminal; what does not fit is cut off.
    """
    told = []
    for process in sorted(processes, key=lambda process: not process.role.startswith("learner")):
        if process.role.startswith(SILENT):
            continue
        doing = next((a.what for a in process.activities if a.thread == MAIN_THREAD), "starting")
        told.append(f"{process.role}: {doing if process.alive else 'ended'}")
    text = "  ".join([duration(seconds), *filter(None, [bar("".join(told[:1]))]), *told])
    return text if len(text) < width else f"{text[: width - 4]}..."


def bar(doing: str) -> str:
    """Draw how far something is that says 'M of N': the finest such pair counts, which is the last.

    >>> bar("waiting for a batch: 5 of 8 groups, 48 of 64 episodes"), bar("loading models")
    ('[#########---]', '')
    """
    counted = _COUNTED.findall(doing)
    if not counted or not int(counted[-1][1]):
        return ""
    done, total = map(int, counted[-1])
    full = min(BAR, BAR * done // total)
    return f"[{'#' * full}{'-' * (BAR - full)}]"

"""Log file of a process, with times: console lines, log records, and the traceback of its failure.

Children of a run redirect their output to such a file. The learner writes to the console and, by a thread
that a slow disk may block instead of the learner, to its file.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from asyncrl.observability import waits
from asyncrl.observability.background_file import BackgroundFile

CONSOLE: Final = "asyncrl.console"
"""Logger of console lines."""
_LIMIT: Final = 4 << 20
_CLOSE_SECONDS: Final = 2.0
_log = logging.getLogger(__name__)


class _FileHandler(logging.Handler):
    def __init__(self, file: BackgroundFile) -> None:
        super().__init__(logging.INFO)
        self._file = file
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._file.add((self.format(record) + "\n").encode(errors="backslashreplace"))


class _OnConsole(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Pass records that are not on the console already."""
        return record.name not in (CONSOLE, __name__)


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Append log records from the level INFO on, and an exception's traceback, to a file within the block.

    Warnings go to standard error too.
    """
    file = BackgroundFile(
        path, f"lines of {path.name}", limit=_LIMIT, lost=waits.DROPPED_LINES, tell=lambda line: None
    )
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)
    console.addFilter(_OnConsole())
    handlers, package = (_FileHandler(file), console), logging.getLogger("asyncrl")
    before, package.propagate = (package.level, package.propagate), False
    package.setLevel(logging.INFO)
    for handler in handlers:
        package.addHandler(handler)
    _log.info("process %d begins, %s", os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S %z"))
    try:
        yield
    except Exception:
        _log.exception("process %d failed", os.getpid())
        raise
    finally:
        for handler in handlers:
            package.removeHandler(handler)
        package.setLevel(before[0])
        package.propagate = before[1]
        file.close(_CLOSE_SECONDS)

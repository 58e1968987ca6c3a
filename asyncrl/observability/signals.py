"""Decide when Ctrl-C may interrupt a process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold back the first Ctrl-C until the end of the block; a second one interrupts at once."""
    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or before is not signal.default_int_handler:
        yield  # Ctrl-C raises no KeyboardInterrupt here.
        return
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt

"""Ends a process in order while a thread of it is still inside a library.

What may block for ever runs on a thread of its own, which is left there when it does not end in time. Should
the call return just when Python ends, up to version 3.13 Python ends that thread where it asks for the
interpreter. Within a destructor of torch's that is an abort of the whole process (SIGABRT), after everything
was done; and torchrun then ends the other ranks too. Such a process therefore ends with its exit code, behind
all that Python does at exit, and before Python takes the interpreter apart.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable

_exit_code: int | None = None


class BlockingThread(threading.Thread):
    """Daemon thread for a call into a library that may block for ever."""

    def __init__(self, call: Callable[[], object], name: str) -> None:
        super().__init__(target=call, name=name, daemon=True)


def expect_exit(code: int) -> int:
    """Say with which code this process is about to end, the last that its program does; returns the code."""
    global _exit_code
    _exit_code = code
    return code


# The first to be registered is called last: a program imports this before what has to do something at exit.
@atexit.register
def _end() -> None:
    if _exit_code is None or not any(isinstance(thread, BlockingThread) for thread in threading.enumerate()):
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError, ValueError):  # Closed, or with nobody to read it.
            stream.flush()
    os._exit(_exit_code)

"""Prepare a supervised child, then call the function that it was started for.

Apart from `supervisor` so that a child imports nothing else.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

from tqdm import tqdm

from asyncrl.observability.signals import die_with_parent, expect_exit
from asyncrl.storage.regular_files import open_regular


def run_child(name: str, target: str, args: tuple[str, ...], log_path: str) -> None:
    """Send all output to the log, tie this process's life to its parent's, then call ``target(*args)``."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    redirect_output(log_path)
    die_with_parent(parent.pid)
    # Ctrl-C reaches the whole process group; only the learner answers it, and then ends the others in order.
    for of_the_terminal in (signal.SIGINT, signal.SIGHUP):  # They reach all processes of it.
        signal.signal(of_the_terminal, signal.SIG_IGN)
    # The lock of its own is a semaphore of the system, which stays behind when this process is killed.
    tqdm.set_lock(threading.RLock())
    print(f"--- {name} starts, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}", flush=True)
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(*args)
    expect_exit(0)


def redirect_output(log_path: str) -> None:
    """Append standard output and error, also those of C libraries, to a file; lines are written at once."""
    log = open_regular(Path(log_path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    os.close(log)
    faulthandler.enable()

"""Take file descriptors away from this process, for real."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open no file at all, not even with what a reserve gives back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def all_taken() -> Iterator[None]:
    """Let files of others take all descriptors that are free; a reserve still has its own."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, before[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

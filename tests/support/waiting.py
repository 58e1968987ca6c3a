"""Polls for what another thread or process does."""

import time
from collections.abc import Callable

PATIENCE = 60.0


def wait_for(
    condition: Callable[[], object], what: Callable[[], object] = str, seconds: float = PATIENCE
) -> None:
    """Poll until `condition` is true; fails with `what` after `seconds`."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what()
        time.sleep(0.01)

"""Do parts of a round at once: on a CPU the fitter computes with one thread, and the others idle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, TypeVar

import torch

from asyncrl.config.run import TrainConfig
from asyncrl.observability import process_status

Result = TypeVar("Result")
LOOK_EVERY: Final = 1.0
"""Seconds between two looks whether the parts have ended."""


def parts_at_once(config: TrainConfig, device: torch.device) -> bool:
    """Whether two parts of a round are made at once: by a process of its own, which uses a core for each.

    On a GPU one part keeps the device busy, and with --inline all cores belong to every operation.
    """
    return device.type == "cpu" and not config.inline


def side_by_side(
    parts: Mapping[str, Callable[[], Result]], *, patience: float, at_once: bool
) -> list[Result]:
    """Do all parts; each is an activity of its own, in a thread of its own if they are done at once.

    Results do not depend on `at_once`, as long as no two parts draw from torch's global generator.

    Args:
        parts: What each does -> does it.
        patience: Seconds that a part may be without progress; see `process_status.activity`.
        at_once: Else, or where there is one, one after the other in this thread.

    Returns:
        Their results, in order.

    Raises:
        Exception: What the first part, in order, that failed raised, once all have ended.
    """
    threads = torch.get_num_threads()

    def do(what: str) -> Result:
        torch.set_num_threads(threads)  # OpenMP has this number per thread.
        with process_status.activity(what, patience):
            return parts[what]()

    if not at_once or len(parts) < 2:
        return [do(what) for what in parts]
    with ThreadPoolExecutor(len(parts)) as pool:
        running = [pool.submit(do, what) for what in parts]
        while wait(running, timeout=LOOK_EVERY).not_done:
            process_status.progress()  # Whether a part hangs is told by its own thread.
    return [part.result() for part in running]

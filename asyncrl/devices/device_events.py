"""Moments in a device's own time: what a stream has reached, and the seconds between two of them.

On the CPU work is done when the call returns, so every moment has passed and the clock is the host's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch

from asyncrl.errors import RunError
from asyncrl.observability import waits

POLL_INTERVAL: Final = 0.0002
"""Seconds between two looks at a device; a call that blocks until it is done could not have a deadline."""


class DeviceEvent:
    """The point that the current stream of a device has been given work up to."""

    def __init__(self, device: torch.device) -> None:
        self._at = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    @property
    def passed(self) -> bool:
        """Whether the device is there; raises what went wrong on the device before."""
        return self._event is None or self._event.query()

    def since(self, earlier: DeviceEvent) -> float:
        """Seconds between two moments of one device that have passed."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        return earlier._event.elapsed_time(self._event) / 1000


def wait_for(moments: Sequence[DeviceEvent], deadline: float) -> float:
    """Wait until all `moments` have passed; returns the seconds that took.

    Raises:
        RunError: They did not pass within `deadline` seconds.
    """
    if all(moment.passed for moment in moments):
        return 0.0
    began = time.monotonic()
    with waits.waiting(waits.DECISION, deadline):
        while not all(moment.passed for moment in moments):
            if time.monotonic() - began > deadline:
                raise RunError(
                    f"The device did not finish one decision of a part of the slots within {deadline:g} s "
                    "(--hang-timeout). Use fewer --actor.slots, or a larger timeout if it is only slow."
                )
            time.sleep(POLL_INTERVAL)
    return time.monotonic() - began

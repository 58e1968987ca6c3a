"""Events of a device's stream, and the seconds between two of them.

On the CPU work is done when the call returns, so every event has passed and the clock is the host's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch

from asyncrl.errors import RunError
from asyncrl.observability import waits

POLL_INTERVAL: Final = 0.0002
"""Seconds between two queries of a device; a blocking call would have no deadline."""


class DeviceEvent:
    """End of the work queued so far on the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._at = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    @property
    def passed(self) -> bool:
        """True if the device has come this far; raises an earlier error of the device."""
        return self._event is None or self._event.query()

    def since(self, earlier: DeviceEvent) -> float:
        """Measure the seconds from `earlier`; both are events of one device, and have passed."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        return earlier._event.elapsed_time(self._event) / 1000


def wait_for(events: Sequence[DeviceEvent], deadline: float) -> float:
    """Wait until all `events` have passed; returns the seconds.

    Raises:
        RunError: They did not pass within `deadline` seconds.
    """
    if all(event.passed for event in events):
        return 0.0
    began = time.monotonic()
    with waits.waiting(waits.DECISION, deadline):
        while not all(event.passed for event in events):
            if time.monotonic() - began > deadline:
                raise RunError(
                    f"The device did not finish one decision of a part of the slots within {deadline:g} s "
                    "(--hang-timeout). Use fewer --actor.slots, or a larger timeout if it is only slow."
                )
            time.sleep(POLL_INTERVAL)
    return time.monotonic() - began

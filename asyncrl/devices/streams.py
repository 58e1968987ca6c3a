"""Events of a device's stream, and CUDA graphs: one launch per call where the host would be the bottleneck.

On the CPU work is done when the call returns, so every event has passed and the clock is the host's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

WARM_UP: Final = 2  # Calls before the capture: they compile, and let libraries choose their kernels


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


class CudaGraphed:
    """Replays the first call of `function` with new numbers in the inputs, overwriting the last result.

    Weights may change in place, but must not move (`forget`); shapes and types of the inputs stay.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Sequence[Tensor] = ()
        self._result: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        """Copy the inputs into the graph and replay it."""
        if self._graph is None:
            self._capture(inputs)
        assert self._graph is not None
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._result

    def forget(self) -> None:
        """Free the graph and its memory; the next call captures it again."""
        self._graph, self._inputs, self._result = None, (), None

    def _capture(self, inputs: Sequence[Tensor]) -> None:
        self._inputs = [tensor.clone() for tensor in inputs]
        device = inputs[0].device
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                self._function(*self._inputs)
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # On a stream of the inputs' device, which need not be the current one. Other threads of an actor may
        # receive weights during the capture, which the default mode forbids.
        with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
            self._result = self._function(*self._inputs)
        self._graph = graph

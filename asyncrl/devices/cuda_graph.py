"""A function of tensors as one CUDA graph: one launch per call, where the host would be the bottleneck."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

WARM_UP: Final = 2
"""Calls before the capture: they compile, and let libraries choose their kernels."""


class CudaGraphed:
    """Replays the first call of `function` with new numbers in the inputs.

    The next call overwrites the result, in stream order. Weights may change in place, but must not move
    (`forget`); shapes and types of the inputs stay those of the first call.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Store a function of tensors on one GPU, which must not wait for the device."""
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

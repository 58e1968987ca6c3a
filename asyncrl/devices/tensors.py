"""Copies to a device, pixel conversions, memory peaks; events and CUDA graphs; the device of a process."""

from __future__ import annotations

import logging
import os
import re
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import asyncrl
from asyncrl.errors import ConfigError, RunError
from asyncrl.storage.assets import user_cache_folder

INDUCTOR: Final = "TORCHINDUCTOR_CACHE_DIR"
TRITON: Final = "TRITON_CACHE_DIR"
_log = logging.getLogger(__name__)


def to_signed(pictures: Tensor) -> Tensor:
    """Map ``[...]`` uint8 to ``[...]`` float32 in [-1, 1]."""
    return pictures.float() / 127.5 - 1


def to_uint8(pictures: Tensor) -> Tensor:
    """Map ``[...]`` floats in [-1, 1] (clamped) to the nearest ``[...]`` uint8."""
    return ((pictures.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def all_finite(values: Tensor) -> bool:
    """Return True if all values are finite, or, for bools, if all are True."""
    if values.dtype == torch.bool or not values.numel():
        return bool(values.all())
    return all(end.isfinite().item() for end in values.detach().aminmax())  # `isfinite` is 20 times slower.


def require_finite(model: str, **outputs: Tensor) -> None:
    """Raise RunError, with model and name, for an output that is not `all_finite`."""
    for name, values in outputs.items():
        if not all_finite(values):
            raise RunError(
                f"The {name.replace('_', '-')} of the {model} are not finite: its weights hold NaN or "
                "infinity, or its numbers overflow. Use an earlier checkpoint, or copy its folder again."
            )


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device through page-locked memory, without blocking or sharing memory."""
    if device.type != "cuda":
        return torch.tensor(array, device=device)
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    locked = torch.empty(array.shape, dtype=dtype, pin_memory=True)
    np.copyto(locked.numpy(), array)
    return locked.to(device, non_blocking=True)


def constant_to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array as `to_device`; in inference mode too, the result can take part in a gradient later."""
    with torch.inference_mode(False):
        return to_device(array, device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device as `to_device`; a tensor already there is returned itself."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def host_peak() -> float:
    """Return the peak resident memory of this process, in bytes."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_memory(device: torch.device) -> float:
    """Return the peak bytes of this process's tensors on a GPU; without a GPU, `host_peak`."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else host_peak()


# --- events of a device's stream, and CUDA graphs ---
# On the CPU work is done when the call returns, so every event has passed and the clock is the host's.

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
        """True if the device has reached this event; raises an earlier error of the device."""
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


# --- the device of a process ---


def count_gpus(name: str) -> int:
    """Return the number of GPUs that PyTorch sees; 0 for --device cpu."""
    return torch.cuda.device_count() if name != "cpu" else 0


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Choose the device of a process by --device; raises ConfigError if there is none."""
    if name not in ("cpu", "cuda", "auto"):
        raise ConfigError(f"--device is {name!r}. Use cpu, cuda or auto.")
    count = count_gpus(name)
    if name == "cuda" and not count:
        raise ConfigError(
            "--device is cuda, but PyTorch sees no CUDA device. Use --device cpu, or run `asyncrl doctor`."
        )
    return torch.device("cuda", local_rank % count) if count else torch.device("cpu")


def take_device(name: str, local_rank: int = 0) -> torch.device:
    """Choose the device of this process, check its matrix products, and make it the current one."""
    device = pick_device(name, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        check_matrix_products(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return device


def use_compiler_cache(device: torch.device) -> None:
    """Keep code that torch compiles in the user's cache folder, unless the user chose another.

    It is loaded as code, so only the user has access. All processes share it, and it may be deleted.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Imports of torch's compiler write torch's own folder into the variable, which does not count.
    if os.environ.get(INDUCTOR, "") not in ("", default_cache_dir()):  # Triton's is within it.
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    made_by = re.sub(r"[^A-Za-z0-9.+-]+", "_", f"{asyncrl.__version__}-{torch.__version__}-{name}")
    folder = user_cache_folder() / "compiled" / made_by
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:  # Torch's own folder stays.
        _log.warning("%s cannot be made (%s); set %s to choose another", folder, error.strerror, INDUCTOR)
        return
    os.environ[INDUCTOR] = str(folder)
    os.environ.setdefault(TRITON, str(folder / "triton"))


# --- matrix products ---

# cuBLAS of CUDA 13.0 is wrong on an H100, in a process that may use 84 to 104 of its 132 multiprocessors
# (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE 65 to 80): products of 8192 rows by 1152 x 1152 and 4304 x 1152 bfloat16
# numbers, layers of the policy's vision tower, are off by as much as the numbers are large, and gradients are
# soon not finite (docs/measurements/run_speed.md).
SHARE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"  # Of the multiprocessors, for a client of MPS
SIZES: Final = ((8192, 1152, 1152), (8192, 4304, 1152), (8192, 1024, 4096), (2048, 4096, 4096))
"""Rows, width and columns: linear layers of the vision towers and of the language model."""
TOLERANCE: Final = 0.03  # Largest error / largest number; rounding makes 0.002 to 0.004


def check_matrix_products(device: torch.device, sizes: Sequence[tuple[int, int, int]] = SIZES) -> float:
    """Return the largest error of bfloat16 products of the policies' sizes, or raise ConfigError."""
    errors = [0.0]
    for rows, width, columns in sizes:
        generator = torch.Generator(device).manual_seed(0)  # Leaves the global one alone.
        a_MK, b_NK = (
            torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
            for shape in ((rows, width), (columns, width))
        )
        exact_MN = a_MK.float() @ b_NK.float().T
        error = float((torch.matmul(a_MK, b_NK.T).float() - exact_MN).abs().max() / exact_MN.abs().max())
        if not error < TOLERANCE:  # NaN is not.
            raise ConfigError(
                f"{device} multiplies matrices wrongly: of {rows} x {width} and {width} x {columns} bfloat16 "
                f"numbers, a product is off by {error:.3g} of the largest. cuBLAS does that where a process "
                f"may use only some multiprocessors: unset {SHARE} (it is {os.environ.get(SHARE, 'not set')})"
                ", leave the GPU out (CUDA_VISIBLE_DEVICES), or try another build of PyTorch."
            )
        errors.append(error)
    return max(errors)

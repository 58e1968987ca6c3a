"""Where a GPU's time goes: the kernels of some calls, by what they do.

Times come from torch's profiler (CUPTI), on the device's own clock. A class is told by a kernel's name; names
that fit none are listed, so that nothing hides in *other*. *Idle* is the time from the first kernel to the
last in which none ran: launches that come too late, or a host that waits.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from measuring import table, wait
from torch._C._autograd import DeviceType

CLASSES: Final[dict[str, str]] = {
    "attention": r"sdpa|flash|fmha|attention",
    "between devices": r"nccl",
    "convolutions": r"fprop|dgrad|wgrad|conv|nchw|nhwc",
    "matrix products": r"gemm|nvjet|cutlass|wgmma|cublas|splitk|triton_tem|scaled_mm",
    "fused by the compiler": r"^triton_",
    "copies": r"^mem(cpy|set)|copy_kernel|catarray",
    "element by element, sums": r"elementwise|reduce|norm|softmax|index|gather|scatter|multi_tensor",
}
"""Class -> pattern of kernel names; the first that fits counts."""
OTHER: Final = "other"
IDLE: Final = "idle"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch."""

    name: str
    start: float
    """Microseconds."""
    end: float


def class_of(name: str) -> str:
    """Return what a kernel does, by its name."""
    lowered = name.lower()
    return next((label for label, pattern in CLASSES.items() if re.search(pattern, lowered)), OTHER)


def kernels(run: Callable[[], object], device: torch.device, rounds: int) -> list[Kernel]:
    """Run some calls under the profiler, after one that does not count; returns what the device did."""
    run()
    wait(device)
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(rounds):
            run()
        wait(device)
    found: Any = profiler.events() or []
    return [
        Kernel(name=event.name, start=event.time_range.start, end=event.time_range.end)
        for event in found
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def busy(found: Iterable[Kernel]) -> float:
    """Return the microseconds in which at least one kernel ran."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(found, key=lambda k: k.start):
        total += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total


def shares(found: Sequence[Kernel]) -> dict[str, float]:
    """Return class -> microseconds, largest first, and how long the device was idle.

    Kernels that run at the same time count each, so that the classes may add up to more than the whole.
    """
    taken = _sums((class_of(kernel.name), kernel) for kernel in found)
    whole = max(k.end for k in found) - min(k.start for k in found)
    return taken | {IDLE: whole - busy(found)}


def _sums(named: Iterable[tuple[str, Kernel]]) -> dict[str, float]:
    """Return name -> microseconds, largest first."""
    taken = defaultdict[str, float](float)
    for name, kernel in named:
        taken[name] += kernel.end - kernel.start
    return dict(sorted(taken.items(), key=lambda item: -item[1]))


def report(title: str, run: Callable[[], object], device: torch.device, *, rounds: int = 2) -> str:
    """Profile some calls; returns a table of milliseconds of one, and the longest of the other kernels."""
    if device.type != "cuda":
        return f"{title}: kernels are counted on a GPU only."
    found = kernels(run, device, rounds)
    if not found:
        return f"{title}: the profiler saw no kernel; nothing is said about where the time goes."
    by_class = shares(found)
    whole = max(k.end for k in found) - min(k.start for k in found)
    lines = [
        [label, f"{micro / 1000 / rounds:.2f}", f"{micro / whole:.1%}"] for label, micro in by_class.items()
    ]
    others = _sums((kernel.name[:90], kernel) for kernel in found if class_of(kernel.name) == OTHER)
    text = table([title, "ms", "share"], lines)
    for name, micro in list(others.items())[:3]:
        text += f"\n  other: {micro / 1000 / rounds:.2f} ms {name}"
    return text

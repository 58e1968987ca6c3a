"""What speed benchmarks share: the device's own rate, times, counted FLOPs, tables."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode


def seconds(action: Callable[[], object], device: torch.device, *, rounds: int = 5, warm: int = 2) -> float:
    for _ in range(warm):
        action()
    wait(device)
    began = time.perf_counter()
    for _ in range(rounds):
        action()
    wait(device)
    return (time.perf_counter() - began) / rounds


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """FLOP/s of a large square matrix product of random bfloat16 numbers."""

    burst: float
    """Of a hundredth of a second: what is usually quoted."""
    sustained: float
    """Of a second and a half: a GPU that computes for longer than an instant lowers its clock."""

    def __str__(self) -> str:
        burst, sustained = self.burst / 1e12, self.sustained / 1e12
        return f"bfloat16 matrix products: {burst:.0f} TFLOP/s at first, {sustained:.0f} sustained"


def matmul_rate(device: torch.device) -> Rate:
    side = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    once = seconds(lambda: a @ b, device, rounds=10)
    lasting = seconds(lambda: a @ b, device, rounds=int(1.5 / once))
    return Rate(burst=2 * side**3 / once, sustained=2 * side**3 / lasting)


def counted(action: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counter:
        action()
    return float(counter.get_total_flops())


def randomised(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    module = nn.Module.to(module, dtype).to_empty(device=device)
    for name, parameter in module.named_parameters():
        if "gamma" in name or ("norm" in name and parameter.ndim == 1 and name.endswith("weight")):
            parameter.data.fill_(1)
        elif parameter.ndim > 1:
            parameter.data.normal_(0, 0.02)
        else:
            parameter.data.zero_()
    return module.eval().requires_grad_(False)


def commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout
    return (name.strip() or "unknown") + ("+" if changed.strip() else "")


def heading(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"python {shlex.join(sys.argv)}\ncommit {commit()}, torch {torch.__version__}, {name}\n"


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = [list(titles), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in text) for i in range(len(titles))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *[c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]])
        for row in text
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


# --- kernels of a GPU, by what they do: times of torch's profiler (CUPTI), on the device's own clock ---

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
    lowered = name.lower()
    return next((label for label, pattern in CLASSES.items() if re.search(pattern, lowered)), OTHER)


def kernels(run: Callable[[], object], device: torch.device, rounds: int) -> list[Kernel]:
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
    taken = defaultdict[str, float](float)
    for name, kernel in named:
        taken[name] += kernel.end - kernel.start
    return dict(sorted(taken.items(), key=lambda item: -item[1]))


def kernel_report(title: str, run: Callable[[], object], device: torch.device, *, rounds: int = 2) -> str:
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

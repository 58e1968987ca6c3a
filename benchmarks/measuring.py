"""What speed benchmarks share: the device's own rate, times, counted FLOPs, tables."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def seconds(action: Callable[[], object], device: torch.device, *, rounds: int = 5, warm: int = 2) -> float:
    """Mean duration of `action`, after `warm` calls that do not count."""
    for _ in range(warm):
        action()
    wait(device)
    began = time.perf_counter()
    for _ in range(rounds):
        action()
    wait(device)
    return (time.perf_counter() - began) / rounds


def wait(device: torch.device) -> None:
    """Wait for everything that the device was told to do."""
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
    """Measure what 100 % means in the tables."""
    side = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    once = seconds(lambda: a @ b, device, rounds=10)
    lasting = seconds(lambda: a @ b, device, rounds=int(1.5 / once))
    return Rate(burst=2 * side**3 / once, sustained=2 * side**3 / lasting)


def counted(action: Callable[[], object]) -> float:
    """FLOPs of matrix products, convolutions and attention in one call, two per multiply-add."""
    with FlopCounterMode(display=False) as counter:
        action()
    return float(counter.get_total_flops())


def randomised(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Give a module from the meta device random weights: speed does not depend on values, if finite."""
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
    """The commit of the code that runs, with a + when files are changed."""
    git = ["git", "-C", str(Path(__file__).parent)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout
    return (name.strip() or "unknown") + ("+" if changed.strip() else "")


def heading(device: torch.device) -> str:
    """Command, commit, torch and device, in the first two lines of a report."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"python {shlex.join(sys.argv)}\ncommit {commit()}, torch {torch.__version__}, {name}\n"


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of equal width; the first to the left, numbers to the right."""
    text = [list(titles), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in text) for i in range(len(titles))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *[c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]])
        for row in text
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])

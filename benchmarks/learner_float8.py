"""How `learner_speed` compares 8-bit products of frozen layers with those of the stored numbers, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from measuring import wait
from torch import Tensor, nn

from asyncrl.policies.frozen import use_float8_where_frozen
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy

TITLES: Final = ["float8 / stored", "rows", "stored ms", "float8 ms", "ratio", "cosine", "relative error"]
Layers = Mapping[Any, nn.Module]
"""What lies below each adapted layer."""


def both_kinds(policy: OpenVLAOFTPolicy) -> tuple[Layers, Layers]:
    """Return the layers below adapters as stored and rounded, sharing weights; the policy keeps the former.

    The second matrices of adapters, which begin at 0, get random numbers: else the first have no gradient.
    """
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0, 0.02)
    adapted = [module for module in policy.modules() if hasattr(module, "lora_A")]
    stored: dict[Any, Any] = {module: module.base_layer for module in adapted}
    use_float8_where_frozen(policy)
    rounded: dict[Any, Any] = {module: module.base_layer for module in adapted}
    put(stored)
    return stored, rounded


def put(layers: Layers) -> None:
    """Let the policy compute with these layers."""
    for module, layer in layers.items():
        module.base_layer = layer


def gradients(policy: OpenVLAOFTPolicy, run: Callable[[], object]) -> dict[str, Tensor]:
    """Return the adapters' gradients of one call, in float32."""
    policy.zero_grad()
    run()
    found = {n: p.grad.float() for n, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return found


def likeness(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the cosine of all gradients as one vector, and the mean over tensors of their relative error."""
    dot = sum(float((found[n] * expected[n]).sum()) for n in expected)
    sizes = [sum(float(g.square().sum()) for g in of.values()) ** 0.5 for of in (found, expected)]
    errors = [float((found[n] - g).norm() / g.norm()) for n, g in expected.items() if g.any()]
    return dot / (sizes[0] * sizes[1]), statistics.fmean(errors)


def in_turns(
    policy: OpenVLAOFTPolicy, kinds: tuple[Layers, Layers], run: Callable[[], object], rounds: int
) -> list[float]:
    """Time forward and backward with either kind of layers, one after the other: median seconds of each."""
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for kind, times in zip(kinds, taken, strict=True):
            put(kind)
            run()  # Compiled, or whatever the change of layers costs.
            wait(policy.device)
            began = time.perf_counter()
            run()
            wait(policy.device)
            if number:
                times.append(time.perf_counter() - began)
    put(kinds[0])
    return [statistics.median(times) for times in taken]


def compared(
    policy: OpenVLAOFTPolicy,
    kinds: tuple[Layers, Layers],
    how: str,
    rows: int,
    run: Callable[[], object],
    rounds: int = 5,
) -> list[object]:
    """Return a line of the table of `TITLES`.

    Args:
        policy: That has the layers.
        kinds: From `both_kinds`.
        how: Eager or compiled.
        rows: Decisions of a pass.
        run: Forward and backward.
        rounds: Turns that count.
    """
    seconds = in_turns(policy, kinds, run, rounds)
    expected = gradients(policy, run)
    put(kinds[1])
    found = gradients(policy, run)
    put(kinds[0])
    cosine, error = likeness(found, expected)
    times = [f"{1000 * taken:.1f}" for taken in seconds]
    return [how, rows, *times, f"{seconds[1] / seconds[0]:.3f}", f"{cosine:.4f}", f"{error:.4f}"]

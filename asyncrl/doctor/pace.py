"""Say what the cost model expects of a run: here, and of one to eight devices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from asyncrl.config.run import TrainConfig
from asyncrl.doctor import faster_learner, placements
from asyncrl.doctor.cost import Prediction, predict
from asyncrl.doctor.findings import Examination, Finding, Sizes, ok
from asyncrl.doctor.host import GIB
from asyncrl.doctor.rates import FLOAT8, FLOAT32, H100, H200, KNOWN, DeviceRate
from asyncrl.doctor.work import RunWork
from asyncrl.errors import ConfigError
from asyncrl.launch.placement import WORDS, parse_placement, ranks_named
from asyncrl.launch.placement_text import sizes_of_hosts
from asyncrl.launch.simulated import simulator_named

if TYPE_CHECKING:
    import torch

HERE_NONE: Final = 8
"""Devices that are reckoned with where there is none and the placement names no ranks."""
COUNTS: Final = (1, 2, 4, 8)
"""Devices of the table."""
Choices = list[tuple[str, TrainConfig, Sizes, RunWork]]
"""Flags, and what a run with them is."""
ADAPTERS: Final = 32
"""Rank that the table tries where all weights do not fit."""


def check_pace(examination: Examination) -> Finding | None:
    """Predict decisions and updates on this host's GPUs, or on eight where there is none; None: not known.

    The rate of a GPU's matrix products is measured, for a hundredth of a second.
    """
    import torch

    config, sizes, work = examination.config, examination.sizes, examination.work
    if sizes is None or work is None:
        return None
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    device = device_here(torch.device("cuda", 0)) if gpus else H200
    ranks = (gpus or HERE_NONE) if config.placement in WORDS else ranks_named(config.placement)
    try:
        placement = parse_placement(config.placement, ranks, gpus)
    except ConfigError:  # The line about the placement says so, or actors join later.
        return None
    found = predict(config, work, sizes, device, placement)
    where = f"{ranks} x {device.name}" + ("" if gpus else ", none of which is here")
    where += ", other hosts taken to be as this one" if len(sizes_of_hosts(config.placement)) > 1 else ""
    more = faster_learner.advice(config, work, sizes, device, placement)
    if not placement.fitters and len(sizes_of_hosts(config.placement)) < 2:
        more += placements.advice(config, work, sizes, device, ranks, found)
    return ok("pace", f"expected, not measured ({where}): {described(config, work, found)}{more}")


def described(config: TrainConfig, work: RunWork, found: Prediction) -> str:
    """Write a prediction as a line."""
    actor, learner = found.actor, found.learner
    world = sum(stage.flops * stage.calls for stage in work.world.decision)
    rounded = sum(stage.float8 * stage.calls for stage in work.world.decision)
    narrow = ""
    if rounded:
        narrow = f" ({rounded / 1e12:.1f} of {float8_products(config.imagination.compile)})"
    if work.world.float32:
        narrow += f" (the world's in float32: {FLOAT32:g} times the time of --imagination.precision bf16)"
    frozen = ""
    if work.frozen:
        frozen = f"; {work.frozen / 1e12:.1f} TFLOP of a pass are {float8_products(config.learner.compile)}"
    played = bool(simulator_named(config.world))
    parts = f"policy {1000 * actor.policy:.1f}"
    if not played:
        parts += f", world {1000 * actor.world:.1f}, opening {1000 * actor.opening:.1f}"
    return (
        f"a decision is {(work.policy + world) / 1e12:.1f} TFLOP{narrow} and takes an actor "
        f"{1000 * actor.decision:.1f} ms ({parts}); an update of {found.decisions} decisions takes the "
        f"learner {learner.update:.1f} s ({learner.before:.1f} before it, passes {learner.passes:.1f}, "
        f"reading {learner.after:.1f}, steps {learner.steps:.1f}{frozen}) and its actors "
        f"{found.batch:.1f} s; {'at least ' if played else ''}{minutes(found.seconds)} minutes from one "
        "update to the next, "
        f"{found.groups_per_minute:.3g} groups/min; what bounds it: {found.bottleneck}"
        + ("; the simulators' time comes on top" if played else "")
    )


def float8_products(compiled: bool) -> str:
    """Say how fast layers with 8-bit products are taken to be.

    >>> float8_products(True)
    '8-bit products, 1.38 times as fast as those of bfloat16'
    """
    return f"8-bit products, {FLOAT8.of(compiled):g} times as fast as those of bfloat16"


def minutes(seconds: float) -> str:
    """Write minutes with two digits that mean something.

    >>> minutes(30), minutes(500), minutes(6000)
    ('0.50', '8.3', '100')
    """
    found = seconds / 60
    return f"{found:.2f}" if found < 1 else f"{found:.1f}" if found < 20 else f"{found:.0f}"


def device_here(device: torch.device) -> DeviceRate:
    """Return what a GPU of this host can do; what is not known of its kind is taken to be an H100's."""
    import torch

    name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    known = KNOWN.get(name, replace(H100, name=name))
    return replace(known, memory=float(memory), products=burst_rate(device))


def burst_rate(device: torch.device, side: int = 8192, rounds: int = 10) -> float:
    """Measure FLOP/s of products of square bfloat16 matrices of random numbers, for about 10 ms on a GPU.

    Args:
        device: Where.
        side: Rows and columns.
        rounds: Products that count; two come before them.
    """
    import torch

    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(2):
        torch.matmul(a, b)
    wait()
    began = time.perf_counter()
    for _ in range(rounds):
        torch.matmul(a, b)
    wait()
    return rounds * 2 * side**3 / (time.perf_counter() - began)


def expected_table(config: TrainConfig) -> list[str]:
    """Write the memory and the minutes of a shipped recipe on several devices, for its header.

    Where the recipe as it stands does not fit, adapters are tried.

    Raises:
        ConfigError: The recipe names models that are not known without their files.
    """
    lines = [
        "Expected by the cost model (asyncrl doctor --costs), not measured; all episodes of full length."
    ]
    if simulator_named(config.world):
        lines.append("What the simulators take comes on top.")
    if config.imagination.precision == "float8" and not simulator_named(config.world):
        lines.append(f"Actors: {float8_products(config.imagination.compile)}.")
    if config.learner.frozen_precision == "float8":
        lines.append(f"Learners: {float8_products(config.learner.compile)}.")
    lines.append(f"{'devices':<29}{'learner GiB':>12}{'actor GiB':>10}{'minutes an update':>19}  bound by")
    return [*lines, *_rows(config)]


def _rows(config: TrainConfig) -> Iterator[str]:
    choices = _choices(config)
    for count in COUNTS:
        rows: dict[str, list[str]] = {}
        for device in (H100, H200):
            flags, row = _row(config, choices, device, count)
            rows.setdefault(row, [flags]).append(f"{device.memory / 1e9:.0f}")
        for row, (flags, *sizes) in rows.items():
            name = f"{count} x {' or '.join(sizes)} GB{flags}"
            yield f"{name:<29}{row}"


def _row(config: TrainConfig, choices: Choices, device: DeviceRate, count: int) -> tuple[str, str]:
    """Return the flags that make the recipe fit, and what is expected of it then."""
    placement = parse_placement(config.placement, count, 0)
    least = []
    for flags, chosen, sizes, work in choices:
        found = predict(chosen, work, sizes, device, placement)
        if found.fits(device):
            own = f"{found.actor_bytes / GIB:.0f}" if found.actor_bytes else "the same"
            memory = f"{found.learner_bytes / GIB:>12.0f}{own:>10}"
            return flags, f"{memory}{minutes(found.seconds):>19}  {found.bottleneck}"
        least.append(max(found.learner_bytes, found.actor_bytes) / GIB)
    return "", f"does not fit: {min(least):.0f} GiB, and a tenth of a device stays free"


def _choices(config: TrainConfig) -> Choices:
    """Return the recipe, and the same with adapters where it trains all weights."""
    from asyncrl.doctor.published import published_run

    variants = [("", config)]
    if not config.lora.rank:
        variants.append((", adapters", replace(config, lora=replace(config.lora, rank=ADAPTERS))))
    return [(flags, chosen, *published_run(chosen)) for flags, chosen in variants]

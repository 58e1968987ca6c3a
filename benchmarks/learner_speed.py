"""How fast does the 7.5 B OpenVLA-OFT policy learn, and what does compilation gain?

    python benchmarks/learner_speed.py --rows 8 32
    python benchmarks/learner_speed.py --recomputed               only the second table

Random weights, adapters, gradient checkpointing: one micro-batch forward, and forward and backward. The share
is that of the device's own rates of bfloat16 matrix products over the model's FLOPs: two passes with gradient
(adapters), one without; what checkpointing computes again counts as time only, as in `time/mfu`. The second
table is of layers that keep what they need, compiled: decisions per second beside those of a policy whose
layers all compute it again. On a GPU a third one says in which kernels a compiled pass spends its time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import policy_speed
import torch
import tyro
from measuring import Rate, commit, counted, heading, kernel_report, matmul_rate, seconds, table, wait
from policy_speed import SAMPLING, Reading, inputs

from asyncrl.policies.acceleration import compile_blocks, enable_gradient_checkpointing
from asyncrl.policies.interface import PolicyInputs
from asyncrl.policies.lora import add_lora
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy

BOTH: Final = "forward and backward"
KEPT_TITLES: Final = ["layers that compute again", "rows", "decisions/s", "ratio", "peak GiB"]


@dataclass(frozen=True, kw_only=True)
class Settings(policy_speed.Settings):
    """Time a learner's passes; adapters of rank `lora` learn."""

    rows: tuple[int, ...] = (8, 32)
    """Decisions of a micro-batch."""
    every: int = 1
    """--learner.gradient-checkpointing-every of the first table."""
    kept_rows: tuple[int, ...] = (16, 32)
    """Decisions of a micro-batch in the second table."""
    recomputed: bool = False
    """Make the second table, and nothing else."""


def build(settings: Settings) -> OpenVLAOFTPolicy:
    policy = policy_speed.build(settings, torch.device(settings.device))
    add_lora(policy, settings.lora, float(settings.lora), dtype=policy.config.torch_dtype)
    enable_gradient_checkpointing(policy, every=settings.every)
    return policy.eval()


def keep(policy: OpenVLAOFTPolicy, every: int) -> None:
    for block in policy.blocks():
        block.__dict__.pop("forward", None)
    if every:
        enable_gradient_checkpointing(policy, every=every)


def fix(policy: OpenVLAOFTPolicy) -> None:
    torch.compiler.reset()
    compile_blocks(policy, dynamic=False)


def kept(policy: OpenVLAOFTPolicy, settings: Settings) -> list[list[object]]:
    lines, usual = list[list[object]](), 0.0
    for rows in settings.kept_rows:
        given = inputs(policy, settings, rows, padded=False)
        for every in (1, 2, 4, 0):
            keep(policy, every)
            fix(policy)
            name = f"one in {every}" if every else "none"
            try:
                pace, peak = rows / timed(policy, given), peak_gib(policy.device)
            except torch.OutOfMemoryError:
                lines.append([name, rows, "does not fit", "", ""])
                continue
            usual = usual or pace
            lines.append([name, rows, f"{pace:.1f}", f"{pace / usual:.3f}", f"{peak:.1f}"])
            print(lines[-1], flush=True)
    keep(policy, settings.every)
    return lines


def timed(policy: OpenVLAOFTPolicy, given: PolicyInputs) -> float:
    both = passes(policy, given)[BOTH][1]
    both()
    if policy.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(policy.device)
    return seconds(both, policy.device, rounds=4)


def peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def passes(policy: OpenVLAOFTPolicy, given: PolicyInputs) -> dict[str, tuple[int, Callable[[], object]]]:
    shape = (len(given.input_ids), policy.config.slots)
    tokens = policy.as_chunk(torch.randint(0, 256, shape, device=policy.device))

    @torch.no_grad()
    def forward() -> object:
        return policy.evaluate(given, {"tokens": tokens}, SAMPLING)

    def both() -> None:
        found = policy.evaluate(given, {"tokens": tokens}, SAMPLING)
        (found.logprob.mean() + found.entropy.mean()).backward()

    return {"forward": (1, forward), BOTH: (2, both)}


def read(policy: OpenVLAOFTPolicy, how: str, settings: Settings, flops: float, rate: Rate) -> list[Reading]:
    found = []
    cases = [(rows, False) for rows in settings.rows] + [(settings.rows[-1], True)]
    for rows, padded in cases:
        given = inputs(policy, settings, rows, padded=padded)
        for name, (count, run) in passes(policy, given).items():
            began = time.perf_counter()
            run()
            wait(policy.device)
            first = time.perf_counter() - began
            taken = seconds(run, policy.device, rounds=4)
            label = f"{name}, {how}" + (", padded" if padded else "")
            pace = count * flops * rows / taken
            shares = {"burst": pace / rate.burst, "sustained": pace / rate.sustained}
            found.append(Reading(how=label, rows=rows, seconds=taken, first=first, **shares))
            print(found[-1], flush=True)
    return found


def report(readings: list[Reading]) -> str:
    lines = [
        [r.how, r.rows, f"{1000 * r.seconds:.1f}", f"{r.burst:.1%}", f"{r.sustained:.1%}", f"{r.first:.0f}"]
        for r in readings
    ]
    return table(["", "rows", "ms", "of burst", "of sustained", "first call s"], lines)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    device = torch.device(settings.device)
    print(heading(device), flush=True)
    rate = matmul_rate(device)
    print(f"{rate}\n", flush=True)
    policy = build(settings)
    if settings.recomputed:
        lines = kept(policy, settings)
        print("\n" + table(KEPT_TITLES, lines))
        _finish(settings, {"kept": lines})
        return
    one = inputs(policy, settings, 1, padded=False)
    flops = counted(passes(policy, one)["forward"][1])
    readings = read(policy, "eager", settings, flops, rate)
    compile_blocks(policy)
    readings += read(policy, "compiled", settings, flops, rate)
    last = passes(policy, inputs(policy, settings, settings.rows[-1], padded=False))[BOTH][1]
    where = kernel_report(f"{BOTH}, compiled", last, device)
    print("\n" + report(readings) + "\n\n" + where)
    fewer = kept(policy, settings)
    print("\n" + table(KEPT_TITLES, fewer))
    content: dict[str, object] = {"matmul": vars(rate), "flops": flops, "kernels": where}
    _finish(settings, content | {"readings": [vars(reading) for reading in readings], "kept": fewer})


def _finish(settings: Settings, content: dict[str, object]) -> None:
    device = torch.device(settings.device)
    if device.type == "cuda":
        print(f"\npeak memory {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB")
    if settings.json:
        Path(settings.json).write_text(json.dumps({"commit": commit()} | content, indent=1))


if __name__ == "__main__":
    main()

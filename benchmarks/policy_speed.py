"""How fast does the 7.5 B OpenVLA-OFT policy decide, and does it see the same when it learns?

    python benchmarks/policy_speed.py --rows 1 8 32

Random weights: speed does not depend on the values. A decision is pictures and prompts to 56 tokens; its
share is that of the device's own rate of bfloat16 matrix products over counted FLOPs. The last lines compare
the log-probs of acting (compiled) with those that the learner computes for the same tokens (eager).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from measuring import Rate, commit, counted, heading, matmul_rate, randomised, seconds, table, wait

from asyncrl.policies.acceleration import GraphedChoice, compile_blocks
from asyncrl.policies.interface import PolicyInputs, SamplingParams
from asyncrl.policies.lora import add_lora
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy, new_policy

SAMPLING = SamplingParams(temperature=1.6, top_k=0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time the policy."""

    rows: tuple[int, ...] = (1, 8, 32)
    """Decisions made together."""
    prompt: int = 35
    """Tokens of the prompt."""
    lora: int = 32
    """Rank of the adapters in the last line; 0: without that line."""
    device: str = "cuda"
    tiny: bool = False
    """The embedded size, to try the script on a CPU."""
    json: str = ""
    """Also write the numbers here."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One line of the table."""

    how: str
    rows: int
    seconds: float
    burst: float
    """Share of the first rate of matrix products."""
    sustained: float
    """Share of the sustained one."""
    first: float
    """Seconds of the first call: compilation."""


def build(settings: Settings, device: torch.device) -> OpenVLAOFTPolicy:
    config = OpenVLAOFTConfig.tiny() if settings.tiny else OpenVLAOFTConfig.full()
    with torch.device("meta"):
        policy = new_policy(config)
    made: Any = randomised(policy, device, config.torch_dtype)
    made.restore_buffers()
    return made


def inputs(policy: OpenVLAOFTPolicy, settings: Settings, rows: int, *, padded: bool) -> PolicyInputs:
    device, side = policy.device, 64 if settings.tiny else 256
    mask = torch.ones(rows, settings.prompt, dtype=torch.int64, device=device)
    if padded:
        mask[::2, 1:5] = 0
    return PolicyInputs(
        pixels=torch.randint(0, 256, (rows, side, side, 3), dtype=torch.uint8, device=device),
        input_ids=torch.randint(3, policy.config.first_action_id, mask.shape, device=device),
        attention_mask=mask,
        padded=padded,
    )


def read(
    how: str, choose: Callable[..., Any], given: PolicyInputs, slots: int, flops: float, rate: Rate
) -> Reading:
    rows, device = len(given.input_ids), given.input_ids.device
    uniforms = torch.rand(rows, slots, dtype=torch.float64, device=device)
    decide = partial(choose, given, SAMPLING, uniforms)
    began = time.perf_counter()
    decide()
    wait(device)
    first = time.perf_counter() - began
    taken = seconds(decide, device, rounds=20 if rows < 8 else 6)
    pace = flops * rows / taken
    shares = {"burst": pace / rate.burst, "sustained": pace / rate.sustained}
    print(f"{how:22} {rows:3} rows  {1000 * taken:7.1f} ms  {shares}  first {first:.0f} s", flush=True)
    return Reading(how=how, rows=rows, seconds=taken, first=first, **shares)


def captured(policy: OpenVLAOFTPolicy) -> Callable[..., Any]:
    return GraphedChoice(policy.choose) if policy.device.type == "cuda" else policy.choose


@torch.no_grad()
def agreement(policy: OpenVLAOFTPolicy, choose: Callable[..., Any], given: PolicyInputs) -> dict[str, float]:
    rows = len(given.input_ids)
    uniforms = torch.rand(rows, policy.config.slots, dtype=torch.float64, device=policy.device)
    chosen = choose(given, SAMPLING, uniforms)
    acted = chosen.logprobs.gather(-1, chosen.tokens.unsqueeze(-1)).squeeze(-1)
    with torch.compiler.set_stance("force_eager"):
        evaluated = policy.evaluate(
            given, {"tokens": policy.as_chunk(chosen.tokens)}, SAMPLING
        ).logprob.flatten(1)
    off = (acted - evaluated).abs()
    whole = (acted - evaluated).sum(dim=1).abs()
    return {
        "mean per token": float(off.mean()),
        "max per token": float(off.max()),
        "mean per decision": float(whole.mean()),
        "max per decision": float(whole.max()),
    }


@torch.inference_mode()
def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    device = torch.device(settings.device)
    print(heading(device), flush=True)
    rate = matmul_rate(device)
    print(f"{rate}\n", flush=True)
    policy = build(settings, device)
    slots = policy.config.slots
    one = inputs(policy, settings, 1, padded=False)
    flops = counted(partial(policy.choose, one, SAMPLING, None))
    readings = []
    for rows in settings.rows:
        given = inputs(policy, settings, rows, padded=False)
        readings.append(read("eager", policy.choose, given, slots, flops, rate))
    most = settings.rows[-1]
    mixed = inputs(policy, settings, most, padded=True)
    compile_blocks(policy, dynamic=False)
    for rows in settings.rows:
        given = inputs(policy, settings, rows, padded=False)
        readings.append(read("compiled", captured(policy), given, slots, flops, rate))
    readings.append(read("compiled, padded", captured(policy), mixed, slots, flops, rate))
    same = agreement(policy, captured(policy), mixed)
    if settings.lora:
        add_lora(policy, settings.lora, float(settings.lora), dtype=policy.config.torch_dtype)
        compile_blocks(policy, dynamic=False)
        readings.append(read(f"... LoRA rank {settings.lora}", captured(policy), mixed, slots, flops, rate))

    print(f"\n{flops / 1e12:.2f} TFLOP per decision, {settings.prompt} prompt tokens\n")
    print(table(
        ["", "rows", "ms", "decisions/s", "of burst", "of sustained", "first call s"],
        [[r.how, r.rows, f"{1000 * r.seconds:.1f}", f"{r.rows / r.seconds:.0f}",
          f"{r.burst:.1%}", f"{r.sustained:.1%}", f"{r.first:.0f}"] for r in readings]))  # fmt: skip
    print("\nlog-probs of acting against evaluating: " + ", ".join(f"{k} {v:.1e}" for k, v in same.items()))
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB")
    if settings.json:
        content = {"commit": commit(), "matmul": vars(rate), "flops": flops, "agreement": same}
        content["readings"] = [vars(reading) for reading in readings]
        Path(settings.json).write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()

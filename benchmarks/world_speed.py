"""How fast does the Wan world imagine at its published size, and what do compilation and shortcuts gain?

    python benchmarks/world_speed.py --rows 16 32

Random weights: speed does not depend on the values. The first table is per stage: the seconds that a decision
(8 frames of each slot) takes, and its share of the device's own rates of bfloat16 matrix products over
counted FLOPs. The second is frames per second of whole decisions; every line that begins with + adds to the
one before it, and the ratio is to the first line, in the same run. The last tables say in which kernels a
compiled decision spends its time, as stored and with 8-bit products.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from measuring import (
    Rate,
    commit,
    counted,
    heading,
    kernel_report,
    matmul_rate,
    randomised,
    seconds,
    table,
    wait,
)

from asyncrl.records import ACTION_DIM, CHUNK, StartState
from asyncrl.worlds.layers import use_float8
from asyncrl.worlds.wan.tiny_decoder import TinyDecoder, TinyDecoderConfig
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig
from asyncrl.worlds.wan.vae import VaeConfig, WanVae, encode_step, use_channels_last
from asyncrl.worlds.wan.world import WanState, WanWorld


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time the world model."""

    rows: tuple[int, ...] = (16, 32)
    """Slots imagined together; the second table uses the last one."""
    rounds: int = 3
    """Decisions per reading."""
    device: str = "cuda"
    """Where."""
    tiny: bool = False
    """The embedded sizes, to try the script on a CPU."""
    json: str = ""
    """Also write the numbers here."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One reading of the first table."""

    stage: str
    how: str
    rows: int
    seconds: float
    burst: float
    """Share of the first rate of matrix products."""
    sustained: float
    """Share of the sustained one."""


def build(settings: Settings, device: torch.device) -> WanWorld:
    size, vae_size = TransformerConfig.full(), VaeConfig.full()
    if settings.tiny:
        size, vae_size = TransformerConfig.tiny(), VaeConfig.tiny()
    with torch.device("meta"):
        transformer, vae = ActionWanTransformer(size), WanVae(vae_size)
    dtype = torch.float32 if settings.tiny else torch.bfloat16
    transformer: Any = randomised(transformer, device, dtype)
    vae: Any = randomised(vae, device, dtype)
    transformer.rope = WanRotaryPosEmbed(size.head_dim, (1, size.patch, size.patch), 1024).to(device)
    use_channels_last(vae)
    pixels = 64 if settings.tiny else 256
    return WanWorld(transformer, vae, image_size=pixels, schedule_steps=5, device=device, memory="frames")


def tiny_decoder(settings: Settings, device: torch.device, vae: WanVae) -> TinyDecoder:
    with torch.device("meta"):
        decoder = TinyDecoder(TinyDecoderConfig.tiny() if settings.tiny else TinyDecoderConfig.full())
    made: Any = randomised(decoder, device, vae.dtype)
    return made


def begin(world: WanWorld, rows: int) -> tuple[WanState, torch.Tensor, list[int]]:
    rng = np.random.default_rng(0)
    side = world.image_size
    one = StartState(
        name="random",
        task="",
        frame=rng.integers(0, 256, (side, side, 3), dtype=np.uint8),
        context_frames=np.zeros((0, side, side, 3), np.uint8),
        context_actions=np.zeros((0, ACTION_DIM), np.float32),
    )
    state = world.start([one]).select([0] * rows)
    return state, torch.randn(rows, CHUNK, ACTION_DIM, device=world.device), list(range(rows))


def stages(world: WanWorld, rows: int) -> dict[str, Callable[[int], object]]:
    state, actions, seeds = begin(world, rows)
    new = torch.randn_like(state.anchor.expand(-1, -1, 2, -1, -1))
    window = torch.cat([state.memory, new], dim=2)
    side = world.image_size
    frames = torch.rand(rows, 3, 4, side, side, device=world.device) * 2 - 1

    def split_slots(tensors: list[torch.Tensor], n: int) -> list[torch.Tensor]:
        return [tensor[:n] for tensor in tensors]

    layers = {"layers": world._encoder_layers}
    return {
        "encode": lambda n: encode_step(world.vae, frames[:n], split_slots(state.encoder_cache, n), **layers),
        "denoise": lambda n: world.denoise(state if n == rows else state.select([0]), actions[:n], seeds[:n]),
        "decode": lambda n: world.decoder.decode(window[:n], split_slots(state.cache, n)),
    }


@torch.inference_mode()
def measure_stages(
    world: WanWorld, how: str, settings: Settings, rate: Rate, flops: dict[str, float]
) -> list[Stage]:
    found = []
    for rows in settings.rows:
        for name, run in stages(world, rows).items():
            if name not in flops:
                flops[name] = counted(partial(run, 1))
            taken = seconds(partial(run, rows), world.device, rounds=settings.rounds)
            pace = flops[name] * rows / taken
            shares = {"burst": pace / rate.burst, "sustained": pace / rate.sustained}
            found.append(Stage(stage=name, how=how, rows=rows, seconds=taken, **shares))
            print(f"{name:8} {how:9} {rows:3} slots  {1000 * taken:8.1f} ms  {shares}", flush=True)
    return found


@torch.inference_mode()
def frames_per_second(world: WanWorld, settings: Settings) -> float:
    rows = settings.rows[-1]
    state, actions, seeds = begin(world, rows)
    taken = seconds(lambda: world.imagine(state, actions, seeds), world.device, rounds=settings.rounds)
    return CHUNK * rows / taken


@torch.inference_mode()
def kernels_of(world: WanWorld, settings: Settings, how: str) -> str:
    state, actions, seeds = begin(world, settings.rows[-1])
    return kernel_report(how, lambda: world.imagine(state, actions, seeds), world.device)


def compiled_paces(world: WanWorld, settings: Settings, how: str) -> Iterator[tuple[str, float]]:
    yield f"exact, {how}", frames_per_second(world, settings)
    world.memory = "latents"
    yield "+ memory in latents, decoder goes on", frames_per_second(world, settings)
    world.decoder = tiny_decoder(settings, world.device, world.vae)
    world.decoder.compile()
    yield "+ tiny decoder", frames_per_second(world, settings)
    for steps in (3, 1):
        world.schedule_steps = steps
        yield f"+ {steps} of 5 steps", frames_per_second(world, settings)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    device = torch.device(settings.device)
    print(heading(device), flush=True)
    rate = matmul_rate(device)
    print(f"{rate}\n", flush=True)
    world = build(settings, device)
    rows, flops = settings.rows[-1], dict[str, float]()
    measured = measure_stages(world, "eager", settings, rate, flops)
    pace = [("exact, eager", frames_per_second(world, settings))]

    world.compile(rows)
    only = replace(settings, rows=(rows,))  # Another number of slots would be compiled anew.
    measured += measure_stages(world, "compiled", only, rate, flops)
    where = [kernels_of(world, settings, "exact, compiled")]
    pace += compiled_paces(world, settings, "compiled")
    del world
    world = build(settings, device)
    use_float8(world.transformer.blocks)
    world.compile(rows)
    measured += [s for s in measure_stages(world, "float8", only, rate, flops) if s.stage == "denoise"]
    where.append(kernels_of(world, settings, "exact, compiled, float8"))
    pace += compiled_paces(world, settings, "compiled, float8")
    wait(device)

    print("\n" + table(
        ["stage", "how", "slots", "TFLOP/slot", "ms", "of burst", "of sustained"],
        [[s.stage, s.how, s.rows, f"{flops[s.stage] / 1e12:.2f}", f"{1000 * s.seconds:.1f}",
          f"{s.burst:.1%}", f"{s.sustained:.1%}"] for s in measured]))  # fmt: skip
    first = pace[0][1]
    print("\n" + table(
        [f"{rows} slots", "frames/s", "ratio"],
        [[name, f"{value:.0f}", f"{value / first:.2f}"] for name, value in pace]))  # fmt: skip
    print("\n" + "\n\n".join(where))
    if device.type == "cuda":
        print(f"\npeak memory {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB")
    if settings.json:
        content = {"commit": commit(), "matmul": vars(rate), "flops": flops, "pace": pace}
        content["kernels"] = where
        content["stages"] = [vars(stage) for stage in measured]
        Path(settings.json).write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()

"""How fast do OpenSora's and EVAC's worlds imagine at their published sizes, and what do they take?

    python benchmarks/published_worlds_speed.py --json speed.json    everything
    python benchmarks/published_worlds_speed.py --worlds evac --parts networks state
    python benchmarks/published_worlds_speed.py --tiny --device cpu --rows 2

Random weights: speed does not depend on the values. The parts, each for the worlds that it is about:

    networks   STDiT3's step, EVAC's UNet and both frame decoders: share of the device's own rate of bfloat16
               matrix products, measured in the same run, over counted FLOPs
    prefix     OpenSora's decisions with keys and values of the condition frames computed once, against the
               whole window in every step
    compile    whole decisions, compiled against eager
    state      bytes that a slot remembers
    memory     peak device memory while decisions are imagined, beside weights and the doctor's `slot_bytes`

The last table has all of it, with what is asked for. Frames per second count all slots.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro
from measuring import Rate, commit, counted, heading, matmul_rate, seconds, table
from random_worlds import begin, build_evac, build_opensora
from torch import Tensor

from asyncrl.devices.cuda_graph import CudaGraphed
from asyncrl.records import CHUNK, SlotBytes
from asyncrl.worlds.evac.conditions import conditions_of
from asyncrl.worlds.evac.world import EvacWorld, estimate_slot
from asyncrl.worlds.opensora.memory import slot_bytes
from asyncrl.worlds.opensora.rectified_flow import sample
from asyncrl.worlds.opensora.world import OpenSoraWorld

GIB, MIB = 2**30, 2**20
Part = Literal["networks", "prefix", "compile", "state", "memory"]
Name = Literal["opensora", "evac"]
World = OpenSoraWorld | EvacWorld


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time the published worlds."""

    rows: int = 16
    """Slots imagined together."""
    rounds: int = 2
    """Decisions per reading."""
    decisions: int = 32
    """Of an episode, which EVAC has room for."""
    worlds: tuple[Name, ...] = ("opensora", "evac")
    """Which of them."""
    parts: tuple[Part, ...] = ("networks", "prefix", "compile", "state", "memory")
    """What is measured; see above."""
    evac_steps: int = 0
    """EVAC's network calls per decision; 0: as published, 50."""
    device: str = "cuda"
    """Where."""
    tiny: bool = False
    """Small sizes, to try the script on a CPU."""
    json: str = ""
    """Also write the numbers here."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A line of the last table."""

    world: Name
    part: Part
    what: str
    value: float
    unit: str
    asked: str = ""
    """What it should be; empty: nothing is asked for."""
    beside: str = ""
    """What it is to be seen beside."""


# ---- networks ------------------------------------------------------------------------------------


def opensora_networks(world: OpenSoraWorld, settings: Settings) -> dict[str, Callable[[int], object]]:
    """A step and the drawing of a decision, as functions of the number of slots."""
    state, actions, _ = begin(world, settings.rows, settings.decisions)
    cond, rows = state.latents, settings.rows
    new = torch.randn(rows, cond.shape[1], CHUNK, *cond.shape[3:], device=world.device)
    times = torch.full((rows,), 500.0, device=world.device)
    prefixes = {n: world.transformer.prefix(cond[:n]) for n in {1, rows}}

    def step(n: int) -> Tensor:
        return world.transformer.step(new[:n], times[:n], actions[:n], prefixes[n])

    return {
        "STDiT3, a step": step,
        "frame decoder": lambda n: world.vae.decode(new[:n].transpose(1, 2).flatten(0, 1)),
    }


def evac_networks(world: EvacWorld, settings: Settings) -> dict[str, Callable[[int], object]]:
    """A call of the UNet and the drawing of a decision, as functions of the number of slots."""
    state, actions, _ = begin(world, settings.rows, settings.decisions)
    told = conditions_of(
        world.networks,
        world._geometry,
        state,
        actions,
        remembered=world.config.history,
        encode=lambda maps: world._encode(maps, world._encode_frames),
    )
    shape = (settings.rows, told.history.shape[1], CHUNK, *told.history.shape[3:])
    new = torch.randn(shape, device=world.device)

    def unet(n: int) -> Tensor:
        own = {name: value[:n] if isinstance(value, Tensor) else value for name, value in vars(told).items()}
        return world._told_velocity(type(told)(**own), new[:n], 500)

    return {
        "UNet, a step": unet,
        "frame decoder": lambda n: world._decode(new[:n].transpose(1, 2).flatten(0, 1)),
    }


ASKED_SHARE = {"STDiT3, a step": 0.55, "UNet, a step": 0.45, "frame decoder": 0.5}
"""Of the device's rate, compiled."""


@torch.inference_mode()
def measure_networks(
    world: World, name: Name, how: str, settings: Settings, rate: Rate, flops: dict[str, float]
) -> Iterator[Reading]:
    """Time the networks; `flops` of one slot are counted while nothing is compiled."""
    found = (
        opensora_networks(world, settings)
        if isinstance(world, OpenSoraWorld)
        else evac_networks(world, settings)
    )
    for what, run in found.items():
        if what not in flops:
            flops[what] = counted(partial(run, 1))
        taken = seconds(partial(run, settings.rows), world.device, rounds=5 * settings.rounds)
        room = working_memory(partial(run, settings.rows), world.device)
        pace = flops[what] * settings.rows / taken
        asked = f">= {100 * ASKED_SHARE[what]:.0f}" if how == "compiled" else ""
        work = f"{1000 * taken:.1f} ms, {flops[what] / 1e12:.3g} TFLOP/slot"
        beside = f"{work}, {100 * pace / rate.burst:.0f} % of burst, works in {room / GIB:.2f} GiB"
        share = 100 * pace / rate.sustained
        yield Reading(
            world=name,
            part="networks",
            what=f"{what}, {how}",
            value=share,
            unit="%",
            asked=asked,
            beside=beside,
        )


def working_memory(action: Callable[[], object], device: torch.device) -> int:
    """Bytes that `action` has allocated at most, its result included."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    return torch.cuda.max_memory_allocated(device) - before


# ---- decisions -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """Whole decisions of all slots."""

    pace: float
    """Frames per second."""
    peak: int
    """Bytes of device memory at most, weights and the states before and after a decision included."""


@torch.inference_mode()
def decide(world: World, how: str, settings: Settings) -> Decisions:
    """Time decisions and watch the memory that they take."""
    on_gpu = world.device.type == "cuda"
    state, actions, seeds = begin(world, settings.rows, settings.decisions)
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    rounds = settings.rounds
    taken = seconds(lambda: world.imagine(state, actions, seeds), world.device, rounds=rounds, warm=1)
    # What a captured graph works in stays reserved for it, and counts as allocated while it is captured only.
    peak = torch.cuda.max_memory_reserved if how == "compiled" else torch.cuda.max_memory_allocated
    return Decisions(pace=CHUNK * settings.rows / taken, peak=peak(world.device) if on_gpu else 0)


def whole_window(world: OpenSoraWorld) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The sampler that shows the transformer all twelve frames in every step."""

    def velocity(condition: Tensor, scaled: Tensor, new: Tensor, times: Tensor) -> Tensor:
        return world.transformer(torch.cat([condition, new], dim=2), times, scaled)

    def draw(condition: Tensor, noise: Tensor, scaled: Tensor) -> Tensor:
        return sample(partial(velocity, condition, scaled), noise, steps=world.schedule_steps)

    return draw


def measure_window(world: OpenSoraWorld, how: str, with_prefix: float, settings: Settings) -> Reading:
    """Compare decisions with the prefix cache, whose frames per second are known, to those without."""
    kept, plain = world._sampler, whole_window(world)
    world._sampler = CudaGraphed(plain) if isinstance(kept, CudaGraphed) else plain
    without = decide(world, how, settings).pace
    world._sampler = kept
    return Reading(
        world="opensora",
        part="prefix",
        what=f"prefix cache over whole window, {how}",
        value=with_prefix / without,
        unit="times",
        asked=">= 1.3" if how == "compiled" else "",
        beside=f"{with_prefix:.1f} and {without:.1f} frames/s",
    )


def compile_world(world: World, rows: int) -> None:
    """Compile as an actor does."""
    world.compile(rows)


# ---- memory --------------------------------------------------------------------------------------


def doctor_slot(world: World, settings: Settings) -> SlotBytes:
    """What the doctor takes slots for."""
    dtype = torch.float32 if settings.tiny else torch.bfloat16
    if isinstance(world, EvacWorld):
        return estimate_slot(world.config, settings.decisions, dtype)
    return slot_bytes(world.transformer.size, world.vae.size, world.image_size, dtype)


def measure_state(world: World, name: Name, settings: Settings) -> Reading:
    """Count the bytes of the tensors of a slot's state."""
    state, _, _ = begin(world, settings.rows, settings.decisions)
    tensors = [value for value in vars(state).values() if isinstance(value, Tensor)]
    each = sum(tensor.nbytes for tensor in tensors) / settings.rows
    asked = {"opensora": "<= 1", "evac": "<= 8"}[name]
    beside = f"room for {settings.decisions} decisions" if name == "evac" else ""
    return Reading(
        world=name,
        part="state",
        what="state of a slot",
        value=each / MIB,
        unit="MiB",
        asked=asked,
        beside=beside,
    )


def memory_reading(world: World, name: Name, how: str, peak: int, settings: Settings) -> Reading:
    """Hold the peak of decisions against what the doctor would have said."""
    weights = sum(p.nbytes for module in world.modules().values() for p in module.parameters())
    slot = doctor_slot(world, settings)
    drawing = slot.drawing(settings.rows, graphs=how == "compiled")
    estimate = weights + settings.rows * slot.kept + drawing
    beside = (
        f"{estimate / GIB:.2f} by the doctor: weights {weights / GIB:.2f}, kept {slot.kept / MIB:.1f} and "
        f"scratch {slot.scratch / MIB:.0f} MiB a slot, shared {slot.shared / MIB:.0f} MiB"
    )
    return Reading(
        world=name, part="memory", what=f"peak memory, {how}", value=peak / GIB, unit="GiB",
        asked=f"{0.85 * estimate / GIB:.1f} - {1.15 * estimate / GIB:.1f}", beside=beside,
    )  # fmt: skip


# ---- all of it -----------------------------------------------------------------------------------


def measure(world: World, name: Name, settings: Settings, rate: Rate) -> Iterator[Reading]:
    """Measure one world: eager first, then compiled."""
    flops, found = dict[str, float](), dict[str, Decisions]()
    parts = set(settings.parts)
    if "state" in parts:
        yield measure_state(world, name, settings)
    for how in ("eager", "compiled") if parts - {"state"} else ():
        if how == "compiled":
            compile_world(world, settings.rows)
        if parts & {"prefix", "compile", "memory"}:
            found[how] = decide(world, how, settings)
            print(f"{name} {how}: {found[how].pace:.1f} frames/s", flush=True)
        if "memory" in parts:
            yield memory_reading(world, name, how, found[how].peak, settings)
        if "networks" in parts:
            yield from measure_networks(world, name, how, settings, rate, flops)
        if "prefix" in parts and isinstance(world, OpenSoraWorld):
            yield measure_window(world, how, found[how].pace, settings)
    if "compile" in parts:
        compiled, eager = found["compiled"].pace, found["eager"].pace
        beside = f"{compiled:.1f} and {eager:.1f} frames/s, {steps_of(world)} steps"
        yield Reading(
            world=name, part="compile", what="compiled over eager", value=compiled / eager, unit="times",
            asked=">= 1.4", beside=beside,
        )  # fmt: skip


def steps_of(world: World) -> int:
    """Network calls per decision."""
    return world.schedule_steps if isinstance(world, OpenSoraWorld) else len(world.steps)


def measure_all(settings: Settings, device: torch.device, rate: Rate) -> list[Reading]:
    """Measure the worlds one after the other; only one is on the device at a time."""
    found = list[Reading]()
    for name in settings.worlds:
        if name == "opensora":
            world = build_opensora(tiny=settings.tiny, device=device)
        else:
            world = build_evac(tiny=settings.tiny, steps=settings.evac_steps, device=device)
        for reading in measure(world, name, settings, rate):
            print(" | ".join(line_of(reading)), flush=True)
            found.append(reading)
        del world
        gc.collect()
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def line_of(reading: Reading) -> list[str]:
    """A reading as cells of the last table."""
    value = f"{reading.value:.2f} {reading.unit}"
    return [f"{reading.world}: {reading.what}", value, reading.asked, reading.beside]


def write_json(path: Path, settings: Settings, rate: Rate, readings: Sequence[Reading]) -> None:
    """Write settings, the device's rates and all readings."""
    content = {"commit": commit(), "settings": asdict(settings), "matmul": vars(rate)}
    content["readings"] = [asdict(reading) for reading in readings]
    path.write_text(json.dumps(content, indent=1))


def main() -> None:
    """Measure, print."""
    settings = tyro.cli(Settings, description=__doc__)
    device = torch.device(settings.device)
    print(heading(device), flush=True)
    rate = matmul_rate(device)
    print(f"{rate}\n", flush=True)
    readings = measure_all(settings, device, rate)
    if settings.json:
        write_json(Path(settings.json), settings, rate, readings)
    titles = [f"{settings.rows} slots", "measured", "asked", ""]
    print("\n" + table(titles, [line_of(reading) for reading in readings]))


if __name__ == "__main__":
    main()

"""What each approximation of the world model gains and costs: episodes imagined exactly and otherwise.

    python benchmarks/world_approximations.py                               the shipped world, on the CPU
    python benchmarks/world_approximations.py --random full --device cuda   true size: speed alone

A policy plays in the exact world first: frames as memory, the full decoder, as many steps as the folder says.
Then every line imagines the same episodes again, from the same start states with the same actions and noise
seeds, and is compared with the exact frames. "exact, other noise" is for scale: two draws of the exact world.
Speed is measured in rounds in which the lines take turns; a gain is the median of the ratios to the exact
line of the same round.
"""

from __future__ import annotations

import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from asyncrl.devices.float8 import use_float8
from asyncrl.fitting.fit_decoder import psnr
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.policies.openvla.policy import load_policy
from asyncrl.records import ACTION_DIM, CHUNK, StartState
from asyncrl.rewards.model import ResNetReward, load_reward
from asyncrl.storage.asset_paths import policy_folder, start_states_path, world_folder
from asyncrl.worlds.start_states import load_start_states, start_state_at
from asyncrl.worlds.wan.tiny_decoder import Decoder, TinyDecoder, TinyDecoderConfig, load_decoder
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig
from asyncrl.worlds.wan.vae import VaeConfig, WanVae
from asyncrl.worlds.wan.world import WanWorld, load_world

BANDS = ((1, 1), (2, 3), (4, 6))
"""First and last decision of each band of the PSNR."""
TASK = "any"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure the approximations of a world model against its exact path."""

    world: str = "tabletop"
    """World, with its reward model and its tiny decoder."""
    policy: str = "tabletop"
    """Policy that chooses the actions."""
    start_states: str = "tabletop"
    """Where episodes begin."""
    random: Literal["", "tiny", "full"] = ""
    """Random weights of this size instead of --world, random actions and pictures: for speed alone."""
    episodes: int = 64
    """Episodes to compare."""
    decisions: int = 6
    """Length of an episode."""
    batch: int = 16
    """Slots of a decision, also while speed is measured."""
    rounds: int = 5
    """Rounds of the speed measurement, in each of which every line imagines one batch of episodes."""
    threshold: float = 0.7
    """Probability from which a frame counts as success."""
    steps: tuple[int, ...] = (4, 3, 2, 1)
    """Numbers of denoising steps to try alone."""
    together_steps: tuple[int, ...] = (3, 2, 1)
    """Numbers of denoising steps to try with everything else."""
    only: tuple[str, ...] = ()
    """Names of the lines beside the exact one; none: all."""
    compile: bool = False
    """Add compiled lines: the exact one, and everything together."""
    device: str = "cpu"
    """Where the models run; on a GPU the world computes in bfloat16."""
    seed: int = 0
    """Of start states, actions and noise."""
    json: str = ""
    """Also write the numbers here."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One way to imagine."""

    name: str
    memory: Literal["frames", "latents"] = "frames"
    decoder: Literal["full", "anew", "tiny"] = "full"
    """anew: the full decoder, which draws the memory again before the new latents and keeps nothing else."""
    steps: int = 0
    """Network calls per decision; 0 = the folder's."""
    other_noise: bool = False
    float8: bool = False
    """See `ImaginationSettings.precision`."""
    compile: bool = False


def lines(settings: Settings, full_steps: int) -> list[Line]:
    """The exact path first, then each approximation alone, then together."""
    found = [
        Line(name="exact"),
        Line(name="exact, other noise", other_noise=True),
        Line(name="exact, float8", float8=True),
        Line(name="latents as memory, decoder anew", memory="latents", decoder="anew"),
        Line(name="latents as memory, decoder goes on", memory="latents"),
        Line(name="the same with the tiny decoder", memory="latents", decoder="tiny"),
    ]
    found += [Line(name=f"exact, {_steps(steps)}", steps=steps) for steps in settings.steps]
    together = [Line(name="latents, tiny decoder", memory="latents", decoder="tiny", steps=full_steps)]
    together += [replace(together[0], steps=steps) for steps in settings.together_steps]
    together = [replace(line, name=f"{line.name}, {_steps(line.steps)}") for line in together]
    found += together[1:]
    if settings.compile:
        compiled = [found[0], found[2], found[4], *together]
        found += [replace(line, name=f"{line.name}, compiled", compile=True) for line in compiled]
    return found


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


class Anew:
    """Wraps the full decoder: every call draws [memory, new latents] behind the first frame, as published."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._opening = 0

    def decode(self, latents_BZFhw: Tensor, cache: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """Draw the next frames; the cache is what follows the first frame, and then the last latent."""
        if cache is None:
            frames, after = self.decoder.decode(latents_BZFhw, None)
            self._opening = len(after)
            return frames, after
        first, memory = list(cache[: self._opening]), list(cache[self._opening :])
        frames, _ = self.decoder.decode(torch.cat([*memory, latents_BZFhw], dim=2), first)
        drawn_before = 4 * len(memory)
        last = latents_BZFhw[:, :, -1:].clone()
        return frames[:, :, drawn_before:], [*(tensor.clone() for tensor in first), last]

    def compile(self) -> None:
        """Compile the wrapped decoder."""
        self.decoder.compile()


@dataclass(kw_only=True)
class Networks:
    """What the lines share; compiled lines have some of their own."""

    transformer: ActionWanTransformer
    rounded: ActionWanTransformer
    """The same in 8 bits."""
    vae: WanVae
    tiny: TinyDecoder
    image_size: int
    steps: int
    device: torch.device

    def world(self, line: Line) -> WanWorld:
        """Build the world of a line."""
        decoder: Decoder | None = self.tiny if line.decoder == "tiny" else None
        made: Any = self._world(line, decoder)
        return self._world(line, Anew(made.decoder)) if line.decoder == "anew" else made

    def _world(self, line: Line, decoder: Decoder | None) -> WanWorld:
        chosen: dict[str, Any] = {"memory": line.memory, "decoder": decoder}
        return WanWorld(
            self.rounded if line.float8 else self.transformer,
            self.vae,
            image_size=self.image_size,
            schedule_steps=line.steps or self.steps,
            device=self.device,
            **chosen,
        )


def build_networks(settings: Settings, device: torch.device) -> Networks:
    """Load the world of `--world`, or draw the weights of `--random`."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if settings.random:
        return random_networks(settings.random, device, dtype)
    folder = world_folder(settings.world)
    world = load_world(folder, device=device, dtype=dtype)
    size = world.vae.size
    own = {"latents_mean": size.latents_mean, "latents_std": size.latents_std}
    tiny = load_decoder(folder, **own, device=device, dtype=dtype)
    return Networks(
        transformer=world.transformer,
        rounded=_rounded(world.transformer),
        vae=world.vae,
        tiny=tiny,
        image_size=world.image_size,
        steps=world.schedule_steps,
        device=device,
    )


def random_networks(size: str, device: torch.device, dtype: torch.dtype) -> Networks:
    """Networks of a named size with random weights; speed does not depend on the values."""
    torch.manual_seed(0)
    full = size == "full"
    with torch.device(device):
        transformer = ActionWanTransformer(TransformerConfig.full() if full else TransformerConfig.tiny())
        torch.nn.Module.to(transformer, dtype)
        vae = WanVae(VaeConfig.full() if full else VaeConfig.tiny())
        tiny = TinyDecoder(TinyDecoderConfig.full() if full else TinyDecoderConfig.tiny())
    for module in (transformer, vae, tiny):
        torch.nn.Module.to(module, dtype).eval().requires_grad_(False)
    return Networks(
        transformer=transformer,
        rounded=_rounded(transformer),
        vae=vae,
        tiny=tiny,
        image_size=256 if full else 64,
        steps=5,
        device=device,
    )


def _rounded(transformer: ActionWanTransformer) -> ActionWanTransformer:
    rounded = copy.deepcopy(transformer)
    use_float8(rounded.blocks)
    return rounded


@dataclass(frozen=True, kw_only=True)
class Script:
    """What every line plays: where it begins and what is done."""

    starts: list[StartState]
    actions_ED8A: NDArray[np.float32]
    """``[E, D, 8, 7]``."""
    seed: int

    def noise(self, rows: Sequence[int], decision: int, other: bool) -> list[int]:
        """Noise seeds of a decision."""
        words = [[self.seed, int(other), row, decision] for row in rows]
        return [int(np.random.SeedSequence(word).generate_state(1)[0]) for word in words]


def write_script(settings: Settings, networks: Networks) -> tuple[Script, list[Tensor]]:
    """Let the policy play in the exact world; returns what it did and the exact frames, batch by batch."""
    starts = (
        random_starts(settings.episodes, networks.image_size) if settings.random else _first_starts(settings)
    )
    policy = None
    if not settings.random:
        policy = load_policy(policy_folder(settings.policy), device=networks.device).eval()
    rng = np.random.default_rng(settings.seed)
    actions = rng.uniform(-1, 1, (len(starts), settings.decisions, CHUNK, ACTION_DIM)).astype(np.float32)
    script = Script(starts=starts, actions_ED8A=actions, seed=settings.seed)
    return script, play(settings, networks.world(Line(name="exact")), script, Line(name="exact"), policy)


def _first_starts(settings: Settings) -> list[StartState]:
    states = load_start_states(start_states_path(settings.start_states, settings.world))
    return [start_state_at(states, settings.seed, n) for n in range(settings.episodes)]


def random_starts(count: int, size: int) -> list[StartState]:
    """Start states of noise."""
    rng = np.random.default_rng(0)
    nothing = (np.empty((0, size, size, 3), np.uint8), np.empty((0, ACTION_DIM), np.float32))
    return [
        StartState(
            name=str(n),
            task=TASK,
            frame=rng.integers(0, 256, (size, size, 3), dtype=np.uint8),
            context_frames=nothing[0],
            context_actions=nothing[1],
        )
        for n in range(count)
    ]


@torch.inference_mode()
def play(
    settings: Settings, world: WanWorld, script: Script, line: Line, policy: Policy | None = None
) -> list[Tensor]:
    """Imagine all episodes; a policy writes its actions into the script.

    Returns:
        Per batch the frames ``[B, 8 D, H, W, 3]`` uint8 in host memory.
    """
    sampling, parts = SamplingParams(temperature=1.0, top_k=0), []
    for begin in tqdm(range(0, len(script.starts), settings.batch), desc=line.name, mininterval=2.0):
        rows = range(begin, min(begin + settings.batch, len(script.starts)))
        some = [script.starts[row] for row in rows]
        state = world.start(some)
        seen = np.stack([start.present_frame for start in some])
        drawn: list[Tensor] = []
        for decision in range(settings.decisions):
            if policy is not None:
                inputs = policy.preprocess(seen, [start.task for start in some])
                acted = policy.act(inputs, sampling, script.noise(rows, decision, False))
                script.actions_ED8A[rows.start : rows.stop, decision] = acted.actions.cpu().numpy()
            actions = script.actions_ED8A[rows.start : rows.stop, decision]
            frames, state = world.imagine(state, actions, script.noise(rows, decision, line.other_noise))
            drawn.append(frames.cpu())
            seen = drawn[-1][:, -1].numpy()
        parts.append(torch.cat(drawn, dim=1))
    return parts


@dataclass(frozen=True, kw_only=True)
class StoredEpisode:
    """The figures of one line."""

    name: str
    psnr: list[float]
    """dB against the exact path, per band; 78.1 means equal."""
    same_verdict: float | None
    """Share of frames with the exact frame's verdict."""
    same_outcome: float | None
    """Share of episodes with the exact episode's outcome."""
    success: float | None
    """Share of episodes that the reward model calls solved."""
    gain: float = 0.0
    """Frames per second over those of the exact path in the same round, median."""
    frames_per_second: float = 0.0
    """Median."""


def compare(
    settings: Settings,
    name: str,
    frames: list[Tensor],
    exact: list[Tensor],
    reward: ResNetReward | None,
    tasks: list[str],
) -> StoredEpisode:
    """Compare a line's frames with the exact ones."""
    decibels = torch.cat([psnr(a, b) for a, b in zip(frames, exact, strict=True)])
    bands = [decibels[:, CHUNK * (first - 1) : CHUNK * last] for first, last in bands_of(settings.decisions)]
    means = [float(band.mean()) for band in bands]
    if reward is None:
        return StoredEpisode(name=name, psnr=means, same_verdict=None, same_outcome=None, success=None)
    mine, theirs = (verdicts(settings, reward, video, tasks) for video in (frames, exact))
    return StoredEpisode(
        name=name,
        psnr=means,
        same_verdict=float((mine == theirs).mean()),
        same_outcome=float((mine.any(1) == theirs.any(1)).mean()),
        success=float(mine.any(1).mean()),
    )


def bands_of(decisions: int) -> list[tuple[int, int]]:
    """The bands that episodes of this length have; the last one ends with the episode."""
    own = [(first, min(last, decisions)) for first, last in BANDS if first <= decisions]
    return [*own[:-1], (own[-1][0], decisions)] if len(own) == len(BANDS) else own


def verdicts(
    settings: Settings, reward: ResNetReward, frames: list[Tensor], tasks: list[str]
) -> NDArray[np.bool_]:
    """``[E, 8 D]`` bool."""
    scores, begin = [], 0
    for part in frames:
        scores.append(reward.score(part, tasks[begin : begin + len(part)]).cpu())
        begin += len(part)
    return (torch.cat(scores) >= settings.threshold).numpy()


@torch.inference_mode()
def seconds_of(settings: Settings, world: WanWorld, script: Script) -> float:
    """Time to imagine one batch of episodes, without opening them."""
    some = script.starts[: settings.batch]
    state = world.start(some)
    seeds = [script.noise(range(len(some)), decision, False) for decision in range(settings.decisions)]
    _wait(world.device)
    began = time.perf_counter()
    for decision in range(settings.decisions):
        frames, state = world.imagine(state, script.actions_ED8A[: len(some), decision], seeds[decision])
        frames.cpu()
    _wait(world.device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def race(settings: Settings, worlds: list[WanWorld], script: Script) -> list[tuple[float, float]]:
    """Gain over the first world and frames per second of every world; they take turns."""
    frames = min(settings.batch, len(script.starts)) * settings.decisions * CHUNK
    rates: list[list[float]] = []
    for _ in tqdm(range(settings.rounds), desc="speed", mininterval=2.0):
        rates.append([frames / seconds_of(settings, world, script) for world in worlds])
    return [
        (
            statistics.median(row[index] / row[0] for row in rates),
            statistics.median(row[index] for row in rates),
        )
        for index in range(len(worlds))
    ]


def table(rows: list[StoredEpisode], bands: list[tuple[int, int]]) -> str:
    """A Markdown table."""
    heads = [f"decision {first}" if first == last else f"decisions {first}-{last}" for first, last in bands]
    text = [
        f"| | gain | frames/s | PSNR, {' | '.join(heads)} | same verdict | same outcome | success |",
        "|---" * (6 + len(bands)) + "|",
    ]
    for row in rows:
        decibels = " | ".join("equal" if value > 78 else f"{value:.1f}" for value in row.psnr)
        shares = " | ".join(
            "-" if share is None else f"{share:.1%}"
            for share in (row.same_verdict, row.same_outcome, row.success)
        )
        text.append(f"| {row.name} | {row.gain:.2f}x | {row.frames_per_second:.0f} | {decibels} | {shares} |")
    return "\n".join(text)


def main() -> None:
    """Imagine, compare, race, print."""
    settings = tyro.cli(Settings, description=__doc__)
    device = torch.device(settings.device)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    threads = torch.get_num_threads()
    print(
        f"{' '.join(sys.argv)}\ncommit {commit.strip() or 'unknown'}, {where}, {threads} threads", flush=True
    )
    networks = build_networks(settings, device)
    reward = None if settings.random else load_reward(world_folder(settings.world), device=device)
    script, exact = write_script(settings, networks)
    chosen = lines(settings, networks.steps)
    chosen = [line for line in chosen if line == chosen[0] or not settings.only or line.name in settings.only]
    own = build_networks(settings, device) if settings.compile else networks
    worlds, rows, tasks = [], [], [start.task for start in script.starts]
    for line in chosen:
        world: Any = (own if line.compile else networks).world(line)
        if line.compile:
            world.compile(settings.batch)
        frames = exact if line == chosen[0] else play(settings, world, script, line)
        rows.append(compare(settings, line.name, frames, exact, reward, tasks))
        worlds.append(world)
    speeds = race(settings, worlds, script)
    rows = [
        replace(row, gain=gain, frames_per_second=rate)
        for row, (gain, rate) in zip(rows, speeds, strict=True)
    ]
    print(table(rows, bands_of(settings.decisions)))
    if settings.json:
        Path(settings.json).write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()

"""A world, a policy and start states in; latents and the frames that the world's decoder draws of them out.

What a tiny decoder learns from: pairs that the world makes itself, so no recordings are needed.

Dimension letters: E episodes, B episodes imagined at once, D decisions, Z latent channels, h w latent grid,
F = 2 + 2 D latent frames, T = 5 + 8 D frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from asyncrl.devices.tensors import to_uint8
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.records import StartState
from asyncrl.worlds.wan.tiny_decoder import Decoder
from asyncrl.worlds.wan.world import WanWorld


@dataclass(frozen=True, kw_only=True)
class Imagined:
    """Episodes as a decoder sees them, in host memory."""

    latents: Tensor
    """``[E, Z, F, h, w]`` float32, normalised: the anchor, the first memory, two per decision."""
    frames: Tensor
    """``[E, T, H, W, 3]`` uint8 that the full decoder drew of them as one stream."""
    tasks: list[str]
    """``[E]`` instructions."""

    def __len__(self) -> int:
        return len(self.tasks)


class Recorder:
    """Passes latents on to a decoder, and keeps them and the frames that come back."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.latents: list[Tensor] = []
        self.frames: list[Tensor] = []

    def decode(self, latents_BZFhw: Tensor, cache: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """Draw the next frames; see `Decoder`."""
        frames, after = self.decoder.decode(latents_BZFhw, cache)
        self.latents.append(latents_BZFhw.float().cpu())
        self.frames.append(to_uint8(frames).permute(0, 2, 3, 4, 1).cpu())
        return frames, after

    def speed_up(self) -> None:
        """Compile the decoder it passes latents on to."""
        self.decoder.speed_up()


@contextmanager
def recorded(world: WanWorld) -> Iterator[Recorder]:
    """Record what the world's decoder is given, for as long as the block lasts."""
    recorder = Recorder(world.decoder)
    world.decoder = recorder
    try:
        yield recorder
    finally:
        world.decoder = recorder.decoder


@torch.no_grad()
def imagine_episodes(
    world: WanWorld,
    policy: Policy,
    sampling: SamplingParams,
    starts: Sequence[StartState],
    *,
    decisions: int,
    batch: int,
    seed: int,
    name: str,
) -> Imagined:
    """Imagine one episode of `decisions` decisions from each start state, whether or not it succeeds earlier.

    Args:
        world: Keeps latents as its memory, so that an episode is one stream for its decoder.
        policy: Chooses the actions; it samples.
        sampling: How.
        starts: ``E`` start states.
        decisions: ``D``.
        batch: Episodes imagined side by side.
        seed: Of noise and sampling; episode e has numbers of its own, whatever `batch` is.
        name: Shown in the progress bar.
    """
    parts: list[tuple[Tensor, Tensor]] = []
    with tqdm(total=len(starts) * decisions, desc=name, unit="decision", mininterval=2.0) as bar:
        for begin in range(0, len(starts), batch):
            some = starts[begin : begin + batch]
            with recorded(world) as recorder:
                tasks, state = [start.task for start in some], world.start(some)
                seen_BHW3 = np.stack([_now(start) for start in some])
                for decision in range(decisions):
                    seeds = [_seed(seed, begin + row, decision) for row in range(len(some))]
                    acted = policy.act(policy.preprocess(seen_BHW3, tasks), sampling, seeds)
                    frames, state = world.imagine(state, acted.actions, seeds)
                    seen_BHW3 = frames[:, -1].cpu().numpy()
                    bar.update(len(some))
            parts.append((torch.cat(recorder.latents, dim=2), torch.cat(recorder.frames, dim=1)))
    return Imagined(
        latents=torch.cat([latents for latents, _ in parts]),
        frames=torch.cat([frames for _, frames in parts]),
        tasks=[start.task for start in starts],
    )


def _now(start: StartState) -> np.ndarray:
    return start.context_frames[-1] if len(start.context_frames) else start.frame


def _seed(run: int, episode: int, decision: int) -> int:
    return int(np.random.SeedSequence([run, episode, decision]).generate_state(1)[0])

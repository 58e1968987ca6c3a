"""Distil a tiny decoder from the full decoder's frames, and measure how well they agree.

Letters: E episodes, B episodes of a batch, F latent frames, T frames, H W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.devices.tensors import require_finite, to_uint8
from asyncrl.errors import ConfigError
from asyncrl.fitting.loop import Schedule, minimise, prepared
from asyncrl.fitting.world import reconstruction_loss, to_video
from asyncrl.observability.terminal import progress
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.records import StartState
from asyncrl.rewards.interface import RewardModel
from asyncrl.worlds.wan.tiny_decoder import TinyDecoder, TinyDecoderConfig, save_decoder
from asyncrl.worlds.wan.world import WanWorld


def fresh_decoder(world: Any) -> TinyDecoder:
    """Build a tiny decoder with fresh weights on the CPU; ConfigError if the world is not a Wan world."""
    if not isinstance(world, WanWorld):
        raise ConfigError(
            "--world is a world whose frames are decoded one by one; a tiny decoder takes the place of one "
            "that draws causal video, and there is none for this kind. Use the world as it is."
        )
    size = TinyDecoderConfig.full() if world.image_size >= 128 else TinyDecoderConfig.tiny()
    return TinyDecoder(replace(size, z_dim=world.vae.size.z_dim))


def write_decoder(folder: Path, decoder: TinyDecoder, world: WanWorld, fit: dict[str, Any]) -> None:
    """Write a tiny decoder with the statistics of the world's latents."""
    size = world.vae.size
    save_decoder(folder, decoder, latents_mean=size.latents_mean, latents_std=size.latents_std, fit=fit)


@dataclass(frozen=True, kw_only=True)
class ImaginedVideos:
    """Latents and frames of episodes, in host memory."""

    latents: Tensor  # [E, Z, F, h, w] float32, normalised: the anchor, the first memory, two per decision.
    frames: Tensor  # [E, T, H, W, 3] uint8, drawn by the full decoder as one stream.
    tasks: list[str]  # [E] instructions.

    def __len__(self) -> int:
        return len(self.tasks)


class Recorder:
    """Stands in for a decoder and keeps its latents and frames."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.latents: list[Tensor] = []
        self.frames: list[Tensor] = []

    def decode(self, latents_BZFhw: Tensor, cache: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """Draw the next frames and keep them."""
        frames, after = self.decoder.decode(latents_BZFhw, cache)
        self.latents.append(latents_BZFhw.float().cpu())
        self.frames.append(to_uint8(frames).permute(0, 2, 3, 4, 1).cpu())
        return frames, after

    def compile(self) -> None:
        """Compile the decoder."""
        self.decoder.compile()


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
) -> ImaginedVideos:
    """Imagine `decisions` decisions from each of ``E`` start states, also after a success."""
    parts: list[tuple[Tensor, Tensor]] = []
    decoder = world.decoder
    try:
        with progress(total=len(starts) * decisions, desc=name, unit="decision") as bar:
            for begin in range(0, len(starts), batch):
                world.decoder = recorder = Recorder(decoder)
                some = starts[begin : begin + batch]
                tasks, state = [start.task for start in some], world.open_slots(some)
                seen_BHW3 = np.stack([start.present_frame for start in some])
                for decision in range(decisions):
                    sources = ([seed, begin + row, decision] for row in range(len(some)))
                    seeds = [int(np.random.SeedSequence(words).generate_state(1)[0]) for words in sources]
                    acted = policy.act(policy.preprocess(seen_BHW3, tasks), sampling, seeds)
                    require_finite("policy", actions=acted.actions, log_probs=acted.logprob)
                    frames, state = world.imagine(state, acted.actions, seeds)
                    require_finite("world model", frames=state.finite)
                    seen_BHW3 = frames[:, -1].cpu().numpy()
                    bar.update(len(some))
                parts.append((torch.cat(recorder.latents, dim=2), torch.cat(recorder.frames, dim=1)))
    finally:
        world.decoder = decoder
    return ImaginedVideos(
        latents=torch.cat([latents for latents, _ in parts]),
        frames=torch.cat([frames for _, frames in parts]),
        tasks=[start.task for start in starts],
    )


OPENING: Final = 5  # Frames of a stream before the first imagined one.
COMPARED: Final = 16  # Episodes compared at once.


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """Agreement of a tiny decoder's new frames with the full decoder's, on held-out episodes."""

    psnr: float  # dB, mean over frames of uint8 pictures.
    worst_psnr: float  # dB, first percentile over frames.
    same_verdict: float = math.nan  # Share of frames with the same verdict; nan without a reward model.
    same_outcome: float = math.nan  # Share of episodes that succeed in both or neither; nan likewise.
    success: float = math.nan  # Share of the full decoder's episodes with a success; nan likewise.

    def as_dict(self) -> dict[str, float | None]:
        """Return rounded values for JSON, None instead of nan."""
        return {name: None if value != value else round(value, 4) for name, value in asdict(self).items()}


def fit_decoder(decoder: nn.Module, imagined: ImaginedVideos, schedule: Schedule) -> float:
    """Train `decoder` (float32, on its device) on whole episodes, so that it learns to use its memory."""
    device = next(decoder.parameters()).device
    generator = torch.Generator().manual_seed(schedule.seed)
    some = imagined.frames[:: max(1, len(imagined) // 64)]
    background_3HW = to_video(some.to(device)).mean((0, 2))
    draw = prepared(decoder, device, compiled=schedule.compiled)

    def loss_at(step: int) -> Tensor:
        rows = torch.randint(len(imagined), (schedule.batch,), generator=generator)
        drawn = draw(imagined.latents[rows].to(device)).float()
        return reconstruction_loss(drawn, to_video(imagined.frames[rows].to(device)), background_3HW)

    decoder.train()
    loss = minimise("decoder", decoder, loss_at, schedule, average=0.998, rngs=[generator])
    decoder.eval()
    return loss


@torch.no_grad()
def compare(
    decoder: nn.Module, held_out: ImaginedVideos, reward: RewardModel | None, *, threshold: float
) -> Likeness:
    """Measure `decoder` against the full decoder's frames, the opening ones left out."""
    device = next(decoder.parameters()).device
    decibels: list[Tensor] = []
    verdicts: list[tuple[Tensor, Tensor]] = []
    for begin in progress(range(0, len(held_out), COMPARED), desc="compare"):
        rows = slice(begin, begin + COMPARED)
        pictures = decoder(held_out.latents[rows].to(device))
        require_finite("tiny decoder", frames=pictures)
        drawn = to_uint8(pictures).permute(0, 2, 3, 4, 1)[:, OPENING:]
        wanted = held_out.frames[rows].to(device)[:, OPENING:]
        decibels.append(psnr(drawn, wanted).flatten())
        if reward is not None:
            scores = [reward.score(video, held_out.tasks[rows]) for video in (wanted, drawn)]
            require_finite("reward model", scores=torch.stack(scores))
            verdicts.append((scores[0] >= threshold, scores[1] >= threshold))
    per_frame = torch.cat(decibels)
    likeness = Likeness(psnr=float(per_frame.mean()), worst_psnr=float(per_frame.quantile(0.01)))
    if not verdicts:
        return likeness
    full, tiny = (torch.cat(both) for both in zip(*verdicts, strict=True))
    return replace(
        likeness,
        same_verdict=float((full == tiny).float().mean()),
        same_outcome=float((full.any(1) == tiny.any(1)).float().mean()),
        success=float(full.any(1).float().mean()),
    )


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Compute the peak signal-to-noise ratio ``[...]`` of uint8 ``[..., H, W, 3]`` in dB, at most 78."""
    error = (a.float() - b.float()).square().flatten(-3).mean(-1)
    return 10 * torch.log10(255**2 / error.clamp(min=1e-3))

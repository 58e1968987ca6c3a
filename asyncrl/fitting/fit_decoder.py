"""Distil a tiny decoder from the full decoder's frames, and measure how alike the two draw.

Dimension letters: E episodes, B episodes of a batch, F latent frames, T frames, H W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from asyncrl.devices.tensors import to_uint8
from asyncrl.fitting.autoencoder import reconstruction_loss, to_video
from asyncrl.fitting.loop import minimise, prepared
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.records import StartState
from asyncrl.rewards.interface import RewardModel
from asyncrl.seeds import recorded_noise_seed
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
        """Draw the next frames and keep them. See `Decoder.decode`."""
        frames, after = self.decoder.decode(latents_BZFhw, cache)
        self.latents.append(latents_BZFhw.float().cpu())
        self.frames.append(to_uint8(frames).permute(0, 2, 3, 4, 1).cpu())
        return frames, after

    def compile(self) -> None:
        """Compile the decoder it passes latents on to."""
        self.decoder.compile()


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
        starts: ``E`` start states.
        decisions: ``D``.
    """
    parts: list[tuple[Tensor, Tensor]] = []
    with tqdm(total=len(starts) * decisions, desc=name, unit="decision", mininterval=2.0) as bar:
        for begin in range(0, len(starts), batch):
            some = starts[begin : begin + batch]
            with recorded(world) as recorder:
                tasks, state = [start.task for start in some], world.open_slots(some)
                seen_BHW3 = np.stack([start.present_frame for start in some])
                for decision in range(decisions):
                    seeds = [recorded_noise_seed(seed, begin + row, decision) for row in range(len(some))]
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


OPENING = 5
"""Frames of a stream that were seen and not imagined: the first and its four followers."""


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """How much a tiny decoder's new frames are like the full decoder's, on episodes it was not fitted on."""

    psnr: float
    """dB, mean over frames of uint8 pictures."""
    worst_psnr: float
    """dB, the frame below which 1 % of the frames lie."""
    same_verdict: float
    """Share of frames that the reward model judges alike; nan without a reward model."""
    same_outcome: float
    """Share of episodes of which it judges alike whether any frame shows success; nan without one."""
    success: float
    """Share of the full decoder's episodes with a success: how much there is to disagree about."""

    def as_dict(self) -> dict[str, float | None]:
        """Return rounded values, for JSON, which knows no nan."""
        return {name: None if value != value else round(value, 4) for name, value in asdict(self).items()}


def fit_decoder(
    decoder: nn.Module,
    imagined: Imagined,
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    compiled: bool = False,
) -> float:
    """Train `decoder` in place on whole episodes, so that its memory blocks learn what to remember.

    Args:
        decoder: On the device to train on, in float32.

    Returns:
        Mean loss of the last tenth.

    Raises:
        RunError: The loss stopped being finite.
    """
    device = next(decoder.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    some = imagined.frames[:: max(1, len(imagined) // 64)]
    background_3HW = to_video(some.to(device)).mean((0, 2))
    draw = prepared(decoder, device, compiled=compiled)

    def loss_at(step: int) -> Tensor:
        rows = torch.randint(len(imagined), (batch,), generator=generator)
        drawn = draw(imagined.latents[rows].to(device)).float()
        return reconstruction_loss(drawn, to_video(imagined.frames[rows].to(device)), background_3HW)

    decoder.train()
    loss = minimise("decoder", decoder, loss_at, steps=steps, learning_rate=learning_rate, average=0.998)
    decoder.eval()
    return loss


@torch.no_grad()
def compare(
    decoder: nn.Module,
    held_out: Imagined,
    reward: RewardModel | None,
    *,
    threshold: float,
    batch: int = 16,
) -> Likeness:
    """Measure `decoder` against the full decoder's frames, the opening ones left out."""
    device = next(decoder.parameters()).device
    decibels: list[Tensor] = []
    verdicts: list[tuple[Tensor, Tensor]] = []
    for begin in tqdm(range(0, len(held_out), batch), desc="compare", mininterval=2.0):
        rows = slice(begin, begin + batch)
        drawn = to_uint8(decoder(held_out.latents[rows].to(device))).permute(0, 2, 3, 4, 1)[:, OPENING:]
        wanted = held_out.frames[rows].to(device)[:, OPENING:]
        decibels.append(psnr(drawn, wanted).flatten())
        if reward is not None:
            scores = [reward.score(video, held_out.tasks[rows]) for video in (wanted, drawn)]
            verdicts.append((scores[0] >= threshold, scores[1] >= threshold))
    nan = float("nan")
    per_frame = torch.cat(decibels)
    likeness = Likeness(
        psnr=float(per_frame.mean()),
        worst_psnr=float(per_frame.quantile(0.01)),
        same_verdict=nan,
        same_outcome=nan,
        success=nan,
    )
    if not verdicts:
        return likeness
    full, tiny = (torch.cat(both) for both in zip(*verdicts, strict=True))
    return Likeness(
        psnr=likeness.psnr,
        worst_psnr=likeness.worst_psnr,
        same_verdict=float((full == tiny).float().mean()),
        same_outcome=float((full.any(1) == tiny.any(1)).float().mean()),
        success=float(full.any(1).float().mean()),
    )


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Compute the peak signal-to-noise ratio in dB, at most 78.

    Args:
        a: ``[..., H, W, 3]`` uint8.
        b: The same shape and dtype.

    Returns:
        ``[...]`` float32.

    Example:
        >>> black = torch.zeros(1, 2, 2, 3, dtype=torch.uint8)
        >>> psnr(black, black + 255).tolist(), round(psnr(black, black).item())
        ([0.0], 78)
    """
    error = (a.float() - b.float()).square().flatten(-3).mean(-1)
    return 10 * torch.log10(255**2 / error.clamp(min=1e-3))

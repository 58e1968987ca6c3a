"""How good is the world model, and how good its reward model? Held-out simulator episodes in, two tables out.

    python benchmarks/world_quality.py --episodes 128
    python benchmarks/world_quality.py --world models/world --data data/held_out --horizons 8 32 96 \
        --strip strip.png

Each episode is recorded in the true simulator from seeds that no fit has used, with a demonstrator of mixed
quality or (`--policy tabletop`) with a policy, 64 steps of it; or it is read from recordings (`--data`) that
no fit has seen. The world model gets its first frame and its actions. PSNR is against the true frames, next
to two baselines: the first frame repeated, and the autoencoder's own reconstruction (the best that a latent
world model can do). The feature distance is the Fréchet distance between the reward network's trunk features
of true and of drawn frames.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from asyncrl.devices.tensors import to_signed
from asyncrl.evaluation.contact_sheet import imagine_again
from asyncrl.evaluation.evaluate import acting
from asyncrl.fitting.collect import record as record_starts
from asyncrl.fitting.loading import load_recordings
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.worlds.interface import load_fitted
from asyncrl.policies.interface import SamplingParams
from asyncrl.policies.openvla.policy import load_policy
from asyncrl.rewards.model import ResNetReward, load_reward
from asyncrl.simulators.build import SimulatorSource
from asyncrl.simulators.interface import Demonstrator, random_start
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import Act
from asyncrl.storage.asset_paths import policy_folder, world_folder

FIRST_SEED = 900_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure a world model against the true simulator."""

    world: str = "tabletop"
    """World model and reward model."""
    policy: str = ""
    """Measure on this policy's own roll-outs instead: what training imagines."""
    data: tuple[str, ...] = ()
    """Folders of recordings that were held out; none: tabletop is recorded."""
    episodes: int = 128
    """Episodes that are recorded, each of 64 steps."""
    horizons: tuple[int, ...] = (8, 32, 64)
    """Steps at which the bands of the table end."""
    strip: str = ""
    """Also draw the longest episode: true frames above the imagined ones (PNG)."""
    judged: int = 48
    """Steps after which an episode that did not succeed has failed; tabletop is trained with 48."""
    threshold: float = 0.7
    """Success threshold of the reward model."""
    workers: int = os.cpu_count() or 1
    """Simulator processes."""
    device: str = "cpu"
    """Where the models run."""
    json: str = ""
    """Also write the numbers here."""


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB of uint8 pictures, mean over frames."""
    error = (a.astype(np.float32) - b.astype(np.float32)).reshape(len(a), -1)
    return float((10 * np.log10(255**2 / np.maximum(np.square(error).mean(1), 1e-3))).mean())


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """Fréchet distance between Gaussians fitted to two sets of features ``[n, d]``."""
    mean = np.square(a.mean(0) - b.mean(0)).sum()
    cov_a, cov_b = np.cov(a.T), np.cov(b.T)
    product = np.linalg.eigvals(cov_a @ cov_b).real.clip(0)
    return float(mean + np.trace(cov_a) + np.trace(cov_b) - 2 * np.sqrt(product).sum())


@torch.no_grad()
def features(reward: ResNetReward, frames: np.ndarray) -> np.ndarray:
    """Trunk features ``[n, d]`` of uint8 frames ``[n, H, W, 3]``."""
    parts = torch.from_numpy(frames).split(512)
    trunk: Any = reward.network.visual_encoder
    outputs = [trunk(to_signed(x.to(reward.device)).permute(0, 3, 1, 2)) for x in parts]
    return torch.cat([o.mean((2, 3)) if o.ndim == 4 else o for o in outputs]).cpu().double().numpy()


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One episode: frame i was produced by action i; see `Recordings`."""

    seed: int
    task: str
    frames: np.ndarray
    actions: np.ndarray
    success: np.ndarray
    poses: np.ndarray
    """Empty: not recorded."""


def episodes_of(recordings: Recordings) -> list[Recorded]:
    """Recordings as episodes."""
    return [
        Recorded(
            seed=int(recordings.seeds[e]),
            task=recordings.tasks[e],
            frames=recordings.frames[recordings.span(e)],
            actions=recordings.actions[recordings.span(e)],
            success=recordings.success[recordings.span(e)],
            poses=recordings.poses[recordings.span(e)],
        )
        for e in range(len(recordings))
    ]


def scores(reward: ResNetReward, episodes: list[Recorded], frames: list[np.ndarray]) -> list[np.ndarray]:
    """Success probability of every frame but the first, per episode."""
    return [
        reward.score(torch.from_numpy(f[None, 1:]), [e.task])[0].cpu().numpy()
        for e, f in zip(episodes, frames, strict=True)
    ]


def precision_recall(predicted: np.ndarray, true: np.ndarray) -> tuple[float, float]:
    """Share of predicted successes that are true, and of true ones that were predicted."""
    hits = float((predicted & true).sum())
    return hits / max(1.0, float(predicted.sum())), hits / max(1.0, float(true.sum()))


def record(folder: Path, settings: Settings) -> None:
    """Record up to 64 steps per episode: a demonstrator of mixed quality, or a policy until it succeeds."""
    source = SimulatorSource(name="tabletop", places=8, image_size=64, horizon=64)
    seeds = range(FIRST_SEED, FIRST_SEED + settings.episodes)
    starts = [random_start(source.spec(), seed) for seed in seeds]
    act: Act | Demonstrator = Demonstrator(noise=(0.0, 0.5), spread=0.012, retry=True, extra_decisions=8)
    if settings.policy:
        policy = load_policy(policy_folder(settings.policy), device=settings.device)
        act = acting(policy, SamplingParams(temperature=1.0, top_k=0), rows=16)
    extra = act.extra_decisions if isinstance(act, Demonstrator) else 0
    with SimulatorPool(source, workers=settings.workers) as pool:
        record_starts(folder, pool, act, starts, extra_decisions=extra, about={"policy": settings.policy})


def main() -> None:
    """Record, imagine, compare, print."""
    settings = tyro.cli(Settings, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        if not settings.data:
            record(Path(folder), settings)
        recordings = load_recordings([Path(name) for name in settings.data or (folder,)])
    result = measure(settings, recordings)
    if settings.json:
        Path(settings.json).write_text(json.dumps(result, indent=2) + "\n")


def measure(settings: Settings, recordings: Recordings) -> dict[str, Any]:
    """Imagine what was recorded and compare: what the two tables show, which are printed too."""
    fitted = load_fitted(world_folder(settings.world), torch.device(settings.device))
    reward = load_reward(world_folder(settings.world), device=settings.device)
    episodes = episodes_of(recordings)
    imagined = imagine_again(fitted.world, episodes)
    drawn = fitted.redraw(recordings)
    redrawn = [drawn[recordings.span(e)] for e in range(len(recordings))]
    still = [np.repeat(e.frames[:1], len(e.frames), 0) for e in episodes]
    table = pictures(reward, settings.horizons, episodes, imagined, redrawn, still)
    if settings.strip:
        draw_strip(Path(settings.strip), episodes, imagined, settings.horizons[-1])
    return {
        "picture": table,
        "reward": verdicts(reward, episodes, imagined, settings.threshold, settings.judged),
    }


def draw_strip(file: Path, episodes: list[Recorded], imagined: list[np.ndarray], horizon: int) -> None:
    """Write seven frames of the longest episode up to a step: the true ones above the imagined ones."""
    from PIL import Image

    longest = max(range(len(episodes)), key=lambda e: len(episodes[e].frames))
    last = min(horizon, len(episodes[longest].frames) - 1)
    steps = np.linspace(0, last, 7).round().astype(int)
    rows = [
        np.concatenate(list(frames[steps]), 1) for frames in (episodes[longest].frames, imagined[longest])
    ]
    Image.fromarray(np.concatenate(rows)).save(file)
    print(f"{file}: {episodes[longest].task}, steps {', '.join(map(str, steps))}")


def pictures(
    reward: ResNetReward, horizons: tuple[int, ...], episodes: list[Recorded], *drawn: list[np.ndarray]
) -> list[dict[str, float]]:
    """Print and return PSNR and feature distance up to each horizon."""
    baselines = f"{'VAE alone':>10} {'still':>7}"
    print(f"{'steps':>7} {'PSNR':>8} {baselines} {'feature distance':>17} {baselines}")
    rows = []
    before = 0
    for horizon in horizons:
        window = slice(before + 1, horizon + 1)
        true = np.concatenate([e.frames[window] for e in episodes])
        others = [np.concatenate([f[window] for f in kind]) for kind in drawn]
        decibels = [psnr(true, other) for other in others]
        real = features(reward, true)
        distances = [frechet(real, features(reward, other)) for other in others]
        print(
            f"{before + 1:>3}-{horizon:<3} {decibels[0]:>8.2f} {decibels[1]:>10.2f} {decibels[2]:>7.2f} "
            f"{distances[0]:>17.3f} {distances[1]:>10.3f} {distances[2]:>7.3f}"
        )
        kinds = ("", "_vae", "_still")
        row: dict[str, float] = {"horizon": horizon}
        row |= {f"psnr{kind}": value for kind, value in zip(kinds, decibels, strict=True)}
        rows.append(row | {f"distance{kind}": value for kind, value in zip(kinds, distances, strict=True)})
        before = horizon
    return rows


def verdicts(
    reward: ResNetReward, episodes: list[Recorded], imagined: list[np.ndarray], threshold: float, steps: int
) -> dict[str, float]:
    """Print and return precision and recall on true frames, and of imagined episodes against the truth."""
    horizon = slice(0, steps)
    truth = [e.success[1:] for e in episodes]
    on_true = scores(reward, episodes, [e.frames for e in episodes])
    frames = precision_recall(np.concatenate(on_true) >= threshold, np.concatenate(truth))
    solved = np.array([t[horizon].any() for t in truth])
    real = precision_recall(np.array([(s[horizon] >= threshold).any() for s in on_true]), solved)
    dreamt = np.array([(s[horizon] >= threshold).any() for s in scores(reward, episodes, imagined)])
    episode = precision_recall(dreamt, solved)
    print(f"\nreward model, threshold {threshold}          precision  recall")
    print(f"true frames                            {frames[0]:>9.3f} {frames[1]:>7.3f}")
    print(f"true episodes ({f'{steps} steps)':<24} {real[0]:>9.3f} {real[1]:>7.3f}")
    print(f"imagined episodes against the truth    {episode[0]:>9.3f} {episode[1]:>7.3f}")
    print(f"solved: {solved.mean():.3f} in truth, {dreamt.mean():.3f} in imagination")
    return {"frame_precision": frames[0], "frame_recall": frames[1], "episode_precision": real[0],
            "episode_recall": real[1], "imagined_precision": episode[0], "imagined_recall": episode[1],
            "solved_true": float(solved.mean()), "solved_imagined": float(dreamt.mean())}  # fmt: skip


if __name__ == "__main__":
    main()

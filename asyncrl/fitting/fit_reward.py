"""Train the reward model to tell whether a frame shows the task solved.

It will judge frames that a world model drew, so half of what it sees has gone through the VAE.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm

from asyncrl.devices.tensors import to_signed, to_uint8
from asyncrl.fitting.loop import minimise
from asyncrl.fitting.recordings import Recordings
from asyncrl.rewards.model import ResNetReward
from asyncrl.worlds.wan.vae import WanVae, decode_stream


@torch.no_grad()
def redraw(vae: WanVae, latents: list[Tensor], batch: int = 64) -> np.ndarray:
    """Decode encoded episodes back to frames, in the recordings' order.

    Args:
        vae: Encoded the episodes.
        latents: ``[L, z, h, w]`` float32 of each episode; see `fit_vae.encode_recordings`.
        batch: Episodes decoded side by side, of one length.

    Returns:
        ``[F, H, W, 3]`` uint8.
    """
    frames: list[np.ndarray | None] = [None] * len(latents)
    by_length: dict[int, list[int]] = {}
    for episode, encoded in enumerate(latents):
        by_length.setdefault(len(encoded), []).append(episode)
    parts = [alike[i : i + batch] for alike in by_length.values() for i in range(0, len(alike), batch)]
    for part in tqdm(parts, desc="redraw", mininterval=2.0):
        video = decode_stream(vae, torch.stack([latents[e] for e in part]).transpose(1, 2))
        drawn = to_uint8(video).permute(0, 2, 3, 4, 1).cpu().numpy()
        for episode, stream in zip(part, drawn, strict=True):
            frames[episode] = np.concatenate([stream[:1], stream[5:]])
    return np.concatenate([f for f in frames if f is not None])


def fit_reward(
    reward: ResNetReward,
    recordings: Recordings,
    drawn: np.ndarray,
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
) -> float:
    """Train on frames with the simulator's verdict, half of them solved; a wrong task is unsolved.

    Args:
        reward: Its network is trained in place.
        recordings: Frames, tasks and success.
        drawn: ``[F, H, W, 3]`` uint8, the same frames as the VAE draws them.
        steps: Optimizer steps.
        batch: Frames per step.
        learning_rate: Peak learning rate.
        seed: Of the choice of frames.

    Returns:
        Mean loss of the last tenth.
    """
    rng = np.random.default_rng(seed)
    device = next(reward.network.parameters()).device
    sources = [torch.from_numpy(x).to(device) for x in (recordings.frames, drawn)]
    tasks_F = np.repeat(reward.task_ids(recordings.tasks).cpu().numpy(), np.diff(recordings.offsets))
    solved_rows, unsolved_rows = np.flatnonzero(recordings.success), np.flatnonzero(~recordings.success)
    late_rows = _late(recordings)
    num_tasks = len(reward.config.tasks)

    def loss_at(step: int) -> Tensor:
        rows = np.concatenate(
            [
                rng.choice(solved_rows, batch // 2),
                rng.choice(unsolved_rows, batch // 4),
                rng.choice(late_rows, batch // 4),
            ]
        )
        tasks, labels = tasks_F[rows].copy(), recordings.success[rows].copy()
        wrong = rng.random(len(rows)) < 0.1
        tasks[wrong] = (tasks[wrong] + rng.integers(1, num_tasks, size=int(wrong.sum()))) % num_tasks
        labels &= ~wrong
        source = sources[step % 2]
        pictures = to_signed(source[torch.from_numpy(rows).to(device)]).permute(0, 3, 1, 2)
        logits = reward.network.logits(pictures, torch.from_numpy(tasks).to(device))
        return binary_cross_entropy_with_logits(logits, torch.from_numpy(labels).to(device).float())

    reward.network.train()
    loss = minimise("reward", reward.network, loss_at, steps=steps, learning_rate=learning_rate)
    reward.network.eval()
    return loss


def _late(recordings: Recordings) -> np.ndarray:
    """Find the unsolved frames of each episode's last two decisions, which look almost solved: rows."""
    rows = [
        np.arange(max(recordings.span(e).start, recordings.span(e).stop - 16), recordings.span(e).stop)
        for e in range(len(recordings))
    ]
    late = np.concatenate(rows)
    return late[~recordings.success[late]]

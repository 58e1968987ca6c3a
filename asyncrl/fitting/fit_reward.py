"""Train the reward model that judges whether a frame shows the task solved.

It will judge frames that a world model drew, so half of its examples went through the world's autoencoder.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from asyncrl.devices.tensors import to_signed
from asyncrl.errors import ConfigError
from asyncrl.fitting.loop import BatchSource, Schedule, minimise
from asyncrl.fitting.recordings import Frames, Recordings
from asyncrl.fitting.world import Size
from asyncrl.rewards.files import RewardConfig
from asyncrl.rewards.resnet import ResNetReward, RewardNetwork


def fresh_reward(size: Size, recordings: Recordings, device: torch.device) -> ResNetReward:
    """Build a reward model of the recordings' tasks and picture size."""
    make = RewardConfig.tiny if size == "tiny" else RewardConfig.small
    config = make(tuple(sorted(set(recordings.tasks))), recordings.image_size)
    return ResNetReward(RewardNetwork(config), config, device=device)


def fit_reward(reward: ResNetReward, recordings: Recordings, drawn: Frames, schedule: Schedule) -> float:
    """Train on frames with the simulator's verdict, half of them solved; with a wrong task they are unsolved.

    `drawn` are the frames as the world's autoencoder draws them, ``[F, H, W, 3]`` uint8.
    """
    rng = np.random.default_rng(schedule.seed)
    device = next(reward.network.parameters()).device
    sources = [BatchSource(frames, device) for frames in (recordings.frames, drawn)]
    success_F, batch = recordings.success, schedule.batch
    tasks_F = np.repeat(reward.task_ids(recordings.tasks).cpu().numpy(), np.diff(recordings.offsets))
    num_tasks = len(reward.config.tasks)
    solved, unsolved, late = np.flatnonzero(success_F), np.flatnonzero(~success_F), _late(recordings)
    for rows, lacking in ((solved, "shows the task solved"), (late, "of the end shows it unsolved")):
        if not len(rows):
            raise ConfigError(
                f"No frame of --data {lacking}: a reward model learns from successes and from failures. Add "
                "recordings of a demonstrator that is better or worse (--expert.spread, --expert.noise), and "
                "say of a data set when it is solved (--dataset.success KEY, --dataset.solved end)."
            )

    def loss_at(step: int) -> Tensor:
        shares = ((solved, batch // 2), (unsolved, batch // 4), (late, batch // 4))
        rows = np.concatenate([rng.choice(some, count) for some, count in shares])
        tasks, labels = tasks_F[rows].copy(), success_F[rows].copy()
        wrong = (rng.random(len(rows)) < 0.1) & (num_tasks > 1)
        shifts = rng.integers(1, max(2, num_tasks), size=int(wrong.sum()))
        tasks[wrong] = (tasks[wrong] + shifts) % num_tasks
        labels &= ~wrong
        pictures = to_signed(sources[step % 2].take(torch.from_numpy(rows))).permute(0, 3, 1, 2)
        if step % 2:  # The layout that a decoder draws in: in another one, convolutions round otherwise.
            pictures = pictures.contiguous()
        logits = reward.network.logits(pictures, torch.from_numpy(tasks).to(device))
        return binary_cross_entropy_with_logits(logits, torch.from_numpy(labels).to(device).float())

    reward.network.train()
    loss = minimise("reward", reward.network, loss_at, schedule)
    reward.network.eval()
    return loss


def _late(recordings: Recordings) -> np.ndarray:
    """Return the unsolved frames of each episode's last two decisions, which look almost solved: rows."""
    spans = map(recordings.span, range(len(recordings)))
    late = np.concatenate([np.arange(max(span.start, span.stop - 16), span.stop) for span in spans])
    return late[~recordings.success[late]]

"""Train the reward model to tell whether a frame shows the task solved.

It will judge frames that a world model drew, so half of what it sees went through the world's autoencoder.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from asyncrl.devices.tensors import to_signed
from asyncrl.errors import ConfigError
from asyncrl.fitting.batch_source import BatchSource
from asyncrl.fitting.frame_file import Frames
from asyncrl.fitting.loop import WARMUP, minimise
from asyncrl.fitting.recordings import Recordings
from asyncrl.rewards.model import ResNetReward


def fit_reward(
    reward: ResNetReward,
    recordings: Recordings,
    drawn: Frames,
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    warmup: int = WARMUP,
) -> float:
    """Train on frames with the simulator's verdict, half of them solved; a wrong task is unsolved.

    Args:
        reward: Its network is trained in place.
        recordings: Frames, tasks and success.
        drawn: ``[F, H, W, 3]`` uint8, the same frames as the world's autoencoder draws them.
        steps: Optimizer steps.
        batch: Frames per step.
        learning_rate: Peak learning rate.
        seed: Of the choice of frames.
        warmup: Steps until the peak of the learning rate.

    Returns:
        Mean loss of the last tenth.

    Raises:
        ConfigError: The recordings hold no success, or no failure.
    """
    rng = np.random.default_rng(seed)
    device = next(reward.network.parameters()).device
    sources = [BatchSource(frames, device) for frames in (recordings.frames, drawn)]
    tasks_F = np.repeat(reward.task_ids(recordings.tasks).cpu().numpy(), np.diff(recordings.offsets))
    solved_rows, unsolved_rows = np.flatnonzero(recordings.success), np.flatnonzero(~recordings.success)
    late_rows = _late(recordings)
    _check_both(solved_rows, late_rows)
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
        wrong = (rng.random(len(rows)) < 0.1) & (num_tasks > 1)
        shifts = rng.integers(1, max(2, num_tasks), size=int(wrong.sum()))
        tasks[wrong] = (tasks[wrong] + shifts) % num_tasks
        labels &= ~wrong
        seen = sources[step % 2].take(torch.from_numpy(rows))
        pictures = to_signed(seen).permute(0, 3, 1, 2)
        if step % 2:  # The layout that a decoder draws in: in another one, convolutions round otherwise.
            pictures = pictures.contiguous()
        logits = reward.network.logits(pictures, torch.from_numpy(tasks).to(device))
        return binary_cross_entropy_with_logits(logits, torch.from_numpy(labels).to(device).float())

    reward.network.train()
    loss = minimise(
        "reward", reward.network, loss_at, steps=steps, learning_rate=learning_rate, warmup=warmup
    )
    reward.network.eval()
    return loss


def shows_both(recordings: Recordings) -> bool:
    """Tell whether there is a solved frame and an unsolved late one, without which nothing can be fitted."""
    return bool(recordings.success.any()) and bool(len(_late(recordings)))


def _check_both(solved_rows: np.ndarray, late_rows: np.ndarray) -> None:
    """Refuse recordings that do not show both verdicts.

    Raises:
        ConfigError: No frame is solved, or none of the last ones is unsolved.
    """
    for rows, lacking in (
        (solved_rows, "shows the task solved"),
        (late_rows, "of the end shows it unsolved"),
    ):
        if not len(rows):
            raise ConfigError(
                f"No frame of --data {lacking}: a reward model learns from successes and from failures. Add "
                "recordings of a demonstrator that is better or worse (--expert.spread, --expert.noise), and "
                "say of a data set when it is solved (--dataset.success KEY, --dataset.solved end)."
            )


def _late(recordings: Recordings) -> np.ndarray:
    """Find the unsolved frames of each episode's last two decisions, which look almost solved: rows."""
    rows = [
        np.arange(max(recordings.span(e).start, recordings.span(e).stop - 16), recordings.span(e).stop)
        for e in range(len(recordings))
    ]
    late = np.concatenate(rows)
    return late[~recordings.success[late]]

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
from asyncrl.fitting.frame_file import BatchSource, Frames
from asyncrl.fitting.loop import WARMUP, minimise
from asyncrl.fitting.recordings import Recordings
from asyncrl.rewards.resnet import ResNetReward


class _Examples:
    """Frames with the simulator's verdict, half of them solved; a wrong task is unsolved."""

    def __init__(self, reward: ResNetReward, recordings: Recordings, frames: Frames) -> None:
        """Draw from `frames`, ``[F, H, W, 3]`` uint8, which are those of the recordings or look like them."""
        self._device = next(reward.network.parameters()).device
        self._source = BatchSource(frames, self._device)
        self._success_F = recordings.success
        self._tasks_F = np.repeat(
            reward.task_ids(recordings.tasks).cpu().numpy(), np.diff(recordings.offsets)
        )
        self._num_tasks = len(reward.config.tasks)
        self._solved, self._unsolved = np.flatnonzero(self._success_F), np.flatnonzero(~self._success_F)
        self._late = _late(recordings)
        _check_both(self._solved, self._late)

    def take(self, batch: int, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Draw pictures ``[B, 3, H, W]`` in -1..1, tasks ``[B]`` int64 and labels ``[B]`` float32."""
        rows = np.concatenate(
            [
                rng.choice(self._solved, batch // 2),
                rng.choice(self._unsolved, batch // 4),
                rng.choice(self._late, batch // 4),
            ]
        )
        tasks, labels = self._tasks_F[rows].copy(), self._success_F[rows].copy()
        wrong = (rng.random(len(rows)) < 0.1) & (self._num_tasks > 1)
        shifts = rng.integers(1, max(2, self._num_tasks), size=int(wrong.sum()))
        tasks[wrong] = (tasks[wrong] + shifts) % self._num_tasks
        labels &= ~wrong
        pictures = to_signed(self._source.take(torch.from_numpy(rows))).permute(0, 3, 1, 2)
        device = self._device
        return pictures, torch.from_numpy(tasks).to(device), torch.from_numpy(labels).to(device).float()


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
    drawn_of: Recordings | None = None,
) -> float:
    """Train on frames with the simulator's verdict, half of them solved; a wrong task is unsolved.

    Args:
        drawn: ``[F, H, W, 3]`` uint8, frames as the world's autoencoder draws them.
        drawn_of: Whose frames are drawn; None: all of `recordings`.

    Returns:
        Mean loss of the last tenth.

    Raises:
        ConfigError: The recordings hold no success, or no failure.
    """
    rng = np.random.default_rng(seed)
    true = _Examples(reward, recordings, recordings.frames)
    redrawn = _Examples(reward, drawn_of or recordings, drawn)

    def loss_at(step: int) -> Tensor:
        pictures, tasks, labels = (redrawn if step % 2 else true).take(batch, rng)
        if step % 2:  # The layout that a decoder draws in: in another one, convolutions round otherwise.
            pictures = pictures.contiguous()
        return binary_cross_entropy_with_logits(reward.network.logits(pictures, tasks), labels)

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
    """Refuse recordings that do not show both verdicts."""
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

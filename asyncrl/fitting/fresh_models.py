"""Models with fresh weights that are made for what was recorded: picture size, tasks, actions.

Letters: E episodes, F frames of all episodes, A numbers per action.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from asyncrl.errors import ConfigError
from asyncrl.fitting.recordings import FIRST_SIMULATOR, Recordings
from asyncrl.fitting.worlds.interface import Size
from asyncrl.policies.action_tokens import BINS, NormStats
from asyncrl.policies.openvla.autoregressive import new_policy
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.files import STATISTICS
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from asyncrl.policies.openvla.tokenizer import PromptTokenizer, build_word_tokenizer, words_for
from asyncrl.records import ACTION_DIM
from asyncrl.rewards.files import RewardConfig
from asyncrl.rewards.resnet import ResNetReward, build_network
from asyncrl.storage.atomic import write_json

Statistics = Literal["auto", "q01_q99", "none"]
LARGEST_PATCH: Final = 16
"""Pixels."""


def patch_size(image_size: int) -> int:
    """Choose the side of a patch: at most `LARGEST_PATCH` pixels, and at least 8 x 8 patches where that goes.

    Example:
        >>> [patch_size(side) for side in (64, 96, 128, 256)]
        [8, 12, 16, 16]
    """
    most = min(LARGEST_PATCH, max(1, image_size // 8))
    patch = max(side for side in range(1, most + 1) if image_size % side == 0)
    if image_size // patch > 2 * -(-image_size // most):
        near = image_size // most * most
        raise ConfigError(
            f"--data has pictures of {image_size} pixels, which only patches of {patch} pixels tile: "
            f"{(image_size // patch) ** 2} tokens a picture. Use a side with a divisor of 8 to "
            f"{LARGEST_PATCH}, such as {near}: --dataset.image-size {near} of a data set, asyncrl collect "
            f"--image-size {near} of a simulator."
        )
    return patch


def fresh_policy(size: Size, recordings: Recordings, statistics: Statistics) -> OpenVLAOFTPolicy:
    """Build a policy that knows the words of the recordings, sees their pictures, and spans their actions.

    Args:
        statistics: q01_q99: its tokens span what was recorded. none: they span [-1, 1]. auto: as the
            simulator asks for.

    Raises:
        ConfigError: The pictures are not square.
    """
    side = recordings.image_size
    tokenizer = build_word_tokenizer(words_for(recordings.tasks))
    changes: dict[str, Any] = {"image_size": side, "patch_size": patch_size(side)}
    base = getattr(OpenVLAOFTConfig, size)()
    padding = base.vocab_size - base.token_count
    tokens = max(base.token_count, BINS + tokenizer.get_vocab_size())
    changes |= {"token_count": tokens, "vocab_size": tokens + padding}
    changes["action_dim"] = recordings.actions.shape[1]
    if statistics == "q01_q99" or (statistics == "auto" and recordings.simulator != FIRST_SIMULATOR):
        stats = action_statistics(recordings)
        changes |= {"norm_key": recordings.simulator, "norm_stats": {recordings.simulator: stats}}
    config = getattr(OpenVLAOFTConfig, size)(**changes)
    return new_policy(config, PromptTokenizer(tokenizer, pad_id=config.token_count))


def executed(recordings: Recordings) -> np.ndarray:
    """Return the actions that were carried out, ``[F - E, A]`` float32: all but each episode's first row."""
    return np.delete(recordings.actions, recordings.offsets[:-1], axis=0)


def action_statistics(recordings: Recordings) -> NormStats:
    """Measure what actions are scaled with: the first and 99th percentile of each number but the gripper's.

    The last of 7 numbers is the gripper's, and stays as it is, where it keeps to -1 to 1.

    Raises:
        ConfigError: No action was recorded.
    """
    actions = executed(recordings)
    if not len(actions):
        raise ConfigError("--data holds no action: there is nothing to imitate. Record whole episodes.")
    low, high = np.quantile(actions.astype(np.float64), [0.01, 0.99], axis=0)
    width = actions.shape[1]
    gripper = width == ACTION_DIM and float(np.abs(actions[:, -1]).max()) <= 1
    scaled = (True,) * (width - 1) + (not gripper,)
    return NormStats(q01=tuple(low.tolist()), q99=tuple(high.tolist()), mask=scaled)


def write_statistics(folder: Path, policy: OpenVLAOFTPolicy, recordings: Recordings) -> None:
    """Write `dataset_statistics.json` beside a policy, as published policies have it: for other programs.

    Nothing is written where the policy has no statistics, or has those of other recordings.
    """
    key = policy.config.norm_key
    if not key or policy.config.norm_stats[key] != action_statistics(recordings):
        return
    actions = executed(recordings).astype(np.float64)
    measured = {"mean": actions.mean(0), "std": actions.std(0), "max": actions.max(0), "min": actions.min(0)}
    entry = policy.config.norm_stats[key].to_published()
    entry["action"] |= {name: values.tolist() for name, values in measured.items()}
    counts = {"num_transitions": len(actions), "num_trajectories": len(recordings)}
    write_json(folder / STATISTICS, {key: entry | counts})


def fresh_reward(size: Size, recordings: Recordings, device: torch.device) -> ResNetReward:
    """Build a reward model of the recordings' tasks and picture size.

    Raises:
        ConfigError: The pictures are not square.
    """
    make = RewardConfig.tiny if size == "tiny" else RewardConfig.small
    config = make(tuple(sorted(set(recordings.tasks))), recordings.image_size)
    return ResNetReward(build_network(config), config, device=device)

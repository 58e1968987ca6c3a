"""Train a policy to imitate recorded demonstrations (behaviour cloning).

Models with fresh weights that are made for what was recorded: picture size, tasks, actions.

Letters: E episodes, F frames of all episodes, A numbers per action.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.fitting.frame_file import BatchSource, Frames, shown_to
from asyncrl.fitting.loop import ONE_RANK, FitRanks, Shares, minimise, prepared
from asyncrl.fitting.recordings import FIRST_SIMULATOR, Recordings
from asyncrl.fitting.worlds.interface import Size
from asyncrl.policies.action_tokens import BINS, NormStats, encode, normalise, opening_of
from asyncrl.policies.interface import PolicyInputs, SamplingParams
from asyncrl.policies.openvla.autoregressive import new_policy
from asyncrl.policies.openvla.config import OpenVLAOFTConfig, require_trainable
from asyncrl.policies.openvla.files import STATISTICS
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from asyncrl.policies.openvla.tokenizer import PromptTokenizer, build_word_tokenizer, words_for
from asyncrl.records import ACTION_DIM, CHUNK
from asyncrl.rewards.files import RewardConfig
from asyncrl.rewards.resnet import ResNetReward, RewardNetwork
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
    return ResNetReward(RewardNetwork(config), config, device=device)


def examples(recordings: Recordings) -> np.ndarray:
    """Find the frames after which the recording has at least one whole decision's actions.

    Returns:
        ``[N]`` int64, rows of `recordings.frames`.
    """
    rows = [
        np.arange(recordings.span(e).start, recordings.span(e).stop - CHUNK)
        for e in range(len(recordings))
        if recordings.span(e).stop - recordings.span(e).start > CHUNK
    ]
    if not rows:
        raise ConfigError(f"No recorded episode is longer than {CHUNK} steps: there is nothing to imitate.")
    return np.concatenate(rows)


def check_imitable(policy: OpenVLAOFTPolicy, recordings: Recordings) -> None:
    """Check that the policy can say what was done and can tell the tasks apart.

    Raises:
        ConfigError: It cannot.
    """
    width = recordings.actions.shape[1]
    if width != policy.config.action_dim:
        raise ConfigError(
            f"--data has actions of {width} numbers, but the policy makes {policy.config.action_dim}. Leave "
            f"--refine out: a fresh policy makes as many as the recordings have."
        )
    policy.tokenizer.batch(sorted(set(recordings.tasks)))


def tokens_of(actions: np.ndarray, config: OpenVLAOFTConfig) -> np.ndarray:
    """Find the bins that a policy decodes to given actions, up to half a bin: the inverse of its `decode`.

    Args:
        actions: ``[F, A]`` float32 in the environment's units.

    Returns:
        ``[F, A]`` int32, 0..255.
    """
    scaled = opening_of(actions, config.gripper)
    if config.norm_key:
        scaled = normalise(scaled, config.norm_stats[config.norm_key])
    return encode(scaled)


def fit_policy(
    policy: OpenVLAOFTPolicy,
    recordings: Recordings,
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    drawn: Frames | None = None,
    jitter: float = 1.3,
    compiled: bool = False,
    average: float = 0.999,
    micro_batch: int = 0,
    pictures_on_device: bool = True,
    ranks: FitRanks = ONE_RANK,
) -> float:
    """Minimise the negative log-likelihood of the recorded actions, in nats per token.

    Args:
        batch: Examples per step.
        drawn: ``[F, H, W, 3]`` uint8, the frames as a world model's autoencoder draws them, for every
            second step: the policy will act on imagined pictures and must not take them for something else.
        average: Decay of the moving average of what is trained, which replaces it at the end; 0: none.
        micro_batch: Examples that a rank computes at once; 0: all of its own. The step is the same, up to
            rounding, whatever it is and however many ranks there are.

    Returns:
        Mean loss of the last tenth.

    Raises:
        ConfigError: The policy needs more than a picture per decision, or makes other than 8 steps; the
            recorded actions have another width; or it reads two of the instructions alike.
    """
    require_trainable(policy.config)
    check_imitable(policy, recordings)
    device = next(policy.parameters()).device
    shares = Shares.of(batch, ranks, micro_batch)
    imitation = _Imitation(
        policy, recordings, drawn, seed=seed, jitter=jitter, shares=shares, resident=pictures_on_device
    )

    def logprob(pixels: Tensor, input_ids: Tensor, attention_mask: Tensor, tokens_BCA: Tensor) -> Tensor:
        inputs = PolicyInputs(
            pixels=pixels,
            input_ids=input_ids,
            attention_mask=attention_mask,
            padded=imitation.prompts.padded,
        )
        return policy.evaluate(
            inputs, {"tokens": tokens_BCA}, SamplingParams(temperature=1.0, top_k=0)
        ).logprob

    logprob = prepared(logprob, device, compiled=compiled)

    def loss_at(count: int) -> Tensor:
        step, part = divmod(count, shares.parts)
        if part == 0:
            imitation.draw(batch)
        return -logprob(*imitation.part(step, part)).mean()

    policy.train()
    loss = minimise(
        "policy",
        policy,
        loss_at,
        steps=steps,
        learning_rate=learning_rate,
        warmup=min(200, steps // 10),
        average=average,
        parts=shares.parts,
        ranks=ranks,
    )
    policy.eval()
    return loss


class _Imitation:
    """The recordings, from which examples are drawn."""

    def __init__(
        self,
        policy: OpenVLAOFTPolicy,
        recordings: Recordings,
        drawn: Frames | None,
        *,
        seed: int,
        jitter: float,
        shares: Shares,
        resident: bool,
    ) -> None:
        self.shares = shares
        self.device = policy.device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.jitter = jitter
        pictures = (frames for frames in (recordings.frames, drawn) if frames is not None)
        self.sources = [
            BatchSource(shown_to(policy, frames), self.device, resident=resident) for frames in pictures
        ]
        self.tokens = self._put(tokens_of(recordings.actions, policy.config))
        self.rows = self._put(examples(recordings))
        names = sorted(set(recordings.tasks))
        self.prompts = policy.preprocess(recordings.frames[: len(names)], names)
        numbers = [names.index(task) for task in recordings.tasks]
        self.tasks = self._put(np.repeat(numbers, np.diff(recordings.offsets)))
        self.chunk = torch.arange(1, CHUNK + 1, device=self.device)

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def draw(self, batch: int) -> None:
        """Choose the examples of a step: all ranks choose the same, and each keeps its own."""
        drawn = torch.randint(len(self.rows), (batch,), generator=self.generator, device=self.device)
        rows = self.rows[drawn]
        imitated = self.tokens[rows[:, None] + self.chunk]
        moved = self.jitter * torch.randn(imitated.shape, generator=self.generator, device=self.device)
        tokens = (imitated + moved.round().int()).clamp(0, BINS - 1)
        self.drawn = self.shares.own(rows), self.shares.own(tokens)

    def part(self, step: int, part: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return micro-batch `part` of this rank's examples of step `step`; the sources take turns."""
        rows, tokens = (self.shares.part(chosen, part) for chosen in self.drawn)
        task = self.tasks[rows]
        pixels = self.sources[step % len(self.sources)].take(rows)
        return pixels, self.prompts.input_ids[task], self.prompts.attention_mask[task], tokens

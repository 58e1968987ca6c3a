"""Fit policies, by behaviour cloning, and reward models to recorded frames.

Both will see frames that a world model drew, so half of the examples can come from its autoencoder.

Letters: E episodes, F frames of all episodes, A numbers per action.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from asyncrl.devices.tensors import to_signed
from asyncrl.errors import ConfigError
from asyncrl.fitting.loop import WARMUP, BatchSource, Schedule, minimise, prepared
from asyncrl.fitting.recording_files import FIRST_SIMULATOR, FrameFile, Frames, Recordings, blocks
from asyncrl.fitting.settings import Size
from asyncrl.policies.action_tokens import BINS, NormStats, encode, normalise, opening_of
from asyncrl.policies.interface import PolicyInputs, SamplingParams
from asyncrl.policies.openvla.config import OpenVLAOFTConfig, require_trainable
from asyncrl.policies.openvla.files import STATISTICS
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy, new_policy
from asyncrl.policies.openvla.preprocess import PromptTokenizer, build_word_tokenizer, words_for
from asyncrl.records import ACTION_DIM, CHUNK
from asyncrl.rewards.resnet import ResNetReward, RewardConfig, RewardNetwork
from asyncrl.storage.atomic import write_json

_log = logging.getLogger(__name__)
LARGEST_PATCH: Final = 16  # Pixels.
MOST_CLIPPED: Final = 0.05  # Share of a number's steps that a policy may clip without a warning.
LEAST_RANGE: Final = 1e-3  # Least width of a number that (nearly) never changed: never divide by zero.


def patch_size(image_size: int) -> int:
    """Choose the side of a patch: at most `LARGEST_PATCH` pixels, with at least 8 x 8 patches if possible."""
    most = min(LARGEST_PATCH, max(1, image_size // 8))
    patch = max(side for side in range(1, most + 1) if image_size % side == 0)
    if image_size // patch > 2 * -(-image_size // most):
        near = image_size // most * most
        raise ConfigError(
            f"--data has pictures of {image_size} pixels, which only patches of {patch} pixels tile: "
            f"{(image_size // patch) ** 2} tokens a picture. Use a side with a divisor of 8 to "
            f"{LARGEST_PATCH}, such as {near}: --dataset.image-size {near} for LeRobot and robomimic, "
            f"asyncrl collect --image-size {near}, or resize the pictures that you record."
        )
    return patch


def fresh_policy(
    size: Size, recordings: Recordings, statistics: Literal["auto", "q01_q99", "none"]
) -> OpenVLAOFTPolicy:
    """Build a policy for the words, pictures and actions of recordings; see `settings.FitPolicy`."""
    side = recordings.image_size
    tokenizer = build_word_tokenizer(words_for(recordings.tasks))
    base: OpenVLAOFTConfig = getattr(OpenVLAOFTConfig, size)()
    tokens = max(base.token_count, BINS + tokenizer.get_vocab_size())
    changes: dict[str, Any] = {
        "image_size": side,
        "patch_size": patch_size(side),
        "token_count": tokens,
        "vocab_size": tokens + base.vocab_size - base.token_count,
        "action_dim": recordings.actions.shape[1],
    }
    if statistics == "q01_q99" or (statistics == "auto" and recordings.simulator != FIRST_SIMULATOR):
        stats = action_statistics(recordings)
        changes |= {"norm_key": recordings.simulator, "norm_stats": {recordings.simulator: stats}}
    config = getattr(OpenVLAOFTConfig, size)(**changes)
    return new_policy(config, PromptTokenizer(tokenizer, pad_id=config.token_count))


def executed(recordings: Recordings) -> NDArray[np.float32]:
    """Return the actions that were carried out, ``[F - E, A]``: all but each episode's first row."""
    return np.delete(recordings.actions, recordings.offsets[:-1], axis=0)


def action_range(recordings: Recordings) -> NDArray[np.float64]:
    """Return the first and the 99th percentile of each number of an action, ``[2, A]``.

    Where these are closer than `LEAST_RANGE` (the number hardly moves), its extremes, at least so far apart.
    Values outside are clipped.
    """
    actions = executed(recordings).astype(np.float64)
    if not len(actions):
        raise ConfigError("--data holds no action: there is nothing to imitate. Record whole episodes.")
    ends, extremes = np.quantile(actions, [0.01, 0.99], axis=0), np.stack([actions.min(0), actions.max(0)])
    middle, half = extremes.mean(0), np.maximum(extremes[1] - extremes[0], LEAST_RANGE) / 2
    return np.where(ends[1] - ends[0] < LEAST_RANGE, [middle - half, middle + half], ends)


def action_statistics(recordings: Recordings) -> NormStats:
    """Measure the range of each number. The last of 7 is the gripper's, unscaled if within [-1, 1]."""
    low, high = action_range(recordings)
    actions, width = executed(recordings), len(low)
    gripper = width == ACTION_DIM and float(np.abs(actions[:, -1]).max()) <= 1
    scaled = (True,) * (width - 1) + (not gripper,)
    return NormStats(q01=tuple(low.tolist()), q99=tuple(high.tolist()), mask=scaled)


def write_statistics(folder: Path, policy: OpenVLAOFTPolicy, recordings: Recordings) -> None:
    """Write a published policy's `dataset_statistics.json`, if the policy has the recordings' statistics."""
    key = policy.config.norm_key
    if not key or policy.config.norm_stats[key] != action_statistics(recordings):
        return
    actions = executed(recordings).astype(np.float64)
    measured = {"mean": actions.mean(0), "std": actions.std(0), "max": actions.max(0), "min": actions.min(0)}
    entry = policy.config.norm_stats[key].to_published()
    entry["action"] |= {name: values.tolist() for name, values in measured.items()}
    counts = {"num_transitions": len(actions), "num_trajectories": len(recordings)}
    write_json(folder / STATISTICS, {key: entry | counts})


def examples(recordings: Recordings) -> np.ndarray:
    """Return the rows ``[N]`` int64 of the frames with a whole recorded decision after them."""
    spans = map(recordings.span, range(len(recordings)))
    rows = [np.arange(s.start, s.stop - CHUNK) for s in spans if s.stop - s.start > CHUNK]
    if not rows:
        raise ConfigError(f"No recorded episode is longer than {CHUNK} steps: there is nothing to imitate.")
    return np.concatenate(rows)


def check_imitable(policy: OpenVLAOFTPolicy, recordings: Recordings) -> None:
    """Check that the policy can represent the recorded actions and tokenise the tasks."""
    width = recordings.actions.shape[1]
    if width != policy.config.action_dim:
        raise ConfigError(
            f"--data has actions of {width} numbers, but the policy makes {policy.config.action_dim}. Leave "
            f"--refine out: a fresh policy makes as many as the recordings have."
        )
    policy.tokenizer.batch(sorted(set(recordings.tasks)))


def tokens_of(actions: np.ndarray, config: OpenVLAOFTConfig) -> np.ndarray:
    """Compute the bins ``[F, A]`` int32, 0..255, that a policy decodes to actions ``[F, A]``."""
    scaled = opening_of(actions, config.gripper)
    if config.norm_key:
        scaled = normalise(scaled, config.norm_stats[config.norm_key], clip=False)
    outside = (np.abs(scaled) > 1.01).mean(0)
    if (share := outside.max()) > MOST_CLIPPED:
        _log.warning(
            "%.0f %% of the actions lie, in number %d, outside the range that the policy's tokens span: its "
            "end is imitated. Measure the range: --statistics q01_q99.",
            100 * share,
            outside.argmax(),
        )
    return encode(scaled)


def shown_to(policy: OpenVLAOFTPolicy, frames: Frames) -> Frames:
    """Return frames in the policy's size ``[F, S, S, 3]`` if its resizing is slow, else unchanged; uint8."""
    if policy.config.image_pipeline == "rlinf":
        return frames
    size = policy.config.image_size
    shown = FrameFile((len(frames), size, size, 3))
    for part in blocks(frames.shape):
        shown.write(part.start, policy.place_pictures(frames[part]).cpu().numpy())
    return shown


def fit_policy(
    policy: OpenVLAOFTPolicy,
    recordings: Recordings,
    schedule: Schedule,
    *,
    drawn: Frames | None = None,
    jitter: float = 1.3,
    average: float = 0.999,
    pictures_on_device: bool = True,
) -> float:
    """Minimise the negative log-likelihood of the recorded actions, in nats per token.

    `drawn` are the frames as a world's autoencoder draws them, for every second step; `jitter` is the
    standard deviation of the noise on the imitated tokens, in bins; `average` as in `minimise`.
    """
    require_trainable(policy.config)
    check_imitable(policy, recordings)
    frames = [recordings.frames] if drawn is None else [recordings.frames, drawn]
    device, resident = policy.device, pictures_on_device
    sources = [BatchSource(shown_to(policy, some), device, resident=resident) for some in frames]
    generator = torch.Generator(device).manual_seed(schedule.seed)
    loss_at = _imitation(policy, recordings, sources, schedule, jitter, generator)
    policy.train()
    schedule = replace(schedule, warmup=min(WARMUP, schedule.steps // 10))
    loss = minimise("policy", policy, loss_at, schedule, average=average, rngs=[generator])
    policy.eval()
    return loss


def _imitation(
    policy: OpenVLAOFTPolicy,
    recordings: Recordings,
    sources: list[BatchSource],
    schedule: Schedule,
    jitter: float,
    generator: torch.Generator,
) -> Callable[[int], Tensor]:
    device, names = policy.device, sorted(set(recordings.tasks))
    tokens_FA, rows_N, tasks_F = (
        torch.from_numpy(array).to(device)
        for array in (
            tokens_of(recordings.actions, policy.config),
            examples(recordings),
            np.repeat([names.index(task) for task in recordings.tasks], np.diff(recordings.offsets)),
        )
    )
    prompts = policy.preprocess(recordings.frames[: len(names)], names)
    chunk = torch.arange(1, CHUNK + 1, device=device)
    sampling = SamplingParams(temperature=1.0, top_k=0)
    own: list[Tensor] = []

    def logprob(pixels: Tensor, input_ids: Tensor, attention_mask: Tensor, tokens_BCA: Tensor) -> Tensor:
        inputs = PolicyInputs(
            pixels=pixels, input_ids=input_ids, attention_mask=attention_mask, padded=prompts.padded
        )
        return policy.evaluate(inputs, {"tokens": tokens_BCA}, sampling).logprob

    run = prepared(logprob, device, compiled=schedule.compiled)

    def loss_at(count: int) -> Tensor:
        step, part = divmod(count, schedule.parts)
        if part == 0:
            drawn = torch.randint(len(rows_N), (schedule.batch,), generator=generator, device=device)
            rows = rows_N[drawn]
            imitated = tokens_FA[rows[:, None] + chunk]
            moved = jitter * torch.randn(imitated.shape, generator=generator, device=device)
            tokens = (imitated + moved.round().int()).clamp(0, BINS - 1)
            own[:] = schedule.own(rows), schedule.own(tokens)
        rows, tokens = (schedule.part(tensor, part) for tensor in own)
        task = tasks_F[rows]
        pixels = sources[step % len(sources)].take(rows)
        return -run(pixels, prompts.input_ids[task], prompts.attention_mask[task], tokens).mean()

    return loss_at


def fresh_reward(size: Size, recordings: Recordings, device: torch.device) -> ResNetReward:
    """Build a reward model of the recordings' tasks and picture size."""
    make = RewardConfig.tiny if size == "tiny" else RewardConfig.small
    config = make(tuple(sorted(set(recordings.tasks))), recordings.image_size)
    return ResNetReward(RewardNetwork(config), config, device=device)


def fit_reward(reward: ResNetReward, recordings: Recordings, drawn: Frames, schedule: Schedule) -> float:
    """Train on frames with the simulator's verdict, half of them solved; with a wrong task, none is solved.

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
    loss = minimise("reward", reward.network, loss_at, schedule, rngs=[rng])
    reward.network.eval()
    return loss


def _late(recordings: Recordings) -> np.ndarray:
    """Return the rows of unsolved frames in each episode's last two decisions, which look almost solved."""
    spans = map(recordings.span, range(len(recordings)))
    late = np.concatenate([np.arange(max(span.start, span.stop - 16), span.stop) for span in spans])
    return late[~recordings.success[late]]

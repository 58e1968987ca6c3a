"""Behaviour cloning: recorded demonstrations in, a policy that imitates them out."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.fitting.loop import minimise
from asyncrl.fitting.recordings import Recordings
from asyncrl.policies.action_tokens import encode
from asyncrl.policies.openvla_oft import OpenVLAOFT
from asyncrl.policies.protocol import PolicyInputs, SamplingParams
from asyncrl.records import CHUNK


def examples(recordings: Recordings) -> np.ndarray:
    """Rows of frames after which the recording has at least one whole chunk of actions."""
    rows = [
        np.arange(recordings.span(e).start, recordings.span(e).stop - CHUNK)
        for e in range(len(recordings))
        if recordings.span(e).stop - recordings.span(e).start > CHUNK
    ]
    if not rows:
        raise ConfigError(f"No recorded episode is longer than {CHUNK} steps: there is nothing to imitate.")
    return np.concatenate(rows)


def fit_policy(
    policy: OpenVLAOFT,
    recordings: Recordings,
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    jitter: float = 0.01,
) -> float:
    """Minimise the negative log-likelihood of the recorded actions, in nats per token.

    Args:
        policy: Trained in place.
        recordings: Demonstrations; every frame with 8 following actions is an example.
        steps: Optimizer steps.
        batch: Examples per step.
        learning_rate: Peak learning rate.
        seed: Of the choice of examples.
        jitter: Standard deviation of noise on the actions before they become bins (a bin is 1/128 wide):
            neighbouring bins then share what is learned.

    Returns:
        Mean loss of the last tenth.
    """
    rng = np.random.default_rng(seed)
    device = next(policy.parameters()).device
    frames = torch.from_numpy(recordings.frames).to(device)
    names = sorted(set(recordings.tasks))
    prompts = policy.preprocess(recordings.frames[: len(names)], names)
    task_F = np.repeat([names.index(t) for t in recordings.tasks], np.diff(recordings.offsets))
    rows_all = examples(recordings)
    sampling = SamplingParams(temperature=1.0, top_k=0)

    def loss_at(step: int) -> Tensor:
        rows = rng.choice(rows_all, batch)
        actions = recordings.actions[rows[:, None] + np.arange(1, CHUNK + 1)]
        noisy = actions + jitter * rng.standard_normal(actions.shape).astype(np.float32)
        tokens = torch.from_numpy(encode(np.clip(noisy, -1, 1))).to(device)
        task = torch.from_numpy(task_F[rows]).to(device)
        inputs = PolicyInputs(
            pixels=frames[torch.from_numpy(rows).to(device)],
            input_ids=prompts.input_ids[task],
            attention_mask=prompts.attention_mask[task],
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return -policy.evaluate(inputs, tokens, sampling).logprob.mean()

    policy.train()
    loss = minimise("policy", policy, loss_at, steps=steps, learning_rate=learning_rate, average=0.999)
    policy.eval()
    return loss

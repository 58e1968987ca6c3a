"""Small honest stand-ins for the learner's surroundings: a table policy, and episodes made of numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.records import Episode

BINS = 256


@dataclass(frozen=True)
class Evaluation:
    logprob: Tensor
    entropy: Tensor
    value: Tensor | None = None


class TablePolicy(nn.Module):
    """One row of logits per observation; the observation's number is its first pixel. Everything by hand."""

    def __init__(self, rows: int = 6, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.logits = nn.Parameter(torch.randn(rows, 8, 7, BINS, generator=generator))
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        self.evaluated: list[int] = []

    def preprocess(self, frames: np.ndarray, tasks: list[str]) -> Any:
        assert len(frames) == len(tasks)
        return torch.from_numpy(frames[:, 0, 0, 0].astype(np.int64))

    def evaluate(self, inputs: Any, sample: Mapping[str, Tensor], sampling: Any, **through: Any) -> Any:
        self.evaluated.append(len(inputs))
        logits = self.scale * self.logits[inputs] / sampling.temperature
        tokens = sample["tokens"].long()[..., None]
        if sampling.top_k:  # What was drawn stays possible.
            edge = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
            drawn = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, tokens, True)
            logits = logits.masked_fill((logits < edge) & ~drawn, -torch.inf)
        logp = logits.log_softmax(-1)
        entropy = -torch.where(torch.isneginf(logp), 0.0, logp.exp() * logp).sum(-1)
        chosen = logp.gather(-1, tokens)[..., 0]
        return Evaluation(chosen, entropy)

    def act(self, inputs: Any, sampling: Any, seeds: Any) -> Any:
        raise AssertionError("the learner never samples")

    def trainable_tensors(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.named_parameters()}

    acting_tensors = trainable_tensors

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())

    def parameter_groups(self, lr: float, value_lr: float) -> list[dict[str, Any]]:
        return [{"name": "policy", "params": list(self.parameters()), "lr": lr}]


class TableActorCritic(TablePolicy):
    """The same with a table of values: one (chunk level) or eight (action level) per observation."""

    def __init__(self, rows: int = 6, seed: int = 0, width: int = 1) -> None:
        super().__init__(rows, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        self.table = nn.Parameter(torch.randn(rows, width, generator=generator))

    def values(self, inputs: Any) -> Tensor:
        return self.table[inputs]

    def evaluate(self, inputs: Any, sample: Mapping[str, Tensor], sampling: Any, **through: Any) -> Any:
        found = super().evaluate(inputs, sample, sampling, **through)
        return Evaluation(found.logprob, found.entropy, self.table[inputs])

    def parameter_groups(self, lr: float, value_lr: float) -> list[dict[str, Any]]:
        return [
            {"name": "policy", "params": [self.logits, self.scale, self.unused], "lr": lr},
            {"name": "value", "params": [self.table], "lr": value_lr},
        ]


def episode(
    *,
    group: int = 0,
    member: int = 0,
    group_size: int = 2,
    rows: tuple[int, ...] = (0, 1),
    success_at: int = -1,
    versions: tuple[int, ...] | None = None,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    image: int = 2,
) -> Episode:
    """An episode whose decision n looked at table row ``rows[n]``; success at flat step `success_at`."""
    n = len(rows)
    rng = np.random.default_rng([seed, group, member])
    frames = np.zeros((n, image, image, 3), np.uint8)
    frames[:, 0, 0, 0] = rows
    rewards = np.zeros((n, 8), np.float32)
    if success_at >= 0:
        rewards.reshape(-1)[success_at] = 1
    return Episode(
        episode_id=f"{seed:08x}{group:016x}{member:08x}",
        group_id=f"{group:08d}",
        member=member,
        group_size=group_size,
        actor="actor-0",
        task="lift the red block",
        start_state="start",
        world_version=0,
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        end_reason="success" if success_at >= 0 else "truncated",
        frames=frames,
        sample={"tokens": rng.integers(0, BINS, (n, 8, 7)).astype(np.int32)},
        logprobs=rng.uniform(-7.0, -4.5, (n, 8, 7)).astype(np.float32),
        values=np.full(n, np.nan, np.float32),
        actions=np.zeros((n, 8, 7), np.float32),
        rewards=rewards,
        success_scores=rewards.copy(),
        policy_versions=np.array(versions or (0,) * n, np.int64),
        noise_seeds=np.arange(n, dtype=np.int64),
        final_frame=frames[-1] + np.uint8(1),
        video=np.zeros((0, image, image, 3), np.uint8),
    )


def groups_of(outcomes: list[list[int]], *, seed: int = 0, **changes: Any) -> list[list[Episode]]:
    """Groups with the given success steps (-1: truncated); every episode has two decisions."""
    groups: list[list[Episode]] = []
    for g, members in enumerate(outcomes):
        about = {"group": g, "group_size": len(members), "seed": seed} | changes
        rows = [((g + i) % 6, (g + i + 2) % 6) for i in range(len(members))]
        made = enumerate(zip(rows, members, strict=True))
        groups.append([episode(member=i, rows=at, success_at=step, **about) for i, (at, step) in made])
    return groups

"""The update once more, slow and obvious: float64, one decision, unit and token after the other.

Nothing here imports the learner's mathematics. Only the settings and the batch are shared.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings, CriticSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ActorSettings, OptimizerSettings
from asyncrl.learner.batches import Batch, build_batch
from support.table_policy import TableActorCritic, TablePolicy, groups_of

PLACES = [(c, a) for c in range(8) for a in range(7)]


def f64(values: Tensor) -> Tensor:
    return values.detach().double()


@dataclass
class Table:
    """The policy's parameters in float64."""

    logits: Tensor
    values: Tensor | None

    @classmethod
    def of(cls, policy: TablePolicy) -> Table:
        logits = (f64(policy.scale) * f64(policy.logits)).requires_grad_()
        critic = isinstance(policy, TableActorCritic)
        return cls(logits, f64(policy.table).requires_grad_() if critic else None)

    def logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """``[D, 8, 7]`` log-probs and entropies."""
        logp = (self.logits / batch.sampling.temperature).log_softmax(-1)
        rows = torch.from_numpy(batch.frames[:, 0, 0, 0].astype("int64"))
        entropy = -(logp.exp() * logp).sum(-1)
        return logp[rows].gather(-1, batch.sample["tokens"][..., None])[..., 0], entropy[rows]


WEIGHING = ("tis", "mis", "decoupled")


def units_of(level: str) -> list[list[tuple[int, int]]]:
    if level == "token":
        return [[place] for place in PLACES]
    return [[(c, a) for a in range(7)] for c in range(8)] if level == "action" else [PLACES]


def valid(batch: Batch, d: int, unit: list[tuple[int, int]]) -> list[tuple[int, int]]:
    mask = batch.mask[d].tolist()
    return [(c, a) for c, a in unit if mask[c][a]]


def decisions_of(batch: Batch, episode: int) -> list[int]:
    return [d for d, e in enumerate(batch.episode.tolist()) if e == episode and bool(batch.mask[d].any())]


def group_advantages(config: TrainConfig, batch: Batch) -> dict[tuple[int, int], float]:
    """``(decision, step) -> advantage``."""
    chosen, size = config.algorithm, batch.group_size
    everybody, scores = batch.returns.tolist(), []
    for i, score in enumerate(everybody):
        siblings = everybody[i - i % size : i - i % size + size]
        if len(set(siblings)) < 2:
            scores.append(0.0)
            continue
        mean = statistics.fmean(siblings)
        among = {"group_std": siblings, "batch_std": everybody}.get(chosen.advantage_scale)
        spread = 1.0 if among is None else statistics.stdev(among) + 1e-6
        scores.append((score - mean) / spread)
    return {(d, c): scores[int(batch.episode[d])] for d in range(len(batch.tasks)) for c in range(8)}


def critic_targets(
    config: TrainConfig, batch: Batch, table: Table, start: Tensor
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Advantages, value targets and old values per ``(decision, value)``."""
    assert table.values is not None
    critic, width, table_values = config.critic, table.values.shape[1], table.values.tolist()
    advantages, targets, old = {}, {}, {}
    for e in range(len(batch.returns)):
        places, rewards, values, ratios = [], [], [], []
        for d in decisions_of(batch, e):
            row = int(batch.frames[d, 0, 0, 0])
            for k in range(width):
                unit = PLACES if width == 1 else [(k, a) for a in range(7)]
                tokens = valid(batch, d, unit)
                if not tokens:
                    continue
                places.append((d, k))
                steps = range(8) if width == 1 else [k]
                rewards.append(sum(float(batch.rewards[d, c]) for c in steps))
                values.append(table_values[row][k])
                log_ratio = sum(float(start[d][t]) - float(batch.behaviour_logprob[d][t]) for t in tokens)
                ratios.append(math.exp(min(20.0, max(-20.0, log_ratio))))
        final_row = int(batch.final_frames[e, 0, 0, 0])
        over = batch.terminated[e] or critic.truncation == "failure"
        end = 0.0 if over else table_values[final_row][0]
        if config.correction.kind == "vtrace":
            pg, goal = slow_vtrace(config, rewards, values, end, ratios)
        else:
            pg, goal = slow_gae(critic.gamma, critic.lam, rewards, values, end)
        advantages |= dict(zip(places, pg, strict=True))
        targets |= dict(zip(places, goal, strict=True))
        old |= dict(zip(places, values, strict=True))
    if critic.normalize_advantages:
        found = list(advantages.values())
        mean, spread = statistics.fmean(found), statistics.stdev(found) + 1e-5
        advantages = {place: (a - mean) / spread for place, a in advantages.items()}
    return advantages, targets, old


def slow_gae(
    gamma: float, lam: float, rewards: list[float], values: list[float], end: float
) -> tuple[list[float], list[float]]:
    after = [*values[1:], end]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    found = [sum((gamma * lam) ** k * x for k, x in enumerate(deltas[t:])) for t in range(len(deltas))]
    return found, [a + v for a, v in zip(found, values, strict=True)]


def slow_vtrace(
    config: TrainConfig, rewards: list[float], values: list[float], end: float, ratios: list[float]
) -> tuple[list[float], list[float]]:
    gamma, lam, n = config.critic.gamma, config.critic.lam, len(values)
    after = [*values[1:], end]
    rho = [min(1.0, r) for r in ratios]
    c = [lam * min(1.0, r) for r in ratios]
    goal = []
    for s in range(n):
        total, product = values[s], 1.0
        for t in range(s, n):
            total += gamma ** (t - s) * product * rho[t] * (rewards[t] + gamma * after[t] - values[t])
            product *= c[t]
        goal.append(total)
    later = [lam * g + (1 - lam) * a for g, a in zip([*goal[1:], end], after, strict=True)]
    return [rho[t] * (rewards[t] + gamma * later[t] - values[t]) for t in range(n)], goal


def weights_of(config: TrainConfig, batch: Batch, gaps: list, d: int, unit: list[tuple[int, int]]) -> float:
    """Importance weight of one unit; `gaps` holds log proximal - log behaviour."""
    chosen = config.correction
    if chosen.kind not in WEIGHING:
        return 1.0
    own = decisions_of(batch, int(batch.episode[d]))
    level, first = config.algorithm.level if chosen.level == "auto" else chosen.level, unit[0]
    members = {
        "token": [(d, first)],
        "action": [(d, place) for place in valid(batch, d, [(first[0], a) for a in range(7)])],
        "decision": [(d, place) for place in valid(batch, d, PLACES)],
        "episode": [(of, place) for of in own for place in valid(batch, of, PLACES)],
    }[level]
    total = sum(gaps[of][c][a] for of, (c, a) in members)
    raw = math.exp(total / len(members) if chosen.geometric else total)
    if chosen.kind == "tis":
        return min(max(raw, chosen.min_weight), chosen.max_weight)
    low = chosen.min_weight if chosen.kind == "mis" else 0.0
    return raw if low <= raw <= chosen.max_weight else 0.0


def unit_loss(config: TrainConfig, now: Tensor, proximal: Tensor, advantage: float) -> Tensor:
    """Loss of one unit from the log-probs of its valid tokens."""
    chosen = config.algorithm
    difference = (now - proximal).mean() if chosen.objective == "gspo" else (now - proximal).sum()
    ratio = difference.exp()
    edge = ratio.clamp(1 - chosen.clip_low, 1 + chosen.clip_high)
    if chosen.objective == "cispo":
        return -edge.detach() * advantage * now.sum()
    loss = torch.maximum(-advantage * ratio, -advantage * edge)
    if chosen.dual_clip and advantage < 0:
        loss = torch.minimum(loss, torch.tensor(-advantage * chosen.dual_clip, dtype=torch.float64))
    return loss


def counted(
    config: TrainConfig, batch: Batch, level: str, episodes: list[int]
) -> Iterator[tuple[int, list, float]]:
    """``(decision, valid tokens of a unit, what the unit counts)``."""
    found = [
        (d, tokens)
        for e in episodes
        for d in decisions_of(batch, e)
        for unit in units_of(level)
        if (tokens := valid(batch, d, unit))
    ]
    home = batch.episode.tolist()
    sizes = Counter(home[d] for d, _ in found)
    each = {"token": 56, "action": 8, "decision": 1}[level] * config.actor.max_decisions
    for d, tokens in found:
        own = sizes[home[d]]
        count = {
            "token_mean": 1 / len(found),
            "length_normalised": 1 / (len(episodes) * own),
            "constant": 1 / (len(episodes) * each),
        }[config.algorithm.aggregation]
        yield d, tokens, count


def slow_loss(
    config: TrainConfig,
    batch: Batch,
    table: Table,
    before: Table,
    reference: Table | None,
    episodes: list[int],
) -> Tensor:
    """The loss of the given episodes, with gradient to `table`."""
    chosen, correction = config.algorithm, config.correction
    now, entropy = table.logprobs(batch)
    start = before.logprobs(batch)[0].detach()
    behaviour, proximal = batch.behaviour_logprob.double(), start
    if correction.kind == "naive":
        proximal = behaviour
    if chosen.kind == "ppo":
        teaching, targets, old = critic_targets(config, batch, before, start)
    else:
        teaching, targets, old = group_advantages(config, batch), {}, {}
    wide = before.values is not None and before.values.shape[1] > 1
    gaps = (proximal - behaviour).tolist()
    anchor = reference.logprobs(batch)[0].detach() if reference is not None else now
    loss = torch.zeros((), dtype=torch.float64)
    for d, tokens, count in counted(config, batch, chosen.level, episodes):
        c, _ = tokens[0]
        advantage = teaching[d, c if chosen.kind == "grpo" or wide else 0]
        at = tuple(zip(*tokens, strict=True))
        term = unit_loss(config, now[d][at], proximal[d][at], advantage)
        moved = float(now[d][at].detach().mean().exp() - behaviour[d][at].mean().exp())
        beyond = advantage * moved > 0 and abs(moved) > config.trust_region
        if config.trust_region and beyond:
            continue
        loss = loss + count * weights_of(config, batch, gaps, d, tokens) * term
    for d, tokens, count in counted(config, batch, "token", episodes):
        place = tokens[0]
        loss = loss - chosen.entropy_coef * count * entropy[d][place]
        if reference is not None:
            gap = now[d][place] - anchor[d][place]
            penalty = gap**2 / 2
            behind = float(now[d][place].detach() - behaviour[d][place])
            fresh = correction.kind == "none" and chosen.kind == "grpo"
            weight = 1.0 if fresh else min(math.exp(behind), correction.max_weight)
            loss = loss + chosen.kl_coef * count * weight * penalty
    mine = {place: t for place, t in targets.items() if int(batch.episode[place[0]]) in episodes}
    for (d, k), target in mine.items():
        assert table.values is not None
        value = table.values[int(batch.frames[d, 0, 0, 0]), k]
        error = huber(value - target, config.critic.huber)
        if config.critic.value_clip:
            near = old[d, k] + (value - old[d, k]).clamp(-config.critic.value_clip, config.critic.value_clip)
            error = torch.maximum(error, huber(near - target, config.critic.huber))
        loss = loss + 0.5 * error / len(mine)
    return loss


def huber(error: Tensor, delta: float) -> Tensor:
    return error**2 / 2 if error.abs() <= delta else delta * (error.abs() - delta / 2)


def recipe(**changes: Any) -> TrainConfig:
    """Settings that leave the gradient as it is; ``algorithm__kind="ppo"`` sets ``algorithm.kind``."""
    parts: dict[str, dict[str, Any]] = {
        "algorithm": {"group_size": 3},
        "optimizer": {"max_grad_norm": 1e9, "learning_rate": 0.01},
        "critic": {"learning_rate": 0.01},
        "correction": {},
    }
    for name, value in changes.items():
        part, _, field = name.partition("__")
        parts[part][field] = value
    return TrainConfig(
        actor=ActorSettings(max_decisions=6),
        algorithm=AlgorithmSettings(**parts["algorithm"]),
        optimizer=OptimizerSettings(**parts["optimizer"]),
        critic=CriticSettings(**parts["critic"]),
        correction=CorrectionSettings(**parts["correction"]),
    )


OUTCOMES = [[10, -1, -1], [-1, -1, -1], [2, 15, -1]]
"""Steps of success of three groups; the middle one carries no signal, an episode of the last ends early."""


def stale_batch(outcomes: list[list[int]] = OUTCOMES, spread: float = 0.3, **changes: Any) -> Batch:
    """A batch whose behaviour policy was near the table's: log-ratios of about `spread` per token."""
    batch = build_batch(groups_of(outcomes, **changes), version=2)
    logprob, _ = Table.of(TablePolicy(rows=8)).logprobs(batch)
    noise = spread * torch.randn(logprob.shape, generator=torch.Generator().manual_seed(5))
    near = (logprob.detach().float() - noise).clamp(max=0.0)
    return dataclasses.replace(batch, behaviour_logprob=near)


def name_of(changes: dict[str, Any]) -> str:
    return "-".join(f"{key.split('__')[1]}={value}" for key, value in changes.items()) or "default"

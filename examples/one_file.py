"""The algorithm of asyncrl in one file: GRPO inside a world model, from samples that are one update old.

    python examples/one_file.py            # the shipped table on two CPU cores, 25 s per update

    imagine     the policy acts, the world model draws what follows, the reward model judges it
    advantage   an episode is compared with its siblings, which began at the same start state
    correct     importance weights make up for the policy having changed since it sampled
    step        one clipped policy-gradient step

`asyncrl train` computes the same with actors, a replay and a learner in processes of their own: there the
actors do not wait for the learner, and a sample may be as old as --replay.max-lag allows. Here both take
turns, and the age is one update. tests/test_one_file.py compares two of these updates with the learner's.

Dimension letters:
    B  episodes              N  decisions of an episode    D  decisions of all episodes
    C  steps per decision    A  numbers of an action       H, W  image size in pixels
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.records import StartState, episode_seed, noise_seed, sampling_seed
from asyncrl.rewards.interface import RewardModel
from asyncrl.worlds.interface import World

SAMPLING = SamplingParams(temperature=1.0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The defaults of `asyncrl train`."""

    groups: int = 16
    """Start states of an update."""
    group_size: int = 8
    """Episodes from each start state."""
    max_decisions: int = 6
    """Decisions until an episode has failed."""
    threshold: float = 0.7
    """Probability from which the reward model calls a frame a success."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """The ratio to the policy before the update is kept within 1 - clip_low and 1 + clip_high."""
    dual_clip: float = 3.0
    """Where the advantage A is negative the loss is at most -A times this."""
    max_weight: float = 2.0
    """Largest importance weight."""
    trust_region: float = 0.2
    """Largest gain of a token's probability, in the direction of its advantage, since it was sampled."""
    learning_rate: float = 1e-4
    max_grad_norm: float = 1.0
    micro_batch: int = 32
    """Decisions of a forward and backward pass: memory and speed, not the result."""


@dataclass(kw_only=True)
class Imagination:
    """An episode while and after it is imagined."""

    start: StartState
    seed: int
    frame: NDArray[np.uint8]
    """``[H, W, 3]`` what the policy sees next."""
    frames: list[NDArray[np.uint8]] = field(default_factory=list)
    """N times ``[H, W, 3]``: what each decision was taken on."""
    tokens: list[Tensor] = field(default_factory=list)
    """N times ``[C, A]`` int64: the action tokens that were drawn."""
    logprobs: list[Tensor] = field(default_factory=list)
    """N times ``[C, A]`` float32: their log-probs when they were drawn."""
    steps: int = 0
    """Steps until the success, that one included, or all."""
    success: bool = False

    def add(
        self, tokens: Tensor, logprobs: Tensor, frames: NDArray[np.uint8], solved: NDArray[np.bool_]
    ) -> None:
        """Append a decision: C frames were drawn, of which `solved` says where the task looks fulfilled."""
        self.frames.append(self.frame)
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)
        self.frame = frames[-1]
        self.success = bool(solved.any())
        self.steps += int(solved.argmax()) + 1 if self.success else len(solved)


@torch.inference_mode()
def imagine(
    policy: Policy,
    world: World[Any],
    reward: RewardModel,
    starts: Sequence[StartState],
    update: int,
    settings: Settings,
) -> list[Imagination]:
    """Imagine ``B = groups * group_size`` episodes; siblings are adjacent."""
    episodes = [
        Imagination(
            start=start, seed=episode_seed(0, update * len(starts) + group, member), frame=start.present_frame
        )
        for group, start in enumerate(starts)
        for member in range(settings.group_size)
    ]
    state = world.start([episode.start for episode in episodes], decisions=settings.max_decisions)
    running = list(range(len(episodes)))
    for decision in range(settings.max_decisions):
        batch = [episodes[i] for i in running]
        tasks = [episode.start.task for episode in batch]
        noise = [noise_seed(episode.seed, decision) for episode in batch]
        inputs = policy.preprocess(np.stack([episode.frame for episode in batch]), tasks)
        acted = policy.act(inputs, SAMPLING, [sampling_seed(seed) for seed in noise])
        frames, state = world.imagine(state, acted.actions, noise)
        solved = (reward.score(frames, tasks) >= settings.threshold).cpu().numpy()
        drawn = frames.cpu().numpy()
        for row, episode in enumerate(batch):
            episode.add(acted.sample["tokens"][row], acted.logprob[row], drawn[row], solved[row])
        kept = [row for row, episode in enumerate(batch) if not episode.success]
        if not kept:
            break
        running, state = [running[row] for row in kept], state.select(kept)
    return episodes


def advantages(returns: Tensor, group_size: int) -> Tensor:
    """Compute ``(R - mean) / (std + 1e-6)`` within each group, 0 where all scored the same; ``[B]``.

    GRPO, arXiv:2402.03300, section 4.1.2.
    """
    groups = returns.unflatten(0, (-1, group_size))
    scored = (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + 1e-6)
    differ = groups.amax(dim=1, keepdim=True) > groups.amin(dim=1, keepdim=True)
    return torch.where(differ, scored, 0.0).flatten()


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """All decisions of some episodes."""

    frames: NDArray[np.uint8]
    """``[D, H, W, 3]``."""
    tasks: list[str]
    tokens: Tensor
    """``[D, C, A]``."""
    behaviour: Tensor
    """``[D, C, A]`` log-probs of the policy that sampled."""
    mask: Tensor
    """``[D, C, A]`` bool: steps until the end of the episode."""
    advantage: Tensor
    """``[D, 1, 1]``."""

    @classmethod
    def of(cls, episodes: Sequence[Imagination], group_size: int) -> Decisions:
        """Flatten episodes."""
        returns = torch.tensor([float(episode.success) for episode in episodes])
        scored = advantages(returns, group_size)
        tokens = torch.stack([one for episode in episodes for one in episode.tokens])
        chunk, dim = tokens.shape[1:]
        steps = [torch.arange(len(e.tokens) * chunk).unflatten(0, (-1, chunk)) < e.steps for e in episodes]
        return cls(
            frames=np.stack([frame for episode in episodes for frame in episode.frames]),
            tasks=[episode.start.task for episode in episodes for _ in episode.frames],
            tokens=tokens,
            behaviour=torch.stack([one for episode in episodes for one in episode.logprobs]),
            mask=torch.cat(steps)[:, :, None].expand(-1, -1, dim),
            advantage=torch.cat(
                [a.expand(len(episode.frames)) for a, episode in zip(scored, episodes, strict=True)]
            )[:, None, None],
        )

    def logprob(self, policy: Policy, rows: Tensor) -> Tensor:
        """Evaluate some decisions with the current weights: ``[len(rows), C, A]``."""
        inputs = policy.preprocess(self.frames[rows.numpy()], [self.tasks[row] for row in rows.tolist()])
        return policy.evaluate(inputs, {"tokens": self.tokens[rows]}, SAMPLING).logprob.float()


def token_loss(now: Tensor, old: Tensor, behaviour: Tensor, advantage: Tensor, settings: Settings) -> Tensor:
    """Compute the loss of each token, ``[D, C, A]``; only `now` has a gradient.

    The clipped ratio (PPO, arXiv:1707.06347; dual clip, arXiv:1912.09729) is taken against the policy before
    the update, `old`, and weighed by how much likelier that one made the token than the policy that sampled
    (truncated importance sampling). A token that updates since then moved far is left out.
    """
    ratio = (now - old).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * settings.dual_clip), loss)
    weight = (old - behaviour).exp().clamp(max=settings.max_weight)
    moved = torch.sign(advantage) * (now.detach().exp() - behaviour.exp())
    return torch.where(moved > settings.trust_region, 0.0, weight * loss)


def learn(policy: Policy, optimizer: torch.optim.Optimizer, batch: Decisions, settings: Settings) -> float:
    """Make one step on a batch; returns the loss. Every valid token of the batch counts the same."""
    tokens = batch.mask.sum()
    taught = torch.nonzero(batch.advantage.flatten()).flatten()  # The others have no gradient.
    optimizer.zero_grad()
    total = 0.0
    for rows in taught.split(settings.micro_batch):
        now = batch.logprob(policy, rows)
        # Before the only step the current policy is the one before the update.
        loss = token_loss(now, now.detach(), batch.behaviour[rows], batch.advantage[rows], settings)
        loss = torch.where(batch.mask[rows], loss, 0.0).sum() / tokens
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(policy.trainable_parameters().values(), settings.max_grad_norm)
    optimizer.step()
    return total


def optimizer_of(policy: Policy, settings: Settings) -> torch.optim.Optimizer:
    """Build AdamW over the weights that learn."""
    parameters = policy.trainable_parameters().values()
    return torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def main(updates: int = 10) -> None:
    """Improve the shipped policy in the shipped world."""
    from asyncrl.config.sections import ImaginationSettings
    from asyncrl.launch.named_models import named_policy, named_reward, named_world
    from asyncrl.storage.assets import start_states_path
    from asyncrl.worlds.start_states import load_start_states

    settings, cpu = Settings(), torch.device("cpu")
    starts = load_start_states(start_states_path("tabletop", "tabletop"))
    named, named_judge = named_world("tabletop", ()), named_reward("", named_world("tabletop", ()).folder, ())
    world = named.kind.load(named.folder, cpu, ImaginationSettings())
    reward = named_judge.kind.load(named_judge.folder, cpu, sorted({start.task for start in starts}))
    learner = named_policy("tabletop", ()).kind.load(named_policy("tabletop", ()).folder, cpu)
    actor = copy.deepcopy(learner)
    optimizer = optimizer_of(learner, settings)

    draw = np.random.default_rng(0)
    for update in range(updates):
        chosen = [starts[i] for i in draw.choice(len(starts), settings.groups, replace=False)]
        episodes = imagine(actor, world, reward, chosen, update, settings)
        actor.load_state_dict(learner.state_dict())  # It samples the next batch with weights one update old.
        loss = learn(learner, optimizer, Decisions.of(episodes, settings.group_size), settings)
        success = sum(episode.success for episode in episodes) / len(episodes)
        print(f"update {update + 1}: {success:.1%} imagined success, loss {loss:+.4f}", flush=True)


if __name__ == "__main__":
    main()

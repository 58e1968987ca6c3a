"""What do whole updates gain from each thing that the learner leaves out? Ratios of the same run.

    python benchmarks/learner_updates.py                            # OpenVLA-OFT at full size, one GPU
    python benchmarks/learner_updates.py --tiny --device cpu        # the embedded size

Random weights, adapters. The batch has `groups` groups of 8 episodes of `decisions` decisions; a `silent`
share of the groups scored all the same. Instructions are as long as those of a LIBERO suite. Every way of
updating is timed in turn, `rounds` times (on a CPU in seconds of the processor, which others do not disturb);
a ratio is the median of a way over that of the update as it is:

    in the batch's order     micro-batches are not sorted by the length of their prompts
    all looked at before     the pass before the first of several steps has every decision
    a pass to see movement   how far the policy moved is read from a whole micro-batch after the only step

The first line of a recipe is the update over the forward and backward passes of its micro-batches alone. The
last table counts what sorting saves at the sizes of a published recipe; it needs no device.
"""

from __future__ import annotations

import json
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import policy_speed
import torch
import tyro
from measuring import commit, heading, table, wait

from asyncrl.config.actor import ActorSettings
from asyncrl.config.run import TrainConfig
from asyncrl.launch.build_learner import build_update
from asyncrl.learner import prepare, update_metrics
from asyncrl.learner.batches import Batch, build_batch
from asyncrl.learner.forward import longest_first
from asyncrl.learner.minibatches import split_minibatches
from asyncrl.learner.update import Update
from asyncrl.policies.acceleration import compile_blocks, enable_gradient_checkpointing
from asyncrl.policies.lora import add_lora
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from asyncrl.policies.openvla.tokenizer import WORDS
from asyncrl.records import CHUNK, Episode

Suite = Literal["spatial", "object", "goal", "10"]
PROMPTS: Final[dict[Suite, tuple[int, ...]]] = {
    "spatial": (35, 30, 36, 32, 31, 33, 31, 32, 31, 31),
    "object": (26, 29, 26, 30, 28, 27, 25, 27, 28, 28),
    "goal": (23, 26, 25, 22, 23, 24, 25, 24, 25, 20),
    "10": (31, 25, 30, 29, 30, 31, 36, 38, 30, 28),
}
"""Tokens of the prompts of each LIBERO suite, with the tokenizer of Llama 2."""
REST: Final = 256 + 56
"""Positions of OpenVLA-OFT beside the prompt: patches and slots."""
PUBLISHED: Final = (128, 8, 4, 32)
"""Groups, episodes of a group, minibatches and micro-batch of the Wan recipes."""
MEMBERS: Final = 8


@dataclass(frozen=True, kw_only=True)
class Settings(policy_speed.Settings):
    """Time whole updates; adapters of rank `lora` learn."""

    rows: tuple[int, ...] = (32,)
    """Decisions of a micro-batch: the first number."""
    groups: int = 8
    """Groups of 8 episodes in a batch."""
    decisions: int = 4
    """Decisions of an episode."""
    silent: float = 0.5
    """Share of the groups that teach nothing."""
    suite: Suite = "10"
    """LIBERO suite whose instructions are as long."""
    rounds: int = 5
    """Updates of each way that are timed, after one that is not."""
    compile: bool = True
    """Compile the layers, on a GPU."""


def instruction(policy: OpenVLAOFTPolicy, tokens: int) -> str:
    """An instruction of known words whose prompt has so many tokens, or as few as there can be."""
    words = max(1, tokens - policy.prompt_tokens(WORDS[0]) + 1)
    return " ".join(WORDS[(tokens + k) % len(WORDS)] for k in range(words))


def make_batch(policy: OpenVLAOFTPolicy, settings: Settings) -> Batch:
    """Noise for frames and tokens; in a group that teaches something every other episode succeeded."""
    rng = np.random.default_rng(0)
    size, chunk = (64 if settings.tiny else 256), (settings.decisions, CHUNK, policy.config.action_dim)
    lengths = PROMPTS[settings.suite]

    def episode(group: int, member: int) -> Episode:
        silent = group < settings.silent * settings.groups
        rewards = np.zeros(chunk[:2], np.float32)
        rewards[-1, -1] = float(not silent and member % 2)
        frames = rng.integers(0, 256, (settings.decisions, size, size, 3), dtype=np.uint8)
        return Episode(
            episode_id=uuid.UUID(int=(group << 32) + member).hex, group_id=f"{group:08d}", member=member,
            group_size=MEMBERS, actor="actor-0", task=instruction(policy, lengths[group % len(lengths)]),
            start_state="noise", world_version=0, seed=0, temperature=1.6, top_k=0,
            end_reason="success" if rewards.any() else "truncated", frames=frames,
            sample={"tokens": rng.integers(0, 256, chunk).astype(np.int32)},
            logprobs=rng.uniform(-6, -5, chunk).astype(np.float32),
            values=np.full(settings.decisions, np.nan, np.float32), actions=np.zeros(chunk, np.float32),
            rewards=rewards, success_scores=rewards.copy(),
            policy_versions=np.zeros(settings.decisions, np.int64), noise_seeds=np.arange(settings.decisions),
            final_frame=frames[-1], video=frames[:0],
        )  # fmt: skip

    order = rng.permutation(settings.groups).tolist()
    return build_batch([[episode(g, i) for i in range(MEMBERS)] for g in order], version=1)


def build(settings: Settings) -> OpenVLAOFTPolicy:
    """The policy as a learner with adapters has it."""
    policy = policy_speed.build(settings, torch.device(settings.device))
    add_lora(policy, settings.lora, float(settings.lora), dtype=policy.config.torch_dtype)
    enable_gradient_checkpointing(policy)
    if settings.compile and policy.device.type == "cuda":
        compile_blocks(policy)
    return policy.eval()


@contextmanager
def put(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an attribute be something else for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def in_order(update: Update) -> Iterator[None]:
    """Leave decisions as the batch has them."""
    with put(update.policy, "prompt_tokens", lambda task: 0):
        yield


@contextmanager
def all_before(update: Update) -> Iterator[None]:
    """Evaluate every decision before the first step."""
    with put(prepare, "rows_that_teach", lambda batch, *_: torch.arange(len(batch.tasks))):
        yield


@contextmanager
def whole_pass(update: Update) -> Iterator[None]:
    """Read how far the policy moved from as many decisions as a pass takes."""
    with put(update_metrics, "MOVEMENT_SHARE", 1):
        yield


@contextmanager
def as_it_is(update: Update) -> Iterator[None]:
    """Change nothing."""
    yield


def passes_alone(update: Update, batch: Batch) -> None:
    """Forward and backward passes of the decisions that teach something, and nothing else."""
    estimates = update.recipe.estimate(batch, None, update.ranks)
    rows = torch.nonzero((estimates.advantages != 0).flatten(1).any(dim=1)).flatten()
    rows = rows[longest_first(update.forward.prompt_lengths(batch.tasks)[rows])]
    update.stepper.clear_gradient()
    for part in update.forward.micro_batches(len(rows)):
        found = update.forward.evaluate(batch, rows[part])
        (found.logprob.mean() + found.entropy.mean()).backward()


def timed(update: Update, batch: Batch, settings: Settings, ways: dict[str, Any]) -> dict[str, float]:
    """Median seconds of each way of updating, and of the passes alone; all in turn."""
    actions: dict[str, Callable[[], object]] = {"passes alone": lambda: passes_alone(update, batch)}
    for name, changed in ways.items():

        def run(changed: Any = changed) -> None:
            with changed(update):
                update(batch, version=1)

        actions[name] = run
    clock = time.perf_counter if update.device.type == "cuda" else time.process_time
    found: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(settings.rounds + 1):
        for name, action in actions.items():
            wait(update.device)
            began = clock()
            action()
            wait(update.device)
            if number:
                found[name].append(clock() - began)
    return {name: statistics.median(times) for name, times in found.items()}


RECIPES: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "one step": (1, {"as it is": as_it_is, "in the batch's order": in_order,
                     "a pass to see movement": whole_pass}),
    "four steps": (4, {"as it is": as_it_is, "in the batch's order": in_order,
                       "all looked at before": all_before}),
}  # fmt: skip
"""Minibatches, and ways to make the update."""


def updates(settings: Settings, policy: OpenVLAOFTPolicy, batch: Batch) -> list[list[object]]:
    """Time all ways of all recipes; a line for each."""
    lines: list[list[object]] = []
    for name, (minibatches, ways) in RECIPES.items():
        config = replace(TrainConfig(), actor=ActorSettings(max_decisions=settings.decisions))
        chosen = replace(config.algorithm, minibatches=minibatches, micro_batch=settings.rows[0])
        update = build_update(replace(config, algorithm=chosen), policy)
        found = timed(update, batch, settings, ways)
        usual = found["as it is"]
        lines.append(
            [name, "as it is / passes alone", f"{usual:.3f}", f"{usual / found['passes alone']:.3f}"]
        )
        for way in list(ways)[1:]:
            lines.append([name, f"{way} / as it is", f"{found[way]:.3f}", f"{found[way] / usual:.3f}"])
    return lines


def padding(lengths: Sequence[int], *, ordered: bool) -> tuple[float, float]:
    """Share of the positions that are padding, and of the passes that need a mask, at the published sizes.

    Episodes have 16 to 32 decisions, and every group teaches something.
    """
    groups, members, minibatches, size = PUBLISHED
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(np.repeat(rng.choice(lengths, groups), members))
    decisions = torch.from_numpy(rng.integers(16, 33, groups * members))
    padded = positions = masked = passes = 0
    for episodes in split_minibatches(groups * members, minibatches, (0, 0, 0)):
        rows = tokens[episodes.sort().values].repeat_interleave(decisions[episodes.sort().values])
        rows = rows if ordered else rows[longest_first(rows)]
        for part in rows.split(size):
            padded += int((part.max() - part).sum())
            positions += int(part.max() + REST) * len(part)
            masked += int(part.min() < part.max())
            passes += 1
    return padded / positions, masked / passes


def counts() -> list[list[object]]:
    """What sorting saves at the published sizes, suite by suite."""
    lines: list[list[object]] = []
    for suite in get_args(Suite):
        before, after = (padding(PROMPTS[suite], ordered=ordered) for ordered in (True, False))
        lines.append([suite, *(f"{share:.2%}" for pair in zip(before, after, strict=True) for share in pair)])
    return lines


def main() -> None:
    """Measure, print."""
    settings = tyro.cli(Settings, description=__doc__)
    device = torch.device(settings.device)
    print(heading(device), flush=True)
    policy = build(settings)
    batch = make_batch(policy, settings)
    print(f"{len(batch.tasks)} decisions, median of {settings.rounds} updates\n", flush=True)
    lines = updates(settings, policy, batch)
    print(table(["recipe", "", "s", "ratio"], lines))
    saved = counts()
    titles = ["suite", "padding, batch's order", "sorted", "passes with a mask, batch's order", "sorted"]
    print("\nat the sizes of the Wan recipes\n\n" + table(titles, saved))
    if device.type == "cuda":
        print(f"\npeak memory {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB")
    if settings.json:
        content = {"commit": commit(), "updates": lines, "padding": saved}
        Path(settings.json).write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()

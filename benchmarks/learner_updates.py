"""How long do whole updates take over their passes alone, and in which parts and kernels is their time?

    python benchmarks/learner_updates.py                            OpenVLA-OFT at full size, one GPU
    python benchmarks/learner_updates.py --tiny --device cpu        the embedded size
    torchrun --nproc-per-node 4 benchmarks/learner_updates.py --lora 0              all weights, divided

Random weights, learner ranks as `asyncrl train` has them. The batch of each has `groups` groups of 8
episodes of `decisions` decisions; all members of a `silent` share of the groups score the same. Instructions
have the lengths of a LIBERO suite. Updates are timed in turn with the forward and backward passes of their
micro-batches alone, `rounds` times (on a CPU in processor seconds); with --reshard-after step and all
weights, also updates that gather weights in each pass. Ratios are of medians. MFU counts two passes with
adapters and three with all weights, as `time/mfu` does, over the data sheet's peak.

The second table divides an update's time, with a wait for the device around each part, so that its sum
exceeds an update; the device's time by kernels follows.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import policy_speed
import torch
import tyro
from measuring import commit, heading, kernel_report, table, wait

from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ActorSettings
from asyncrl.devices.tensors import pick_device
from asyncrl.launch.build import build_update, compile_learning
from asyncrl.launch.job import read_job
from asyncrl.learner import update as update_module
from asyncrl.learner.batches import Batch, build_batch
from asyncrl.learner.forward import longest_first
from asyncrl.learner.fsdp import UNITS, ReshardAfter, shard, summed_gradient
from asyncrl.learner.ranks import LearnerRanks, joined_ranks, not_finite
from asyncrl.learner.update import Update
from asyncrl.learner.update_metrics import Throughput
from asyncrl.observability.metrics_system import MFU
from asyncrl.policies.acceleration import enable_gradient_checkpointing
from asyncrl.policies.lora import add_lora
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from asyncrl.policies.openvla.preprocess import WORDS
from asyncrl.records import CHUNK, Episode

Suite = Literal["spatial", "object", "goal", "10"]
PROMPTS: Final[dict[Suite, tuple[int, ...]]] = {
    "spatial": (35, 30, 36, 32, 31, 33, 31, 32, 31, 31),
    "object": (26, 29, 26, 30, 28, 27, 25, 27, 28, 28),
    "goal": (23, 26, 25, 22, 23, 24, 25, 24, 25, 20),
    "10": (31, 25, 30, 29, 30, 31, 36, 38, 30, 28),
}
"""Tokens of the prompts of each LIBERO suite, with the tokenizer of Llama 2."""
MEMBERS: Final = 8


@dataclass(frozen=True, kw_only=True)
class Settings(policy_speed.Settings):
    """Time whole updates."""

    lora: int = 32
    """Rank of the adapters that learn; 0: all weights do."""
    rows: tuple[int, ...] = (32,)
    """Decisions of a micro-batch: the first number."""
    groups: int = 8
    """Groups of 8 episodes in a rank's batch."""
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
    every: int = 1
    """--learner.gradient-checkpointing-every; 0: no layer computes again."""
    reshard_after: ReshardAfter = "pass"
    """--learner.reshard-after."""


class Stopwatch:
    """Adds up the seconds inside some calls, by name. Waits for the device before and after each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    def now(self) -> float:
        wait(self.device)
        return time.perf_counter()

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*arguments: Any, **more: Any) -> Any:
            began = self.now()
            try:
                return call(*arguments, **more)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - began

        return timed


def instruction(policy: OpenVLAOFTPolicy, tokens: int) -> str:
    words = max(1, tokens - policy.prompt_tokens(WORDS[0]) + 1)
    return " ".join(WORDS[(tokens + k) % len(WORDS)] for k in range(words))


def make_groups(policy: OpenVLAOFTPolicy, settings: Settings, rank: int) -> list[list[Episode]]:
    rng = np.random.default_rng(rank)
    size, chunk = (64 if settings.tiny else 256), (settings.decisions, CHUNK, policy.config.action_dim)
    lengths = PROMPTS[settings.suite]

    def episode(group: int, member: int) -> Episode:
        silent = group < settings.silent * settings.groups
        rewards = np.zeros(chunk[:2], np.float32)
        rewards[-1, -1] = float(not silent and member % 2)
        frames = rng.integers(0, 256, (settings.decisions, size, size, 3), dtype=np.uint8)
        return Episode(
            episode_id=uuid.UUID(int=(rank << 64) + (group << 32) + member).hex,
            group_id=f"{rank * settings.groups + group:08d}", member=member,
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
    return [[episode(g, i) for i in range(MEMBERS)] for g in order]


def build(settings: Settings) -> OpenVLAOFTPolicy:
    device = torch.device(settings.device)
    torch.manual_seed(0)  # The same weights on all ranks.
    policy = policy_speed.build(settings, device)
    if settings.lora:
        add_lora(policy, settings.lora, float(settings.lora), dtype=policy.config.torch_dtype)
    else:
        policy.requires_grad_(True)
    if settings.every:
        enable_gradient_checkpointing(policy, every=settings.every)
    return shard(policy.eval(), device, "bf16", reshard_after=settings.reshard_after)


@contextmanager
def put(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def in_each_pass(update: Update) -> Iterator[None]:
    with put(update.policy, UNITS, replace(getattr(update.policy, UNITS), stay=False)):
        yield


@contextmanager
def as_it_is(update: Update) -> Iterator[None]:
    yield


def whole(update: Update, groups: Sequence[Sequence[Episode]]) -> None:
    update(build_batch(groups, version=1), version=1)
    assert not not_finite(update.policy.trainable_parameters(), update.ranks)


def passes_alone(update: Update, batch: Batch) -> None:
    estimates = update.recipe.estimate(batch, None, update.ranks)
    rows = torch.nonzero((estimates.advantages != 0).flatten(1).any(dim=1)).flatten()
    rows = rows[longest_first(update.forward.prompt_lengths(batch.tasks)[rows])]
    update.optimizer.zero_grad()
    parts = update.forward.split(len(rows))
    with summed_gradient(update.policy) as pass_is_last:
        for number, part in enumerate(parts, start=1):
            found = update.forward.evaluate(batch, rows[part])
            if number == len(parts):
                pass_is_last()
            (found.logprob.mean() + found.entropy.mean()).backward()


def parts(update: Update, groups: Sequence[Sequence[Episode]], settings: Settings) -> list[list[object]]:
    watch = Stopwatch(update.device)
    places: tuple[tuple[Any, str, str], ...] = (
        (update_module, "add_kl_after_step", "KL to the policy before"),
        (update.forward, "evaluate", "forward passes"),
        (torch.Tensor, "backward", "backward passes"),
        (update.optimizer, "zero_grad", "clearing the gradient"),
        (update.stepper, "step", "clipping and stepping"),
    )
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        for owner, name, title in places:
            stack.enter_context(put(owner, name, watch.around(title, getattr(owner, name))))
        for number in range(settings.rounds + 1):
            watch.seconds.clear()
            began = watch.now()
            whole(update, groups)
            spent = watch.seconds | {"whole update": watch.now() - began}
            moved = spent["KL to the policy before"]
            spent["forward passes"] -= moved  # A pass of its own is inside of it.
            spent["all else"] = spent["whole update"] - sum(spent[title] for _, _, title in places)
            for title, taken in spent.items() if number else ():
                found.setdefault(title, []).append(taken)
    return [[title, f"{1000 * statistics.median(times):.0f}"] for title, times in found.items()]


def timed(
    update: Update, groups: Sequence[Sequence[Episode]], settings: Settings, ways: dict[str, Any]
) -> dict[str, float]:
    batch = build_batch(groups, version=1)
    actions: dict[str, Callable[[], object]] = {"passes alone": lambda: passes_alone(update, batch)}
    for name, changed in ways.items():

        def run(changed: Any = changed) -> None:
            with changed(update):
                whole(update, groups)

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


def utilisation(
    update: Update, groups: Sequence[Sequence[Episode]], settings: Settings
) -> Callable[[float], str]:
    batch = build_batch(groups, version=1)
    teaching = sum(any(e.rewards.any() for e in group) for group in groups) * MEMBERS * settings.decisions
    throughput = Throughput(
        update.policy,
        update.ranks,
        micro_batch=settings.rows[0],
        precision="bf16",
        adapters=bool(settings.lora),
    )

    def read(seconds: float) -> str:
        found = throughput.measure(batch, teaching, seconds)
        return f"{found[MFU]:.1%}" if MFU in found else "-"

    return read


def updates(
    settings: Settings, policy: OpenVLAOFTPolicy, ranks: LearnerRanks
) -> tuple[list[list[object]], list[list[object]], str]:
    groups = make_groups(policy, settings, ranks.rank)
    tasks = tuple(sorted({group[0].task for group in groups}))
    config = replace(TrainConfig(), actor=ActorSettings(max_decisions=settings.decisions))
    algorithm = replace(
        config.algorithm,
        minibatches=1,
        micro_batch=settings.rows[0],
        groups_per_update=settings.groups,
        group_size=MEMBERS,
    )
    update = build_update(replace(config, algorithm=algorithm), policy, ranks=ranks)
    if settings.compile and policy.device.type == "cuda":
        torch.compiler.reset()
        compile_learning(update, tasks)
    ways = {"update": as_it_is}
    if settings.reshard_after == "step" and not settings.lora:
        ways |= {"gathered in each pass": in_each_pass}
    found = timed(update, groups, settings, ways)
    read = utilisation(update, groups, settings)
    usual, alone = found["update"], found["passes alone"]
    lines: list[list[object]] = [
        ["update / passes alone", f"{usual:.3f}", f"{usual / alone:.3f}", read(usual), read(alone)]
    ]
    for way in list(ways)[1:]:
        taken = found[way]
        lines.append([f"{way} / update", f"{taken:.3f}", f"{taken / usual:.3f}", read(taken), ""])
    of_parts = parts(update, groups, settings)
    print(found, of_parts, flush=True)
    return lines, of_parts, kernel_report("update", lambda: whole(update, groups), update.device)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    job = read_job()
    device = pick_device(settings.device, job.local_rank)
    settings = replace(settings, device=str(device))
    with ExitStack() as stack:
        who = "the other ranks that are timed"
        ranks = stack.enter_context(joined_ranks(device, job.rank, job.size, "bf16", who, who))
        if ranks.rank:
            stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        measure(settings, device, ranks)


def measure(settings: Settings, device: torch.device, ranks: LearnerRanks) -> None:
    print(heading(device), flush=True)
    policy = build(settings)
    decisions = settings.groups * MEMBERS * settings.decisions
    where = f" on each of {ranks.size} ranks" if ranks.size > 1 else ""
    print(f"{decisions} decisions{where}, median of {settings.rounds} updates\n", flush=True)
    lines, of_parts, kernels = updates(settings, policy, ranks)
    print("\n" + table(["", "s", "ratio", "MFU", "of the passes"], lines))
    print("\n" + table(["part of an update", "ms"], of_parts))
    print("\n" + kernels)
    if device.type == "cuda":
        print(f"\npeak memory {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB")
    if settings.json and not ranks.rank:
        content = {"commit": commit(), "updates": lines, "parts": of_parts}
        Path(settings.json).write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()

"""Builds the learner of a run: the update, the loop around it, what compiles before the first batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from asyncrl.config.evaluation import EvaluationSettings
from asyncrl.config.loading import to_json
from asyncrl.config.run import TrainConfig
from asyncrl.launch.idle_offload import learner_offload
from asyncrl.launch.learner_start import LearnerStart
from asyncrl.launch.placement import only_learns
from asyncrl.launch.policies import build_reference
from asyncrl.learner.early_compile import EarlyCompile, Shown, fix_sizes, has_known_sizes
from asyncrl.learner.forward import Reference
from asyncrl.learner.learner import Learner
from asyncrl.learner.loop import Log, LoopSettings
from asyncrl.learner.metrics import Throughput
from asyncrl.learner.progress import Told
from asyncrl.learner.ranks import LearnerRanks
from asyncrl.learner.update import Update
from asyncrl.learner.weight_export import ActingWeights, copy_policy
from asyncrl.observability.metrics_system import GROUPS_READY
from asyncrl.policies.acceleration import compile_blocks
from asyncrl.policies.interface import FixesPrompts, Policy, SamplingParams
from asyncrl.replay.interface import LearnerPort
from asyncrl.storage import checkpoint
from asyncrl.weights.interface import Publisher


def build_learner(
    config: TrainConfig,
    start: LearnerStart,
    port: LearnerPort,
    publisher: Publisher,
    log: Log,
    ranks: LearnerRanks,
    *,
    types: Mapping[str, torch.dtype],
    checkpoints: checkpoint.Checkpoints,
    stop_requested: Callable[[], bool],
    tell_estimate: Told,
) -> Learner:
    """Build the learner and, when the run resumes, bring it to where the checkpoint stopped."""
    reference = build_reference(config, start.policy, start.policy.device)
    acting = ActingWeights(start.policy, types)
    update = build_update(config, start.policy, ranks=ranks, reference=reference)
    if config.learner.compile:
        compile_learning(update, start.shown)
    early = _early_compile(config, update, start.shown, stop_requested, port)
    learner = Learner(
        update,
        port,
        publisher,
        log,
        checkpoints,
        loop_settings(config),
        copy_policy=partial(copy_policy, start.policy, ranks),
        acting_tensors=lambda: acting,
        throughput=Throughput(
            start.policy,
            ranks,
            micro_batch=config.algorithm.micro_batch,
            precision=config.learner.precision,
            adapters=config.lora.rank > 0,
        ),
        offload=learner_offload(config, update),
        stop_requested=stop_requested,
        tell_estimate=tell_estimate,
        compile_early=early or (lambda version: {}),
    )
    if start.checkpoint is not None:
        learner.restore(start.checkpoint)
    return learner


def build_update(
    config: TrainConfig,
    policy: Policy,
    *,
    ranks: LearnerRanks | None = None,
    reference: Reference | None = None,
) -> Update:
    """Build what updates the policy, over its (already sharded) parameters.

    Args:
        ranks: The learner ranks; None: this one alone.
    """
    return Update(
        policy,
        config.algorithm,
        config.correction,
        config.critic,
        config.optimizer,
        updates=config.updates,
        max_decisions=config.actor.max_decisions,
        trust_region=config.trust_region,
        seed=config.seed,
        ranks=ranks,
        reference=reference,
    )


def compile_learning(update: Update, shown: Shown | None) -> None:
    """Compile the layers of an update's policy, at their first calls.

    For one size where all instructions are known and the policy can pad them alike, for any size elsewhere:
    then there are several graphs, which take minutes instead of half of one.
    """
    policy: object = update.policy
    if shown is None or not isinstance(policy, FixesPrompts):
        compile_blocks(update.policy)
        return
    policy.fix_prompts(shown.tasks)
    fix_sizes(update)
    compile_blocks(update.policy, dynamic=False)


def _early_compile(
    config: TrainConfig,
    update: Update,
    shown: Shown | None,
    stop_requested: Callable[[], bool],
    port: LearnerPort,
) -> EarlyCompile | None:
    """Build what compiles before the first batch; None where it has nothing to do, or cannot."""
    wanted = config.learner.compile and config.learner.compile_early
    in_the_way = config.inline or config.learner.offload  # See the setting.
    if not wanted or in_the_way or shown is None or not has_known_sizes(update.policy):
        return None
    if not any(True for _ in update.policy.blocks()):
        return None

    def batch_ready() -> bool:
        """Whether rank 0 could be given a batch now; other ranks do not ask."""
        if update.ranks.rank > 0:
            return False
        return port.status().get(GROUPS_READY, 0.0) >= config.algorithm.groups_per_update

    return EarlyCompile(
        update,
        shown,
        SamplingParams(temperature=config.algorithm.temperature, top_k=config.algorithm.top_k),
        stop_requested,
        batch_ready=batch_ready,
        hang_timeout=config.hang_timeout,
    )


def loop_settings(config: TrainConfig) -> LoopSettings:
    """Numbers of the learner's loop."""
    return LoopSettings(
        updates=config.updates,
        checkpoint_every=config.checkpoint_every,
        evaluate_every=config.evaluate_every,
        batch_timeout=config.batch_timeout,
        hang_timeout=config.hang_timeout,
        batches_ahead=config.max_lag + 1,
        first_weights_deadline=first_weights_deadline(config),
        config_hash=config_hash(config),
    )


def first_weights_deadline(config: TrainConfig) -> float:
    """Seconds the first actor has to take the first version; one that must join first may come late."""
    return max(config.startup_timeout, config.batch_timeout if only_learns(config.placement) else 0.0)


def config_hash(config: TrainConfig) -> str:
    """Identify the settings that decide what is learned: not where the run lies, nor how long it is."""
    same = replace(config, run_dir="", updates=1, resume=False, evaluate_every=0)
    same = replace(same, evaluation=EvaluationSettings())
    return hashlib.sha256(to_json(same).encode()).hexdigest()[:16]

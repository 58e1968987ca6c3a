"""The learner's side of a run: models that fit each other, the run's folder, the update and its loop.

Errors are raised before a process is started or a folder is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.config.run import TrainConfig, load_file
from asyncrl.config.sections import WorldDefaults
from asyncrl.devices.offload import NO_OFFLOAD, OffloadedTensors
from asyncrl.devices.tensors import take_device, use_compiler_cache
from asyncrl.errors import ConfigError
from asyncrl.launch.environment import WorldFiles, check_environment, offload_idle, with_world_defaults
from asyncrl.launch.job import Hosts, Job, RunInfo, open_store
from asyncrl.launch.named_models import build_policy, named_policy, named_world
from asyncrl.launch.placement import Placement, copies_of, only_learns
from asyncrl.launch.simulated import SimulatorFiles
from asyncrl.learner.forward import Reference
from asyncrl.learner.fsdp import shard
from asyncrl.learner.learner import Learner, LoopSettings, WriteMetrics
from asyncrl.learner.ranks import Groups, LearnerRanks, joined_ranks
from asyncrl.learner.recipe import build_recipe
from asyncrl.learner.update import Update
from asyncrl.learner.update_metrics import Throughput
from asyncrl.learner.weight_export import acting_types, acting_weights, copy_policy
from asyncrl.policies.acceleration import compile_blocks
from asyncrl.policies.interface import Policy
from asyncrl.registry import names_code
from asyncrl.replay.events import require_ledger
from asyncrl.replay.interface import ANY_FORMAT, EpisodeFormat, LearnerPort
from asyncrl.replay.store import LEDGER, read_meta
from asyncrl.storage import checkpoint, run_folder, run_owner
from asyncrl.storage.assets import simulator_named
from asyncrl.storage.run_folder import check_folder
from asyncrl.storage.run_owner import RunIdentity, RunLock
from asyncrl.weights.interface import NullPublisher, Publisher

MEETING_DEADLINE: Final = 600.0  # seconds for the learner ranks to meet


class LoadedModels(NamedTuple):
    """The loaded policy of a run, and its other models, checked but not loaded."""

    config: TrainConfig  # with the world's defaults
    defaults: WorldDefaults
    policy: Policy
    files: WorldFiles | SimulatorFiles


@dataclass(frozen=True, kw_only=True)
class LearnerStart:
    """Policy and folder that the learner begins with."""

    policy: Policy
    run_dir: Path
    identity: RunIdentity
    lock: RunLock
    checkpoint: Path | None  # of a resumed run
    episodes: EpisodeFormat = ANY_FORMAT
    tasks: Sequence[str] = ()  # all instructions of the run; empty: unknown

    @property
    def version(self) -> int:
        """Version of the policy: 0, or that of the checkpoint."""
        return int(self.checkpoint.name.rpartition("_")[2]) if self.checkpoint else 0


def use_device(config: TrainConfig, local_rank: int = 0) -> torch.device:
    """Seed this learner process, and use its threads, device and compiler cache; returns the device."""
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.seed)
    device = take_device(config.device, local_rank)
    if config.imagination.compile or config.learner.compile:
        use_compiler_cache(device)
    return device


def load_models(asked: TrainConfig, device: torch.device) -> LoadedModels:
    """Load the policy of a run to `device`, and check that all its models are there and fit each other."""
    config, defaults = with_world_defaults(asked)
    build_recipe(config.algorithm, config.correction, config.critic)
    if config.imagination.compile and not simulator_named(config.world):
        _check_compilable(config)
    files = check_environment(config)
    policy = build_policy(config, device, learns=True)
    files.check_policy(policy)
    if names_code(config.policy) and files.starts:
        from asyncrl.launch.conformance import try_policy

        try_policy(policy, files.starts)
    if config.evaluate_every:
        from asyncrl.launch import evaluator  # It needs simulators, which are not imported without cause.

        evaluator.plan(config, files, policy)
    return LoadedModels(config, defaults, policy, files)


def _check_compilable(config: TrainConfig) -> None:
    policy = named_policy(config.policy, config.policy_settings).kind
    world = named_world(config.world, config.world_settings).kind
    for kind, method in ((policy, "compile_acting"), (world, "compile")):
        if not hasattr(kind, method):
            raise ConfigError(
                f"--imagination.compile is set, but {kind.__name__} has no {method}. Leave the flag out, or "
                "add the method."
            )


def start_run(models: LoadedModels, again: Path | None = None) -> LearnerStart:
    """Make or find the run's folder; `again` is that of an earlier start of the same job."""
    config, _, policy, files = models
    config = check_resumed(config, again)
    run = run_folder.claim(config, None if config.resume else again)
    folder = checkpoint.latest(run.path) if config.resume else None
    if folder is not None:
        checkpoint.verify(folder)
    return LearnerStart(
        policy=policy,
        run_dir=run.path,
        identity=run.identity,
        lock=run.lock,
        checkpoint=folder,
        episodes=files.episode_format(policy, config.actor.max_decisions),
        tasks=files.spec.tasks if isinstance(files, SimulatorFiles) else files.tasks,
    )


def check_resumed(config: TrainConfig, again: Path | None = None) -> TrainConfig:
    """Check, before models are loaded, that a run to resume is not alive and its small files can be read.

    Returns the settings; a run restarted by torchrun (`again`) resumes if it has a checkpoint.
    """
    if again is not None:  # Processes of its earlier start may still be ending: `claim` waits for them.
        config = replace(config, run_dir=str(again), resume=checkpoint.latest(again) is not None)
        run_owner.check_files(again)
    else:
        run_folder.check_free(config)
    if not config.resume:
        return config
    check_folder(folder := run_folder.locate(config))
    replay, newest = folder / run_folder.REPLAY, checkpoint.latest(folder)
    if (replay / "replay.json").exists():
        read_meta(replay)
    if newest is not None:
        require_ledger(replay / LEDGER, checkpoint.recorded_ledger(newest))
    return config


def learner_offload(config: TrainConfig, update: Update) -> OffloadedTensors:
    """Return the offloading of this rank's weights, gradient and optimizer state while it waits."""
    if not config.learner.offload:
        return NO_OFFLOAD
    reference = getattr(update.reference, "policy", None)

    def trained() -> Iterator[Tensor]:
        for parameter in update.policy.trainable_parameters().values():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
            state = update.optimizer.state.get(parameter, {})
            yield from (value for value in state.values() if isinstance(value, Tensor))

    models = [model for model in (update.policy, reference) if isinstance(model, nn.Module)]
    return offload_idle(models, trained, update.device)


def learner_group(
    config: TrainConfig, job: Job, ranks: int, device: torch.device
) -> AbstractContextManager[LearnerRanks]:
    """Join the other learner ranks within the block; all call it at about the same time."""
    rank = job.rank if ranks > 1 else 0
    who = f"learner rank {rank} of {ranks}"
    return joined_ranks(
        device,
        rank,
        ranks,
        config.learner.precision,
        f"{who} to meet the other learners",
        f"{who} to make its part of an update or a checkpoint",
        store=PrefixStore("learners", open_store(job, MEETING_DEADLINE)) if ranks > 1 else None,
        patience=config.batch_timeout + first_weights_deadline(config),
    )


def build_learner(
    config: TrainConfig,
    start: LearnerStart,
    port: LearnerPort,
    publisher: Publisher,
    write_metrics: WriteMetrics,
    ranks: LearnerRanks,
    *,
    stop_requested: Callable[[], bool],
    show: Callable[[int, Groups], None] = lambda version, groups: None,
    copies: int = 1,
) -> Learner:
    """Shard the policy over the ranks and build or resume this rank's learner; a collective."""
    policy, types = start.policy, acting_types(start.policy)
    reshard_after = config.learner.reshard_after
    shard(policy, policy.device, config.learner.precision, copies=copies, reshard_after=reshard_after)
    reference = None
    if config.algorithm.kl_coef:
        adapted = config.lora.rank > 0
        frozen = policy if adapted else build_policy(config, policy.device)
        reference = Reference(frozen, without_adapters=adapted)
    acting = acting_weights(policy, types)
    update = build_update(config, policy, ranks=ranks, reference=reference)
    if config.learner.compile:
        compile_learning(update, start.tasks)
    learner = Learner(
        update,
        port,
        publisher,
        write_metrics,
        _checkpoints(config, start.run_dir, ranks),
        loop_settings(config),
        copy_policy=partial(copy_policy, policy, ranks),
        acting_tensors=lambda: acting,
        throughput=Throughput(
            policy,
            ranks,
            micro_batch=config.algorithm.micro_batch,
            precision=config.learner.precision,
            adapters=config.lora.rank > 0,
        ),
        offload=learner_offload(config, update),
        stop_requested=stop_requested,
        show=show,
    )
    if start.checkpoint is not None:
        learner.restore(start.checkpoint)
    return learner


def _checkpoints(config: TrainConfig, run_dir: Path, ranks: LearnerRanks) -> checkpoint.Checkpoints:
    link: Any = None  # The ranks' writers have a group of their own.
    if ranks.size > 1:
        link = dist.new_group(backend="gloo", timeout=timedelta(seconds=checkpoint.WRITE_DEADLINE))
    ledger = run_dir / run_folder.REPLAY / LEDGER
    return checkpoint.Checkpoints(run_dir, keep=config.keep_checkpoints, link=link, ledger=ledger)


def learn_as_follower(
    info: RunInfo, job: Job, placement: Placement, hosts: Hosts, poll: Callable[[], bool]
) -> None:
    """Learn on a rank other than 0 until rank 0 ends the run; `poll` supervises children."""
    from asyncrl.launch.endpoints import client_keys
    from asyncrl.replay.client import ZmqLearnerPort

    run_dir = Path(info.run_dir)
    config = load_file(run_dir / "config.json")
    device = use_device(config, job.local_rank)
    start = LearnerStart(
        policy=build_policy(config, device, learns=True),
        run_dir=run_dir,
        identity=info.identity,
        lock=run_owner.join(run_dir),
        checkpoint=Path(info.checkpoint) if info.checkpoint else None,
        tasks=info.tasks,
    )
    keys = client_keys(info.keys, "learner")
    port = ZmqLearnerPort(info.replay_endpoint, rank=job.rank, security=keys, identity=start.identity)
    size, copies = len(placement.learners), copies_of(config, placement, hosts)
    try:
        with learner_group(config, job, size, device) as ranks:
            build_learner(
                config,
                start,
                port,
                NullPublisher(),
                lambda version, metrics: None,
                ranks,
                stop_requested=poll,
                copies=copies,
            ).run()
    finally:
        port.close()


def build_update(
    config: TrainConfig,
    policy: Policy,
    *,
    ranks: LearnerRanks | None = None,
    reference: Reference | None = None,
) -> Update:
    """Build the update of a policy over its (already sharded) parameters, by default on one rank."""
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


def compile_learning(update: Update, tasks: Sequence[str]) -> None:
    """Compile the layers of an update's policy, at their first calls."""
    if not tasks or not hasattr(update.policy, "fix_prompts"):
        compile_blocks(update.policy)
        return
    update.policy.fix_prompts(tasks)
    update.fix_sizes()  # Graphs for any size take minutes instead of half of one.
    compile_blocks(update.policy, dynamic=False)


def loop_settings(config: TrainConfig) -> LoopSettings:
    """Settings of the learner's loop."""
    return LoopSettings(
        updates=config.updates,
        checkpoint_every=config.checkpoint_every,
        evaluate_every=config.evaluate_every,
        batch_timeout=config.batch_timeout,
        hang_timeout=config.hang_timeout,
        batches_ahead=config.replay.max_lag + 1,
        first_weights_deadline=first_weights_deadline(config),
        compiles=config.learner.compile,
    )


def first_weights_deadline(config: TrainConfig) -> float:
    """Seconds for the first actor to receive the first version; more if it has yet to join."""
    return max(config.startup_timeout, config.batch_timeout if only_learns(config.placement) else 0.0)

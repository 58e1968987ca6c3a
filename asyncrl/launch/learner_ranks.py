"""The learner ranks of a run: they meet, spread the policy, and run the same loop; rank 0 leads it.

    rank 0      opens the run (`run`), joins, learns, decides the end
    rank k > 0  waits for the run's facts, joins, learns what it is dealt, ends when rank 0 says so

The default process group holds learners only. One rank that computes in float32 needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.config.loading import load_file
from asyncrl.config.run import TrainConfig
from asyncrl.launch import console, endpoints
from asyncrl.launch.build import build_learner, first_weights_deadline
from asyncrl.launch.job import Hosts, Job, RunInfo, open_store
from asyncrl.launch.learner_start import LearnerStart
from asyncrl.launch.named_models import build_learning_policy
from asyncrl.launch.own_device import take_device, use_compiler_cache
from asyncrl.launch.placement import Placement, copies_of
from asyncrl.learner.early_compile import ObservationShapes
from asyncrl.learner.fsdp import make_float32_masters, shard
from asyncrl.learner.ranks import DistributedRanks, LearnerRanks, default_group
from asyncrl.learner.weight_export import acting_types
from asyncrl.replay.client import ZmqRankPort
from asyncrl.replay.store import LEDGER
from asyncrl.storage import run_owner
from asyncrl.storage.checkpoint import WRITE_DEADLINE, Checkpoints
from asyncrl.storage.run_folder import REPLAY
from asyncrl.weights.interface import NullPublisher

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # pyright: ignore[reportPrivateImportUsage]

    from asyncrl.launch.children import ChildProcesses
    from asyncrl.learner.learner import Learner, WriteRow
    from asyncrl.replay.interface import LearnerPort
    from asyncrl.weights.interface import Publisher

MEETING_DEADLINE: Final = 600.0


def learners_store(job: Job) -> Store:
    """Open the store in which several learner ranks meet."""
    return PrefixStore("learners", open_store(job, MEETING_DEADLINE))


@contextmanager
def learner_group(
    config: TrainConfig,
    job: Job,
    ranks: int,
    device: torch.device,
    *,
    while_waiting: Callable[[], object] = lambda: None,
) -> Iterator[LearnerRanks]:
    """Meet the other learner ranks for the time of the block; all call it at about the same time.

    Raises:
        RunError: A rank did not come.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks == 1 and config.learner.precision == "fp32":
        yield LearnerRanks()
        return
    rank = job.rank if ranks > 1 else 0
    store = learners_store(job) if ranks > 1 else HashStore()
    who = f"learner rank {rank} of {ranks}"
    joined = default_group(
        device,
        f"{who} to meet the other learners",
        f"{who} to make its part of an update or a checkpoint",
        store=store,
        rank=rank,
        size=ranks,
    )
    with joined:
        patience = config.batch_timeout + first_weights_deadline(config)
        yield DistributedRanks(patience, while_waiting=while_waiting)


def build_joined_learner(
    config: TrainConfig,
    start: LearnerStart,
    port: LearnerPort,
    publisher: Publisher,
    write_row: WriteRow,
    group: LearnerRanks,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda line: None,
    copies: int = 1,
) -> Learner:
    """Spread the policy over the group and build this rank's learner; collective.

    `tell` gets a line or two; of `copies` see `placement.copies_of`.

    Raises:
        CheckpointError: The checkpoint does not fit the policy.
    """
    types = acting_types(start.policy)
    policy: Any = start.policy  # An `nn.Module` too: `build` has seen to it.
    if not isinstance(group, DistributedRanks):
        make_float32_masters(policy, "fp32")
    else:
        shard(
            start.policy,
            start.policy.device,
            config.learner.precision,
            copies=copies,
            reshard_after=config.learner.reshard_after,
        )
    return build_learner(
        config,
        start,
        port,
        publisher,
        write_row,
        group,
        types=types,
        checkpoints=_checkpoints(config, start.run_dir, group),
        stop_requested=stop_requested,
        on_estimate=console.tell_estimate(config, tell),
    )


def _checkpoints(config: TrainConfig, run_dir: Path, group: LearnerRanks) -> Checkpoints:
    """Give the ranks' writers a link of their own."""
    link: ProcessGroup | None = None
    if group.size > 1:
        made: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=WRITE_DEADLINE))
        link = made
    return Checkpoints(run_dir, keep=config.keep_checkpoints, link=link, ledger=run_dir / REPLAY / LEDGER)


def run_follower_rank(
    info: RunInfo, job: Job, placement: Placement, hosts: Hosts, children: ChildProcesses
) -> None:
    """Learn on a rank other than 0 until rank 0 ends the run.

    Raises:
        AsyncRLError: The run failed, or another rank is gone.
    """
    config = load_file(Path(info.run_dir) / "config.json")
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.seed)
    device = take_device(config.device, job.local_rank)
    use_compiler_cache(config, device)
    checkpoint = Path(info.checkpoint) if info.checkpoint else None
    policy = build_learning_policy(config, device)
    version = int(checkpoint.name.rpartition("_")[2]) if checkpoint else 0
    run_dir = Path(info.run_dir)
    start = LearnerStart(
        policy=policy,
        run_dir=run_dir,
        identity=run_owner.read_identity(run_dir),
        lock=run_owner.join(run_dir),
        version=version,
        checkpoint=checkpoint,
        shown=ObservationShapes.from_json(info.shown),
    )
    port = ZmqRankPort(
        info.replay_endpoint,
        f"learner-{job.rank}",
        security=endpoints.client_keys(info.keys, "learner"),
        identity=info.identity,
    )
    try:
        with learner_group(
            config, job, len(placement.learners), device, while_waiting=children.poll
        ) as group:
            build_joined_learner(
                config,
                start,
                port,
                NullPublisher(),
                lambda version, metrics: None,
                group,
                stop_requested=children.poll,
                copies=copies_of(config, placement, hosts),
            ).run()
    finally:
        port.close()

"""A learner rank that fails ends, although its device waits for others."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from asyncrl.config.run import TrainConfig
from asyncrl.errors import RunError
from asyncrl.launch import build
from asyncrl.launch.build import learner_group
from asyncrl.launch.job import Job

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
ENDS_WITHIN = 20.0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_a_rank_that_fails_does_not_wait_for_the_others(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    failed: Queue[float] = context.Queue()
    ranks = [context.Process(target=_learn, args=(rank, f"{tmp_path}/store", failed)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    try:
        at = failed.get(timeout=100)
        ranks[0].join(ENDS_WITHIN)
        assert ranks[0].exitcode == 3, f"rank 0 still runs {time.time() - at:.0f} s after its failure"
        assert ranks[1].is_alive(), "rank 1 was to take no part all this time"
    finally:
        for rank in ranks:
            rank.kill()
            rank.join(10)


def _learn(rank: int, store: str, failed: Queue[float]) -> None:
    """Rank 0 fails while its device waits for rank 1."""
    job = Job(rank=rank, size=2, local_rank=rank, local_size=2)
    build.open_store = lambda job, deadline: dist.FileStore(store, 2)  # type: ignore[assignment]
    device = torch.device("cuda", rank)
    try:
        with learner_group(TrainConfig(), job, 2, device):
            values = torch.ones(1 << 20, device=device)
            dist.all_reduce(values)
            torch.cuda.synchronize()
            if rank == 1:
                time.sleep(100.0)
            dist.all_reduce(values)  # Rank 1 does not take part, so this one stays under way.
            failed.put(time.time())
            raise RunError("out of memory")
    except RunError:
        raise SystemExit(3) from None

"""A process reads its place in the job, and what rank 0 decided reaches the other ranks."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.config.run import TrainConfig
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.hosts import meet
from asyncrl.launch.job import (
    Job,
    RunInfo,
    Stopped,
    read_job,
    receive,
    remember_run,
    run_of_earlier_start,
    share,
)

INFO = RunInfo(run_dir="/runs/ä", replay_endpoint="ipc:///tmp/r", weights_endpoint="tcp://127.0.0.1:5")


@pytest.fixture
def job() -> Iterator[Job]:
    """Rank 0 of 3, with a store like the one that torchrun's agent keeps."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    yield Job(size=3, local_size=3, store=("127.0.0.1", store.port), name="job")
    del store


def rank(job: Job, number: int, **more: object) -> Job:
    return replace(job, rank=number, local_rank=number, **more)  # type: ignore[arg-type]


def test_a_process_alone_is_rank_0_of_1_and_needs_no_store() -> None:
    assert read_job({}) == read_job({"RANK": "0", "WORLD_SIZE": "1"}) == Job()
    share(INFO, Job(), 1.0)


def test_torchruns_variables_are_read() -> None:
    job = read_job({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert (job.rank, job.size, job.local_rank, job.here) == (5, 8, 1, range(4, 8))
    assert job.status_folder(Path("run")) == Path("run/hosts/4")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'two', expected a whole number"):
        read_job({"WORLD_SIZE": "two"})
    with pytest.raises(ConfigError, match="it is left over from a job"):
        read_job({"WORLD_SIZE": "4"})


def test_several_ranks_that_torchrun_did_not_start_are_refused() -> None:
    for job in (read_job({"RANK": "0", "WORLD_SIZE": "2"}), Job(size=4, local_size=2)):
        with pytest.raises(ConfigError, match=r"WORLD_SIZE is \d, but torchrun did not start this process"):
            meet(TrainConfig(), job, lambda hosts, facts: hosts)


def test_facts_reach_every_rank(job: Job) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(receive, rank(job, number), 20.0, lambda: False) for number in (1, 2)]
        share(INFO, job, 20.0)
        assert [future.result(20.0) for future in waiting] == [INFO, INFO]


def test_a_restarted_job_does_not_read_the_facts_of_its_first_start_but_finds_its_run(job: Job) -> None:
    share(INFO, job, 20.0)
    remember_run(job, Path("/runs/a"))
    assert run_of_earlier_start(job) is None
    assert run_of_earlier_start(replace(job, restarts=1)) == Path("/runs/a")
    with pytest.raises(RunError, match=r"Rank 1 waited 0\.2 s at 127\.0\.0\.1:.* for rank 0 to"):
        receive(rank(job, 1, restarts=1), 0.2, lambda: False)


def test_a_rank_that_is_told_to_stop_waits_for_rank_0_no_longer(job: Job) -> None:
    """torchrun sends SIGTERM when rank 0 has failed, and kills after 30 s what does not end."""
    asked = iter((False, False, True))
    with pytest.raises(Stopped):
        receive(rank(job, 1), 60.0, lambda: next(asked))
    on_another_host = replace(rank(job, 1), local_rank=0, local_size=1)
    with pytest.raises(Stopped):
        meet(TrainConfig(), on_another_host, lambda hosts, facts: hosts, stop_requested=lambda: True)


def test_a_store_that_is_gone_is_an_error_that_names_it() -> None:
    with pytest.raises(RunError, match="Rank 1 could not meet the other ranks: it lost torchrun's store at"):
        receive(Job(rank=1, size=2, store=("127.0.0.1", 1)), 0.2, lambda: False)

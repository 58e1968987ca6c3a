"""Which device a process works on, on hosts with and without GPUs."""

import os

import pytest
import torch

import asyncrl
from asyncrl.config.run import TrainConfig
from asyncrl.devices.tensors import INDUCTOR, TRITON, pick_device, use_compiler_cache
from asyncrl.errors import ConfigError
from asyncrl.launch.job import Job
from asyncrl.launch.placement import parse_placement, transport_of
from asyncrl.launch.roles import PRIORITY, give_way


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that this host has so many GPUs."""
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_auto_takes_a_gpu_where_there_is_one(gpus):
    gpus(0)
    assert pick_device("auto") == torch.device("cpu")
    gpus(2)
    assert pick_device("auto") == torch.device("cuda", 0)
    assert pick_device("cpu") == torch.device("cpu")


def test_ranks_beyond_the_number_of_gpus_share_them(gpus):
    gpus(2)
    assert [pick_device("cuda", rank).index for rank in range(5)] == [0, 1, 0, 1, 0]


def test_what_cannot_be_had_is_refused(gpus):
    gpus(0)
    with pytest.raises(ConfigError, match="no CUDA device"):
        pick_device("cuda", 1)
    with pytest.raises(ConfigError, match=r"'gpu'. Use cpu, cuda or auto"):
        pick_device("gpu")


@pytest.mark.parametrize(
    ("count", "ranks", "placement", "transport"),
    [
        (0, 2, "auto", "shared_memory"),
        (1, 1, "auto", "cuda_ipc"),
        (4, 4, "auto", "nccl"),
        (4, 4, "learner=0-1,actor=2-3", "nccl"),
        (4, 4, "learner=0-3,actor=0-3", "cuda_ipc"),  # Collocated.
        (4, 4, "learner=0-3,actor=1-3", "nccl"),  # Each actor beside a learner that is not rank 0.
        (2, 3, "learner=0,actor=1-2", "cuda_ipc"),  # Rank 2 is on GPU 0 again.
        (2, 4, "learner=0,actor=1-3", "shared_memory"),  # Ranks 1 and 3 share GPU 1.
    ],
)
def test_the_transport_follows_from_who_shares_a_gpu(gpus, count, ranks, placement, transport):
    gpus(count)
    assert transport_of(TrainConfig(), parse_placement(placement, ranks), range(ranks)) == transport


@pytest.mark.parametrize(
    ("count", "ranks", "placement", "rank", "lower"),
    [
        (1, 1, "auto", 0, True),
        (1, 2, "learner=0,actor=1", 1, True),
        (2, 2, "learner=0,actor=1", 1, False),
        (2, 3, "learner=0,actor=1-2", 2, True),  # On GPU 0 again.
        (0, 2, "learner=0,actor=1", 1, False),
    ],
)
def test_an_actor_gives_way_where_it_shares_a_gpu_with_a_learner(
    gpus, monkeypatch, count, ranks, placement, rank, lower
):
    gpus(count)
    monkeypatch.delenv(PRIORITY, raising=False)
    placed = parse_placement(placement, ranks)
    job = Job(rank=rank, size=ranks, local_rank=rank, local_size=ranks)
    give_way("auto", placed, job)
    assert os.environ.get(PRIORITY) == ("1" if lower else None)
    monkeypatch.setenv(PRIORITY, "0")  # The user's own stays.
    give_way("auto", placed, job)
    assert os.environ[PRIORITY] == "0"


CPU = torch.device("cpu")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (INDUCTOR, TRITON):
        monkeypatch.setenv(name, "")  # So that it is put back afterwards.
        monkeypatch.delenv(name)
    return tmp_path / "cache"


def test_compiled_code_is_kept_for_the_user_alone_by_versions_and_device(cache, monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir, triton_cache_dir

    assert cache_dir() == os.environ[INDUCTOR] == default_cache_dir()  # As its imports leave the variable.
    use_compiler_cache(CPU)
    folder = cache / "asyncrl" / "compiled" / f"{asyncrl.__version__}-{torch.__version__}-cpu"
    assert (os.environ[INDUCTOR], os.environ[TRITON]) == (str(folder), str(folder / "triton"))
    assert (cache_dir(), triton_cache_dir(0)) == (str(folder), str(folder / "triton"))
    assert folder.stat().st_mode & 0o077 == 0
    monkeypatch.delenv(INDUCTOR)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3 / x")
    use_compiler_cache(torch.device("cuda", 0))
    assert os.environ[INDUCTOR].endswith("-NVIDIA_H100_80GB_HBM3_x")


def test_a_folder_of_compiled_code_that_the_user_chose_stays(cache, monkeypatch):
    monkeypatch.setenv(INDUCTOR, "/mine")
    use_compiler_cache(CPU)
    assert os.environ[INDUCTOR] == "/mine"


def test_where_the_folder_cannot_be_made_torch_keeps_its_own(cache, caplog):
    cache.write_text("a file")
    use_compiler_cache(CPU)
    assert INDUCTOR not in os.environ
    assert INDUCTOR in caplog.text

"""Which device a process works on, on hosts with and without GPUs."""

from __future__ import annotations

import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.launch.devices import pick_device


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

"""On a GPU: what an update waits for."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.launch.build import build_update
from asyncrl.learner.batches import build_batch
from asyncrl.learner.fsdp import shard
from asyncrl.observability import metrics_training as m
from asyncrl.policies.lora import add_lora
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import OpenVLAOFTPolicy
from support.slow_update import recipe
from support.table_policy import groups_of

pytestmark = pytest.mark.gpu
OUTCOMES = [[3, -1], [-1, 5], [2, -1], [-1, 12]]


def waits_of(micro_batch: int) -> int:
    """How often an update of 16 decisions waits for the device, counted by torch itself."""
    device = torch.device("cuda", 0)
    policy = OpenVLAOFTPolicy(OpenVLAOFTConfig.tiny()).to(device, torch.bfloat16)
    add_lora(policy, 4, 0.0)
    policy = shard(policy.eval(), device, "bf16")
    config = recipe(algorithm__group_size=2, algorithm__micro_batch=micro_batch)
    update, batch = build_update(config, policy), build_batch(groups_of(OUTCOMES, image=64), version=0)
    for _ in range(2):
        assert update(batch)[m.GRAD_NORM] > 0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            update(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in seen)


def test_an_update_waits_for_the_device_at_its_end_whatever_its_passes() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    try:
        one_pass, eight_passes = waits_of(16), waits_of(2)
    finally:
        dist.destroy_process_group()
    assert eight_passes == one_pass == 3  # For the means, the maxima, and the steps' norms.

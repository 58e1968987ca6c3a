"""The GPU transports of the weight channel, with real actor processes."""

import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from asyncrl.learner import weight_export
from asyncrl.learner.weight_export import GatheredWeights
from asyncrl.weights import packing
from asyncrl.weights.publisher import BroadcastPublisher
from asyncrl.weights.receiver import WeightReceiver
from support.ranks import run_ranks
from support.weights import PATIENCE, TYPES, Actor, raw, timed_publish, wait_for_all
from support.weights import masters as gathering_masters

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
DEADLINE = 5.0


def test_a_killed_actor_on_the_learners_gpu_does_not_stop_those_on_others(folder: Path) -> None:
    """The group of both kinds becomes one of NCCL only, and again one of both."""
    if GPUS < 2:
        pytest.skip(f"needs 2 GPUs, found {GPUS}")
    channel = BroadcastPublisher("cuda_ipc", folder, device="cuda:0", deadline=DEADLINE)
    near, far = Actor(), Actor()
    near.join(channel.endpoint, "near", "cuda_ipc", "cuda:0", DEADLINE)
    far.join(channel.endpoint, "far", "cuda_ipc", "cuda:1", DEADLINE)
    timed_publish(channel, 0, "cuda:0")
    wait_for_all(channel, 0, 2, 2 * PATIENCE)
    near.signal(signal.SIGKILL)
    timed_publish(channel, 1, "cuda:0")
    assert far.has(1)
    near.end()
    near = Actor()
    near.join(channel.endpoint, "near", "cuda_ipc", "cuda:0", DEADLINE)
    assert near.has(1)
    for each in (near, far):
        assert each.ask("leave") == "left"
        each.end()
    channel.close()


def test_a_link_over_nccl_ends_at_once_however_long_a_broadcast_may_take(folder: Path) -> None:
    """Its group asks nobody for news through a store that was deleted, which would last as long."""
    if GPUS < 2:
        pytest.skip(f"needs 2 GPUs, found {GPUS}")
    patient = 3 * PATIENCE
    channel = BroadcastPublisher("nccl", folder, device="cuda:0", deadline=patient)
    for version in range(2):
        actor = Actor()
        actor.join(channel.endpoint, "far", "nccl", "cuda:1", patient)
        timed_publish(channel, version, "cuda:0")
        assert actor.has(version)
        time.sleep(3.0)  # NCCL's monitor looks every second.
        if version == 0:
            actor.signal(signal.SIGKILL)
            actor.end()
    closing = time.monotonic()
    channel.close()
    assert time.monotonic() - closing < PATIENCE / 2
    assert actor.ask("leave") == "left"
    actor.end()


def test_the_sum_for_gpus_is_the_same_on_both_kinds_of_device() -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**63), 2**63 - 1, (1000 * packing.FOLD + 3,), generator=generator)
    assert int(packing.weighted_sum(words.to("cuda:0"))) == int(packing.weighted_sum(words))


def test_a_swap_waits_for_nothing_and_is_not_overtaken_by_the_next_version(folder: Path) -> None:
    device = torch.device("cuda", 0)
    tensors = {"body": torch.zeros(2**24, device=device)}
    receiver = WeightReceiver("cuda_ipc", f"ipc://{folder}", "actor-0", tensors, device)  # Of no learner.
    receiving = torch.cuda.Stream(device)

    def arrive(version: int) -> None:
        with torch.cuda.stream(receiving):
            receiver._spare_buffers()[0].fill_(version)
        receiver._accept(version)

    arrive(0)
    receiving.synchronize()
    torch.cuda._sleep(10**9)  # About half a second of the actor's stream.
    began = time.monotonic()
    assert receiver.swap_into(tensors) == 0
    assert time.monotonic() - began < 0.2
    assert not torch.cuda.current_stream(device).query()
    arrive(1)
    arrive(2)  # Into the buffers that the swap is still to read.
    torch.cuda.synchronize(device)
    assert tensors["body"].unique().tolist() == [0.0]
    assert receiver.swap_into(tensors) == 2
    torch.cuda.synchronize(device)
    assert tensors["body"].unique().tolist() == [2.0]
    receiver.close()


def masters() -> dict[str, torch.Tensor]:
    """Without the NaN: GPUs write it with other bits (0x7fff) than CPUs (0x7fc0), and none is ever sent."""
    return {name: torch.where(t.isnan(), 0.0, t) for name, t in gathering_masters().items()}


def cast() -> dict[str, bytes]:
    return raw({name: t.to(TYPES[name]) for name, t in masters().items()})


def test_what_is_packed_on_a_gpu_is_what_the_cpu_casts() -> None:
    assert packed({name: t.to("cuda:0") for name, t in masters().items()}) == cast()


def packed(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """What lies in a packed buffer on this rank's GPU; nothing on other ranks than 0."""
    manifest = packing.build_manifest(tensors, TYPES)
    buffers = packing.allocate(manifest, torch.device("cuda", torch.cuda.current_device()))
    leads = not dist.is_initialized() or dist.get_rank() == 0
    views = packing.views_in(manifest, buffers) if leads else {}
    GatheredWeights(lambda: tensors, TYPES).write(views)
    torch.cuda.synchronize()
    return raw(views)


def gather_over_nccl(bucket: int) -> dict[str, bytes]:
    from torch.distributed.device_mesh import DeviceMesh

    weight_export.BUCKET = bucket
    torch.cuda.set_device(dist.get_rank())
    mesh = DeviceMesh.from_group(dist.new_group(backend="nccl"), "cuda")
    own = {name: t.to("cuda") for name, t in masters().items()}
    sharded = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in own.items() if n != "even"}
    return packed({**sharded, "even": own["even"]})


@pytest.mark.parametrize("bucket", [2**28, 128])
def test_rows_on_two_gpus_come_together_bit_for_bit(bucket: int) -> None:
    if GPUS < 2:
        pytest.skip(f"needs 2 GPUs, found {GPUS}")
    assert run_ranks(gather_over_nccl, bucket, deadline=100.0) == [cast(), {}]

"""Sharded weights come together in rank 0's packed buffer exactly as whole ones are cast into it."""

from __future__ import annotations

import pytest
import torch
from test_weights import raw
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from two_ranks import run_ranks

from asyncrl.errors import ConfigError
from asyncrl.launch.outgoing import ActingWeights, acting_types
from asyncrl.learner import gathering
from asyncrl.learner.gathering import gather
from asyncrl.learner.nowhere import NullPublisher
from asyncrl.learner.sharding import shard
from asyncrl.policies.lora import add_lora
from asyncrl.policies.openvla_config import OpenVLAOFTConfig
from asyncrl.policies.openvla_oft import OpenVLAOFT
from asyncrl.weights import layout
from asyncrl.weights.outbox import Outbox

SHAPES = {"even": (4, 6), "odd": (5, 3), "one_row": (1, 7), "large": (257, 33), "line": (11,)}
TYPES = {name: torch.bfloat16 for name in SHAPES} | {"line": torch.float32}


def masters() -> dict[str, Tensor]:
    """Float32 values, most of which bfloat16 has to round, and a NaN, an infinity and a subnormal."""
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    found["odd"][4, 2], found["odd"][0, 0], found["large"][256, 32] = torch.nan, -torch.inf, 1e-40
    return found


def filled(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    """What `gather` writes into a packed buffer; nothing on other ranks than 0."""
    manifest = layout.build_manifest(tensors, TYPES)
    buffers = layout.allocate(manifest, torch.device("cpu"))
    places = layout.places_in(manifest, buffers) if torch.distributed.get_rank() == 0 else {}
    gather(tensors, TYPES, places)
    return {name: raw({name: place})[name] for name, place in places.items()}


def gather_in_buckets_of(size: int) -> dict[str, bytes]:
    gathering.BUCKET = size
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    sharded: dict[str, Tensor] = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in masters().items()}
    sharded["even"] = masters()["even"]  # Whole on every rank.
    found = filled(sharded)
    with pytest.raises(ConfigError, match=r"'even' are spread as .*Replicate.*only rows"):
        gather({"even": distribute_tensor(masters()["even"], mesh, [Replicate()])}, TYPES, {})
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("ranks", "bucket"), [(2, 2**28), (3, 128)])
def test_rows_of_all_ranks_come_together_bit_for_bit(ranks: int, bucket: int) -> None:
    expected = raw({name: t.to(TYPES[name]) for name, t in masters().items()})
    first, *others = run_ranks(gather_in_buckets_of, bucket, ranks=ranks)
    assert first == expected
    assert others == [{}] * (ranks - 1)


def policy_of(lora: int) -> OpenVLAOFT:
    torch.manual_seed(0)
    policy = OpenVLAOFT(OpenVLAOFTConfig.tiny(dtype="bfloat16", value_head="chunk"))
    if lora:
        add_lora(policy, lora, 0.0)
    for parameter in policy.parameters():  # What is trained has more digits than actors get.
        if parameter.requires_grad:
            parameter.data = parameter.data.float() + torch.rand(parameter.shape) * 1e-3
    return policy


def publish_a_sharded_policy(lora: int) -> dict[str, bytes]:
    plain = OpenVLAOFT(OpenVLAOFTConfig.tiny(dtype="bfloat16", value_head="chunk"))
    if lora:
        add_lora(plain, lora, 0.0)
    types = acting_types(plain)
    policy = shard(policy_of(lora), torch.device("cpu"), "bf16")
    source = ActingWeights(policy, types)
    if torch.distributed.get_rank() > 0:
        NullPublisher().publish(source, 0)
        return {}
    outbox = Outbox(torch.device("cpu"))
    outbox.pack(source, 0)
    assert outbox.manifest is not None
    places = layout.places_in(outbox.manifest, outbox.slots[0])
    assert not [name for name in places if name.startswith("value_head.")]
    return raw(places)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("lora", [0, 2])
def test_a_sharded_policy_is_packed_in_the_actors_types(lora: int) -> None:
    whole, trained = policy_of(lora), torch.float32 if lora else torch.bfloat16
    expected = raw({name: t.to(trained) for name, t in whole.acting_tensors().items()})
    first, second = run_ranks(publish_a_sharded_policy, lora)
    assert first == expected
    assert second == {}


def a_lost_rank() -> str:
    mesh = init_device_mesh("cpu", (2,))
    tensors: dict[str, Tensor] = {"odd": distribute_tensor(masters()["odd"], mesh, [Shard(0)])}
    if torch.distributed.get_rank() == 1:
        return ""  # Leaves: its process ends.
    try:
        filled(tensors)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.timeout(60)
def test_a_rank_whose_peer_is_gone_says_what_it_gathered() -> None:
    text, _ = run_ranks(a_lost_rank)
    assert text.startswith("RunError: Waited in vain for the learner ranks to gather the weights"), text

"""Build the actor's end of the weight channel, as the transport asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.weights import packing
from asyncrl.weights.broadcast_receiver import BroadcastReceiver
from asyncrl.weights.mapped_receiver import MappedReceiver
from asyncrl.weights.membership import connect
from asyncrl.weights.transports.interface import SharesBuffers, build_transport


def build_receiver(
    transport: str,
    endpoint: str,
    name: str,
    manifest_tensors: Mapping[str, Tensor],
    device: torch.device | str = "cpu",
    deadline: float = 60.0,
) -> BroadcastReceiver:
    """Join the weight channel from an actor.

    Args:
        transport: What carries the weights; the same as the learner's.
        endpoint: The publisher's `endpoint`.
        name: The actor's name. An actor that registers under a known name replaces the earlier one.
        manifest_tensors: The tensors that will be swapped, by name, any shapes and dtypes; only shape and
            dtype are read.
        device: The actor's device, with its index when it is a GPU.
        deadline: Seconds after which a broadcast has failed, and a learner that is gone is an error.

    Raises:
        WeightSyncError: no learner publishes there.
        ConfigError: the endpoint's path is too long for a socket, or the transport needs a GPU.
    """
    carrier = build_transport(transport, torch.device(device), deadline)
    manifest = packing.build_manifest(manifest_tensors)
    kind = MappedReceiver if isinstance(carrier, SharesBuffers) else BroadcastReceiver
    return kind(carrier, *connect(Path(endpoint)), name, manifest, deadline)

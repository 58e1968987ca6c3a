"""What leaves the learner: the policy in, weights for the actors and files of a checkpoint out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from asyncrl.learner.group import LearnerGroup
from asyncrl.policies.adapter_files import adapter_tensors, save_adapter
from asyncrl.policies.checkpoints import save_policy
from asyncrl.policies.lora import merged_tensors
from asyncrl.policies.openvla_oft import OpenVLAOFT

ADAPTER_FOLDER: Final = "adapter"


def acting_types(policy: OpenVLAOFT) -> dict[str, torch.dtype]:
    """In which types actors hold what they need; asked before the policy gets its float32 weights."""
    return {name: tensor.dtype for name, tensor in policy.acting_tensors().items()}


def acting_tensors(policy: OpenVLAOFT, types: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """What actors need, in their types; sharded as the policy is."""
    return {name: tensor.to(types[name]) for name, tensor in policy.acting_tensors().items()}


def copy_policy(policy: OpenVLAOFT, group: LearnerGroup) -> Callable[[Path], None]:
    """Gather the policy in host memory, adapters merged, one tensor at a time, with all ranks.

    Returns:
        Writes the policy's files, and the adapters alone into `adapter/`, into a folder; called on rank 0, at
        any time, on any thread.
    """
    whole = _gathered(group, ((n, t.to(policy.config.torch_dtype)) for n, t in merged_tensors(policy)))
    adapters = _gathered(group, adapter_tensors(policy).items())

    def write(folder: Path) -> None:
        save_policy(policy, folder, tensors=whole)
        if adapters:
            save_adapter(policy, folder / ADAPTER_FOLDER, tensors=adapters)

    return write


def _gathered(group: LearnerGroup, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors:  # Merging shards is itself a computation of all ranks together.
        found |= {n: full.to("cpu", copy=True) for n, full in group.whole({name: tensor}).items()}
    return found

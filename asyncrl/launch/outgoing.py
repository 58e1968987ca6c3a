"""What leaves the learner: the policy in, weights for the actors and files of a checkpoint out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from asyncrl.learner.gathering import Gathering
from asyncrl.learner.group import LearnerGroup
from asyncrl.policies.checkpoints.adapters import adapter_tensors, save_adapter
from asyncrl.policies.checkpoints.folder import save_policy
from asyncrl.policies.lora import merged_tensors
from asyncrl.policies.openvla.parallel import OpenVLAOFT
from asyncrl.weights.packing import build_manifest

ADAPTER_FOLDER: Final = "adapter"


def acting_types(policy: OpenVLAOFT) -> dict[str, torch.dtype]:
    """In which types actors hold what they need; asked before the policy gets its float32 weights."""
    return {name: tensor.dtype for name, tensor in policy.acting_tensors().items()}


class ActingWeights:
    """What actors need of the learner's policy, in their types. See `weights.sources.Source`."""

    def __init__(self, policy: OpenVLAOFT, types: Mapping[str, torch.dtype]) -> None:
        """Begin with a policy that is spread over the ranks already, or lies whole on one.

        Args:
            policy: This rank's part; its weights are read at every `write`.
            types: In which actors hold them (`acting_types`).
        """
        self._policy, self._types = policy, types
        tensors = self._tensors()
        self._gathering = Gathering(tensors, types)
        self.manifest = build_manifest(tensors, types)
        """See `Source.manifest`."""

    def write(self, places: Mapping[str, Tensor]) -> None:
        """Cast and gather into rank 0's places; collective. See `Source.write`."""
        self._gathering.write(self._tensors(), places)

    def _tensors(self) -> dict[str, Tensor]:
        # The parameters themselves: detaching a thousand sharded ones takes longer than all else here.
        return {name: p for name, p in self._policy.trainable_parameters().items() if name in self._types}


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

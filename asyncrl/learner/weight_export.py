"""Gathers the sharded weights of all learner ranks into the buffers of rank 0, and into policy folders.

    other ranks   cast their rows of many tensors into one message (a bucket), send it to rank 0
    rank 0        casts its own rows into the buffers while the others' travel, then copies theirs

On CUDA, all of it runs in the order of the current stream. Two NCCL communicators can deadlock if two
processes are in both and launch their kernels in different orders; only learner rank 0 is in both groups.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from asyncrl.learner.ranks import LearnerRanks, explain_lost_peer
from asyncrl.policies.lora import adapter_tensors, save_adapter
from asyncrl.weights import packing
from asyncrl.weights.packing import build_manifest

ADAPTER_FOLDER: Final = "adapter"
BUCKET: Final = 2**28  # Bytes of full tensors that travel together, unless one alone is larger
IN_FLIGHT: Final = 2  # Buckets that travel at the same time: one arrives, one is copied
Views = list[list[Tensor]]


def acting_types(policy: Any) -> dict[str, torch.dtype]:
    """Return the actors' dtypes by name; call it before the policy gets float32 weights."""
    return {name: tensor.dtype for name, tensor in policy.acting_tensors().items()}


def acting_weights(policy: Any, types: Mapping[str, torch.dtype]) -> GatheredWeights:
    """Plan to gather the actors' weights from a sharded policy, or an unsharded one on one rank."""
    # The parameters themselves: detaching a thousand sharded ones takes longer than all else here.
    return GatheredWeights(
        lambda: {name: p for name, p in policy.trainable_parameters().items() if name in types}, types
    )


def copy_policy(policy: Any, ranks: LearnerRanks) -> Callable[[Path], None]:
    """Gather the policy in host memory, adapters merged; return rank 0's writer of its files; collective."""
    full = gather_to_host(ranks, policy.saved_tensors())
    adapters = gather_to_host(ranks, adapter_tensors(policy).items())

    def write(folder: Path) -> None:
        policy.save(folder, tensors=full)
        if adapters:
            save_adapter(policy, folder / ADAPTER_FOLDER, tensors=adapters)

    return write


def gather_to_host(ranks: LearnerRanks, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Gather full tensors by name in rank 0's host memory, one at a time; empty on others; collective."""
    gathered: dict[str, Tensor] = {}
    for name, tensor in tensors:  # Producing it may be a collective: adapters are merged.
        gathered |= {n: full.to("cpu", copy=True) for n, full in ranks.gather_full({name: tensor}).items()}
    return gathered


class GatheredWeights:
    """A `WeightSource` of tensors that keep their names and shapes, sharded or not."""

    def __init__(
        self, tensors_now: Callable[[], Mapping[str, Tensor]], types: Mapping[str, torch.dtype]
    ) -> None:
        self._tensors_now, tensors = tensors_now, tensors_now()
        self.manifest = build_manifest(tensors, types)
        sharded = {name: t for name, t in tensors.items() if isinstance(t, DTensor)}
        self._unsharded = [name for name in tensors if name not in sharded]
        self._buckets = [_Bucket(names, sharded, types) for names in _buckets(sharded, types)]
        self._views: dict[int, tuple[Mapping[str, Tensor], list[Views]]] = {}  # By id of the targets

    def write(self, targets: Mapping[str, Tensor]) -> None:
        """Write every tensor, full and cast, into its target on rank 0; collective."""
        tensors, names = self._tensors_now(), self._unsharded
        if targets:
            packing.copy([targets[name] for name in names], [tensors[name] for name in names])
        under_way: deque[Callable[[], None]] = deque()
        with torch.no_grad(), explain_lost_peer("the learner ranks to gather the weights"):
            for bucket, views in zip(self._buckets, self._views_of(targets), strict=True):
                under_way.append(bucket.start(tensors, views))
                if len(under_way) == IN_FLIGHT:
                    under_way.popleft()()
            while under_way:
                under_way.popleft()()

    def _views_of(self, targets: Mapping[str, Tensor]) -> list[Views]:
        if not targets:
            return [[] for _ in self._buckets]
        known, views = self._views.get(id(targets), ({}, []))
        if known is not targets:
            views = [bucket.views(targets) for bucket in self._buckets]
            self._views[id(targets)] = (targets, views)
        return views


def _buckets(tensors: Mapping[str, DTensor], types: Mapping[str, torch.dtype]) -> Iterator[list[str]]:
    """Yield the names in each bucket: of one dtype, in the same order on every rank."""
    names: list[str] = []
    filled = 0
    for name in sorted(tensors, key=lambda n: (str(types[n]), n)):
        size = tensors[name].numel() * types[name].itemsize
        if names and (filled + size > BUCKET or types[name] != types[names[0]]):
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    if names:
        yield names


class _Bucket:
    """Tensors that travel together. Rank r has the r-th rows; of several copies, the first one sends."""

    def __init__(
        self, names: list[str], tensors: Mapping[str, DTensor], types: Mapping[str, torch.dtype]
    ) -> None:
        for name in names:
            assert tensors[name].placements in ((Shard(0),), (Replicate(), Shard(0))), name
        first = tensors[names[0]]
        self._names, self._dtype, self._device = names, types[names[0]], first.to_local().device
        mesh = first.device_mesh
        self._group: Any = mesh.get_group(mesh.ndim - 1)
        self._takes_part = mesh.ndim == 1 or mesh.get_local_rank(0) == 0
        self._rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        shapes = [tensors[name].shape for name in names]
        self._rows = [[_rows(shape[0], ranks, rank) for shape in shapes] for rank in range(ranks)]
        widths = [math.prod(shape[1:]) for shape in shapes]
        self._sizes = [[n * w for n, w in zip(rows, widths, strict=True)] for rows in self._rows]

    def views(self, targets: Mapping[str, Tensor]) -> Views:
        views = [[targets[name].narrow(0, 0, n) for name, n in zip(self._names, self._rows[0], strict=True)]]
        begins = self._sizes[0]
        for sizes in self._sizes[1:]:
            cuts = zip(self._names, begins, sizes, strict=True)
            views.append([targets[name].view(-1).narrow(0, begin, size) for name, begin, size in cuts])
            begins = [begin + size for begin, size in zip(begins, sizes, strict=True)]
        return views

    def start(self, tensors: Mapping[str, Tensor], views: Views) -> Callable[[], None]:
        if not self._takes_part:
            return lambda: None
        local: list[Tensor] = [cast("DTensor", tensors[name]).to_local() for name in self._names]
        if self._rank > 0:
            message = self._message(self._rank)
            packing.copy(message.split(self._sizes[self._rank]), [t.reshape(-1) for t in local])
            return partial(_wait, self._travel(dist.isend, {0: message}), [message])
        incoming = {rank: self._message(rank) for rank in range(1, len(self._sizes))}
        works = self._travel(dist.irecv, incoming)
        packing.copy(views[0], local)

        def finish() -> None:
            _wait(works, list(incoming.values()))
            for rank, message in incoming.items():
                packing.copy(views[rank], message.split(self._sizes[rank]))

        return finish

    def _message(self, rank: int) -> Tensor:
        return torch.empty(sum(self._sizes[rank]), dtype=self._dtype, device=self._device)

    def _travel(self, direction: Any, messages: Mapping[int, Tensor]) -> list[Any]:
        """Start sending or receiving messages; both sides omit empty ones."""
        operations = [
            dist.P2POp(
                direction, packing.as_bytes(message), dist.get_global_rank(self._group, peer), self._group
            )
            for peer, message in messages.items()
            if message.numel()
        ]
        return dist.batch_isend_irecv(operations) if operations else []


def _rows(rows: int, ranks: int, rank: int) -> int:
    each = -(-rows // ranks)
    return max(0, min(each, rows - rank * each))


def _wait(works: Sequence[Any], kept: Sequence[Tensor]) -> None:
    """Wait for sent messages, kept alive until then: on CUDA the current stream, on the CPU this thread."""
    del kept
    for work in works:
        work.wait()

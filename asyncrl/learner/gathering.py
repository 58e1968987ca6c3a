"""Sharded weights of all learner ranks in, whole tensors in the places that rank 0 gives out.

    other ranks   cast their rows of many tensors into one message (a bucket), send it to rank 0
    rank 0        casts its own rows into the places while the others' travel, then copies theirs beside them

So half as many bytes travel as the float32 weights have, no rank but rank 0 ever holds more than a few
buckets, and there is a message per bucket instead of one per tensor. On CUDA all of it runs in the order of
the current stream, two buckets overlap, and the calling thread waits for nothing.

Two NCCL communicators can block each other for ever: when GPU x runs a kernel of the first and GPU y one of
the second, and each kernel waits for its peer on the other GPU, behind the kernel that is there. It takes
two processes that are in both communicators. The weight group (`weights.transports`) has learner rank 0 and
actors, the learners' group has learners: they share one process, so no kernel of one ever waits for a
process that waits in the other. Within the learners' group all ranks make the same calls in the same order:
gathering is part of `publish`, which the learner's thread calls on every rank, and nothing here depends on
the rank but the direction of a message. An actor on another learner's GPU is another process; the GPU gives
both their share of its time, so their kernels do not queue behind each other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from asyncrl.errors import ConfigError
from asyncrl.learner.distributed_group import naming
from asyncrl.weights import layout

BUCKET: Final = 2**28
"""Bytes of whole tensors that travel together, at most, unless one tensor alone is larger."""
IN_FLIGHT: Final = 2
"""Buckets that travel at the same time: while one arrives, the one before it is put into its places."""


def gather(
    tensors: Mapping[str, Tensor], types: Mapping[str, torch.dtype], places: Mapping[str, Tensor]
) -> None:
    """Write every tensor, whole and cast, into its place on rank 0. A collective of the learner ranks.

    Args:
        tensors: The same names on every rank; whole tensors are taken from rank 0.
        types: What they are cast to, by name.
        places: Rank 0: where they go, of whole shape and of these types. Other ranks: empty.

    Raises:
        ConfigError: a tensor is sharded in another way than by rows over one group of ranks.
        RunError: another learner rank is gone or late.
    """
    sharded = {name: t for name, t in tensors.items() if isinstance(t, DTensor)}
    if places:
        whole = {name: t for name, t in tensors.items() if name not in sharded}
        layout.copy([places[name] for name in whole], list(whole.values()))
    under_way: deque[Callable[[], None]] = deque()
    with torch.no_grad(), naming("the learner ranks to gather the weights"):
        for names in _buckets(sharded, types):
            parts = [_Part(name, sharded[name]) for name in names]
            under_way.append(_start(parts, types[names[0]], places))
            if len(under_way) > IN_FLIGHT - 1:
                under_way.popleft()()
        while under_way:
            under_way.popleft()()


def _buckets(tensors: Mapping[str, DTensor], types: Mapping[str, torch.dtype]) -> Iterator[list[str]]:
    """Names that travel together: of one type, in the same order on every rank."""
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


class _Part:
    """How one tensor is cut: rank r has the r-th piece of so many rows, the last ones fewer or none."""

    def __init__(self, name: str, tensor: DTensor) -> None:
        mesh, placements = tensor.device_mesh, tensor.placements
        if mesh.ndim != 1 or placements != (Shard(0),):
            raise ConfigError(
                f"The weights {name!r} are spread as {placements} over a {mesh.ndim}-dimensional mesh, but "
                "only rows over one group of learner ranks can be published. Shard with FSDP2 on one mesh."
            )
        self.name, self.shape = name, tensor.shape
        self.local = tensor.to_local()
        self.group: Any = mesh.get_group()
        self.rows = -(-tensor.shape[0] // mesh.size())

    def piece(self, rank: int) -> tuple[int, torch.Size]:
        """First row, and shape, of the piece of `rank`."""
        first = min(self.shape[0], rank * self.rows)
        return first, torch.Size((min(self.rows, self.shape[0] - first), *self.shape[1:]))


@dataclass(frozen=True)
class _Incoming:
    """What rank 0 gets from one other rank."""

    message: Tensor
    """``[elements]``, all pieces one after another."""
    pieces: Sequence[Tensor]
    """Views of it."""
    targets: Sequence[Tensor]
    """Where they go."""


def _start(parts: Sequence[_Part], dtype: torch.dtype, places: Mapping[str, Tensor]) -> Callable[[], None]:
    """Let one bucket travel. Returns what ends it, to be called on every rank in the order of the starts."""
    group, device = parts[0].group, parts[0].local.device
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank > 0:
        message = _message(parts, rank, dtype, device)
        layout.copy(_pieces(message, parts, rank), [part.local for part in parts])
        works = _travel(dist.isend, {0: message}, group)
        return partial(_wait, works, [message])
    incoming = {r: _incoming(parts, r, dtype, device, places) for r in range(1, ranks)}
    works = _travel(dist.irecv, {r: one.message for r, one in incoming.items()}, group)
    own = [places[part.name].narrow(0, 0, part.piece(0)[1][0]) for part in parts]
    layout.copy(own, [part.local for part in parts])

    def finish() -> None:
        _wait(works, [one.message for one in incoming.values()])
        for one in incoming.values():
            layout.copy(one.targets, one.pieces)

    return finish


def _incoming(
    parts: Sequence[_Part], rank: int, dtype: torch.dtype, device: torch.device, places: Mapping[str, Tensor]
) -> _Incoming:
    message = _message(parts, rank, dtype, device)
    cuts = [(places[part.name], *part.piece(rank)) for part in parts]
    targets = [place.narrow(0, first, shape[0]) for place, first, shape in cuts]
    return _Incoming(message=message, pieces=_pieces(message, parts, rank), targets=targets)


def _message(parts: Sequence[_Part], rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    elements = sum(math.prod(part.piece(rank)[1]) for part in parts)
    return torch.empty(elements, dtype=dtype, device=device)


def _pieces(message: Tensor, parts: Sequence[_Part], rank: int) -> list[Tensor]:
    shapes = [part.piece(rank)[1] for part in parts]
    cut = message.split([math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(cut, shapes, strict=True)]


def _travel(direction: Any, messages: Mapping[int, Tensor], group: Any) -> list[Any]:
    """Send or receive one message per peer, as bytes, without waiting; both sides leave empty ones out."""
    operations = [
        dist.P2POp(direction, layout.as_bytes(message), dist.get_global_rank(group, peer), group)
        for peer, message in messages.items()
        if message.numel()
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def _wait(works: Sequence[Any], kept: Sequence[Tensor]) -> None:
    """CUDA: the current stream waits for what travels. CPU: this thread does. Till then messages are kept."""
    del kept
    for work in works:
        work.wait()

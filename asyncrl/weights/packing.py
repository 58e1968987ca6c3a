"""Pack named tensors into one flat buffer per dtype, in two alternating sets; unpack and sum them.

E: elements of a buffer: all tensors of one dtype, each padded to a multiple of 16 bytes.
"""

from __future__ import annotations

import json
import math
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError

ALIGNMENT = 16  # Bytes. Every tensor starts at a multiple, so that copies stay vectorised and int64 sums fit.

LARGE = 2**22  # Bytes from which on a tensor is copied by a kernel of its own
FOLD = 4096  # Words per row of the table as which a buffer is summed
CACHED_ROWS = 32  # Rows (1 MiB) that are still in a CPU's cache when they are read again

Buffers = list[Tensor]  # One [E] buffer per dtype, in the order of Manifest.dtypes
BufferPair = tuple[Buffers, Buffers]  # The learner's two buffer sets, by buffer index


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Place of one tensor."""

    name: str
    dtype: str  # Name without the prefix, for example 'bfloat16'
    shape: tuple[int, ...]
    offset: int  # First element in the buffer of its dtype

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Table of contents of the buffers, sorted by name."""

    entries: tuple[Entry, ...]

    @property
    def dtypes(self) -> list[str]:
        """One name per buffer, sorted."""
        return sorted({entry.dtype for entry in self.entries})

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each buffer, padding included."""
        sizes: dict[str, int] = {}
        for entry in self.entries:
            end = entry.offset + _padded(entry.elements, entry.dtype)
            sizes[entry.dtype] = max(sizes.get(entry.dtype, 0), end)
        return sizes

    @cached_property
    def checksum(self) -> int:
        """CRC-32 of the manifest."""
        return zlib.crc32(self.to_json().encode())

    def to_json(self) -> str:
        """Format for `from_json`."""
        return json.dumps([[e.name, e.dtype, list(e.shape), e.offset] for e in self.entries])

    @staticmethod
    def from_json(text: str | bytes) -> Manifest:
        """Parse the text of `to_json`."""
        rows = [(n, d, tuple(s), o) for n, d, s, o in json.loads(text)]
        return Manifest(entries=tuple(Entry(name=n, dtype=d, shape=s, offset=o) for n, d, s, o in rows))


def build_manifest(tensors: Mapping[str, Tensor], types: Mapping[str, torch.dtype] | None = None) -> Manifest:
    """Lay out tensors by name, one buffer per dtype of `types` (None: the tensors' own)."""
    if not tensors:
        raise WeightSyncError(
            "There are no weights to send: the policy has no trainable tensors. Unfreeze some, or add LoRA."
        )
    ends: dict[str, int] = {}
    entries = []
    for name in sorted(tensors):
        dtype = str(types[name] if types else tensors[name].dtype).removeprefix("torch.")
        entry = Entry(name=name, dtype=dtype, shape=tuple(tensors[name].shape), offset=ends.get(dtype, 0))
        ends[dtype] = entry.offset + _padded(entry.elements, dtype)
        entries.append(entry)
    return Manifest(entries=tuple(entries))


def require_same(learner: Manifest, actor: Manifest, actor_name: str) -> None:
    """Raise WeightSyncError, which names the first difference, unless two policies have the same tensors."""
    if learner == actor:
        return
    theirs = {entry.name: entry for entry in learner.entries}
    ours = {entry.name: entry for entry in actor.entries}
    for name in sorted(theirs.keys() | ours.keys()):
        left, right = _described(theirs.get(name)), _described(ours.get(name))
        if left != right:
            raise WeightSyncError(
                f"Tensor {name!r} is {left} on the learner but {right} on {actor_name}. "
                "Both must load the same policy and train the same tensors: compare their --policy."
            )
    raise WeightSyncError(
        f"The learner and {actor_name} lay out equal weights differently. Run both from the same commit."
    )


def allocate(manifest: Manifest, device: torch.device) -> Buffers:
    """Return zeroed ``[E]`` buffers, one per dtype."""
    sizes = manifest.sizes
    buffers = [torch.zeros(sizes[d], dtype=getattr(torch, d), device=device) for d in manifest.dtypes]
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other streams write into them next
    return buffers


def views_in(manifest: Manifest, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return every tensor as a view of its buffer, by name; each takes 5 us."""
    buffer_of = dict(zip(manifest.dtypes, buffers, strict=True))
    return {
        e.name: buffer_of[e.dtype].narrow(0, e.offset, e.elements).view(e.shape) for e in manifest.entries
    }


def fill(into: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy by name, in place and cast."""
    copy(list(into.values()), [source[name] for name in into])


def copy(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copy one by one, in place and cast: small tensors share a kernel, a large one has its own."""
    small_into, small_source = list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for target, tensor in zip(into, source, strict=True):
            if target.nbytes >= LARGE:
                target.copy_(tensor)
            else:
                small_into.append(target)
                small_source.append(tensor)
        if small_into:
            foreach_copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
            foreach_copy(small_into, small_source)


def checksum(buffers: Buffers) -> int:
    """Sum all buffers, in ``[-2**63, 2**63)``, the same on every device; waits for the stream on CUDA."""
    sums = [weighted_sum(buffer) for buffer in buffers]  # All are queued before the first is waited for.
    total = 0
    for one in sums:
        total = (total * 31 + int(one)) % 2**64
    return total - 2**63


def weighted_sum(buffer: Tensor) -> Tensor:
    """Sum a buffer's words, each times its own odd number, modulo 2^64: ``[]`` int64, without waiting.

    A changed word always changes the sum, and a moved one in all but 2^-60 of the cases.
    """
    # The factors are made of row and column, so they need no tensor as large as the buffer.
    words = buffer.view(torch.int64)
    rows, rest = divmod(words.numel(), FOLD)  # The last words may be left over.
    table = words[: rows * FOLD].view(rows, FOLD)
    on_cpu = buffer.device.type == "cpu"
    of_rows, of_columns = _cached_sums(table) if on_cpu else (table.sum(dim=1), table.sum(dim=0))
    factors = _scattered(rows + FOLD + rest, words.device)
    row_factors, column_factors, rest_factors = factors.split([rows, FOLD, rest])
    total = (of_rows * (2 * row_factors + 1)).sum() + (of_columns * (2 * column_factors)).sum()
    return total + (words[rows * FOLD :] * (2 * rest_factors + 1)).sum()


def _cached_sums(table: Tensor) -> tuple[Tensor, Tensor]:
    array = table.numpy()  # Of numpy, whose sums of cached blocks take less than torch's.
    of_rows, of_columns = np.empty(len(array), np.int64), np.zeros(FOLD, np.int64)
    for start in range(0, len(array), CACHED_ROWS):
        block = array[start : start + CACHED_ROWS]
        np.add.reduce(block, axis=1, out=of_rows[start : start + CACHED_ROWS])
        of_columns += np.add.reduce(block, axis=0)
    return torch.from_numpy(of_rows), torch.from_numpy(of_columns)


def _scattered(count: int, device: torch.device) -> Tensor:
    """Return ``[count]`` fixed int64 numbers without a pattern (the mixing steps of splitmix64)."""
    found = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    found = (found ^ ((found >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
    return found ^ ((found >> 27) & (2**37 - 1))


def as_bytes(buffer: Tensor) -> Tensor:
    """View a buffer ``[E]`` as ``[bytes]`` uint8."""
    return buffer.view(torch.uint8)


def _padded(elements: int, dtype: str) -> int:
    per_block = max(1, ALIGNMENT // getattr(torch, dtype).itemsize)
    return -(-elements // per_block) * per_block


def _described(entry: Entry | None) -> str:
    return "absent" if entry is None else f"{entry.dtype} {list(entry.shape)}"


# --- versions in two buffer sets


class WeightSource(Protocol):
    """The learner's weights, in its own dtypes and perhaps sharded over its ranks."""

    @property
    def manifest(self) -> Manifest:
        """Names, full shapes, and the actors' dtypes; fixed for a run."""
        ...

    def write(self, targets: Mapping[str, Tensor]) -> None:
        """Write every tensor, cast, into `targets`, by name, on rank 0; collective if sharded."""


class WholeTensors:
    """A `WeightSource` of unsharded tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.manifest = build_manifest(tensors)

    def write(self, targets: Mapping[str, Tensor]) -> None:
        """Copy every tensor into its place."""
        fill(targets, self._tensors)


def stale_version(version: int, newest: int) -> WeightSyncError:
    """Return the error for a version that is not newer than the newest one."""
    return WeightSyncError(
        f"Version {version} was published after version {newest}, but actors only ever take a newer one. "
        "Publish once per update, with the update's number."
    )


@dataclass(frozen=True, kw_only=True)
class PackedVersion:
    """One version in a buffer set."""

    version: int
    buffer_index: int
    packed: torch.cuda.Event | None  # End of the copies into the buffers; None on the CPU

    @property
    def complete(self) -> bool:
        """True if the copies are done."""
        return self.packed is None or self.packed.query()


class DoubleBuffer:
    """Buffers that the learner's thread packs and the publisher's sends; an unsent version is replaced."""

    def __init__(self, device: torch.device, allocator: Callable[[Manifest], Buffers] | None = None) -> None:
        self.device = device
        self._allocate = allocator or (lambda manifest: allocate(manifest, device))
        self._lock = threading.Lock()
        self._pending: PackedVersion | None = None
        self._current: PackedVersion | None = None
        self._holders = 0
        self.buffer_pair: BufferPair = ([], [])
        self._views: list[dict[str, Tensor]] = []
        self.manifest: Manifest | None = None  # None until the first version is packed
        self.newest = -1

    def pack(self, source: WeightSource, version: int) -> None:
        """Let the source write into the free set; on CUDA in stream order, without waiting for the copies."""
        manifest, event = source.manifest, None
        with self._lock:
            if version <= self.newest:
                raise stale_version(version, self.newest)
            if self.manifest is None:
                self.buffer_pair = (self._allocate(manifest), self._allocate(manifest))
                self._views = [views_in(manifest, buffers) for buffers in self.buffer_pair]
                self.manifest = manifest
            require_same(manifest, self.manifest, "the first publish")
            # Not valid while its buffers are overwritten, and so nothing can be promoted.
            self._pending = None
            index = 0 if self._current is None else 1 - self._current.buffer_index
        # Without the lock: sharded weights are gathered here, and others must not wait for that.
        source.write(self._views[index])
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                event = torch.cuda.Event()
                event.record()
        with self._lock:
            self._pending = PackedVersion(version=version, buffer_index=index, packed=event)
            self.newest = version

    def promote(self) -> PackedVersion | None:
        """Make the newest version the one to send, unless its predecessor is held; None before the first."""
        with self._lock:
            if self._pending is not None and not self._holders:
                self._current, self._pending = self._pending, None
            return self._current

    @property
    def sending(self) -> int:
        """Version being sent; -1 before the first."""
        current = self._current
        return -1 if current is None else current.version

    @contextmanager
    def holding(self) -> Iterator[PackedVersion]:
        """Keep the version being sent in its buffers within the block."""
        with self._lock:
            assert self._current is not None
            self._holders, snapshot = self._holders + 1, self._current
        try:
            yield snapshot
        finally:
            with self._lock:
                self._holders -= 1

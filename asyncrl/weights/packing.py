"""Copy named tensors into one flat buffer per dtype, and out of it again.

A manifest says which tensor lies where in the buffers. Learner and actor each derive it from their own
policy; when the two differ, nothing is sent.

Dimension letters used in this file:
    E  elements of one buffer: all tensors of one dtype, each padded to a multiple of 16 bytes
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError

ALIGNMENT = 16
"""Bytes. Every tensor starts at a multiple of it, so that copies stay vectorised and int64 sums fit."""

LARGE = 2**22
"""Bytes from which on a tensor is copied by a kernel of its own."""
FOLD = 4096
"""Words per row of the table as which a buffer is added up."""

CACHED_ROWS = 32
"""Of them, those that are still in a CPU's cache when they are read again."""
CACHED_BYTES = 8 * FOLD * CACHED_ROWS
"""The same in bytes: 1 MiB. Of less at a time, copies are slower; of much more, sums are."""

Buffers = list[Tensor]
"""One ``[E]`` buffer per dtype, in the order of `Manifest.dtypes`."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where one tensor lies."""

    name: str
    dtype: str
    """Name without the prefix, for example 'bfloat16'."""
    shape: tuple[int, ...]
    offset: int
    """First element in the buffer of its dtype."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The table of contents of the buffers; entries are sorted by name."""

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

    def to_json(self) -> str:
        """Write the manifest so that `from_json` reads it back."""
        return json.dumps([[e.name, e.dtype, list(e.shape), e.offset] for e in self.entries])

    @staticmethod
    def from_json(text: str | bytes) -> Manifest:
        """Read a manifest.

        Raises:
            WeightSyncError: the text is not a manifest.
        """
        try:
            rows = json.loads(text)
            entries = tuple(
                Entry(name=str(n), dtype=str(d), shape=tuple(map(int, s)), offset=int(o))
                for n, d, s, o in rows
            )
        except (ValueError, TypeError) as error:
            raise WeightSyncError(
                f"The learner's weight manifest cannot be read ({error}). "
                "Run learner and actors from the same commit."
            ) from None
        return Manifest(entries=entries)


def build_manifest(tensors: Mapping[str, Tensor], types: Mapping[str, torch.dtype] | None = None) -> Manifest:
    """Lay out tensors one after another, sorted by name, one buffer per dtype.

    Args:
        tensors: Any shapes and dtypes; only shape and dtype are read.
        types: In which they travel, by name; None: in their own.

    Raises:
        WeightSyncError: there is no tensor at all.
    """
    if not tensors:
        raise WeightSyncError(
            "There are no weights to send: the policy has no trainable tensors. Unfreeze some, or add LoRA."
        )
    ends: dict[str, int] = {}
    entries = []
    for name in sorted(tensors):
        dtype = _dtype_name(types[name] if types else tensors[name].dtype)
        entry = Entry(name=name, dtype=dtype, shape=tuple(tensors[name].shape), offset=ends.get(dtype, 0))
        ends[dtype] = entry.offset + _padded(entry.elements, dtype)
        entries.append(entry)
    return Manifest(entries=tuple(entries))


def require_same(learner: Manifest, actor: Manifest, actor_name: str) -> None:
    """Refuse to exchange weights between two policies of different shape.

    Raises:
        WeightSyncError: names the first tensor that differs, in order of name, and both shapes.
    """
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
    """Return zeroed ``[E]`` buffers, one per dtype, on `device`."""
    sizes = manifest.sizes
    buffers = [torch.zeros(sizes[d], dtype=getattr(torch, d), device=device) for d in manifest.dtypes]
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other streams write into them next
    return buffers


def views_in(manifest: Manifest, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return every tensor's place as a view of its buffer. Worth keeping: each takes 5 us.

    Args:
        manifest: What lies where.
        buffers: ``[E]``, one per dtype, as of `allocate`.

    Returns:
        By name, in the shapes and dtypes of `manifest`.
    """
    buffer_of = dict(zip(manifest.dtypes, buffers, strict=True))
    return {
        e.name: buffer_of[e.dtype].narrow(0, e.offset, e.elements).view(e.shape) for e in manifest.entries
    }


def fill(into: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy by name: each of `into` from `source` (in stream order on CUDA).

    Args:
        into: Any shapes and dtypes; written in place.
        source: At least the same names, of the same shapes; cast where the dtypes differ.
    """
    copy(list(into.values()), [source[name] for name in into])


def copy(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copy one by one: no temporaries, one read and one write.

    Many small tensors share a kernel; a large one has its own, which alone reaches the memory's speed.

    Args:
        into: Any shapes and dtypes; written in place.
        source: As many, of the same shapes; cast where the dtypes differ.
    """
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


def total_bytes(buffers: Buffers) -> int:
    """Return the size of one broadcast in bytes."""
    return sum(buffer.nbytes for buffer in buffers)


def checksum(buffers: Buffers) -> int:
    """Sum up the bytes of all buffers, each a multiple of 8 long; waits for the stream on CUDA.

    It is the same on every device. crc32, of a CPU alone, takes four times as long.

    Returns:
        A number in ``[-2**63, 2**63)``, which a message can hold.
    """
    sums = [weighted_sum(buffer) for buffer in buffers]  # All are queued before the first is waited for.
    return _joined(sums)


def copy_and_sum(
    into: Mapping[str, Tensor], manifest: Manifest, buffers: Buffers, views: Mapping[str, Tensor]
) -> int:
    """Copy tensors out of buffers, and sum these up while each block of them is in the CPU's cache.

    One read of the memory for both, which takes a seventh less than one after the other.

    Args:
        into: By name, all that `manifest` names, on any device; written in place.
        manifest: What lies where.
        buffers: ``[E]``, one per dtype, on the CPU. Somebody may write into them at the same time.
        views: Their tensors, see `views_in`.

    Returns:
        `checksum` of the buffers. When nobody wrote meanwhile, the tensors hold what it is the sum of.
    """
    sums = []
    for dtype, buffer in zip(manifest.dtypes, buffers, strict=True):
        running = RunningSum(buffer)
        targets, sources, block = list[Tensor](), list[Tensor](), 0
        for entry in manifest.entries:  # Those of a dtype lie one after another.
            if entry.dtype != dtype:
                continue
            target, source = into[entry.name], views[entry.name]
            begin = source.data_ptr() - buffer.data_ptr()
            if source.nbytes > CACHED_BYTES and target.device.type == "cpu" and target.is_contiguous():
                # What lies before is copied first: a word that changes between sum and copy is not noticed.
                copy(targets, sources)
                targets, sources, block = [], [], 0
                _copy_by_blocks(target, source, begin, running)
                continue
            targets.append(target)
            sources.append(source)
            block += source.nbytes
            if block >= CACHED_BYTES:
                copy(targets, sources)
                running.add_until(begin + source.nbytes)
                targets, sources, block = [], [], 0
        copy(targets, sources)
        sums.append(running.total())
    return _joined(sums)


def _copy_by_blocks(target: Tensor, source: Tensor, begin: int, running: RunningSum) -> None:
    """Copy within the CPU's memory, and add each block to the sum of the buffer in which it begins at a byte.

    Args:
        target: Any shape and dtype, contiguous.
        source: Of the same shape and dtype, contiguous.
        begin: First byte of `source` in the buffer.
        running: Of the buffer.
    """
    into, words = (as_bytes(tensor.detach().view(-1)).numpy() for tensor in (target, source))
    for at in range(0, len(words), CACHED_BYTES):
        end = at + CACHED_BYTES
        np.copyto(into[at:end], words[at:end])  # For blocks of this size it takes less than torch's copy.
        running.add_until(begin + min(end, len(words)))


def _joined(sums: Sequence[Tensor]) -> int:
    """Make one number of those of all buffers, each ``[]`` int64."""
    total = 0
    for one in sums:
        total = (total * 31 + int(one)) % 2**64
    return total - 2**63


def weighted_sum(buffer: Tensor) -> Tensor:
    """Add up a buffer's words, each times an odd number of its own, modulo 2^64.

    A word that changes always changes the sum, and so does one that lies elsewhere, in all but a fraction of
    2^-60 of the cases or so. Row and column of a word each give a part of its factor, so the factors need no
    tensor as large as the buffer: it is read twice, by a CPU the second time from its cache, and nothing is
    written.

    Args:
        buffer: ``[E]`` of any dtype, a multiple of 8 bytes.

    Returns:
        ``[]`` int64, on the buffer's device, not waited for.
    """
    if buffer.device.type == "cpu":
        return RunningSum(buffer).total()
    words = buffer.view(torch.int64)
    table = _table(words)
    return _weighted(words, table.sum(dim=1), table.sum(dim=0))


class RunningSum:
    """Adds a buffer of the CPU up bit by bit, to what `weighted_sum` says of it."""

    def __init__(self, buffer: Tensor) -> None:
        """Begin.

        Args:
            buffer: ``[E]`` of any dtype, a multiple of 8 bytes, on the CPU.
        """
        self._words = buffer.view(torch.int64)
        self._table = _table(self._words).numpy()  # Of numpy, whose sums of cached blocks take less.
        self._of_rows = np.empty(len(self._table), np.int64)
        self._of_columns = np.zeros(FOLD, np.int64)
        self._added = 0
        """Rows that are in the sums."""

    def add_until(self, end: int) -> None:
        """Add what lies before byte `end` and was not added yet, but for a last row that is not whole."""
        rows = min(end // (8 * FOLD), len(self._table))
        while self._added < rows:
            stop = min(rows, self._added + CACHED_ROWS)
            part = self._table[self._added : stop]
            np.add.reduce(part, axis=1, out=self._of_rows[self._added : stop])
            self._of_columns += np.add.reduce(part, axis=0)
            self._added = stop

    def total(self) -> Tensor:
        """Add all that is left; return the sum, ``[]`` int64."""
        self.add_until(8 * self._words.numel())
        return _weighted(self._words, torch.from_numpy(self._of_rows), torch.from_numpy(self._of_columns))


def _table(words: Tensor) -> Tensor:
    """View the words ``[W]`` of a buffer as rows ``[W // FOLD, FOLD]``; the last words may be left over."""
    rows = words.numel() // FOLD
    return words[: rows * FOLD].view(rows, FOLD)


def _weighted(words: Tensor, sums_of_rows: Tensor, sums_of_columns: Tensor) -> Tensor:
    """Weigh the sums ``[R]`` and ``[FOLD]`` of a buffer's table; add those of its words ``[W]`` left over."""
    rows, rest = divmod(words.numel(), FOLD)
    factors = _scattered(rows + FOLD + rest, words.device)
    of_row, of_column, of_rest = factors.split([rows, FOLD, rest])
    total = (sums_of_rows * (2 * of_row + 1)).sum() + (sums_of_columns * (2 * of_column)).sum()
    return total + (words[rows * FOLD :] * (2 * of_rest + 1)).sum()


def _scattered(count: int, device: torch.device) -> Tensor:
    """``[count]`` int64 numbers without a pattern, always the same ones (the mixing steps of splitmix64)."""
    found = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    found = (found ^ ((found >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
    return found ^ ((found >> 27) & (2**37 - 1))


def as_bytes(buffer: Tensor) -> Tensor:
    """View a buffer ``[E]`` as ``[bytes]`` uint8, so that every dtype travels through every transport."""
    return buffer.view(torch.uint8)


def _padded(elements: int, dtype: str) -> int:
    per_block = max(1, ALIGNMENT // getattr(torch, dtype).itemsize)
    return -(-elements // per_block) * per_block


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _described(entry: Entry | None) -> str:
    return "absent" if entry is None else f"{entry.dtype} {list(entry.shape)}"


UNKNOWN: Final = build_manifest({"unknown": torch.zeros(1)})
"""Manifest of who takes whatever tensors the learner has, until the learner says what these are."""

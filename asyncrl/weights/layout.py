"""Named tensors in, one flat buffer per dtype out, and back.

A manifest says which tensor lies where in the buffers. Learner and actor each derive it from their own
policy; when the two differ, nothing is sent.

Dimension letters used in this file:
    E  elements of one buffer: all tensors of one dtype, each padded to a multiple of 16 bytes
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError

ALIGNMENT = 16
"""Bytes. Every tensor starts at a multiple of it, so that copies stay vectorised and int64 sums fit."""

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


def build_manifest(tensors: Mapping[str, Tensor]) -> Manifest:
    """Lay out tensors one after another, sorted by name, one buffer per dtype.

    Args:
        tensors: Any shapes and dtypes; only shape and dtype are read.

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
        dtype = _dtype_name(tensors[name].dtype)
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


def pack(manifest: Manifest, tensors: Mapping[str, Tensor], buffers: Buffers) -> None:
    """Copy every tensor of the manifest into its place in the buffers (in stream order on CUDA)."""
    with torch.no_grad():
        places = _views(manifest, buffers)
        _copy(places, [tensors[entry.name].detach() for entry in manifest.entries])


def unpack(manifest: Manifest, buffers: Buffers, tensors: Mapping[str, Tensor]) -> None:
    """Copy the buffers into the tensors, in place (in stream order on CUDA)."""
    with torch.no_grad():
        places = _views(manifest, buffers)
        _copy([tensors[entry.name].detach() for entry in manifest.entries], places)


def total_bytes(buffers: Buffers) -> int:
    """Size of one broadcast in bytes."""
    return sum(buffer.nbytes for buffer in buffers)


def checksum(buffers: Buffers) -> int:
    """Sum up the bytes of all buffers: crc32 on the CPU, a wrapping sum of int64 words on CUDA (which syncs).

    Learner and actor hold their buffers on the same kind of device, so both use the same of the two.
    """
    if all(buffer.device.type == "cpu" for buffer in buffers):
        crc = 0
        for buffer in buffers:
            crc = zlib.crc32(as_bytes(buffer).numpy().data, crc)
        return crc
    total = 0
    for buffer in buffers:
        total = (total * 31 + int(buffer.view(torch.int64).sum())) % 2**63
    return total


def as_bytes(buffer: Tensor) -> Tensor:
    """View a flat buffer as uint8, so that every dtype travels through every transport."""
    return buffer.view(torch.uint8)


def _views(manifest: Manifest, buffers: Sequence[Tensor]) -> list[Tensor]:
    buffer_of = dict(zip(manifest.dtypes, buffers, strict=True))
    return [buffer_of[e.dtype].narrow(0, e.offset, e.elements).view(e.shape) for e in manifest.entries]


def _copy(into: list[Tensor], source: list[Tensor]) -> None:
    copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
    copy(into, source)  # one kernel for many small tensors


def _padded(elements: int, dtype: str) -> int:
    per_block = max(1, ALIGNMENT // getattr(torch, dtype).itemsize)
    return -(-elements // per_block) * per_block


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _described(entry: Entry | None) -> str:
    return "absent" if entry is None else f"{entry.dtype} {list(entry.shape)}"

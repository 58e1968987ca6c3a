"""Pack the policy's tensors into one of the learner's two buffer sets while the other one is sent.

A version that was not sent yet is replaced by the next one. What is sent stays where it is while somebody
holds it; the learner goes on packing the other set.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.weights import packing
from asyncrl.weights.interface import WeightSource, stale_version
from asyncrl.weights.transports.interface import BufferNotes, BufferPair, SharesBuffers


@dataclass(frozen=True, kw_only=True)
class PackedVersion:
    """One packed version."""

    version: int
    buffer_index: int
    packed: torch.cuda.Event | None
    """Reached once the copies into the buffers are done; absent on the CPU."""
    began: float
    """When `pack` was called, in seconds of `time.monotonic`."""

    @property
    def complete(self) -> bool:
        """Whether the copies are done."""
        return self.packed is None or self.packed.query()


class DoubleBuffer:
    """Packed by the learner's thread, emptied by the publisher's, copied by those of its outlets."""

    def __init__(self, device: torch.device, shared: SharesBuffers | None = None) -> None:
        """Begin empty; the buffers are allocated when the first version is packed.

        Args:
            device: Where they are.
            shared: Makes those out of which others copy themselves, and tells these what is in them.
        """
        self.device = device
        """Where they are."""
        self._shared = shared
        self._notes: BufferNotes | None = None
        self._lock = threading.Lock()
        self._pending: PackedVersion | None = None
        self._current: PackedVersion | None = None
        self._holders = 0
        self.buffer_pair: BufferPair = ([], [])
        self._views: list[dict[str, Tensor]] = []
        """Where each tensor lies in the two sets."""
        self.manifest: packing.Manifest | None = None
        """What the buffers hold; absent until the first version is packed."""
        self.newest = -1
        """Version that was packed last."""

    @property
    def bytes(self) -> int:
        """Size of one version."""
        return packing.total_bytes(self.buffer_pair[0])

    def pack(self, source: WeightSource, version: int) -> int:
        """Let the source write into the set that is not being sent (in stream order on CUDA).

        What is queued on the current stream afterwards, such as the next update, runs after the copies; the
        calling thread does not wait for them.

        Returns:
            The set.

        Raises:
            WeightSyncError: `version` is not newer than the last one, or the tensors changed their shape.
        """
        began = time.monotonic()
        buffer_index = self._begin(source.manifest, version)
        if self._notes is not None:
            self._notes.packing(buffer_index)
        # Without the lock: sharded weights are gathered here, and others must not wait for that.
        source.write(self._views[buffer_index])
        if self._notes is not None:
            self._notes.packed(buffer_index, version)
        with self._lock:
            self._pending = PackedVersion(
                version=version, buffer_index=buffer_index, packed=_record(self.device), began=began
            )
            self.newest = version
        return buffer_index

    def sum_up(self, buffer_index: int) -> None:
        """Sum up the version that was packed last, where others copy it; before the next is packed.

        Args:
            buffer_index: The set that `pack` returned.
        """
        if self._notes is not None:
            checksum = packing.checksum(self.buffer_pair[buffer_index])
            self._notes.summed(buffer_index, self.newest, checksum)

    def checksum(self, snapshot: PackedVersion) -> int:
        """Sum up a version that is sent; 0 where `sum_up` does that. Waits for the current stream on CUDA."""
        return 0 if self._shared else packing.checksum(self.buffer_pair[snapshot.buffer_index])

    def _allocate(self, manifest: packing.Manifest) -> packing.Buffers:
        return self._shared.allocate(manifest) if self._shared else packing.allocate(manifest, self.device)

    def _begin(self, manifest: packing.Manifest, version: int) -> int:
        """Return the set to pack, which nobody sends or reads until it is pending again."""
        with self._lock:
            if version <= self.newest:
                raise stale_version(version, self.newest)
            if self.manifest is None:
                self.buffer_pair = (self._allocate(manifest), self._allocate(manifest))
                self._notes = self._shared.allocate_notes() if self._shared else None
                self._views = [packing.views_in(manifest, buffers) for buffers in self.buffer_pair]
                self.manifest = manifest
            packing.require_same(manifest, self.manifest, "the first publish")
            # Not valid while its buffers are overwritten, and so nothing can be promoted.
            self._pending = None
            return 0 if self._current is None else 1 - self._current.buffer_index

    def views(self, snapshot: PackedVersion) -> dict[str, Tensor]:
        """Return the tensors of a version by name, which are its buffers' memory."""
        return self._views[snapshot.buffer_index]

    def promote(self) -> PackedVersion | None:
        """Make the newest packed version the one to send; its predecessor's set may be packed from now on.

        While the predecessor is held it stays the one to send. None: the first one is still being packed.
        """
        with self._lock:
            if self._pending is not None and not self._holders:
                self._current, self._pending = self._pending, None
            return self._current

    @property
    def sending(self) -> int:
        """Version that is sent now; -1 before the first."""
        current = self._current
        return -1 if current is None else current.version

    @contextmanager
    def holding(self) -> Iterator[PackedVersion]:
        """Keep the version that is sent now in its buffers within the block."""
        with self._lock:
            assert self._current is not None
            self._holders, snapshot = self._holders + 1, self._current
        try:
            yield snapshot
        finally:
            with self._lock:
                self._holders -= 1


def _record(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record()
    return event

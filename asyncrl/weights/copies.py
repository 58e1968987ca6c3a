"""Versions in host memory for the pull server: the outbox in, bytes out. Used by one thread."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from asyncrl.weights import layout
from asyncrl.weights.outbox import Outbox

MOST_COPIES: Final = 4
"""Versions kept at most. Beyond it the oldest goes, and whoever reads it begins again with the newest."""


@dataclass(frozen=True, kw_only=True)
class HostCopy:
    """One version."""

    version: int
    checksum: int
    """See `layout.checksum`."""
    buffers: list[memoryview]
    """The bytes of each buffer."""


class HostCopies:
    """The newest version that was asked for, and older ones that are still read."""

    def __init__(self, outbox: Outbox, device: torch.device) -> None:
        """Begin without copies; `device` is where the outbox has its buffers."""
        self._outbox = outbox
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copies: dict[int, HostCopy] = {}

    @property
    def versions(self) -> list[int]:
        """What is there, oldest first."""
        return sorted(self._copies)

    def newest(self, wanted: set[int]) -> HostCopy:
        """Return the version that is sent now. When it is copied for that, only `wanted` ones stay too."""
        with self._outbox.holding() as snapshot, self._aside():
            version = snapshot.version
            if version in self._copies:
                return self._copies[version]
            self._copies = {old: copy for old, copy in self._copies.items() if old in wanted}
            while len(self._copies) >= MOST_COPIES:
                del self._copies[min(self._copies)]
            if snapshot.packed is not None:
                snapshot.packed.synchronize()
            buffers = [b.to("cpu", copy=True) for b in self._outbox.slots[snapshot.slot]]
        views = [layout.as_bytes(buffer).numpy().data for buffer in buffers]
        copy = HostCopy(version=version, checksum=layout.checksum(buffers), buffers=views)
        self._copies[version] = copy
        return copy

    def get(self, version: int) -> HostCopy | None:
        """Return a version that is there."""
        return self._copies.get(version)

    def clear(self) -> None:
        """Forget all."""
        self._copies.clear()

    def _aside(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

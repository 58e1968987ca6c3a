"""Double buffers of the two ends: a version is packed, or received, while the one before is read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from asyncrl.errors import AttemptEnded, WeightSyncError
from asyncrl.weights import packing
from asyncrl.weights.interface import BufferPair, ChannelClosed, Named, Receiver, WeightSource, stale_version

MOST_COPIES: Final = 4
"""Host copies kept at most. Beyond it the oldest goes, and its readers begin again with the newest."""


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

    def __init__(
        self, device: torch.device, allocate: Callable[[packing.Manifest], packing.Buffers] | None = None
    ) -> None:
        self.device = device
        self._allocate = allocate or (lambda manifest: packing.allocate(manifest, device))
        self._lock = threading.Lock()
        self._pending: PackedVersion | None = None
        self._current: PackedVersion | None = None
        self._holders = 0
        self.buffer_pair: BufferPair = ([], [])
        self._views: list[dict[str, Tensor]] = []
        self.manifest: packing.Manifest | None = None  # None until the first version is packed
        self.newest = -1

    def pack(self, source: WeightSource, version: int) -> None:
        """Let the source write into the free set; on CUDA in stream order, without waiting for the copies."""
        manifest, event = source.manifest, None
        with self._lock:
            if version <= self.newest:
                raise stale_version(version, self.newest)
            if self.manifest is None:
                self.buffer_pair = (self._allocate(manifest), self._allocate(manifest))
                self._views = [packing.views_in(manifest, buffers) for buffers in self.buffer_pair]
                self.manifest = manifest
            packing.require_same(manifest, self.manifest, "the first publish")
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


@dataclass(frozen=True, kw_only=True)
class HostVersion:
    """One version in host memory."""

    version: int
    checksum: int
    buffers: list[memoryview]


class HostVersions:
    """Host copies of the newest versions, for pullers: each is made on a thread of its own, one at a time."""

    def __init__(self, buffers: DoubleBuffer, wake: Callable[[], None]) -> None:
        self._buffers, self._wake = buffers, wake
        cuda = buffers.device.type == "cuda"
        self._stream = torch.cuda.Stream(buffers.device) if cuda else None
        self._next: Future[HostVersion] | None = None
        self.by_number: dict[int, HostVersion] = {}

    def newest(self, wanted: set[int]) -> HostVersion | None:
        """Return the newest copy, and begin to copy a newer version; then only `wanted` copies stay."""
        if self._next is not None and self._next.done():
            copy, self._next = self._next.result(), None
            kept = sorted(self.by_number.keys() & wanted)[1 - MOST_COPIES :]
            self.by_number = {version: self.by_number[version] for version in kept} | {copy.version: copy}
        newest = max(self.by_number, default=-1)
        if self._next is None and self._buffers.sending > newest:
            self._next = Future()
            threading.Thread(target=self._copy, args=[self._next], name="weights copy", daemon=True).start()
        return self.by_number.get(newest)

    def clear(self) -> None:
        """Free all copies but that of the version that is sent: pullers that come and go make it once."""
        sending = self._buffers.sending
        self.by_number = {n: copy for n, copy in self.by_number.items() if n == sending}
        if (made := self._next) is not None and made.done():
            self._next = None if made.exception() or made.result().version != sending else made

    def _copy(self, result: Future[HostVersion]) -> None:
        try:
            aside = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
            with self._buffers.holding() as snapshot, aside:
                if snapshot.packed is not None:
                    snapshot.packed.synchronize()
                buffers = [b.to("cpu", copy=True) for b in self._buffers.buffer_pair[snapshot.buffer_index]]
            views = [packing.as_bytes(buffer).numpy().data for buffer in buffers]
            checksum = packing.checksum(buffers)
            result.set_result(HostVersion(version=snapshot.version, checksum=checksum, buffers=views))
        except Exception as error:  # the thread's boundary: the publisher's thread raises it
            result.set_exception(error)
        self._wake()


@dataclass
class _Set:
    buffers: packing.Buffers
    views: dict[str, Tensor]
    read: torch.cuda.Event | None = None
    """End of the last swap from it; None on the CPU, and before the first."""


class BufferedReceiver(Receiver):
    """The actor's side: a subclass fills the spare buffers on its own thread."""

    def __init__(
        self,
        name: str,
        endpoint: str,
        manifest: packing.Manifest | None,
        device: torch.device,
        deadline: float,
    ) -> None:
        self._name, self._endpoint, self._manifest = name, endpoint, manifest
        self._device, self._deadline = device, deadline
        self._spare: _Set | None = None  # Destination of the next version, made when it comes
        self._complete: _Set | None = None  # The newest complete version
        # Everything below is shared between the two threads and guarded by this condition.
        self._changed = threading.Condition()
        self._version, self._held = -1, -1
        self._state = f"waiting for the learner at {endpoint} to publish its first version"
        self._failure: Exception | None = None
        self.ended = False
        """True after the learner announced that no version will follow."""

    # --- the actor's thread ---

    def wait_for_first(self, deadline: float) -> int:
        """Wait for the first complete version."""
        until = time.monotonic() + deadline
        with self._changed:
            while self._version < 0:
                self.require_alive()
                if self.ended:
                    raise ChannelClosed(f"The learner ended the run before {self._name} had weights.")
                left = until - time.monotonic()
                if left <= 0:
                    raise WeightSyncError(
                        f"{self._name} waited for its first weights, at most {deadline:g} s, and has none: "
                        f"{self._state}. See the learner's log."
                    )
                self._changed.wait(left)
            return self._version

    def swap_into(self, tensors: Named) -> int:
        """Copy the newest complete version into the tensors if it is newer."""
        self.require_alive()
        if self._version <= self._held:
            return self._held
        assert self._manifest is not None  # Of a receiver that adopts one, versions are handed on.
        tensors = tensors() if callable(tensors) else tensors
        packing.require_same(self._manifest, packing.build_manifest(tensors), f"{self._name}'s swap")
        with self._changed:
            complete = self._complete
            assert complete is not None  # There is a version.
            packing.fill(tensors, complete.views)
            if self._device.type == "cuda":
                # `_spare_buffers` waits for this event before the next version is received into them.
                complete.read = torch.cuda.Event()
                complete.read.record(torch.cuda.current_stream(self._device))
            self._held = self._version
        return self._held

    def wait_newer(self, version: int, wait: float) -> None:
        """Wait until there is a newer version."""
        with self._changed:
            if self._version <= version:
                self._changed.wait(wait)

    def hand_on(self, version: int, action: Callable[[Mapping[str, Tensor], int], object]) -> int:
        """Call `action` with the newest complete version if it is newer than `version`; return its number."""
        with self._changed:
            if self._version > version:
                assert self._complete is not None  # It holds the version.
                action(self._complete.views, self._version)
                version = self._version
        return version

    def require_alive(self) -> None:
        """Raise the receiver's failure, after which no version comes."""
        if isinstance(self._failure, AttemptEnded):
            raise self._failure
        if self._failure is not None:
            raise WeightSyncError(str(self._failure)) from self._failure

    # --- the receiver's thread ---

    def _spare_buffers(self) -> packing.Buffers:
        if self._spare is None:
            assert self._manifest is not None
            buffers = packing.allocate(self._manifest, self._device)
            self._spare = _Set(buffers=buffers, views=packing.views_in(self._manifest, buffers))
        if self._spare.read is not None:
            torch.cuda.current_stream(self._device).wait_event(self._spare.read)
        return self._spare.buffers

    def _accept(self, version: int) -> None:
        # The spare buffers, which hold `version`, become the complete ones, unless it is not newer.
        with self._changed:
            if version > self._version:
                assert self._spare is not None  # It holds the version.
                self._spare, self._complete = self._complete, self._spare
                self._version = version
                self._changed.notify_all()

    def _finish(self, failure: Exception | None) -> None:
        with self._changed:
            self._failure, self.ended = failure, failure is None
            self._changed.notify_all()

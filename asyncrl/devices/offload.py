"""Move idle tensors from a device to pinned host memory, and back.

Whole storages move; every tensor, view and parameter object stays, but must not be used while offloaded.
Storages may come back at other addresses: `on_offload` invalidates captured CUDA graphs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.observability import waits

OFFLOAD_AFTER: Final = 0.2  # Least seconds of a wait before tensors are moved
MEMORY_TIMEOUT: Final = 60.0  # Seconds to wait for another process on the device to free memory
_RETRY_INTERVAL: Final = 0.2

Tensors = Callable[[], Iterable[Tensor]]


@dataclass
class _HostCopy:
    """A storage and its copy in host memory."""

    storage: torch.UntypedStorage
    host: Tensor  # [bytes] uint8, pinned where the storage is on a GPU
    frozen: bool
    filled: bool = False  # True if host holds an earlier content of the storage; a frozen one never changes


class OffloadedTensors:
    """Tensors that are all on their devices, or all in host memory. Used by one thread."""

    def __init__(
        self,
        frozen: Tensors,
        changing: Tensors,
        devices: Collection[torch.device],
        *,
        on_offload: Callable[[], object] = lambda: None,
    ) -> None:
        self._frozen, self._changing, self._devices = frozen, changing, set(devices)
        self._on_offload = on_offload
        self._copies: dict[int, _HostCopy] = {}
        self._buffers: dict[int, Tensor] = {}
        """Host memory of changing storages, for reuse; the storages may have been replaced."""
        self.offloaded = False
        self.bytes = 0  # Freed bytes of the devices
        self.seconds = 0.0  # Total time of moves

    def offload(self) -> None:
        """Move all tensors to host memory and free their device memory, also for other processes."""
        if self.offloaded:
            return
        began = time.monotonic()
        self._synchronize()  # Any stream may still read them.
        self._copies = self._host_copies()
        for copy in self._copies.values():
            if not (copy.frozen and copy.filled):
                copy.host.copy_(_bytes_of(copy.storage), non_blocking=True)
                copy.filled = True
        self._synchronize()
        for copy in self._copies.values():
            copy.storage.resize_(0)
        self._on_offload()
        if any(device.type == "cuda" for device in self._devices):
            torch.cuda.empty_cache()
        self.offloaded, self.bytes = True, sum(copy.host.nbytes for copy in self._copies.values())
        self.seconds += time.monotonic() - began

    def restore(self) -> None:
        """Move all tensors back; raises OutOfMemoryError if no memory was free for MEMORY_TIMEOUT seconds."""
        if not self.offloaded:
            return
        began = time.monotonic()
        for copy in self._copies.values():
            _allocate(copy)
        for copy in self._copies.values():
            _bytes_of(copy.storage).copy_(copy.host, non_blocking=True)
        self._synchronize()
        self._buffers = {key: copy.host for key, copy in self._copies.items() if not copy.frozen}
        self._copies = {key: copy for key, copy in self._copies.items() if copy.frozen}
        self.offloaded, self.bytes = False, 0
        self.seconds += time.monotonic() - began

    def host_views(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by name, offloaded ones as views in host memory; writes to changing ones last."""
        views = dict(tensors)
        for name, tensor in tensors.items() if self.offloaded else ():
            if (copy := self._copies.get(tensor.untyped_storage()._cdata)) is not None:
                place = tensor.storage_offset(), tensor.shape, tensor.stride()
                views[name] = torch.empty(0, dtype=tensor.dtype).set_(copy.host.untyped_storage(), *place)
        return views

    @torch.no_grad()
    def _host_copies(self) -> dict[int, _HostCopy]:
        copies: dict[int, _HostCopy] = {}
        for tensors, frozen in ((self._frozen, True), (self._changing, False)):
            local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors()]
            for storage in [tensor.untyped_storage() for tensor in local if tensor.device in self._devices]:
                if not (storage.resizable() and storage.nbytes()):  # Those of mapped files are not.
                    continue
                key = storage._cdata
                copy = copies.get(key) or self._copies.get(key)
                if copy is None:
                    host = self._buffers.get(key)
                    if host is None or host.nbytes != storage.nbytes():
                        on_gpu = storage.device.type == "cuda"
                        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
                    copy = _HostCopy(storage=storage, host=host, frozen=frozen)
                copy.frozen = frozen
                copies[key] = copy
        self._buffers = {}
        return copies

    def _synchronize(self) -> None:
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


@runtime_checkable
class HoldsAddresses(Protocol):
    """A model that stores addresses of its weights, as captured CUDA graphs do."""

    def weights_moved(self) -> None:
        """Forget the addresses: the weights will return elsewhere."""
        ...


class IdleOffload:
    """Offloads tensors once a wait of their owner has lasted a moment. Used by one thread."""

    def __init__(self, tensors: OffloadedTensors | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tensors, self._clock = tensors, clock
        self._since: float | None = None
        self._seconds, self._most = 0.0, 0

    @property
    def enabled(self) -> bool:
        """True if anything is ever offloaded."""
        return self._tensors is not None

    @property
    def next_check_in(self) -> float:
        """Seconds until a wait must call `offload_if_idle` again; inf: never."""
        if self._tensors is None or self._tensors.offloaded:
            return math.inf
        waited = 0.0 if self._since is None else self._clock() - self._since
        return max(0.0, OFFLOAD_AFTER - waited)

    def offload_if_idle(self) -> None:
        """Record that the owner waits; offloads once it waited OFFLOAD_AFTER. Call it repeatedly."""
        if self._tensors is None:
            return
        if self._since is None:
            self._since = self._clock()
        elif self._clock() - self._since >= OFFLOAD_AFTER:
            self._tensors.offload()
            self._most = max(self._most, self._tensors.bytes)

    def restore(self) -> None:
        """Record that the owner works, and restore its tensors."""
        self._since = None
        if self._tensors is not None:
            self._tensors.restore()

    def host_views(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors, offloaded ones as views in host memory."""
        return tensors if self._tensors is None else self._tensors.host_views(tensors)

    def pop_metrics(self) -> tuple[float, int]:
        """Return the seconds of moves, and the most bytes offloaded, since the last call."""
        if self._tensors is None:
            return 0.0, 0
        metrics = self._tensors.seconds - self._seconds, self._most
        self._seconds, self._most = self._tensors.seconds, self._tensors.bytes
        return metrics


NO_OFFLOAD: Final = IdleOffload(None)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _allocate(copy: _HostCopy) -> None:
    until = time.monotonic() + MEMORY_TIMEOUT
    while True:
        try:
            copy.storage.resize_(copy.host.nbytes)
            return
        except torch.OutOfMemoryError:  # Another process on the device may have to offload first.
            if time.monotonic() > until:
                raise
        with waits.waiting(waits.DEVICE_MEMORY, MEMORY_TIMEOUT):
            time.sleep(_RETRY_INTERVAL)

"""Move idle tensors from a device to pinned host memory, and back.

Whole storages move; every tensor, view and parameter object stays, but must not be used while offloaded.
Storages may come back at other addresses: `on_offload` invalidates captured CUDA graphs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.observability import process_status, waits

OFFLOAD_AFTER: Final = 0.2  # Least seconds of a wait before tensors are moved
MEMORY_TIMEOUT: Final = 60.0  # Seconds to wait for another process on the device to free memory
_RETRY_INTERVAL: Final = 0.2

Tensors = Callable[[], Iterable[Tensor]]


@dataclass
class _HostCopy:
    storage: torch.UntypedStorage
    host: Tensor  # [bytes] uint8, pinned where the storage is on a GPU
    frozen: bool


class OffloadedTensors:
    """Tensors that are all on their devices, or all in host memory while their owner waits. One thread."""

    def __init__(
        self,
        frozen: Tensors,
        changing: Tensors,
        devices: Collection[torch.device],
        *,
        on_offload: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._frozen, self._changing, self._devices = frozen, changing, set(devices)
        self._on_offload, self._clock = on_offload, clock
        self.enabled = bool(devices)  # False: nothing is ever offloaded
        self._copies: dict[int, _HostCopy] = {}  # On the device only frozen ones, which never change
        self._buffers: dict[int, Tensor] = {}  # Of changing ones, for reuse: storages may be replaced
        self.offloaded = False
        self.bytes = 0  # Freed bytes of the devices
        self.seconds = 0.0  # Of moves, since the last `pop_metrics`
        self._most = 0  # Offloaded bytes, likewise
        self._waiting_since: float | None = None

    @property
    def next_check_in(self) -> float:
        """Seconds until a wait must call `offload_if_idle` again; inf: never."""
        if self.offloaded or not self.enabled:
            return math.inf
        waited = 0.0 if self._waiting_since is None else self._clock() - self._waiting_since
        return max(0.0, OFFLOAD_AFTER - waited)

    def offload_if_idle(self) -> None:
        """Record that the owner waits; offloads once it waited OFFLOAD_AFTER. Call it repeatedly."""
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        elif self.enabled and self._clock() - self._waiting_since >= OFFLOAD_AFTER:
            self.offload()

    def offload(self) -> None:
        """Move all tensors to host memory and free their device memory, also for other processes."""
        if self.offloaded:
            return
        began = time.monotonic()
        self._synchronize()  # Any stream may still read them.
        earlier, self._copies = self._copies, self._host_copies()
        for key, copy in self._copies.items():
            if not (copy.frozen and key in earlier):
                copy.host.copy_(_bytes_of(copy.storage), non_blocking=True)
        self._synchronize()
        for copy in self._copies.values():
            copy.storage.resize_(0)
        self._on_offload()
        torch.cuda.empty_cache()
        self.offloaded, self.bytes = True, sum(copy.host.nbytes for copy in self._copies.values())
        self._most = max(self._most, self.bytes)
        self.seconds += time.monotonic() - began

    def restore(self) -> None:
        """Move all tensors back, as the owner works; OutOfMemoryError after MEMORY_TIMEOUT without memory."""
        self._waiting_since = None
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
        """Return tensors by name, offloaded ones as host views; writes to `changing` tensors persist."""
        views = dict(tensors)
        for name, tensor in tensors.items() if self.offloaded else ():
            if (copy := self._copies.get(tensor.untyped_storage()._cdata)) is not None:
                place = tensor.storage_offset(), tensor.shape, tensor.stride()
                views[name] = torch.empty(0, dtype=tensor.dtype).set_(copy.host.untyped_storage(), *place)
        return views

    def pop_metrics(self) -> tuple[float, int]:
        """Return the seconds of moves, and the most bytes offloaded, since the last call."""
        metrics = self.seconds, self._most
        self.seconds, self._most = 0.0, self.bytes
        return metrics

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


NO_OFFLOAD: Final = OffloadedTensors(tuple, tuple, ())


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
        with process_status.waiting(waits.DEVICE_MEMORY, MEMORY_TIMEOUT):
            time.sleep(_RETRY_INTERVAL)

"""Tensors that nobody needs for a while: on a device in, in pinned host memory and back out.

`OffloadedTensors` moves whole storages and leaves every tensor, view and parameter object as it is, so
optimizers, modules and shards notice nothing; only, an offloaded tensor must not be touched. `IdleOffload`
decides when: after a wait has lasted a moment, so that short ones cost nothing.

Storages may come back at other addresses. What knows addresses, like a captured CUDA graph, must be told, and
then gives its own memory back as well: `leaving` of `OffloadedTensors`.
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

from asyncrl.observability import waits

OFFLOAD_AFTER: Final = 0.2
"""Seconds that a wait must have lasted."""
ROOM_DEADLINE: Final = 60.0
"""Seconds that another process on the device has to park, when there is no room to return."""
_ROOM_EVERY: Final = 0.2
"""Seconds between two attempts to find that room."""

Tensors = Callable[[], Iterable[Tensor]]


@dataclass
class _Place:
    """A storage and its copy in host memory."""

    storage: torch.UntypedStorage
    host: Tensor
    """``[bytes]`` uint8, pinned where the storage is on a GPU."""
    frozen: bool
    filled: bool = False
    """Whether `host` holds what the storage held once; for a frozen one that is what it holds."""


class OffloadedTensors:
    """Tensors that are all on their devices, or all in host memory. Used by one thread."""

    def __init__(
        self,
        frozen: Tensors,
        changing: Tensors,
        devices: Collection[torch.device],
        *,
        leaving: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin with all tensors on their devices.

        Args:
            frozen: Tensors that never change: they are copied to the host once.
            changing: All others. Both are asked anew each time, because gradients and moments come later.
            devices: Only tensors there are parked.
            leaving: Called each time the tensors have left.
        """
        self._frozen, self._changing, self._devices = frozen, changing, set(devices)
        self._leaving = leaving
        self._places: dict[int, _Place] = {}
        self._rooms: dict[int, Tensor] = {}
        """Host memory of changing storages, which others may have replaced by now, for the next time."""
        self.parked = False
        self.bytes = 0
        """Bytes of devices that are free now because of this."""
        self.seconds = 0.0
        """Time spent moving, in all."""

    def park(self) -> None:
        """Move all tensors to host memory and give their device memory back, also to other processes."""
        if self.parked:
            return
        began = time.monotonic()
        self._synchronize()  # Whatever stream still reads them.
        self._places = self._found()
        for place in self._places.values():
            if not (place.frozen and place.filled):
                place.host.copy_(_bytes_of(place.storage), non_blocking=True)
                place.filled = True
        self._synchronize()
        for place in self._places.values():
            place.storage.resize_(0)
        self._leaving()
        if any(device.type == "cuda" for device in self._devices):
            torch.cuda.empty_cache()
        self.parked, self.bytes = True, sum(place.host.nbytes for place in self._places.values())
        self.seconds += time.monotonic() - began

    def restore_all(self) -> None:
        """Move all tensors back.

        Raises:
            torch.OutOfMemoryError: There was no room for ROOM_DEADLINE seconds.
        """
        if not self.parked:
            return
        began = time.monotonic()
        for place in self._places.values():
            _make_room(place)
        for place in self._places.values():
            _bytes_of(place.storage).copy_(place.host, non_blocking=True)
        self._synchronize()
        self._rooms = {key: place.host for key, place in self._places.items() if not place.frozen}
        self._places = {key: place for key, place in self._places.items() if place.frozen}
        self.parked, self.bytes = False, 0
        self.seconds += time.monotonic() - began

    def host_views(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors by name; those that are parked as views of their copies in host memory.

        What is written there comes back with them, so it must be among the changing ones.
        """
        return {name: self._stand_in(tensor) for name, tensor in tensors.items()}

    def _stand_in(self, tensor: Tensor) -> Tensor:
        place = self._places.get(tensor.untyped_storage()._cdata) if self.parked else None
        if place is None:
            return tensor
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(place.host.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def _found(self) -> dict[int, _Place]:
        """All storages, each once, with room in host memory: that of last time where it was there then."""
        found: dict[int, _Place] = {}
        for tensors, frozen in ((self._frozen, True), (self._changing, False)):
            for storage in self._storages(tensors()):
                place = found.get(storage._cdata) or self._places.get(storage._cdata)
                place = place or _Place(storage=storage, host=self._room(storage), frozen=frozen)
                place.frozen = frozen
                found[storage._cdata] = place
        self._rooms = {}
        return found

    def _room(self, storage: torch.UntypedStorage) -> Tensor:
        """``[bytes]`` uint8 in host memory, that of last time where it fits."""
        room = self._rooms.get(storage._cdata)
        if room is not None and room.nbytes == storage.nbytes():
            return room
        return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")

    @torch.no_grad()
    def _storages(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """The storages on the devices that can be emptied; those of files that are mapped cannot."""
        found = []
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.device in self._devices and local.untyped_storage().resizable():
                found.append(local.untyped_storage())
        return [storage for storage in found if storage.nbytes()]

    def _synchronize(self) -> None:
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


class IdleOffload:
    """Parks while its owner waits. Used by one thread."""

    def __init__(self, parked: OffloadedTensors | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin at work; None never parks."""
        self._parked, self._clock = parked, clock
        self._since: float | None = None
        self._seconds, self._most = 0.0, 0

    @property
    def enabled(self) -> bool:
        """Whether anything is ever parked."""
        return self._parked is not None

    @property
    def next_check_in(self) -> float:
        """Seconds that a wait may last uninterrupted so that `waiting` is called in time; inf: any."""
        if self._parked is None or self._parked.parked:
            return math.inf
        waited = 0.0 if self._since is None else self._clock() - self._since
        return max(0.0, OFFLOAD_AFTER - waited)

    def waiting(self) -> None:
        """Say that the owner waits; parks when it has for long enough. Call it again and again."""
        if self._parked is None:
            return
        if self._since is None:
            self._since = self._clock()
        elif self._clock() - self._since >= OFFLOAD_AFTER:
            self._parked.park()
            self._most = max(self._most, self._parked.bytes)

    def back(self) -> None:
        """Say that the owner goes on: everything is on its device when this returns."""
        self._since = None
        if self._parked is not None:
            self._parked.restore_all()

    def host_views(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `OffloadedTensors.host_views`."""
        return tensors if self._parked is None else self._parked.host_views(tensors)

    def take(self) -> tuple[float, int]:
        """Seconds spent moving, and the most bytes parked, since this was asked last."""
        if self._parked is None:
            return 0.0, 0
        taken = self._parked.seconds - self._seconds, self._most
        self._seconds, self._most = self._parked.seconds, self._parked.bytes
        return taken


NO_OFFLOAD: Final = IdleOffload(None)
"""Parks nothing."""


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """``[bytes]`` uint8 view of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _make_room(place: _Place) -> None:
    """Allocate a storage again; another process that shares the device may have to park first."""
    until = time.monotonic() + ROOM_DEADLINE
    while True:
        try:
            place.storage.resize_(place.host.nbytes)
            return
        except torch.OutOfMemoryError:
            if time.monotonic() > until:
                raise
        with waits.waiting(waits.DEVICE_MEMORY, ROOM_DEADLINE):
            time.sleep(_ROOM_EVERY)

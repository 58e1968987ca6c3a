"""Keep the newest complete version of the weights for the actor to swap in, while the next one arrives.

A thread of the receiver fills the spare buffers and makes them the complete ones; the actor's thread copies
the complete ones into the policy. Neither waits for the other longer than such a copy takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from asyncrl.errors import AttemptEnded, WeightSyncError
from asyncrl.weights import packing
from asyncrl.weights.interface import ChannelClosed, Named

MAX_DAMAGED: Final = 3
"""Damaged messages or versions in a row after which a receiver gives up."""


@dataclass
class _Set:
    """The buffers of one version."""

    buffers: packing.Buffers
    views: dict[str, Tensor]
    """Where each tensor lies in them."""
    read: torch.cuda.Event | None = None
    """Reached once the last swap has read them; absent on the CPU, and before the first swap."""


class BufferedReceiver:
    """The actor's side of a receiver. See `interface.Receiver`."""

    def __init__(
        self, name: str, endpoint: str, manifest: packing.Manifest, device: torch.device, deadline: float
    ) -> None:
        """Begin without a version.

        Args:
            name: The actor's.
            endpoint: Where the versions come from, for errors.
            manifest: Of the tensors that will be swapped.
            device: Where the buffers are.
            deadline: Seconds after which a learner that is gone is an error.
        """
        self._name, self._endpoint, self._manifest = name, endpoint, manifest
        self._device, self._deadline = device, deadline
        self._spare: _Set | None = None
        """Where the next version goes; made when it comes: no answer to an offer waits for it."""
        self._complete: _Set | None = None
        """Where the newest complete version is; absent before the first."""
        # Everything below is shared between the two threads and guarded by this condition.
        self._changed = threading.Condition()
        self._version, self._held = -1, -1
        self._state = f"waiting for the learner at {endpoint} to publish its first version"
        self._failure: Exception | None = None
        self._lost_since: float | None = None
        self._ended = False

    # --- the actor's thread ---

    @property
    def ended(self) -> bool:
        """Whether the learner said that no version will follow."""
        return self._ended

    def wait_for_first(self, deadline: float) -> int:
        """Wait for the first complete version. See `interface.Receiver`."""
        until = time.monotonic() + deadline
        with self._changed:
            while self._version < 0:
                self._require_alive()
                if self._ended:
                    raise ChannelClosed(f"The learner ended the run before {self._name} had weights.")
                left = until - time.monotonic()
                if left <= 0 or self._lost_since is not None:
                    raise WeightSyncError(
                        f"{self._name} waited for its first weights, at most {deadline:g} s, and has none: "
                        f"{self._state}. See the learner's log."
                    )
                self._changed.wait(left)
            return self._version

    def swap_into(self, tensors: Named) -> int:
        """Copy the newest complete version into the tensors when it is newer. See `interface.Receiver`."""
        if self._failure is not None or self._lost_since is not None:
            self._require_alive()
        if self._version <= self._held:
            return self._held
        tensors = tensors() if callable(tensors) else tensors
        packing.require_same(self._manifest, packing.build_manifest(tensors), f"{self._name}'s swap")
        with self._changed:
            self._held = self._copy_newest(tensors)
        return self._held

    def _copy_newest(self, tensors: Mapping[str, Tensor]) -> int:
        """Copy the newest complete version into the tensors and return it."""
        complete = self._complete
        assert complete is not None  # There is a version.
        packing.fill(tensors, complete.views)
        if self._device.type == "cuda":
            # Before the next version is received into these buffers, `_room` waits for this event.
            complete.read = torch.cuda.Event()
            complete.read.record(torch.cuda.current_stream(self._device))
        return self._version

    def wait_newer(self, version: int, wait: float) -> None:
        """Wait a little for news. See `interface.Receiver`."""
        with self._changed:
            if self._version <= version:
                self._changed.wait(wait)

    def _require_alive(self) -> None:
        if isinstance(self._failure, AttemptEnded):
            raise self._failure
        if self._failure is not None:
            raise WeightSyncError(str(self._failure)) from self._failure
        lost = self._lost_since
        if lost is not None and time.monotonic() - lost > self._deadline:
            raise WeightSyncError(
                f"{self._name} lost the learner at {self._endpoint} {time.monotonic() - lost:.0f} s ago and "
                f"still acts with version {self._version}. The learner ended or was restarted: see its log."
            )

    # --- the receiver's thread ---

    def _allocate(self) -> _Set:
        buffers = packing.allocate(self._manifest, self._device)
        return _Set(buffers=buffers, views=packing.views_in(self._manifest, buffers))

    def _room(self) -> packing.Buffers:
        """The spare buffers; what the current stream does next runs after the last swap has read them."""
        if self._spare is None:
            self._spare = self._allocate()
        if self._spare.read is not None:
            torch.cuda.current_stream(self._device).wait_event(self._spare.read)
        return self._spare.buffers

    def _accept(self, version: int) -> None:
        """Make the spare buffers, which hold `version`, the complete ones, unless that is not newer."""
        with self._changed:
            if version > self._version:
                assert self._spare is not None  # It holds the version.
                self._spare, self._complete = self._complete, self._spare
                self._note(version)

    def _note(self, version: int) -> None:
        """Let the actor know that `version` can be swapped in, once no swap is under way."""
        with self._changed:
            self._version = max(self._version, version)
            self._changed.notify_all()

    def _end(self) -> None:
        """Note that no version will follow."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """Note what the actor's next call shall raise."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()


class HandsOn(BufferedReceiver):
    """A receiver for other processes: it takes whatever tensors the learner has, and hands versions on."""

    def hand_on(self, version: int, action: Callable[[Mapping[str, Tensor], int], object]) -> int:
        """Call `action` with the newest complete version, when it is newer than `version`.

        Args:
            version: That was handed on last; -1: none.
            action: Gets the tensors by name, which stay as they are until it returns, and their version.

        Returns:
            The version that was handed on last, now.
        """
        with self._changed:
            if self._version > version:
                assert self._complete is not None  # It holds the version.
                action(self._complete.views, self._version)
                version = self._version
        return version

    def require_alive(self) -> None:
        """Check that versions may still come.

        Raises:
            WeightSyncError: The learner is gone, or refuses.
            AttemptEnded: It belongs to a newer start of the run.
        """
        self._require_alive()

    def _adopt_manifest(self, theirs: packing.Manifest) -> None:
        """Take the learner's tensors; they are fixed for a run.

        Raises:
            WeightSyncError: They are not those of the version that is here.
        """
        if self._version >= 0:
            packing.require_same(theirs, self._manifest, self._name)
            return
        with self._changed:
            self._manifest, self._spare = theirs, None

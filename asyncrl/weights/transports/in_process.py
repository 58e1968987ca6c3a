"""Hand weights over inside one process: what the publisher packs, the receiver unpacks."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import Metric
from asyncrl.weights import packing
from asyncrl.weights.interface import Named, WeightSource, as_weight_source, stale_version


class _SharedVersion:
    """The newest version, copied once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.version = -1
        self.manifest: packing.Manifest | None = None
        self.buffers: packing.Buffers = []
        self.views: dict[str, Tensor] = {}
        self.seconds = 0.0


class InProcessPublisher:
    """The learner's end of the box."""

    def __init__(self, box: _SharedVersion) -> None:
        self._box = box

    def publish(self, weights: WeightSource | Mapping[str, Tensor], version: int) -> None:
        """Copy the weights into the box. See `interface.Publisher.publish`."""
        begun = time.monotonic()
        box, source = self._box, as_weight_source(weights)
        if version <= box.version:
            raise stale_version(version, box.version)
        if box.manifest is None:
            box.manifest = source.manifest
            box.buffers = packing.allocate(source.manifest, box.device)
            box.views = packing.views_in(source.manifest, box.buffers)
        packing.require_same(source.manifest, box.manifest, "the first publish")
        source.write(box.views)
        box.version, box.seconds = version, time.monotonic() - begun

    def wait_for_first(self, version: int, deadline: float, actors: int = 1) -> None:
        """Check that `version` is in the box; nothing can be late here."""
        if self._box.version < version:
            raise WeightSyncError(f"Version {version} was never published: publish before waiting for it.")

    def status(self) -> dict[Metric, float]:
        """Return the newest metrics `weights/*`."""
        return {
            m.WEIGHTS_VERSION: self._box.version,
            m.WEIGHTS_BYTES: packing.total_bytes(self._box.buffers),
            m.WEIGHTS_SECONDS: self._box.seconds,
            m.WEIGHTS_MEMBERS: 1,
        }

    def close(self) -> None:
        """Do nothing: there is nobody to tell."""


class InProcessReceiver:
    """The actor's end of the box."""

    def __init__(self, box: _SharedVersion) -> None:
        self._box = box
        self._held = -1

    def wait_for_first(self, deadline: float) -> int:
        """Return the version in the box. See `interface.Receiver`."""
        if self._box.version < 0:
            raise WeightSyncError("No version was published yet: with --inline the learner publishes first.")
        return self._box.version

    def swap_into(self, tensors: Named) -> int:
        """Copy the box's version into the tensors when it is newer. See `interface.Receiver`."""
        box = self._box
        if box.manifest is not None and box.version > self._held:
            tensors = tensors() if callable(tensors) else tensors
            packing.require_same(box.manifest, packing.build_manifest(tensors), "the actor")
            packing.fill(tensors, box.views)
            self._held = box.version
        return self._held

    def wait_newer(self, version: int, wait: float) -> None:
        """Return at once: nothing can come while this thread waits."""

    def close(self) -> None:
        """Do nothing: the box ends with its holders."""


def build_in_process(device: torch.device | str = "cpu") -> tuple[InProcessPublisher, InProcessReceiver]:
    """Return the two ends of one channel within this process; versions are kept on `device`."""
    box = _SharedVersion(torch.device(device))
    return InProcessPublisher(box), InProcessReceiver(box)

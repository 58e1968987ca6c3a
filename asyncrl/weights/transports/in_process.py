"""Hand weights over inside one process: the receiver unpacks the publisher's buffers."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import Metric
from asyncrl.weights import packing
from asyncrl.weights.interface import Named, Publisher, Receiver
from asyncrl.weights.packing import WeightSource, stale_version


class InProcessPublisher(Publisher):
    """The learner's end, with the newest version."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.version = -1
        self.manifest: packing.Manifest | None = None
        self._buffers: packing.Buffers = []
        self.views: dict[str, Tensor] = {}
        self._seconds = 0.0

    def publish(self, weights: WeightSource, version: int) -> None:
        """Copy the weights."""
        begun = time.monotonic()
        if version <= self.version:
            raise stale_version(version, self.version)
        if self.manifest is None:
            self.manifest = weights.manifest
            self._buffers = packing.allocate(weights.manifest, self._device)
            self.views = packing.views_in(weights.manifest, self._buffers)
        packing.require_same(weights.manifest, self.manifest, "the first publish")
        weights.write(self.views)
        self.version, self._seconds = version, time.monotonic() - begun

    def status(self) -> dict[Metric, float]:
        """Return the newest metrics `weights/*`."""
        return {
            m.WEIGHTS_VERSION: self.version,
            m.WEIGHTS_BYTES: sum(buffer.nbytes for buffer in self._buffers),
            m.WEIGHTS_SECONDS: self._seconds,
            m.WEIGHTS_MEMBERS: 1,
        }


class InProcessReceiver(Receiver):
    """The actor's end."""

    def __init__(self, publisher: InProcessPublisher) -> None:
        self._publisher = publisher
        self._held = -1

    def wait_for_first(self, deadline: float) -> int:
        """Return the version that was published last."""
        if self._publisher.version < 0:
            raise WeightSyncError("No version was published yet: with --inline the learner publishes first.")
        return self._publisher.version

    def swap_into(self, tensors: Named) -> int:
        """Copy the newest version into the tensors if they do not hold it."""
        newest = self._publisher
        if newest.manifest is not None and newest.version > self._held:
            tensors = tensors() if callable(tensors) else tensors
            if self._held < 0:
                packing.require_same(newest.manifest, packing.build_manifest(tensors), "the actor")
            packing.fill(tensors, newest.views)
            self._held = newest.version
        return self._held


def build_in_process(device: torch.device | str = "cpu") -> tuple[InProcessPublisher, InProcessReceiver]:
    """Return the two ends of one channel within this process; versions are kept on `device`."""
    publisher = InProcessPublisher(torch.device(device))
    return publisher, InProcessReceiver(publisher)

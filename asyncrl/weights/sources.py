"""Weights on their way out of the learner: tensors as it holds them in, places of a packed buffer filled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from asyncrl.weights import layout


class Source(Protocol):
    """The learner's weights, in its own types and perhaps spread over its ranks."""

    @property
    def manifest(self) -> layout.Manifest:
        """Names, whole shapes, and the types in which actors hold the weights; the same for a whole run."""
        ...

    def write(self, places: Mapping[str, Tensor]) -> None:
        """Write every tensor, cast, into its place, in the order of the current stream on CUDA.

        A collective of the learner ranks where the weights are sharded: rank 0 gives the places, the others
        none.
        """
        ...


class WholeTensors:
    """Tensors that lie whole in this process and are sent as they are."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.manifest = layout.build_manifest(tensors)
        """See `Source.manifest`."""

    def write(self, places: Mapping[str, Tensor]) -> None:
        """Copy. See `Source.write`."""
        layout.fill(places, self._tensors)


def as_source(weights: Source | Mapping[str, Tensor]) -> Source:
    """Return tensors as a source; a source as it is."""
    return WholeTensors(weights) if isinstance(weights, Mapping) else weights

"""The ports of learner ranks other than 0, which lead nowhere: rank 0 talks to replay, actors and people."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from asyncrl.observability.metrics import Metric
from asyncrl.records import Episode
from asyncrl.weights.interface import Source, as_source


class NullPort:
    """A `LearnerPort` without a replay."""

    def sample(self, *, groups: int, version: int, timeout: float) -> list[list[Episode]]:
        """Never asked: this rank's part comes from rank 0."""
        raise AssertionError("only rank 0 samples")

    def report_version(self, version: int) -> None:
        """Do nothing."""

    def status(self) -> dict[Metric, float]:
        """Return nothing."""
        return {}

    def stop(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class NullPublisher:
    """A `Publisher` without actors."""

    def publish(self, weights: Source | Mapping[str, Tensor], version: int) -> None:
        """Hand this rank's part of the weights to rank 0, which sends them."""
        as_source(weights).write({})

    def wait_for_first(self, version: int, deadline: float, actors: int = 1) -> None:
        """Do nothing."""

    def status(self) -> dict[Metric, float]:
        """Return nothing."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class NullLog:
    """A `Log` that nobody reads."""

    def write(self, step: int, values: Mapping[Metric, float]) -> None:
        """Do nothing."""

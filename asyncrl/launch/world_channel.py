"""Rank 0's end of the channel that carries refitted worlds to the actors: like that of the policy's weights.

rank 0's threads     start it, ask for `status`, close it; never wait
the channel's thread consumes   worlds that a round left below the run's folder, every LOOK_EVERY seconds
                     produces   versions for the actors: the publisher of `weights` sends them
                     waits for  the disk         ended by: close

Always through host memory (shared, or ZeroMQ for actors that joined): a refit is rare, and a second group of
NCCL in a process, used from another thread, may block the first.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

import torch

from asyncrl.config.run import TrainConfig
from asyncrl.errors import RunError
from asyncrl.launch import refits
from asyncrl.observability import metrics_pace as m
from asyncrl.observability.metrics import Metric
from asyncrl.pace import rounds
from asyncrl.pace.fitter import WorldAt
from asyncrl.weights.publisher import BroadcastPublisher

LOOK_EVERY: Final = 0.2
"""Seconds between two looks for a new world."""
TRANSPORT: Final = "shared_memory"
"""See `weights.transports`."""


class WorldChannel:
    """Publishes what the rounds of a run accept."""

    def __init__(self, config: TrainConfig, run_dir: Path, publisher: BroadcastPublisher) -> None:
        """Publish the world that a resumed run has, and every later one.

        Args:
            config: Of the run, with the world's defaults put in.
            run_dir: Its folder.
            publisher: Of a channel of its own; this closes it.
        """
        self._config, self._run_dir, self._publisher = config, run_dir, publisher
        self._version = refits.first_world(config).version
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="world channel", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Return where the run's own actors find it."""
        return self._publisher.endpoint

    @property
    def pull_endpoint(self) -> str:
        """Return where actors that join find it; empty when nobody can join."""
        return self._publisher.pull_endpoint

    def status(self) -> dict[Metric, float]:
        """Return the newest metrics.

        Raises:
            RunError: A world that was accepted could not be sent.
        """
        if self._failure is not None:
            raise RunError(
                f"World version {self._version + 1} could not be sent to the actors ({self._failure}). "
                "See whether its folder in the run's worlds/ is whole, and restart the run with --resume."
            ) from self._failure
        return {m.WORLD_VERSION: float(self._version)}

    def close(self) -> None:
        """Stop, and tell the actors that no version will follow. May be called twice."""
        self._closing.set()
        self._thread.join()
        self._publisher.close()

    def _run(self) -> None:
        try:
            while not self._closing.wait(LOOK_EVERY):
                newest = rounds.newest_world(self._run_dir)
                if newest is not None and newest > self._version:
                    self._publish(newest)
        except Exception as error:  # The thread's boundary: the learner's next row raises it.
            self._failure = error

    def _publish(self, version: int) -> None:
        folder = rounds.world_folder(self._run_dir, version)
        at = WorldAt(folder=folder, reward=folder, version=version)
        self._publisher.publish(refits.tensors_of(self._config, at, torch.device("cpu")), version)
        self._version = version

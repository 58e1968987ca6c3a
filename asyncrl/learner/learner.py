"""The learner: groups of episodes in, policy versions out, until enough updates are made.

produces   version v     never waits: the publisher copies the weights and sends them on its own thread
consumes   groups        waits for: `groups_per_update` complete, fresh groups in the replay
                         ended by: the actors fill them, a stop request (looked at every second), --max-wait
At the start it also waits for the actors to take the first version, so that a broken link fails at once.
"""

from __future__ import annotations

import logging
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

from torch import Tensor

from asyncrl import checkpoint
from asyncrl import metrics as m
from asyncrl.checkpoint import Checkpoints, Progress
from asyncrl.errors import RunError, SampleTimeout
from asyncrl.learner.batches import build_batch, describe
from asyncrl.learner.update import Update
from asyncrl.metrics import Metric
from asyncrl.records import Episode
from asyncrl.replay.ports import LearnerPort
from asyncrl.weights.interface import Publisher

SAMPLE_SLICE: Final = 1.0
"""Longest uninterrupted wait for a batch, in seconds: how soon a stop request is seen."""

_log = logging.getLogger(__name__)


class Log(Protocol):
    """Where the readings of an update go."""

    def write(self, step: int, values: Mapping[Metric, float]) -> None:
        """Record one row; `step` is the policy version."""
        ...


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """Numbers of the learner's loop."""

    updates: int
    """Policy version at which the run is over."""
    groups_per_update: int
    checkpoint_every: int
    """Updates between two checkpoints."""
    max_wait: float
    """Seconds to wait for one batch before the run ends with an error."""
    first_weights_deadline: float
    """Seconds the actors have to take the first version."""
    config_hash: str = ""
    """Identifies the settings of the run in its checkpoints."""


class Learner:
    """Updates the policy and publishes every version. Used by one thread."""

    def __init__(
        self,
        update: Update,
        replay: LearnerPort,
        publisher: Publisher,
        log: Log,
        checkpoints: Checkpoints,
        settings: LearnerSettings,
        *,
        save_policy: Callable[[Path], None],
        stop_requested: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.update = update
        self.replay = replay
        self.publisher = publisher
        self.log = log
        self.checkpoints = checkpoints
        self.settings = settings
        self.save_policy = save_policy
        self.stop_requested = stop_requested
        self.clock = clock
        self.version = 0
        self.groups_used = 0
        self._saved_version = -1
        self._half_updated = False
        self._row_began = 0.0
        self._waited = 0.0

    def restore(self, folder: Path) -> None:
        """Go on where a checkpoint stopped. The policy's weights were loaded from the same folder before.

        Raises:
            CheckpointError: A file is missing, truncated or does not fit the policy.
        """
        progress = checkpoint.load(folder, optimizer=self.update.optimizer, tensors=self._tensors())
        self.version = self._saved_version = progress.version
        self.groups_used = progress.groups_used
        self.update.steps.bad_updates, self.update.steps.bad_in_a_row = (
            progress.bad_updates,
            progress.bad_in_a_row,
        )

    def run(self) -> None:
        """Update until `settings.updates`, a stop request or Ctrl-C; then save, and end the run for all.

        Raises:
            RunError: No batch within `max_wait`, or too many bad updates. Nobody is told to stop then.
            WeightSyncError: The actors did not take the first version.
        """
        try:
            self._publish()
            self.publisher.wait_for_first(self.version, self.settings.first_weights_deadline)
            self._row_began = self.clock()
            while self.version < self.settings.updates:
                groups = self._sample()
                if groups is None:
                    break
                values = self._learn(groups)
                self._publish()
                self.log.write(self.version, values | self._status())
                if self.version % self.settings.checkpoint_every == 0:
                    self._save()
        except KeyboardInterrupt:
            _log.info("interrupted at version %d", self.version)
        self._save()
        self.replay.stop()

    def _sample(self) -> list[list[Episode]] | None:
        """Wait for a batch in slices; None when the run shall stop."""
        began = self.clock()
        while not self.stop_requested():
            left = self.settings.max_wait - (self.clock() - began)
            try:
                groups = self.replay.sample(
                    groups=self.settings.groups_per_update,
                    version=self.version,
                    timeout=min(SAMPLE_SLICE, max(left, 0.0)),
                )
            except SampleTimeout as error:
                if self.clock() - began >= self.settings.max_wait:
                    raise RunError(
                        f"The learner waited {self.settings.max_wait:g} s (--max-wait) for "
                        f"{self.settings.groups_per_update} groups at version {self.version}. {error} "
                        "Look into the actors' logs; raise --max-wait if they are only slow."
                    ) from error
                continue
            self._waited = self.clock() - began
            return groups
        return None

    def _learn(self, groups: list[list[Episode]]) -> dict[Metric, float]:
        """Make one update: the version rises by one, and nothing can interrupt it halfway."""
        began, began_at = self.clock(), self.version
        batch = build_batch(groups, version=self.version)
        with interrupts_deferred():
            self._half_updated = True
            values = self.update(batch, self.version)
            self.version += 1
            self.groups_used += len(groups)
            self._half_updated = False
        return values | describe(groups, version=began_at) | {m.UPDATE_SECONDS: self.clock() - began}

    def _publish(self) -> None:
        self.publisher.publish(self.update.policy.acting_tensors(), self.version)
        self.replay.report_version(self.version)

    def _status(self) -> dict[Metric, float]:
        """Readings of the row that ends now: from the end of the last row, so they cover all the time."""
        now = self.clock()
        seconds = max(now - self._row_began, 1e-9)
        waited, self._waited, self._row_began = self._waited, 0.0, now
        return {
            **self.replay.status(),
            **self.publisher.status(),
            m.GROUPS_PER_MINUTE: 60 * self.settings.groups_per_update / seconds,
            m.LEARNER_WAITING: waited / seconds,
            m.PEAK_MEMORY: peak_memory(),
        }

    def _save(self) -> None:
        """Write a checkpoint of this version, unless it exists or an update was cut in the middle."""
        if self._half_updated:
            _log.warning("no checkpoint: interrupted in the middle of an update; the one before it stays")
            return
        if self._saved_version == self.version:
            return
        progress = Progress(
            version=self.version,
            groups_used=self.groups_used,
            bad_updates=self.update.steps.bad_updates,
            bad_in_a_row=self.update.steps.bad_in_a_row,
            config_hash=self.settings.config_hash,
        )
        self.checkpoints.save(
            progress, save_policy=self.save_policy, optimizer=self.update.optimizer, tensors=self._tensors()
        )
        self._saved_version = self.version

    def _tensors(self) -> dict[str, Tensor]:
        return self.update.policy.trainable_tensors()


def peak_memory() -> float:
    """Largest resident memory this process ever had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold back the first Ctrl-C until the end of the block; a second one interrupts at once."""
    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or before is not signal.default_int_handler:
        yield  # Ctrl-C raises no KeyboardInterrupt here.
        return
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt

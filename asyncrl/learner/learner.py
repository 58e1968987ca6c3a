"""The learner: turns groups of episodes into policy versions until enough updates are made.

produces   version v     never waits: the publisher copies the weights and sends them on its own thread
consumes   groups        waits for: `groups_per_update` complete, fresh groups in the replay
                         ended by: the actors fill them, a stop request (seen in a second), --batch-timeout
At the start it also waits for the actors to take the first version, so that a broken link fails at once.
A version is published and saved only when its weights are finite.

Every learner rank runs this loop and makes the same calls in the same order: rank 0 samples, shares the batch
out, publishes the weights that come together there, and decides when to end. The others' ports lead nowhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from torch import Tensor, nn

from asyncrl.devices.memory import host_peak, peak_memory
from asyncrl.devices.offload import NO_OFFLOAD, IdleOffload
from asyncrl.errors import CheckpointError, RunError, SampleTimeout
from asyncrl.learner.batches import batch_metrics, build_batch
from asyncrl.learner.ranks import Groups, not_finite
from asyncrl.learner.throughput import Throughput
from asyncrl.learner.update import Update
from asyncrl.observability import metrics_system as m
from asyncrl.observability import waits
from asyncrl.observability.metrics import Metric
from asyncrl.observability.process_status import activity
from asyncrl.observability.signals import interrupts_deferred
from asyncrl.replay.interface import LearnerPort
from asyncrl.storage import checkpoint
from asyncrl.storage.checkpoint import Checkpoints, Progress
from asyncrl.weights.interface import Publisher, WeightSource


class Log(Protocol):
    """Where the metrics of an update go."""

    def write(self, step: int, values: Mapping[Metric, float]) -> None:
        """Record one row; `step` is the policy version."""
        ...


class NullLog:
    """A `Log` that nobody reads."""

    def write(self, step: int, values: Mapping[Metric, float]) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Numbers of the learner's loop that belong to no section of the configuration."""

    updates: int
    """Policy version at which the run is over."""
    checkpoint_every: int
    """Updates between two checkpoints."""
    batch_timeout: float
    """Seconds to wait for one batch before the run ends with an error."""
    first_weights_deadline: float
    """Seconds the actors have to take the first version."""
    hang_timeout: float = 900.0
    """Seconds that one update may take."""
    config_hash: str = ""
    """Identifies the settings of the run in its checkpoints."""


SAMPLE_SLICE: Final = 1.0
"""Longest uninterrupted wait for a batch, in seconds: how soon a stop request is seen."""
SHUTDOWN_TIMEOUT_CHECKPOINT: Final = 60.0
"""Seconds that a checkpoint has to be written when the run has failed."""

_log = logging.getLogger(__name__)


class Learner:
    """Updates the policy and publishes every version. Used by one thread."""

    def __init__(
        self,
        update: Update,
        replay: LearnerPort,
        publisher: Publisher,
        log: Log,
        checkpoints: Checkpoints,
        settings: LoopSettings,
        *,
        throughput: Throughput,
        copy_policy: Callable[[], Callable[[Path], None]],
        acting_tensors: Callable[[], WeightSource | Mapping[str, Tensor]],
        offload: IdleOffload = NO_OFFLOAD,
        stop_requested: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Join the parts.

        `throughput` measures the updates; `copy_policy` copies the policy to host memory, with all ranks, and
        returns what writes its files; `acting_tensors` gives what actors need, of which this rank may hold a
        part; `offload` moves what only updates need to host memory while this rank waits; `stop_requested` is
        asked on rank 0.
        """
        self.update = update
        self.replay = replay
        self.publisher = publisher
        self.log = log
        self.checkpoints = checkpoints
        self.settings = settings
        self.copy_policy = copy_policy
        self.acting_tensors = acting_tensors
        self.ranks = update.ranks
        self.groups_per_update = update.recipe.algorithm.groups_per_update
        self.offload = offload
        self.throughput = throughput
        self.stop_requested = stop_requested
        self.clock = clock
        self.version = 0
        self.groups_used = 0
        self._met_actors = False
        self._saved_version = -1
        self._half_updated = False
        self._row_began = 0.0
        self._waited = 0.0

    def restore(self, folder: Path) -> None:
        """Go on where a checkpoint stopped. Frozen weights were loaded from the same folder before.

        Raises:
            CheckpointError: A file is missing, truncated or does not fit the policy.
        """
        progress = checkpoint.load(
            folder, optimizer=self.update.optimizer, parameters=self._parameters(), rank=self.ranks.rank
        )
        self.version = self._saved_version = progress.version
        self.groups_used = progress.groups_used
        stepper = self.update.stepper
        stepper.bad_updates, stepper.bad_in_a_row = progress.bad_updates, progress.bad_in_a_row

    def run(self) -> None:
        """Update until `settings.updates`, a stop request or Ctrl-C; then save, and end the run for all.

        Raises:
            RunError: No batch within `batch_timeout`, too many bad steps, or weights that are not finite.
                Nobody is told to stop then.
            WeightSyncError: The actors did not take the first version.
            CheckpointError: A checkpoint could not be written.
        """
        try:
            self._loop()
        except KeyboardInterrupt:
            _log.info("interrupted at version %d", self.version)
        except BaseException:
            self._finish_after_failure()
            raise
        self._save()
        self.replay.stop()
        self.checkpoints.finish()

    def _loop(self) -> None:
        self._require_finite()
        self._publish()
        self._row_began = self.clock()
        while self.version < self.settings.updates:
            batch, part = self._next_part()
            if part is None:
                return
            with activity(f"updating version {self.version}", self.settings.hang_timeout):
                values = self._learn(part) | batch_metrics(batch or part, version=self.version - 1)
                self._publish()
            self.log.write(self.version, values | self._status())
            if self.version % self.settings.checkpoint_every == 0:
                self._save()
            if failure_reason := self.update.stepper.failure_reason:
                self._save()
                raise RunError(f"{failure_reason} {self._where_to_go_on(checkpoint.WRITE_DEADLINE)}")

    def _next_part(self) -> tuple[Groups | None, Groups | None]:
        """Wait for the batch (rank 0 only) and for this rank's part of it, which is None at the end."""
        try:
            batch = self._next_batch()
            return batch, self.ranks.scatter_groups(batch, self.offload.offload_if_idle)
        finally:
            self.offload.restore()

    def _next_batch(self) -> Groups | None:
        """Rank 0: wait for the actors, then for a batch; None when the run shall stop. Others: None."""
        if self.ranks.rank > 0:
            return None
        try:
            if not self._met_actors:
                self.publisher.wait_for_first(self.version, self.settings.first_weights_deadline)
                self._met_actors, self._row_began = True, self.clock()
            with waits.waiting(waits.BATCH, self.settings.batch_timeout):
                return self._sample()
        except KeyboardInterrupt:
            _log.info("interrupted at version %d", self.version)
            return None

    def _sample(self) -> Groups | None:
        """Wait for a batch in slices; None when the run shall stop."""
        began = self.clock()
        while not self.stop_requested():
            left = self.settings.batch_timeout - (self.clock() - began)
            self.offload.offload_if_idle()
            try:
                groups = self.replay.sample(
                    groups=self.groups_per_update,
                    version=self.version,
                    timeout=min(SAMPLE_SLICE, self.offload.next_check_in, max(left, 0.0)),
                )
            except SampleTimeout as error:
                if self.clock() - began >= self.settings.batch_timeout:
                    raise RunError(
                        f"The learner waited {self.settings.batch_timeout:g} s (--batch-timeout) for "
                        f"{self.groups_per_update} groups at version {self.version}. {error} "
                        "Look into the actors' logs; raise --batch-timeout if they are only slow."
                    ) from error
                continue
            self._waited = self.clock() - began
            return groups
        return None

    def _learn(self, part: Groups) -> dict[Metric, float]:
        """Make one update: the version rises by one, and nothing can interrupt it halfway."""
        began = self.clock()
        batch = build_batch(part, version=self.version)
        with interrupts_deferred():
            self._half_updated = True
            values = self.update(batch, self.version)
            self._require_finite()  # While half updated: what is not finite is neither published nor saved.
            self.version += 1
            self.groups_used += self.groups_per_update
            self._half_updated = False
            seconds = self.clock() - began
            speed = self.throughput.measure(
                batch, self.update.decisions, seconds, policy_learned=self.update.stepper.policy_learns
            )
        return values | speed | {m.UPDATE_SECONDS: seconds}

    def _require_finite(self) -> None:
        """Raise RunError unless all weights that are trained are finite, on all ranks alike."""
        tensors = self.update.policy.trainable_tensors()
        if names := not_finite(tensors, self.ranks):
            raise RunError(
                f"Weights are not finite, {len(names)} of {len(tensors)} tensors ({', '.join(names[:3])}), "
                f"{'after' if self._half_updated else 'before'} the update from version {self.version}. They "
                "are neither published nor saved. Continue with --resume and a lower "
                f"--optimizer.learning-rate, or begin with another --policy. {self._where_to_go_on()}"
            )

    def _where_to_go_on(self, deadline: float = SHUTDOWN_TIMEOUT_CHECKPOINT) -> str:
        """Name the newest checkpoint, once it is complete."""
        self._finish_after_failure(deadline)
        newest = self.checkpoints.newest
        return f"The newest checkpoint is {newest}." if newest else "There is no checkpoint yet."

    def _publish(self) -> None:
        self.publisher.publish(self.acting_tensors(), self.version)  # With all ranks, where it is sharded.
        self.replay.report_version(self.version)

    def _status(self) -> dict[Metric, float]:
        """Return the metrics of the row that ends now. It began when the last one ended: no time is lost."""
        now = self.clock()
        seconds = max(now - self._row_began, 1e-9)
        waited, self._waited, self._row_began = self._waited, 0.0, now
        return {
            **self.replay.status(),
            **self.publisher.status(),
            **waits.wait_metrics(),
            m.GROUPS_PER_MINUTE: 60 * self.groups_per_update / seconds,
            m.LEARNER_WAITING: waited / seconds,
            m.CHECKPOINT_WAITING: self.checkpoints.waited(),
            m.PEAK_MEMORY: host_peak(),
            **self._device_memory(),
        }

    def _device_memory(self) -> dict[Metric, float]:
        found: dict[Metric, float] = {}
        if (device := self.update.device).type == "cuda":
            found[m.LEARNER_MEMORY] = peak_memory([device])
        if self.offload.enabled:
            seconds, offloaded = self.offload.pop_metrics()
            found |= {m.LEARNER_OFFLOAD: seconds, m.LEARNER_OFFLOADED: float(offloaded)}
        return found

    def _save(self) -> None:
        """Begin a checkpoint of this version, unless it exists or an update was cut in the middle."""
        if self._half_updated:
            _log.warning("no checkpoint: interrupted in the middle of an update; the one before it stays")
            return
        if self._saved_version == self.version:
            return
        progress = Progress(
            version=self.version,
            groups_used=self.groups_used,
            bad_updates=self.update.stepper.bad_updates,
            bad_in_a_row=self.update.stepper.bad_in_a_row,
            config_hash=self.settings.config_hash,
        )
        write, optimizer = self.copy_policy(), self.update.optimizer
        self.checkpoints.save(
            progress, write_policy=write, optimizer=optimizer, parameters=self._parameters()
        )
        self._saved_version = self.version

    def _finish_after_failure(self, deadline: float = SHUTDOWN_TIMEOUT_CHECKPOINT) -> None:
        """Let a checkpoint that is being written become complete: it is where the run can go on."""
        try:
            self.checkpoints.finish(deadline)
        except CheckpointError as error:
            _log.warning("%s", error)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return self.update.policy.trainable_parameters()

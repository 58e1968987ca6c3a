"""The learner: turns groups of episodes into policy versions until enough updates are made.

produces   version v     never waits: the publisher copies the weights and sends them on its own thread
consumes   groups        waits for: `groups_per_update` complete, fresh groups in the replay
                         ended by: the actors fill them, a stop request (seen in a second), the replay (it
                         filtered too many), --batch-timeout since the last sign of progress

A version is published and saved only if its weights are finite. Whatever ends the run, the last finished
update is saved, if all ranks can still do that together. All ranks make the same calls in the same order:
rank 0 chooses and shards the batch, publishes the gathered weights, and ends the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncrl.devices.offload import NO_OFFLOAD, OffloadedTensors
from asyncrl.devices.tensors import host_peak, peak_memory
from asyncrl.errors import CheckpointError, RunError, SampleTimeout
from asyncrl.learner.batches import batch_metrics, build_batch, group_outcome
from asyncrl.learner.ranks import Groups, fetch_shard, not_finite
from asyncrl.learner.update import Update
from asyncrl.learner.update_metrics import Throughput
from asyncrl.observability import metrics_system as m
from asyncrl.observability import process_status, waits
from asyncrl.observability.metrics import Metric
from asyncrl.observability.process_status import activity
from asyncrl.replay.interface import BatchDescription, LearnerPort, NothingToLearn
from asyncrl.storage import checkpoint
from asyncrl.storage.checkpoint import Checkpoints, Progress
from asyncrl.weights.interface import Publisher
from asyncrl.weights.packing import WeightSource

SAMPLE_SLICE: Final = 1.0  # Longest uninterrupted wait in seconds: how soon a stop request is seen
HEARTBEAT_EVERY: Final = 5.0  # Seconds between heartbeats of rank 0 to ranks that wait for its batch
SHUTDOWN_TIMEOUT_CHECKPOINT: Final = 300.0  # Seconds that a checkpoint has to be written after a failure
WriteMetrics = Callable[[int, Mapping[Metric, float]], object]  # Policy version, metrics of its update
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Settings of the learner loop."""

    updates: int  # Policy version at which the run is over
    checkpoint_every: int  # Updates between two checkpoints
    batch_timeout: float  # Seconds to wait for a batch without a sign of progress
    first_weights_deadline: float  # Seconds the actors have to take the first version
    evaluate_every: int = 0  # Updates between two evaluated versions, which are checkpoints too; 0 disables
    hang_timeout: float = 900.0  # Seconds that an update may take without a sign of progress
    batches_ahead: int = 1  # Batches that may be imagined together, the awaited one included
    compiles: bool = False  # The first update compiles the layers


class BatchWait:
    """One wait for a batch; it times out `timeout` seconds after its last episode or decision."""

    def __init__(self, timeout: float, clock: Callable[[], float], *, most_decisions: int) -> None:
        self._timeout, self._clock, self._most = timeout, clock, most_decisions
        self._left, self._episodes, self._decisions = most_decisions, 0, -1
        self.began = self._progressed_at = clock()

    @property
    def remaining(self) -> float:
        """Return the seconds until the timeout, unless the batch progresses; never negative."""
        return max(0.0, self._progressed_at + self._timeout - self._clock())

    def update(self, status: SampleTimeout) -> bool:
        """Return True if the batch progressed; a group imagined again counts once."""
        # A new replay counts from 0.
        made = 0 if self._decisions < 0 else max(0, status.decisions - self._decisions)
        self._decisions, more_episodes = status.decisions, status.episodes > self._episodes
        if more_episodes:
            self._episodes, self._left = status.episodes, self._most
        progressed = more_episodes or (made > 0 and self._left > 0)
        self._left -= made
        if progressed:
            self._progressed_at = self._clock()
        return progressed


class Learner:
    """Updates the policy and publishes every version. Used by one thread."""

    def __init__(
        self,
        update: Update,
        replay: LearnerPort,
        publisher: Publisher,
        write_metrics: WriteMetrics,
        checkpoints: Checkpoints,
        settings: LoopSettings,
        *,
        throughput: Throughput,
        copy_policy: Callable[[], Callable[[Path], None]],
        acting_tensors: Callable[[], WeightSource],
        offload: OffloadedTensors = NO_OFFLOAD,
        stop_requested: Callable[[], bool] = lambda: False,
        show: Callable[[int, Groups], None] = lambda version, groups: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the run; `show` gets this rank's groups of every update, and the version after it."""
        self.update, self.replay, self.publisher = update, replay, publisher
        self.write_metrics, self.checkpoints, self.settings = write_metrics, checkpoints, settings
        self.throughput, self.copy_policy, self.acting_tensors = throughput, copy_policy, acting_tensors
        self.offload, self.stop_requested, self.clock = offload, stop_requested, clock
        self.show = show
        self.ranks, self.algorithm = update.ranks, update.recipe.algorithm
        self.early_end = ""  # Why the run ended early without an error; else empty
        self.version = self.groups_used = 0
        self._parameters = update.policy.trainable_parameters
        self._failure: Exception | None = None  # While the others go on: raised once all have saved
        self._heartbeat_at = clock()
        self._actors_joined = self._update_in_progress = False
        self._saved_version = -1
        self._measured_since = self._waited = 0.0

    def restore(self, folder: Path) -> None:
        """Resume from a checkpoint; its frozen weights are already loaded."""
        progress = checkpoint.load(
            folder,
            optimizer=self.update.optimizer,
            parameters=self._parameters(),
            rank=self.ranks.rank,
            verified=True,  # By rank 0, before the run's processes were started.
        )
        self.version = self._saved_version = progress.version
        self.groups_used = progress.groups_used
        stepper = self.update.stepper
        stepper.bad_updates, stepper.bad_in_a_row = progress.bad_updates, progress.bad_in_a_row

    def run(self) -> None:
        """Update until `settings.updates`, a stop request, Ctrl-C or `early_end`; save, end the run."""
        try:
            self._loop()
        except KeyboardInterrupt:
            _log.info("interrupted at version %d", self.version)
        except BaseException as error:
            self._save_alone()
            if self._failure is not None:
                raise self._failure from error  # It came first; the other ranks could not be informed.
            raise
        process_status.set_activity("ending the run")
        if self._failure is not None:
            self._try_to_save()
            raise self._failure
        self._save()
        self.replay.stop()
        self.checkpoints.finish()

    def _loop(self) -> None:
        self._require_finite()
        self._publish()
        self._measured_since = self.clock()
        doing = "compiling the layers and updating" if self.settings.compiles else "updating"
        while self.version < self.settings.updates:
            groups = self._next_shard()
            if groups is None:
                return
            with activity(f"{doing} version {self.version}", self.settings.hang_timeout):
                outcomes = self.ranks.gather_outcomes([group_outcome(group) for group in groups])
                metrics = self._learn(groups)
                metrics |= batch_metrics(outcomes, self.version - 1)
                self._publish()
            try:
                try:
                    metrics |= self._status()
                finally:  # An actor that died ends the run here, but the update was made.
                    self.write_metrics(self.version, metrics)
                self.show(self.version, groups)
            except Exception as error:  # The other ranks go on.
                self._failure = self._failure or error
            doing = "updating"
            intervals = (self.settings.checkpoint_every, self.settings.evaluate_every)
            if any(every > 0 and self.version % every == 0 for every in intervals):
                self._save()
            if failure_reason := self.update.stepper.failure_reason:
                self._save()
                raise RunError(f"{failure_reason} {self._finish_checkpoint(checkpoint.WRITE_DEADLINE)}")

    def _next_shard(self) -> Groups | None:
        # This rank's groups of the next batch; None ends the loop on all ranks: stopped, failed or no groups.
        try:
            while (shard := self.ranks.share_batch(self._next_batch(), self._while_waiting)) is not None:
                began, timeout = self.clock(), self.settings.batch_timeout
                fetched = fetch_shard(self.replay, self.ranks, shard, timeout, self.stop_requested)
                self._waited += self.clock() - began
                if isinstance(fetched, Exception):
                    self._failure = self._failure or fetched
                    return None
                if fetched is not None:
                    return fetched
            return None
        finally:
            self.offload.restore()

    def _while_waiting(self) -> None:
        self.stop_requested()  # It looks after children.
        self.offload.offload_if_idle()

    def _next_batch(self) -> BatchDescription | None:
        if self.ranks.rank > 0 or self._failure:
            return None
        try:
            return self._choose_batch()
        except KeyboardInterrupt:
            _log.info("interrupted at version %d", self.version)
        except NothingToLearn as end:
            self.early_end = str(end)
        except Exception as error:  # Raised by `run`.
            if not self._actors_joined:
                raise  # Nothing happened yet that would have to be saved.
            self._failure = error
        return None

    def _choose_batch(self) -> BatchDescription | None:
        timeout = self.settings.batch_timeout
        if not self._actors_joined:
            deadline = self.settings.first_weights_deadline
            self.publisher.wait_for_first(self.version, deadline, self.stop_requested)
            self._actors_joined, self._measured_since = True, self.clock()
        groups, size = self.algorithm.groups_per_update, self.algorithm.group_size
        most_decisions = groups * size * self.update.max_decisions * self.settings.batches_ahead
        with process_status.waiting(waits.BATCH, timeout):
            wait = BatchWait(timeout, self.clock, most_decisions=most_decisions)
            while not self.stop_requested():
                if self.clock() - self._heartbeat_at >= HEARTBEAT_EVERY:
                    self._heartbeat_at = self.clock()
                    self.ranks.send_heartbeat()
                self.offload.offload_if_idle()
                slice_ = min(SAMPLE_SLICE, self.offload.next_check_in, wait.remaining)
                try:
                    batch = self.replay.choose(groups=groups, version=self.version, timeout=slice_)
                except SampleTimeout as status:
                    if wait.update(status):
                        process_status.progress()
                    ready = f"{status.groups} of {groups} groups, {status.episodes} episodes"
                    process_status.describe(f"{waits.BATCH.name}: {ready}")
                    if not wait.remaining:
                        raise RunError(
                            f"The learner waited {timeout:g} s (--batch-timeout) for {groups} groups at "
                            f"version {self.version} and nothing moved on: no episode was admitted and no "
                            f"actor reported decisions ({self.clock() - wait.began:.0f} s in all). {status} "
                            "Look into the actors' logs; raise --batch-timeout if one decision takes longer."
                        ) from status
                else:
                    self._waited += self.clock() - wait.began
                    return batch
        return None

    def _learn(self, groups: Groups) -> dict[Metric, float]:
        began = self.clock()
        batch = build_batch(groups, version=self.version)
        self._update_in_progress = True
        metrics = self.update(batch, self.version)
        self._require_finite()  # While in progress: weights that are not finite are not saved.
        self.version += 1
        self.groups_used += self.algorithm.groups_per_update
        self._update_in_progress = False
        seconds = self.clock() - began
        speed = self.throughput.measure(
            batch, self.update.decisions, seconds, policy_learned=self.update.stepper.policy_learns
        )
        return metrics | speed | {m.UPDATE_SECONDS: seconds}

    def _require_finite(self) -> None:
        tensors = self._parameters()
        if names := not_finite(tensors, self.ranks):
            raise RunError(
                f"Weights are not finite, {len(names)} of {len(tensors)} tensors ({', '.join(names[:3])}), "
                f"{'after' if self._update_in_progress else 'before'} the update from version "
                f"{self.version}. They are neither published nor saved. Continue with --resume and a lower "
                f"--optimizer.learning-rate, or begin with another --policy. {self._finish_checkpoint()}"
            )

    def _publish(self) -> None:
        self.publisher.publish(self.acting_tensors(), self.version)  # With all ranks, where it is sharded.
        self.replay.report_version(self.version)

    def _status(self) -> dict[Metric, float]:
        # Shares of time begin where those of the last update ended.
        now = self.clock()
        seconds = max(now - self._measured_since, 1e-9)
        waited, self._waited, self._measured_since = self._waited, 0.0, now
        checkpoint_waited, checkpoint_copied = self.checkpoints.pop_seconds()
        status = {
            **self.replay.status(),
            **self.publisher.status(),
            **waits.wait_metrics(),
            m.GROUPS_PER_MINUTE: 60 * self.algorithm.groups_per_update / seconds,
            m.LEARNER_WAITING: waited / seconds,
            m.CHECKPOINT_WAITING: checkpoint_waited,
            m.CHECKPOINT_COPYING: checkpoint_copied,
            m.PEAK_MEMORY: host_peak(),
        }
        if (device := self.update.device).type == "cuda":
            status[m.LEARNER_MEMORY] = peak_memory(device)
        if self.offload.enabled:
            moving, offloaded = self.offload.pop_metrics()
            status |= {m.LEARNER_OFFLOAD: moving, m.LEARNER_OFFLOADED: float(offloaded)}
        return status

    def _save(self) -> None:
        stepper = self.update.stepper
        if self._update_in_progress and stepper.stepped:
            _log.warning("no checkpoint: interrupted in the middle of an update; the one before it stays")
            return
        if self._saved_version == self.version:
            return
        progress = Progress(
            version=self.version,
            groups_used=self.groups_used,
            bad_updates=stepper.bad_updates,
            bad_in_a_row=stepper.bad_in_a_row,
        )
        self.checkpoints.save(
            progress,
            copy_policy=self.copy_policy,
            optimizer=self.update.optimizer,
            parameters=self._parameters(),
        )
        self._saved_version = self.version

    def _save_alone(self) -> None:
        """Save without the other ranks, which may not take part after a failure."""
        self._finish_checkpoint()
        if self.ranks.size == 1:
            if self._actors_joined:
                self._try_to_save()
        elif self._saved_version != self.version:
            _log.warning(
                "version %d is not saved: the learner ranks cannot write a checkpoint together any more",
                self.version,
            )

    def _try_to_save(self) -> None:
        """Save; a failure to save must not hide the failure that is raised next."""
        try:
            self._save()
            self.checkpoints.finish()
        except Exception as error:
            _log.warning("version %d could not be saved: %s", self.version, error)

    def _finish_checkpoint(self, deadline: float = SHUTDOWN_TIMEOUT_CHECKPOINT) -> str:
        try:
            self.checkpoints.finish(deadline)
        except CheckpointError as error:
            _log.warning("%s", error)
        newest = self.checkpoints.newest
        return f"The newest checkpoint is {newest}." if newest else "There is no checkpoint yet."

"""The learner: turns groups of episodes into policy versions until enough updates are made.

produces   version v     never waits: the publisher copies the weights and sends them on its own thread
consumes   groups        waits for: `groups_per_update` complete, fresh groups in the replay
                         ended by: the actors fill them, a stop request (seen in a second), the replay (it
                         filtered too many), --batch-timeout since the last sign of progress
At the start it also waits for the actors to take the first version, so that a broken link fails at once.
A version is published and saved only when its weights are finite. Whatever ends the run, the last finished
update is saved, if all ranks can still do that together.

Every learner rank runs this loop and makes the same calls in the same order: rank 0 chooses the batch, says
which groups are whose, publishes the weights that come together there, and decides when to end. Each rank
fetches its part from the replay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from torch import Tensor, nn

from asyncrl.devices.offload import NO_OFFLOAD, IdleOffload
from asyncrl.devices.tensors import host_peak, peak_memory
from asyncrl.errors import CheckpointError, RunError, SampleTimeout
from asyncrl.learner.batches import batch_metrics, build_batch, outcome_of
from asyncrl.learner.loop import Log, LoopSettings
from asyncrl.learner.metrics import Throughput
from asyncrl.learner.progress import BatchWait, Told, UpdateProgress, fetch_part
from asyncrl.learner.ranks import Groups, not_finite
from asyncrl.learner.update import Update
from asyncrl.observability import metrics_system as m
from asyncrl.observability import process_status, waits
from asyncrl.observability.metrics import Metric
from asyncrl.observability.process_status import activity
from asyncrl.observability.signals import interrupts_deferred
from asyncrl.replay.interface import BatchDescription, LearnerPort, NothingToLearn
from asyncrl.storage import checkpoint
from asyncrl.storage.checkpoint import Checkpoints, Progress
from asyncrl.weights.interface import Publisher, WeightSource

SAMPLE_SLICE: Final = 1.0
"""Longest uninterrupted wait for a batch, in seconds: how soon a stop request is seen."""
TELL_EVERY: Final = 5.0
"""Seconds between two words of rank 0 to the others that it still waits for a batch."""
SHUTDOWN_TIMEOUT_CHECKPOINT: Final = 300.0
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
        tell_estimate: Told = lambda what, seconds: None,
        compile_early: Callable[[int], dict[Metric, float]] = lambda version: {},
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Join the parts.

        `throughput` measures the updates; `copy_policy` copies the policy to host memory, with all ranks, and
        returns what writes its files; `acting_tensors` gives what actors need, of which this rank may hold a
        part; `offload` moves what only updates need to host memory while this rank waits; `stop_requested` is
        asked on rank 0; `tell_estimate` hears once how long a batch takes, and once an update;
        `compile_early` is called once, with all ranks, behind the first publish; it adds to the first row.
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
        self.tell_estimate = tell_estimate
        self.compile_early = compile_early
        self.clock = clock
        self.progress = UpdateProgress(tell_estimate, clock, update.device)
        update.on_pass = self.progress.note
        self.end_reason = ""
        """Why the run ended well before its last update; empty when it did not, or was asked to."""
        self._failure: Exception | None = None
        """What failed on this rank where the others can still be told: raised once all have saved."""
        self._told_ranks_at = clock()
        self._batch_estimated = False
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
        """Update until `settings.updates`, a stop request, Ctrl-C or `end_reason`; save, end the run for all.

        After a failure the last finished update is saved as well, but replay and actors are not told to stop.

        Raises:
            RunError: No batch within `batch_timeout`, too many bad steps, weights that are not finite, or a
                child that died too often.
            ReplayError: No start state is left that can be imagined.
            WeightSyncError: The actors did not take the first version.
            CheckpointError: A checkpoint could not be written.
        """
        try:
            self._loop()
        except KeyboardInterrupt:
            _log.info("interrupted at version %d", self.version)
        except BaseException as error:
            self._save_alone()
            if self._failure is not None:
                raise self._failure from error  # It came first; the other ranks could not be told.
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
        only_first = self.compile_early(self.version)
        self._row_began = self.clock()
        while self.version < self.settings.updates:
            part = self._next_part()
            if part is None:
                return
            with activity(f"updating version {self.version}", self.settings.hang_timeout):
                outcomes = self.ranks.gather_outcomes([outcome_of(group) for group in part])
                values = self._learn(part)
                values |= batch_metrics(outcomes, self.version - 1)
                self._publish()
            self._write_row(values | only_first)
            only_first = {}
            if self.settings.saves(self.version):
                self._save()
            if failure_reason := self.update.stepper.failure_reason:
                self._save()
                raise RunError(f"{failure_reason} {self._where_to_go_on(checkpoint.WRITE_DEADLINE)}")

    def _next_part(self) -> Groups | None:
        """Wait for this rank's part of a batch; None at the end."""
        try:
            while (mine := self._next_description()) is not None:
                began, patience = self.clock(), self.settings.batch_timeout
                part = fetch_part(self.replay, self.ranks, mine, patience, self.stop_requested)
                self._waited += self.clock() - began
                self._failure = self._failure or part.failure
                if part.groups is not None or part.failure is not None:
                    return part.groups
            return None
        finally:
            self.offload.restore()

    def _next_description(self) -> BatchDescription | None:
        """Wait for the next batch: which groups of it are this rank's. None at the end."""
        batch = None
        try:
            batch = None if self._failure else self._next_batch()
        except Exception as error:  # Raised by `run`.
            if not self._met_actors:
                raise  # Nothing happened yet that would have to be saved.
            self._failure = error
        return self.ranks.deal(batch, self.offload.offload_if_idle)

    def _next_batch(self) -> BatchDescription | None:
        """Rank 0: wait for the actors, then for a batch; None when the run shall stop. Others: None."""
        if self.ranks.rank > 0:
            return None
        try:
            if not self._met_actors:
                self.publisher.wait_for_first(self.version, self.settings.first_weights_deadline)
                self._met_actors, self._row_began = True, self.clock()
            with waits.waiting(waits.BATCH, self.settings.batch_timeout):
                return self._choose()
        except KeyboardInterrupt:
            _log.info("interrupted at version %d", self.version)
        except NothingToLearn as end:
            self.end_reason = str(end)
        return None

    def _choose(self) -> BatchDescription | None:
        """Wait for a batch in slices; None when the run shall stop."""
        wait = BatchWait(
            self.settings.batch_timeout,
            self.clock,
            episodes=self.groups_per_update * self.update.recipe.algorithm.group_size,
            decisions=self.update.max_decisions,
            ahead=self.settings.batches_ahead,
        )
        while not self.stop_requested():
            self._tell_ranks()
            self.offload.offload_if_idle()
            try:
                batch = self.replay.choose(
                    groups=self.groups_per_update,
                    version=self.version,
                    timeout=min(SAMPLE_SLICE, self.offload.next_check_in, wait.left),
                )
            except SampleTimeout as error:
                self._go_on_waiting(wait, error)
                continue
            self._waited += wait.seconds
            return batch
        return None

    def _go_on_waiting(self, wait: BatchWait, seen: SampleTimeout) -> None:
        """Renew the deadline when the batch moved on, and say once how long it takes."""
        if wait.note(seen):
            process_status.progress()
        process_status.describe(
            f"{waits.BATCH.name}: {seen.groups} of {self.groups_per_update} groups, {seen.episodes} of "
            f"{self.groups_per_update * self.update.recipe.algorithm.group_size} episodes"
        )
        if not self._batch_estimated and (seconds := wait.estimate(seen)) is not None:
            self._batch_estimated = True
            self.tell_estimate("batch", seconds)
        if not wait.left:
            raise wait.in_vain(f"{self.groups_per_update} groups at version {self.version}", seen) from seen

    def _tell_ranks(self) -> None:
        """Rank 0: tell the others now and then that it still waits."""
        if self.clock() - self._told_ranks_at >= TELL_EVERY:
            self._told_ranks_at = self.clock()
            self.ranks.still_waiting()

    def _learn(self, part: Groups) -> dict[Metric, float]:
        """Make one update: the version rises by one, and nothing can interrupt it halfway."""
        began = self.clock()
        self.progress.begin()
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
        tensors = self._parameters()
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

    def _write_row(self, values: dict[Metric, float]) -> None:
        """Write the update's row. What fails here fails on one rank, at a place where the others go on."""
        with self._failure_kept():
            values = values | self._status()
        with self._failure_kept():
            self.log.write(self.version, values)

    @contextmanager
    def _failure_kept(self) -> Iterator[None]:
        """Keep what fails in the block: `run` raises it, after all ranks have saved."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error

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
            m.CHECKPOINT_COPYING: self.checkpoints.copied(),
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
        if self._half_updated and self.update.stepper.stepped:
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
        self.checkpoints.save(
            progress,
            copy_policy=self.copy_policy,
            optimizer=self.update.optimizer,
            parameters=self._parameters(),
        )
        self._saved_version = self.version

    def _save_alone(self) -> None:
        """Save the last finished update after a failure of which other ranks were not told."""
        self._finish_after_failure()
        if self.ranks.size == 1:
            if self._met_actors:
                self._try_to_save()
        elif self._saved_version != self.version:
            _log.warning(
                "version %d is not saved: the learner ranks cannot write a checkpoint together any more",
                self.version,
            )

    def _try_to_save(self) -> None:
        """Save before a failure is raised, which what goes wrong here must not hide."""
        try:
            self._save()
            self.checkpoints.finish()
        except Exception as error:
            _log.warning("version %d could not be saved: %s", self.version, error)

    def _finish_after_failure(self, deadline: float = SHUTDOWN_TIMEOUT_CHECKPOINT) -> None:
        """Let a checkpoint that is being written become complete: it is where the run can go on."""
        try:
            self.checkpoints.finish(deadline)
        except CheckpointError as error:
            _log.warning("%s", error)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return self.update.policy.trainable_parameters()

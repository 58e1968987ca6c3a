"""Acts with the newest weights in a world model or a simulator, in slots refilled as their episodes end.

consumes   weights      waits for: version 0           ended by: the learner publishes or leaves, deadline
consumes   grants       waits for: credit              ended by: the learner uses a batch, or the run stops
           decisions    waits for: devices, simulators ended by: these, --hang-timeout
produces   episodes     never waits: the replay port keeps them until they are durable
produces   reports      every few seconds: where time and memory went

With two stages a round launches the decision of one half of the slots and then collects that of the other
half, launched the round before: the host works while a device does, and two devices work at the same time.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from asyncrl.actors.acting import Acting, RowFailure, Starts
from asyncrl.actors.slots import Ending, EpisodeInProgress, Slots, Stage, Start, finished_episode, split_slots
from asyncrl.config.sections import ActorSettings
from asyncrl.devices.offload import NO_OFFLOAD, IdleOffload
from asyncrl.devices.tensors import peak_memory
from asyncrl.observability import metrics_system as m
from asyncrl.observability import waits
from asyncrl.observability.metrics import Metric
from asyncrl.observability.process_status import set_activity
from asyncrl.records import Episode
from asyncrl.replay.interface import ActorPort, GroupFailure, GroupGrant, RunStopped
from asyncrl.weights.interface import ChannelClosed, Receiver

FIRST_REPORT = 0.2
"""Seconds until the first report, which short runs would not have otherwise."""
REPORT_EVERY: Final = 2.0
"""Seconds between two reports."""


class ActorTelemetry:
    """Adds up seconds, slots and steps between two reports."""

    def __init__(self, acting: Acting, offload: IdleOffload) -> None:
        self._acting, self._offload = acting, offload
        self._seconds: dict[Metric, float] = {}
        self._live = self._slots = self._useful = self._imagined = 0
        self._since = time.monotonic()
        self._every = FIRST_REPORT

    def add(self, metric: Metric, seconds: float) -> None:
        """Count seconds for a metric that is a share of the time."""
        self._seconds[metric] = self._seconds.get(metric, 0.0) + seconds

    def add_busy(self, seconds: float) -> None:
        """Count a round of the actor's thread, waits for devices included."""
        self.add(m.ACTOR_HOST, seconds)

    def add_live_slots(self, live: int, slots: int) -> None:
        """Count the slots with an episode, when a decision is launched."""
        self._live, self._slots = self._live + live, self._slots + slots

    def add_steps(self, useful: int, imagined: int) -> None:
        """Count steps that were decided, and those of them that lie before their episode's end."""
        self._useful, self._imagined = self._useful + useful, self._imagined + imagined

    def add_device_wait(self, seconds: float) -> None:
        """Count what a round waited for devices."""
        self.add(m.ACTOR_HOST, -seconds)

    def report_if_due(self) -> dict[Metric, float] | None:
        """Return the report, when it is time for one."""
        now = time.monotonic()
        elapsed = now - self._since
        if elapsed < self._every or (self._every == FIRST_REPORT and not self._seconds):
            return None
        self._every = REPORT_EVERY
        devices = self._acting.pop_device_seconds()
        for metric, seconds in devices.items():
            self.add(metric, seconds)
        if all(device.type == "cpu" for device in self._acting.devices):
            self.add(m.ACTOR_HOST, -sum(devices.values()))  # The models ran on the actor's own thread.
        shares = {metric: min(1.0, max(0.0, s / elapsed)) for metric, s in self._seconds.items()}
        self._seconds, self._since = {}, now
        report = {
            m.ACTORS_WAITING: 0.0,
            m.ACTOR_MEMORY: peak_memory(set(self._acting.devices)),
            **{metric: float(count) for metric, count in self._acting.counts.items()},
        } | shares
        if self._slots:
            report[m.LIVE_SLOTS] = self._live / self._slots
        if self._imagined:
            report[m.USEFUL_STEPS] = self._useful / self._imagined
        self._live = self._slots = self._useful = self._imagined = 0
        if self._offload.enabled:
            moving, offloaded = self._offload.pop_metrics()
            report |= {m.ACTOR_OFFLOAD: min(1.0, moving / elapsed), m.ACTOR_OFFLOADED: float(offloaded)}
        return report


_log = logging.getLogger(__name__)

CREDIT_WAIT = 0.2
"""Seconds an idle actor waits for credit before it looks at its messages and weights again."""
SPARE = 4
"""One pending episode is asked for ahead for this many under way: an answer comes with the next round."""


class Actor:
    """Makes episodes until the run stops. Weights change only between two launches of decisions."""

    def __init__(
        self,
        name: str,
        acting: Acting,
        starts: Starts,
        port: ActorPort,
        receiver: Receiver,
        settings: ActorSettings,
        *,
        group_size: int,
        run_seed: int,
        startup_timeout: float = 600.0,
        hang_timeout: float = 900.0,
        offload: IdleOffload = NO_OFFLOAD,
    ) -> None:
        """Join the parts.

        Args:
            settings: Section ``--actor`` of the run's settings.
            startup_timeout: Seconds until the first weights must have arrived; the learner may be loading.
        """
        assert settings.max_decisions  # 0 was replaced by what the world says.
        self.name = name
        self.acting = acting
        self.starts = starts
        self.port = port
        self.receiver = receiver
        self.settings = settings
        self.group_size = group_size
        self.startup_timeout, self.hang_timeout = startup_timeout, hang_timeout
        self.offload = offload
        self.slots = Slots(settings.slots, run_seed=run_seed)
        self._idle_stages = deque(
            Stage[Any](indices=some) for some in split_slots(settings.slots, settings.pipeline_stages)
        )
        self._busy_stages: deque[Stage[Any]] = deque()
        """Stages by what they do; those that do it longest come first."""
        self.version = -1
        self._logged: set[str] = set()
        """Start states whose failure is in the log."""
        self._memory_said = False
        self.telemetry = ActorTelemetry(acting, offload)

    def run(self, should_leave: Callable[[], bool] = lambda: False) -> None:
        """Imagine until the replay (or, before there are weights, the learner) says that the run is over.

        Args:
            should_leave: Asked between two decisions; True ends this actor only.
        """
        try:
            with waits.waiting(waits.FIRST_WEIGHTS, self.startup_timeout):
                self.version = self.receiver.wait_for_first(self.startup_timeout)
            while not (self.port.stopped or should_leave()):
                self.round()
        except (ChannelClosed, RunStopped):
            return

    def round(self, wait: float = CREDIT_WAIT) -> bool:
        """Take news, refill and launch one stage, collect the one launched longest ago, hand over.

        Returns:
            False when there was nothing to imagine: no episode under way or pending, and no credit.
        """
        began = time.monotonic()
        set_activity("talking to the replay", self.hang_timeout)
        self.port.serve()
        self._forget_dropped()
        if (report := self.telemetry.report_if_due()) is not None:
            self.port.report(report)
        self._acquire(0.0)
        # Between two launches: those before read the old weights first, for copies keep the stream's order.
        self.version = self.receiver.swap_into(
            lambda: self.offload.host_views(dict(self.acting.policy.acting_tensors()))
        )
        set_activity(f"deciding with version {self.version}", self.hang_timeout)
        launched = any(self._launch(stage) for stage in list(self._idle_stages))
        if launched:
            self.telemetry.add_live_slots(len(self.slots.live), len(self.slots.episodes))
        if self._busy_stages and not (launched and self._idle_stages):
            self._collect(self._busy_stages.popleft())
        elif not launched:
            self._idle(wait)
            return bool(self.slots.pending)
        self.telemetry.add_busy(time.monotonic() - began)
        return True

    def _launch(self, stage: Stage[Any]) -> bool:
        """Refill a stage and begin its next decision; returns whether there was anything to do."""
        begun = self.slots.fill(self.version, stage.indices, self.acting.suits)
        live = self._live(stage)
        if not live:
            self.acting.release(self.slots, stage)
            return False
        self.offload.restore()
        if begun:
            self._give_up(self.acting.begin(self.slots, stage, begun))
            live = self._live(stage)
        if live:
            self._give_up(self.acting.launch(self.slots, stage, live, self.version))
        if stage.in_flight:
            self._idle_stages.remove(stage)
            self._busy_stages.append(stage)
        return True

    def _live(self, stage: Stage[Any]) -> list[int]:
        return [index for index in stage.indices if self.slots.episodes[index] is not None]

    def _collect(self, stage: Stage[Any]) -> None:
        """Take what became of a decision and hand over the episodes that it ends."""
        failed, waited = self.acting.collect(self.slots, stage, self.hang_timeout)
        self.telemetry.add_device_wait(waited)
        self._idle_stages.append(stage)
        self._give_up(failed)
        self._log_memory()
        set_activity("handing over episodes", self.hang_timeout)
        self._hand_over(stage)

    def _acquire(self, wait: float) -> None:
        """Take grants until every slot has an episode, and those that end next have one to follow."""
        while wanted := self.slots.wanted(self._ending_soon()):
            grants = self.port.acquire_groups(math.ceil(wanted / self.group_size), wait)
            self._forget_dropped()  # Before a number that was dropped is begun again.
            if not grants:
                return
            for grant in grants:
                self._take(grant)
            wait = 0.0

    def _forget_dropped(self) -> None:
        """Stop the groups that the replay gave up: what is left of them is of no use."""
        for number in self.port.pop_dropped():
            self.slots.remove_group(number)

    def _ending_soon(self) -> int:
        """Count the episodes that end with their next decision at the latest, and some that may."""
        under_way = [self.slots.episode(index) for index in self.slots.live]
        last = self.settings.max_decisions - 1
        return max(len(under_way) // SPARE, sum(len(episode.decisions) >= last for episode in under_way))

    def _take(self, grant: GroupGrant) -> None:
        start = self.starts[grant.number]
        if start.name in self.port.quarantined:
            self._report_failure(grant, start, RowFailure(index=-1, cause="quarantined", reason=""))
        else:
            self.slots.add_group(grant, start, self.group_size)

    def _idle(self, wait: float) -> None:
        """Nothing to imagine: wait for credit, or (holding a grant) for the policy version it asks for."""
        began = time.monotonic()
        self.offload.offload_if_idle()
        if self.slots.pending:
            with waits.waiting(waits.NEWER_WEIGHTS):
                self.receiver.wait_newer(self.version, wait)
        else:
            with waits.waiting(waits.CREDIT):
                self._acquire(wait)
        self.telemetry.add(m.ACTORS_WAITING, time.monotonic() - began)

    def _give_up(self, failed: Sequence[RowFailure]) -> None:
        """Stop the groups of episodes that failed: without all its episodes a group is of no use."""
        for failure in failed:
            episode = self.slots.episodes[failure.index]
            if episode is None:  # A sibling failed in the same round.
                continue
            pending = episode.pending
            self.slots.remove_group(pending.grant.number)
            self._log_failure(pending.grant, pending.start, failure)
            self._report_failure(pending.grant, pending.start, failure, pending.member)

    def _report_failure(self, grant: GroupGrant, start: Start, failure: RowFailure, member: int = -1) -> None:
        group_failure = GroupFailure(
            number=grant.number,
            member=member,
            cause=failure.cause,
            start_state=start.name,
            reason=failure.reason,
            left=self.starts.left(self.port.quarantined),
        )
        self.port.fail(group_failure)

    def _log_memory(self) -> None:
        """Say once, after the first decision, what the models really took: what doctor only estimates."""
        if not self._memory_said:
            self._memory_said = True
            peak = peak_memory(set(self.acting.devices)) / 2**30
            _log.info("peak memory after the first decision: %.2f GiB (actor/peak_memory)", peak)

    def _log_failure(self, grant: GroupGrant, start: Start, failure: RowFailure) -> None:
        if start.name not in self._logged:
            self._logged.add(start.name)
            _log.warning(
                "group %d is given up, start state %r: %s",
                grant.number,
                start.name,
                failure.reason,
                exc_info=failure.error,
            )

    def _hand_over(self, stage: Stage[Any]) -> None:
        """Push the episodes that have just ended, and free their slots."""
        for index in self._live(stage):
            episode = self.slots.episode(index)
            fresh = episode.decisions[episode.counted :]
            if not fresh:
                continue  # Its simulator has not answered.
            episode.counted = len(episode.decisions)
            chosen = sum(len(row["success_scores"]) for row in fresh)
            ending = self.acting.ending(episode)
            if ending is None:
                self.telemetry.add_steps(chosen, chosen)
            else:
                self.slots.clear(index)
                finished = self._finished(episode, ending)
                self.telemetry.add_steps(chosen - (finished.rewards.size - finished.steps), chosen)
                self.port.push(finished)

    def _finished(self, episode: EpisodeInProgress, ending: Ending) -> Episode:
        sampling = self.acting.sampling
        return finished_episode(
            episode,
            ending,
            group_size=self.group_size,
            actor=self.name,
            world_version=self.acting.version,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
        )

"""Acts with the newest weights in a world model or a simulator, in slots refilled as their episodes end.

consumes   weights      waits for: version 0           ended by: the learner publishes or leaves, deadline
consumes   grants       waits for: credit              ended by: the learner uses a batch, or the run stops
           decisions    waits for: devices, simulators ended by: these, --hang-timeout
produces   episodes     never waits: the replay port keeps them until they are durable
produces   reports      every few seconds: where time and memory went
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Protocol

from asyncrl.actors.backend import Backend, EpisodeStart, Failure, Slots, Stage, build_episode, split_slots
from asyncrl.config.sections import ActorSettings
from asyncrl.devices.offload import NO_OFFLOAD, OffloadedTensors
from asyncrl.devices.tensors import peak_memory
from asyncrl.observability import metrics_system as m
from asyncrl.observability import process_status, waits
from asyncrl.observability.metrics import Metric
from asyncrl.observability.process_status import set_activity
from asyncrl.replay.interface import ActorPort, GroupFailure, GroupGrant, RunStopped
from asyncrl.weights.interface import ChannelClosed, Receiver

FIRST_REPORT = 0.2  # Seconds until the first report, which short runs would not have otherwise
REPORT_EVERY: Final = 2.0  # Seconds between two reports
CREDIT_WAIT: Final = 0.2  # Seconds an idle actor waits for credit before it reads messages and weights again
RUNNING_PER_PREFETCH: Final = 4  # Running episodes per prefetched one, to hide the round trip of a request
_log = logging.getLogger(__name__)


class StartStream(Protocol):
    """Endless stream of the groups' starts: element n depends on the settings and n alone."""

    def __getitem__(self, n: int) -> EpisodeStart:
        """Return the start of the episodes of grant `n`."""
        ...

    def left(self, quarantined: Collection[str]) -> int:
        """Count the starts that are not quarantined; `replay.interface.ENDLESS` if they never run out."""
        ...


class ActorTelemetry:
    """Sums of seconds, slots and steps between two reports."""

    def __init__(self, backend: Backend, offload: OffloadedTensors) -> None:
        self._backend, self._offload = backend, offload
        self._seconds: dict[Metric, float] = defaultdict(float)
        self._shares: dict[Metric, tuple[int, int]] = {}
        self._since, self._interval = time.monotonic(), FIRST_REPORT

    def add(self, metric: Metric, seconds: float) -> None:
        """Add seconds to a metric that is a share of the time."""
        self._seconds[metric] += seconds

    def add_share(self, metric: Metric, part: int, whole: int) -> None:
        """Add to the numerator and the denominator of a share."""
        parts, wholes = self._shares.get(metric, (0, 0))
        self._shares[metric] = parts + part, wholes + whole

    def report_if_due(self) -> dict[Metric, float] | None:
        """Return a report and begin the next, or None if it is too early."""
        now = time.monotonic()
        elapsed = now - self._since
        if elapsed < self._interval or (self._interval == FIRST_REPORT and not self._seconds):
            return None
        busy = self._backend.pop_device_seconds()
        for metric, seconds in busy.items():
            self.add(metric, seconds)
        if self._backend.device.type == "cpu":
            self.add(m.ACTOR_HOST, -sum(busy.values()))  # The models ran on the actor's own thread.
        report = {
            m.ACTORS_WAITING: 0.0,
            m.ACTOR_MEMORY: peak_memory(self._backend.device),
            **{metric: float(count) for metric, count in self._backend.counts.items()},
            **{metric: min(1.0, max(0.0, s / elapsed)) for metric, s in self._seconds.items()},
            **{metric: part / whole for metric, (part, whole) in self._shares.items() if whole},
        }
        if self._offload.enabled:
            moving, offloaded = self._offload.pop_metrics()
            report |= {m.ACTOR_OFFLOAD: min(1.0, moving / elapsed), m.ACTOR_OFFLOADED: float(offloaded)}
        self._seconds, self._shares = defaultdict(float), {}
        self._since, self._interval = now, REPORT_EVERY
        return report


class Actor:
    """Makes episodes until the run stops.

    With two stages, a step launches the decision of one half of the slots and collects that of the other
    half: the host works while the device does.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        starts: StartStream,
        port: ActorPort,
        receiver: Receiver,
        settings: ActorSettings,
        *,
        group_size: int,
        run_seed: int,
        startup_timeout: float = 600.0,
        hang_timeout: float = 900.0,
        offload: OffloadedTensors = NO_OFFLOAD,
    ) -> None:
        assert settings.max_decisions  # 0 was replaced by the world's own limit.
        self.name, self.backend, self.starts = name, backend, starts
        self.port, self.receiver, self.settings = port, receiver, settings
        self.group_size, self.offload = group_size, offload
        self.startup_timeout, self.hang_timeout = startup_timeout, hang_timeout
        self.slots = Slots(settings.slots, run_seed=run_seed)
        shares = split_slots(settings.slots, settings.pipeline_stages)
        self._idle_stages = deque(Stage[Any](indices=indices) for indices in shares)
        self._busy_stages: deque[Stage[Any]] = deque()  # With a decision in flight, the oldest first
        self.version = -1
        self._logged_starts: set[str] = set()
        self._memory_logged = False
        self.telemetry = ActorTelemetry(backend, offload)

    def run(self, should_leave: Callable[[], bool] = lambda: False) -> None:
        """Act until the run ends, or `should_leave`, called between decisions, returns True."""
        try:
            with process_status.waiting(waits.FIRST_WEIGHTS, self.startup_timeout):
                self.version = self.receiver.wait_for_first(self.startup_timeout)
            while not (self.port.stopped or should_leave()):
                self.step()
        except (ChannelClosed, RunStopped):
            return

    def step(self, wait: float = CREDIT_WAIT) -> bool:
        """Take weights and grants, launch an idle stage, collect the oldest launch; False if it was idle."""
        began = time.monotonic()
        set_activity("talking to the replay", self.hang_timeout)
        self.port.serve()
        self._remove_dropped()
        if (report := self.telemetry.report_if_due()) is not None:
            self.port.report(report)
        self._acquire(0.0)
        # The copy is queued on the same stream, so earlier launches still read the old weights.
        self.version = self.receiver.swap_into(
            lambda: self.offload.host_views(dict(self.backend.policy.acting_tensors()))
        )
        set_activity(f"deciding with version {self.version}", self.hang_timeout)
        launched = any(self._launch(stage) for stage in list(self._idle_stages))
        if launched:
            self.telemetry.add_share(m.LIVE_SLOTS, len(self.slots.live), len(self.slots.episodes))
        if self._busy_stages and not (launched and self._idle_stages):
            self._collect(self._busy_stages.popleft())
        elif not launched:
            self._idle(wait)
            return bool(self.slots.pending)
        self.telemetry.add(m.ACTOR_HOST, time.monotonic() - began)
        return True

    def _launch(self, stage: Stage[Any]) -> bool:
        begun = self.slots.fill(self.version, stage.indices, self.backend.is_cheapest)
        if not self.slots.live_among(stage.indices):
            self.backend.release(self.slots, stage)
            return False
        self.offload.restore()
        if begun:
            self._fail(self.backend.begin(self.slots, stage, begun))
        if live := self.slots.live_among(stage.indices):
            self._fail(self.backend.launch(self.slots, stage, live, self.version))
        if stage.in_flight:
            self._idle_stages.remove(stage)
            self._busy_stages.append(stage)
        return True

    def _collect(self, stage: Stage[Any]) -> None:
        failed, waited = self.backend.collect(self.slots, stage, self.hang_timeout)
        self.telemetry.add(m.ACTOR_HOST, -waited)
        self._idle_stages.append(stage)
        self._fail(failed)
        if not self._memory_logged:
            self._memory_logged = True
            peak = peak_memory(self.backend.device) / 2**30
            _log.info("peak memory after the first decision: %.2f GiB (actor/peak_memory)", peak)
        set_activity("handing over episodes", self.hang_timeout)
        self._push_finished(stage)

    def _push_finished(self, stage: Stage[Any]) -> None:
        for index in self.slots.live_among(stage.indices):
            episode = self.slots.episode(index)
            new = episode.decisions[episode.decisions_reported :]
            if not new:
                continue  # Its simulator has not answered.
            episode.decisions_reported = len(episode.decisions)
            steps = sum(len(row["success_scores"]) for row in new)
            end = self.backend.episode_end(episode)
            if end is None:
                self.telemetry.add_share(m.USEFUL_STEPS, steps, steps)
                continue
            finished = build_episode(
                self.slots.clear(index),
                end,
                group_size=self.group_size,
                actor=self.name,
                world_version=self.backend.world_version,
                sampling=self.backend.sampling,
            )
            useful = steps - (finished.rewards.size - finished.steps)
            self.telemetry.add_share(m.USEFUL_STEPS, useful, steps)
            self.port.push(finished)

    def _acquire(self, wait: float) -> None:
        running = [self.slots.episode(index) for index in self.slots.live]
        at_last = sum(len(episode.decisions) >= self.settings.max_decisions - 1 for episode in running)
        # Episodes at their last decision free their slots next; others may succeed before.
        while wanted := self.slots.wanted(max(len(running) // RUNNING_PER_PREFETCH, at_last)):
            grants = self.port.acquire_groups(math.ceil(wanted / self.group_size), wait)
            self._remove_dropped()  # Before a dropped number is begun again.
            if not grants:
                return
            for grant in grants:
                start = self.starts[grant.number]
                if start.name in self.port.quarantined:
                    self._report(grant, start, Failure(index=-1, cause="quarantined", reason=""), -1)
                else:
                    self.slots.add_group(grant, start, self.group_size)
            wait = 0.0

    def _remove_dropped(self) -> None:
        for number in self.port.pop_dropped():
            self.slots.remove_group(number)

    def _idle(self, wait: float) -> None:
        began = time.monotonic()
        self.offload.offload_if_idle()
        if self.slots.pending:
            with process_status.waiting(waits.NEWER_WEIGHTS):
                self.receiver.wait_newer(self.version, wait)
        else:
            with process_status.waiting(waits.CREDIT):
                self._acquire(wait)
        self.telemetry.add(m.ACTORS_WAITING, time.monotonic() - began)

    def _fail(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            episode = self.slots.episodes[failure.index]
            if episode is None:  # A sibling failed in the same step.
                continue
            plan, start = episode.plan, episode.plan.start
            self.slots.remove_group(plan.grant.number)  # It is useless without all of its episodes.
            if start.name not in self._logged_starts:
                self._logged_starts.add(start.name)
                given_up = (plan.grant.number, start.name, failure.reason)
                _log.warning("group %d is given up, start state %r: %s", *given_up, exc_info=failure.error)
            self._report(plan.grant, start, failure, plan.member)

    def _report(self, grant: GroupGrant, start: EpisodeStart, failure: Failure, member: int) -> None:
        self.port.fail(
            GroupFailure(
                number=grant.number,
                member=member,
                cause=failure.cause,
                start_state=start.name,
                reason=failure.reason,
                left=self.starts.left(self.port.quarantined),
            )
        )

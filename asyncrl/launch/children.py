"""Looks after the child processes of a rank: spawns them, respawns what dies, ends them with the run.

Also the learner's ports with that look built in, wherever they wait longer than a slice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from asyncrl.errors import AsyncRLError, ReplayError, RunError
from asyncrl.launch.supervisor import ChildState, Supervisor
from asyncrl.observability import metrics_system as m
from asyncrl.observability import waits
from asyncrl.observability.metrics import Metric
from asyncrl.observability.signals import StopFlag
from asyncrl.records import Episode
from asyncrl.replay.interface import BatchDescription, LearnerPort

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.weights.interface import Publisher, WeightSource

POLL_INTERVAL: Final = 0.05
"""Seconds between two polls."""


REPLAY = "replay"
"""Name of the child that keeps the episodes."""
ANSWER_DEADLINE = 60.0
"""Seconds a replay that died has to come back and answer."""


class ChildProcesses:
    """Children of one rank, supervised by a thread, so that they come back during long updates too."""

    def __init__(
        self,
        stop: StopFlag,
        tell: Callable[[str], None] = print,
        news: Callable[[], list[str]] = list,
        report_failure: Callable[[str], None] | None = None,
    ) -> None:
        """Begin without children.

        Args:
            report_failure: Receives, once, why a child died too often; the run's end follows from elsewhere.
                None: `poll` raises that.
        """
        self._stop, self._tell, self._news = stop, tell, news
        self._report_failure = report_failure
        self._supervisors: list[Supervisor] = []
        self._states: dict[str, ChildState] = {}
        """Name of a child -> what it is doing."""
        self._respawns_told: dict[str, int] = {}
        self._failure: RunError | None = None
        """A child died too often."""
        self._pending: list[Callable[[], Supervisor]] = []
        self._spawn_error: Exception | None = None
        self._ending = self._reported = False
        # Around everything above; held while children are spawned and polled, not while anybody waits.
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="children", daemon=True)
        self._thread.start()

    def spawn(self, make: Callable[[], Supervisor]) -> None:
        """Spawn a child, which is respawned when it dies; raises what `make` raises."""
        with self._changed:
            self._pending.append(make)
            while self._pending:  # Ended by the thread, which spawns in milliseconds or fails.
                self._changed.wait(POLL_INTERVAL)
            error, self._spawn_error = self._spawn_error, None
        if error is not None:
            raise error

    def poll(self) -> bool:
        """Tell who came back; returns whether the run shall stop. The learner's `stop_requested`."""
        if self._failure is not None:
            if self._report_failure is None:
                raise self._failure
            if not self._reported:
                self._reported = True
                self._report_failure(str(self._failure))
        for child in list(self._supervisors):
            if child.respawns > self._respawns_told.get(child.name, 0):
                self._respawns_told[child.name] = child.respawns
                self._tell(f"{child.name} died and came back (respawn {child.respawns}); see its log")
        for line in self._news():
            self._tell(line)
        return self._stop.set

    @property
    def failure(self) -> RunError | None:
        """Why a child died too often; None when none did."""
        return self._failure

    def wait_until_running(self, name: str) -> None:
        """Poll until the child `name` does not wait for its respawn; nobody waits for the others."""
        self.poll()
        with waits.waiting(waits.RESPAWN):
            while self._states.get(name) is ChildState.BACKING_OFF:
                time.sleep(POLL_INTERVAL)
                self.poll()

    def run_until_done(self, over: Callable[[], bool]) -> None:
        """Poll until all children have finished, a stop is asked for, or the run is `over` without them.

        A rank without children, whose device another one uses, stays until the run is over.
        A child that came too late to hear of the run's end would go on for ever, or die again and again.
        """
        while not (over() or self.poll()):
            states = list(self._states.values())
            if states and all(state is ChildState.FINISHED for state in states):
                return
            time.sleep(POLL_INTERVAL)

    def end(self, deadline: float) -> None:
        """Let the children end by themselves for `deadline` seconds in all, then end those that are left."""
        with self._changed:
            self._ending = True
        until = time.monotonic() + deadline
        for child in reversed(self._supervisors):
            child.wait(max(0.0, until - time.monotonic()))
            child.stop(1.0)
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(POLL_INTERVAL):
            with self._changed:
                self._spawn_pending()
                if not self._ending and self._failure is None:
                    self._poll_states()

    def _spawn_pending(self) -> None:
        for make in self._pending:
            try:
                self._supervisors.append(make())
                self._states[self._supervisors[-1].name] = ChildState.RUNNING
            except Exception as error:  # The thread's boundary: raised where it was asked for.
                self._spawn_error = error
        self._pending.clear()
        self._changed.notify_all()

    def _poll_states(self) -> None:
        for child in self._supervisors:
            try:
                self._states[child.name] = child.poll()
            except RunError as error:  # Raised where the rank polls next.
                self._failure = error
                return


class WatchedReplay:
    """`LearnerPort` that survives a replay that died while its answer is awaited."""

    def __init__(self, port: LearnerPort, children: ChildProcesses) -> None:
        self._port, self._children = port, children
        self.stopped = False

    def choose(self, *, groups: int, version: int, timeout: float) -> BatchDescription:
        """See `LearnerPort.choose`."""
        return self._port.choose(groups=groups, version=version, timeout=timeout)

    def fetch(
        self, wanted: BatchDescription, *, timeout: float, while_waiting: Callable[[], object]
    ) -> list[list[Episode]]:
        """See `LearnerPort.fetch`."""
        return self._port.fetch(wanted, timeout=timeout, while_waiting=while_waiting)

    def report_version(self, version: int) -> None:
        """See `LearnerPort.report_version`."""
        self._port.report_version(version)

    def status(self) -> dict[Metric, float]:
        """See `LearnerPort.status`."""
        until = time.monotonic() + ANSWER_DEADLINE
        with waits.waiting(waits.REPLAY_STATUS, 2 * ANSWER_DEADLINE):
            while True:
                self._children.wait_until_running(REPLAY)
                try:
                    return self._port.status()
                except ReplayError:
                    if time.monotonic() > until:
                        raise

    def stop(self) -> None:
        """See `LearnerPort.stop`."""
        if not self.stopped:
            self.stopped = True
            self._port.stop()

    def close(self) -> None:
        """See `LearnerPort.close`."""
        self._port.close()


class WatchedPublisher:
    """`Publisher` that polls the children while the first actor loads its models."""

    def __init__(self, publisher: Publisher, children: ChildProcesses) -> None:
        self._publisher, self._children = publisher, children

    def publish(self, weights: WeightSource | Mapping[str, Tensor], version: int) -> None:
        """See `Publisher.publish`."""
        self._publisher.publish(weights, version)

    def wait_for_first(self, version: int, deadline: float, actors: int = 1) -> None:
        """See `Publisher.wait_for_first`."""
        until = time.monotonic() + deadline
        with waits.waiting(waits.FIRST_ACTOR, deadline):
            while self._publisher.status()[m.WEIGHTS_MEMBERS] < actors and time.monotonic() < until:
                if self._children.poll():
                    raise KeyboardInterrupt
                time.sleep(POLL_INTERVAL)
            self._publisher.wait_for_first(version, max(1.0, until - time.monotonic()), actors)

    def status(self) -> dict[Metric, float]:
        """See `Publisher.status`."""
        return self._publisher.status()

    def close(self) -> None:
        """See `Publisher.close`."""
        self._publisher.close()


def log_errors(action: Callable[[], object], tell: Callable[[str], None]) -> None:
    """Carry out one step of the ending; its failure is told, but the other steps follow all the same."""
    try:
        action()
    except AsyncRLError as error:
        tell(f"while ending the run: {error}")

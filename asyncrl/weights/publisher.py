"""Broadcast the learner's newest weights to all live actors of its host, or to a process of each other one.

publish (learner's thread)   packs a spare buffer set and returns; waits for nobody
the publisher's thread       consumes   the newest packed version, registrations
                             produces   epochs, broadcasts
                             waits for  answers (READY_SECONDS), forming, broadcast (deadline each)
                             ended by   the members, a member's failure, its name registering again, close
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.observability import metrics_system as m
from asyncrl.observability import waits
from asyncrl.observability.metrics import Metric
from asyncrl.weights.broadcast_timings import BroadcastTimings, timings_of
from asyncrl.weights.deadlines import ABORT_SECONDS, TransportSession
from asyncrl.weights.double_buffer import DoubleBuffer, PackedVersion
from asyncrl.weights.folder_table import FolderTable
from asyncrl.weights.interface import Outlet, WeightSource, as_weight_source
from asyncrl.weights.membership import (
    IDLE_POLL_SECONDS,
    POLL_SECONDS,
    READY_SECONDS,
    SILENT_SECONDS,
    WeightGroup,
)
from asyncrl.weights.pull_server import PullServer, PullSettings
from asyncrl.weights.table import Table, TableError
from asyncrl.weights.table_entries import Member, VersionHeader
from asyncrl.weights.transports.interface import Link, SharesBuffers, Transport, build_transport

PACKING_POLL_SECONDS = 0.0005
"""Pause between two polls of whether the device has packed a version."""
CLOSE_SECONDS = 2.0
"""How long `close` waits for the members to read that the channel is closed."""
_log = logging.getLogger(__name__)


class BroadcastPublisher:
    """Publishes over a table and a transport. See `interface.Publisher`; build it with `build_publisher`."""

    def __init__(
        self,
        transport: Transport,
        table: Table,
        deadline: float,
        *serve: Callable[[DoubleBuffer], Outlet],
        silence: float = SILENT_SECONDS,
    ) -> None:
        self.endpoint = table.endpoint
        """What the actors' `build_receiver` needs."""
        self._transport, self._table, self._deadline = transport, table, deadline
        shared = transport if isinstance(transport, SharesBuffers) else None
        self._buffers = DoubleBuffer(transport.device, shared)
        self._outlets = [make(self._buffers) for make in serve]
        """Others that send what is packed here."""
        self._wake_up = table.open_wake_up()
        self._weight_group = WeightGroup(table, self._wake_up, silence)
        self._session = TransportSession(deadline, self._given_up)
        self._k = 0
        self._sent_in_epoch = -1
        self._failed_in_a_row = 0
        self._packing: PackedVersion | None = None
        """The version to send while it is not in its buffers yet."""
        # Everything below is shared between the two threads and guarded by this condition.
        self._changed = threading.Condition()
        self.sent = BroadcastTimings()
        """The last broadcast that all members took."""
        self._took: dict[str, int] = {}
        self._waiting_for = "no actor has registered"
        self._failure: Exception | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="weights publisher", daemon=True)
        self._thread.start()

    # --- the learner's thread ---

    def publish(self, weights: WeightSource | Mapping[str, Tensor], version: int) -> None:
        """Copy the weights and return at once. See `interface.Publisher.publish`."""
        self._require_alive()
        buffer_index = self._buffers.pack(as_weight_source(weights), version)
        self._wake_up.wake(self._wake_up.name)
        # Actors that copy it themselves begin meanwhile: a copy takes them longer than the sum does here.
        self._buffers.sum_up(buffer_index)

    def wait_for_first(self, version: int, deadline: float, actors: int = 1) -> None:
        """Wait until `actors` actors hold `version`. See `interface.Publisher`."""
        until = time.monotonic() + deadline
        with self._changed:
            while True:
                self._require_alive()
                held = self._took | self.members_elsewhere()
                took = sorted(name for name, newest in held.items() if newest >= version)
                if len(took) >= actors:
                    return
                refused, left = dict(self._weight_group.refused), until - time.monotonic()
                if refused or left <= 0:
                    raise self._first_missing(version, deadline, actors, took, refused)
                self._changed.wait(min(left, POLL_SECONDS))

    def status(self) -> dict[Metric, float]:
        """Return the newest metrics `weights/*`."""
        elsewhere = {metric: x for outlet in self._outlets for metric, x in outlet.status().items()}
        joined = elsewhere.get(m.WEIGHTS_JOINED, 0.0) + elsewhere.get(m.WEIGHTS_HOSTS, 0.0)
        with self._changed:
            return elsewhere | {
                m.WEIGHTS_VERSION: self._buffers.newest,
                m.WEIGHTS_BYTES: self._buffers.bytes,
                m.WEIGHTS_SECONDS: self.sent.seconds,
                m.WEIGHTS_MEMBERS: self.sent.members + joined,
            }

    @property
    def members(self) -> dict[str, int]:
        """Name of every member of the weight group -> newest version that it took; -1: none."""
        names = [member.name for member in self._weight_group.members]
        with self._changed:
            return {name: self._took.get(name, -1) for name in names}

    @property
    def pulls(self) -> PullServer | None:
        """What serves actors that join; absent when nobody can."""
        return next((outlet for outlet in self._outlets if isinstance(outlet, PullServer)), None)

    @property
    def pull_endpoint(self) -> str:
        """Where actors that join fetch the weights; empty when nobody can join."""
        return self.pulls.endpoint if self.pulls else ""

    @property
    def joined(self) -> int:
        """Actors that joined and are there, with or without a version."""
        return len(self.pulls.versions_held()) if self.pulls else 0

    def pop_events(self) -> list[str]:
        """Return and forget one line for each actor that joined or went, and each other host."""
        return [line for outlet in self._outlets for line in outlet.pop_events()]

    def close(self) -> None:
        """Tell the actors that no version will follow, and stop. See `interface.Publisher`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._wake_up.wake(self._wake_up.name)
        for outlet in self._outlets:
            outlet.close()
        self._thread.join(self._deadline + READY_SECONDS + CLOSE_SECONDS + ABORT_SECONDS)

    def members_elsewhere(self) -> dict[str, int]:
        """Name of everybody outside of the weight group, joined or another host -> version held."""
        return {name: held for outlet in self._outlets for name, held in outlet.versions_held().items()}

    def _require_alive(self) -> None:
        self.members_elsewhere()  # Raises when a thread broke down.
        if self._failure is not None:
            raise WeightSyncError(
                f"The weight publisher broke down ({self._failure}): the actors get no new versions. "
                "Restart the run with --resume."
            ) from self._failure
        if self._closing:
            raise WeightSyncError("The weight publisher was closed. Publish before closing it.")

    def _first_missing(
        self, version: int, deadline: float, actors: int, took: list[str], refused: dict[str, str]
    ) -> WeightSyncError:
        known = {member.name for member in self._weight_group.members} | set(self._took)
        late = sorted(known - set(took))
        parts = [
            f"took it: {', '.join(took) or 'nobody'}",
            f"did not: {', '.join(late) or 'nobody'}",
        ]
        parts += [f"never registered: {n}"] if (n := actors - len(known) - len(refused)) > 0 else []
        parts += [f"{name} refused it: {why}" for name, why in sorted(refused.items())]
        joined = f", or {self.pull_endpoint} if they join" if self.pulls else ""
        when = "at once" if refused else f"within {deadline:g} s"
        return WeightSyncError(
            f"Policy version {version} must reach {actors} actors at {self.endpoint}{joined}, "
            f"but {len(took)} have it {when} ({'; '.join(parts)}; publisher: {self._waiting_for}). "
            "See the logs of the actors that did not, or raise --weights.timeout."
        )

    # --- the publisher's thread ---

    def _run(self) -> None:
        try:
            while not self._closing:
                if not self._try_step():
                    self._pause()
            self._weight_group.announce_close(CLOSE_SECONDS)
        except TableError as error:
            _log.warning("The actors were not told that the run is over: %s", error)
        except Exception as error:  # the thread's boundary: the next publish raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._session.drop()
            self._wake_up.close()
            self._table.close()

    def _pause(self) -> None:
        """Wait until the next poll or until woken; after a failure, which every member tells, for longer."""
        if self._failed_in_a_row:
            with self._changed:
                if not self._closing:
                    self._changed.wait(min(1.0, POLL_SECONDS * 2**self._failed_in_a_row))
        elif self._packing is None:
            self._wake_up.wait(IDLE_POLL_SECONDS)
        else:
            until = time.monotonic() + POLL_SECONDS
            while not self._packing.complete and time.monotonic() < until:
                time.sleep(PACKING_POLL_SECONDS)

    def _try_step(self) -> bool:
        """Do a step; one that the operating system does not allow now is done again later."""
        try:
            return self._step()
        except TableError as error:
            self._note_failure(str(error))
            return False

    def _step(self) -> bool:
        """Look for new members and versions. Returns whether one was sent."""
        if (manifest := self._buffers.manifest) is None:
            return False
        if self._weight_group.epoch == 0:
            self._table.set("manifest", manifest.to_json().encode())
        self._weight_group.admit()
        if self._weight_group.changed or self._weight_group.epoch == 0:
            self._attempt("forming the weight group", self._form)
        # Only now: an offer must have ended the epoch of a failed broadcast before its buffers are reused.
        current = self._buffers.promote()
        self._packing = current if current is not None and not current.complete else None
        if current is None or self._packing or not self._session.formed or self._weight_group.changed:
            return False
        if current.version == self._sent_in_epoch:
            return False
        return self._attempt(f"sending version {current.version}", lambda: self._send(current))

    def _attempt(self, what: str, action: Callable[[], None]) -> bool:
        """Do something that dead or slow members can spoil; then the next step forms a new epoch.

        Returns:
            Whether it went well.
        """
        names = _names(self._weight_group.members)
        self._waiting_for = f"{what} (to: {names})"
        try:
            action()
        except WeightSyncError as error:
            self._note_failure(
                f"Epoch {self._weight_group.epoch} of the weight group ({names}) ended: {error}"
            )
            self._weight_group.changed = True
            self._drop_session()
            return False
        self._waiting_for = "waiting for more actors"
        return True

    def _note_failure(self, problem: str) -> None:
        level = logging.INFO if self._closing else logging.WARNING  # At the end of a run nobody waits.
        _log.log(level, "%s", problem)
        self._failed_in_a_row = min(self._failed_in_a_row + 1, 10)

    def _drop_session(self) -> None:
        try:
            self._weight_group.forget_link()
        finally:
            self._session.drop()

    def _form(self) -> None:
        """Form a new epoch of all members that are ready."""
        self._drop_session()
        weight_group, epoch = self._weight_group, self._weight_group.offer()
        self._sent_in_epoch = -1
        if not weight_group.members:
            return
        patience = min(READY_SECONDS, self._deadline)
        with waits.waiting(waits.READY, patience, f" of epoch {epoch}"):
            late = self._await_members("ready", patience)
        if late:
            weight_group.exclude(late)
            raise WeightSyncError(f"left behind, did not answer: {_names(late)}.")
        weight_group.confirm()
        size, buffer_pair = 1 + len(weight_group.offered), self._buffers.buffer_pair

        def form() -> Link:
            store = self._table.epoch_store(epoch, self._deadline)
            return self._transport.connect_root(store, size, buffer_pair)

        with waits.waiting(waits.FORMING, self._deadline, f", epoch {epoch}"):
            self._session.form("forming the weight group", form)
        self._k = 0

    def _send(self, snapshot: PackedVersion) -> None:
        """Send one version to all members and wait until they have it."""
        weight_group, times = self._weight_group, [snapshot.began, time.monotonic()]
        with self._transport.side_stream():
            checksum = self._buffers.checksum(snapshot)
        times.append(time.monotonic())
        weight_group.announce(
            self._k,
            VersionHeader(version=snapshot.version, buffer_index=snapshot.buffer_index, checksum=checksum),
        )
        times.append(time.monotonic())
        about = f" version {snapshot.version}"
        with waits.waiting(waits.BROADCAST, self._deadline, about):
            self._session.use("broadcasting" + about, lambda link: link.send(snapshot.buffer_index))
        times.append(time.monotonic())
        with waits.waiting(waits.RECEIPTS, self._deadline, about):
            late = self._await_members(f"took.{self._k}", self._deadline)
        if late:
            raise WeightSyncError(f"no receipt within {self._deadline:g} s from {_names(late)}.")
        times.append(time.monotonic())
        self._sent_in_epoch, self._failed_in_a_row = snapshot.version, 0
        with self._changed:
            self.sent = timings_of(snapshot.version, len(weight_group.offered), times)
            self._took |= {member.name: snapshot.version for member in weight_group.offered}
            self._changed.notify_all()
        weight_group.clean_up(self._k)
        if self._k == 0:
            weight_group.forget_link()  # All members used it, so all have formed it.
        self._k += 1

    def _await_members(self, what: str, seconds: float) -> list[Member]:
        """Wait for all members' answer. Returns those that are late.

        Raises:
            WeightSyncError: the epoch has no future.
        """
        until = time.monotonic() + seconds
        while late := self._weight_group.missing(what):
            if reason := self._given_up():
                raise WeightSyncError(f"the wait for {_names(late)} was given up: {reason}.")
            if time.monotonic() > until:
                break
            self._wake_up.wait(POLL_SECONDS)
        return late

    def _given_up(self) -> str:
        """Return why the current epoch has no future; empty while it has one."""
        if self._closing:
            return "the publisher is closing"
        self._weight_group.admit()
        if gone := self._weight_group.gone:
            return f"{_names(gone)} died, left or registered again"
        return self._weight_group.broken()


def build_publisher(
    transport: str,
    folder: Path,
    device: torch.device | str = "cpu",
    deadline: float = 60.0,
    pulls: PullSettings | None = None,
    more: Callable[[DoubleBuffer], Outlet] | None = None,
) -> BroadcastPublisher:
    """Open the weight channel on learner rank 0.

    Args:
        transport: What carries the weights.
        folder: Made for the channel, in a private folder of the run, which the caller removes.
        device: The learner's device, with its index when it is a GPU.
        deadline: Seconds after which an actor that does not take part is left behind.
        pulls: Where actors that join fetch the weights; None: nobody can join.
        more: Makes what else sends the versions, given where they are packed, see `between_hosts`.

    Raises:
        ConfigError: an address is not allowed or taken, or the transport needs a GPU.
        WeightSyncError: the folder cannot be made.
    """
    carrier = build_transport(transport, torch.device(device), deadline)
    table = FolderTable.make(folder)

    def serve(buffers: DoubleBuffer) -> PullServer:
        assert pulls is not None
        return PullServer(buffers, carrier.device, pulls)

    outlets = [*([serve] if pulls else []), *([more] if more else [])]
    return BroadcastPublisher(carrier, table, deadline, *outlets)


def _names(members: Iterable[Member]) -> str:
    return ", ".join(member.name for member in members) or "nobody"

"""Receive the learner's broadcasts, and swap the newest one into the policy between two decisions.

swap_into (actor's thread)   copies the newest complete version; waits for nobody
the receiver's thread        consumes   the learner's manifest, offers and broadcasts
                             produces   complete versions, in the spare buffers
                             waits for  forming and broadcast (deadline each); otherwise it polls when the
                                        learner wakes it, and every 100 ms
                             ended by   the learner, a newer offer, close
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from asyncrl.errors import WeightSyncError, first_line
from asyncrl.observability import waits
from asyncrl.weights import packing
from asyncrl.weights.deadlines import ABORT_SECONDS, TransportSession
from asyncrl.weights.membership import IDLE_POLL_SECONDS, POLL_SECONDS, Membership
from asyncrl.weights.swap_buffer import MAX_DAMAGED, BufferedReceiver
from asyncrl.weights.table import Table, TableError, TableGone
from asyncrl.weights.table_entries import LearnerProcess, VersionHeader
from asyncrl.weights.transports.interface import Link, Transport

TROUBLE_SECONDS = 1.0
"""Pause after which a table that could not be used is tried again."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


class BroadcastReceiver(BufferedReceiver):
    """Receives over a table and a transport. See `interface.Receiver`; `build_receiver` builds it."""

    def __init__(
        self,
        transport: Transport,
        table: Table,
        learner: LearnerProcess,
        name: str,
        manifest: packing.Manifest,
        deadline: float,
    ) -> None:
        super().__init__(name, table.endpoint, manifest, transport.device, deadline)
        self._transport, self._table, self._learner = transport, table, learner
        self._wake_up = table.open_wake_up()
        self._membership = Membership(table, learner, name, self._wake_up)
        self._session = TransportSession(deadline, self._given_up)
        self._epoch, self._k, self._damaged = 0, 0, 0
        self._epoch_failed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights receiver", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave the group and stop. See `interface.Receiver`."""
        self._closing.set()
        self._wake_up.wake(self._wake_up.name)
        self._thread.join(2 * ABORT_SECONDS)

    # --- the receiver's thread ---

    def _run(self) -> None:
        try:
            self._take_part()
            self._end()
        except TableGone as error:
            with self._changed:
                self._lost_since = error.since
                self._state = f"the learner at {self._endpoint} is gone ({first_line(error)})"
                self._changed.notify_all()
        except Exception as error:  # the thread's boundary: the next swap raises it
            self._fail(error)
        finally:
            self._session.drop()
            self._wake_up.close()
            self._table.close()

    def _take_part(self) -> None:
        """Serve until the learner ends the channel, or close."""
        if not self._persist(self._await_manifest):
            return
        self._persist(self._membership.register)
        while not self._persist(self._membership.is_closed):
            if self._closing.is_set():
                self._membership.leave()
                return
            if not self._persist(self._step):
                self._wake_up.wait(IDLE_POLL_SECONDS)

    def _persist(self, action: Callable[[], T]) -> T:
        """Do something again and again while the operating system does not let this process use the table."""
        told = ""
        while True:
            try:
                return action()
            except TableError as error:
                if str(error) != told:
                    told = str(error)
                    _log.warning("%s waits: %s", self._name, error)
                self._session.drop()
                self._epoch_failed = True  # Whatever was not said in it is not made up for.
                if self._closing.wait(TROUBLE_SECONDS):
                    raise

    def _await_manifest(self) -> bool:
        """Wait for the learner's manifest and compare it with ours. Returns False when closed before."""
        while (theirs := self._membership.manifest()) is None:
            if self._closing.wait(POLL_SECONDS) or self._membership.is_closed():
                return False
        try:
            self._meet_manifest(theirs)
        except WeightSyncError as error:
            self._membership.register(refused=str(error))
            raise
        self._state = "registered, waiting for a place in the weight group"
        return True

    def _meet_manifest(self, theirs: packing.Manifest) -> None:
        """Compare the learner's manifest with this receiver's.

        Raises:
            WeightSyncError: They differ.
        """
        packing.require_same(theirs, self._manifest, self._name)

    def _step(self) -> bool:
        """Look at the store once and do what it asks for. Returns whether it asked for anything."""
        offer = self._membership.offer()
        if self._membership.excluded(offer):
            _log.warning("%s was left behind in epoch %d and registers again", self._name, offer.epoch)
            self._session.drop()
            self._membership.register()
        elif offer.epoch != self._epoch and self._membership.rank(offer):
            self._session.drop()
            self._epoch, self._k, self._epoch_failed = offer.epoch, 0, False
            self._membership.ready(offer.epoch)
        elif self._membership.rank(offer) and not self._epoch_failed:
            try:
                return self._advance()
            except TableError:
                raise
            except WeightSyncError as error:
                self._session.drop()
                if self._damaged >= MAX_DAMAGED:
                    raise
                self._give_up_epoch(error)
        else:
            return False
        return True

    def _advance(self) -> bool:
        """Form the link of this epoch, or take its next version. Returns False when neither is due."""
        if not self._session.formed:
            if not self._membership.confirmed(self._epoch):
                return False
            self._form()
        elif header := self._membership.header(self._epoch, self._k):
            self._receive(header)
            self._membership.took(self._epoch, self._k)
            self._k += 1
        else:
            return False
        return True

    def _form(self) -> None:
        self._state = f"forming epoch {self._epoch} of the weight group"
        offer = self._membership.offer()
        rank, size, epoch = self._membership.rank(offer), 1 + len(offer.members), self._epoch

        def form() -> Link:
            store = self._table.epoch_store(epoch, self._deadline)
            return self._transport.connect_member(store, rank, size)

        with waits.waiting(waits.JOINING, self._deadline, f", epoch {epoch}"):
            self._session.form(self._state, form)
        self._state = f"member of epoch {self._epoch}, waiting for a version"

    def _receive(self, header: VersionHeader) -> None:
        """Take one version into the spare buffers and, when it is whole, make them the complete ones."""
        with self._transport.side_stream():
            spare = self._room()
        try:
            with waits.waiting(waits.RECEIVING, self._deadline, f": version {header.version}"):
                self._session.use(
                    f"receiving version {header.version}",
                    lambda link: link.receive(header.buffer_index, spare),
                )
        except WeightSyncError:
            # An abandoned broadcast may still write into these buffers.
            self._spare = None
            raise
        # The learner reuses its buffers only after our receipt or after a newer offer.
        if reason := self._given_up():
            raise WeightSyncError(f"Version {header.version} came too late: {reason}.")
        self._require_whole(header, spare)
        self._accept(header.version)

    def _require_whole(self, header: VersionHeader, buffers: packing.Buffers) -> None:
        with self._transport.side_stream():
            found = packing.checksum(buffers)
        if found == header.checksum:
            self._damaged = 0
            return
        self._damaged += 1
        raise WeightSyncError(
            f"{self._name} received version {header.version} with checksum {found:x}, expected "
            f"{header.checksum:x}. The transport damages weights: choose another --weights.transport."
        )

    def _given_up(self) -> str:
        if self._closing.is_set():
            return f"{self._name} is closing"
        return self._membership.superseded(self._epoch)

    def _give_up_epoch(self, error: WeightSyncError) -> None:
        """Tell the learner, unless it knows, and sit still until its next offer."""
        self._epoch_failed = True
        if not self._given_up():
            _log.warning("%s gives up epoch %d of the weight group: %s", self._name, self._epoch, error)
            self._membership.report_failure(self._epoch, str(error))

"""Publish the learner's newest weights to all receivers; form the weight group of its members as needed.

`publish` packs a spare buffer set and returns. The publisher's thread serves the socket and drives:

    idle      a member registered, left, died or failed       -> drop the link; send `group` to all: ready
    ready     all members answered within READY_SECONDS       -> send `form`: forming
              else without the late ones                      -> idle
    forming   the transport linked all members                -> linked
    linked    a version was packed                            -> send `send`, broadcast: receipts
    receipts  all members answered                            -> linked; the previous set may be packed again
    any       deadline, failure or death of a member          -> idle, after a pause that grows

An epoch is one passage from idle to idle. A version is promoted only when no peer may still read the buffers
that it replaces: `_send` returns after all receipts, `_begin_epoch` comes first, pullers hold theirs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from asyncrl.errors import AsyncRLError, ConfigError, WeightSyncError
from asyncrl.observability import metrics_system as m
from asyncrl.observability import process_status, waits
from asyncrl.observability.metrics import Metric
from asyncrl.weights import interface, packing
from asyncrl.weights.interface import POLL_SECONDS, Link, Publisher, TransportSession
from asyncrl.weights.packing import DoubleBuffer, PackedVersion, WeightSource, WholeTensors
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.weight_server import GOODBYE, ServerSettings, Subscriber, WeightServer

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

RELAY_POLL: Final = 0.5  # Seconds between two checks of a relay for the run's end
IDLE_SECONDS = 0.1  # Longest wait for messages and versions
PACKING_POLL_SECONDS = 0.0005  # Seconds between two polls of the device's packing
READY_SECONDS = 2.0  # Longest wait for the members' answer to group
SERVED: Final = 2  # Making the group again lets newcomers wait so many times as long: the others are served
_log = logging.getLogger(__name__)


class BroadcastPublisher(Publisher):
    """Publishes over a socket in a private folder, and a transport."""

    def __init__(
        self,
        transport: str,
        path: Path,
        device: torch.device | str = "cpu",
        deadline: float = 60.0,
        settings: ServerSettings = ServerSettings(),  # noqa: B008 - it is frozen
    ) -> None:
        self._transport = interface.build_transport(transport, torch.device(device), deadline)
        self._path, self._deadline = path, deadline
        self._buffers = DoubleBuffer(self._transport.device, getattr(self._transport, "allocate", None))
        self._stores: TCPStore | None = None
        self._store_prefix = ""
        if settings.store_address:
            self._stores, where = _serve_stores(settings.store_address)
            self._store_prefix = f"{where}/{settings.identity.mark}"
        self.server = WeightServer(path, self._buffers, settings)
        self.endpoint = self.server.endpoint
        self.pull_endpoint = self.server.pull_endpoint  # For receivers elsewhere.
        self._session = TransportSession(deadline, self._given_up, self.server.turn, self.server.wake)
        self._epoch, self._epoch_failed = 0, False
        self._members: list[Subscriber] = []  # Of this epoch.
        self._sent_in_epoch = -1
        self._first, self._disturbed, self._newcomers_from = -1, 0.0, 0.0
        self._failed_in_a_row = 0
        self._sent_seconds, self._sent_members, self._sent_hosts = 0.0, 0, 0  # Of the last broadcast
        self._waiting_for = "no actor has registered"
        self._failure: Exception | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="weights publisher", daemon=True)
        self._thread.start()

    # --- the learner's thread ---

    def publish(self, weights: WeightSource, version: int) -> None:
        """Copy the weights and return at once."""
        self._require_alive()
        self._buffers.pack(weights, version)
        self.server.wake()

    def wait_for_first(
        self, version: int, timeout: float, stop_requested: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until an actor holds `version`, or a stop is requested."""
        until = time.monotonic() + timeout
        with process_status.waiting(waits.FIRST_ACTOR, timeout):
            while not stop_requested():
                self._require_alive()
                with self.server.changed:
                    held = self.versions_held()
                    if max(held.values(), default=-1) >= version:
                        return
                    if (left := until - time.monotonic()) <= 0:
                        raise self._first_missing(version, timeout, held)
                    self.server.changed.wait(min(left, POLL_SECONDS))

    def versions_held(self) -> dict[str, int]:
        """Return the version of each registered receiver by name; -1 before the first."""
        with self.server.changed:
            return {each.name: each.held for each in self.server.subscribers.values()}

    def status(self) -> dict[Metric, float]:
        """Return the newest metrics `weights/*`."""
        with self.server.changed:
            subscribers = list(self.server.subscribers.values())
            seconds, members, hosts = self._sent_seconds, self._sent_members, self._sent_hosts
        pullers = [each for each in subscribers if not each.member and each.held >= 0]
        return {
            m.WEIGHTS_VERSION: self._buffers.newest,
            m.WEIGHTS_BYTES: sum(buffer.nbytes for buffer in self._buffers.buffer_pair[0]),
            m.WEIGHTS_SECONDS: seconds,
            m.WEIGHTS_MEMBERS: members + len(pullers),
            m.WEIGHTS_JOINED: len(pullers),
            m.WEIGHTS_PULL_SECONDS: max((each.seconds for each in pullers), default=0.0),
            m.WEIGHTS_PULLED_BYTES: self.server.sent_bytes,
        } | ({m.WEIGHTS_HOSTS: float(hosts), m.WEIGHTS_HOSTS_SECONDS: seconds} if self._stores else {})

    @property
    def joined(self) -> int:
        """Number of receivers that pull, with or without a version."""
        with self.server.changed:
            return sum(not each.member for each in self.server.subscribers.values())

    def close(self) -> None:
        """Announce that no version will follow, and stop."""
        self._closing = True
        self.server.wake()
        self._thread.join(self._deadline + READY_SECONDS + GOODBYE + interface.ABORT_SECONDS)

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise WeightSyncError(
                f"The weight publisher broke down ({self._failure}): the actors get no new versions. "
                "Restart the run with --resume."
            ) from self._failure
        if self._closing:
            raise WeightSyncError("The weight publisher was closed. Publish before closing it.")

    def _first_missing(self, version: int, timeout: float, registered: Iterable[str]) -> WeightSyncError:
        parts = [f"registered: {', '.join(sorted(registered)) or 'none'}"]
        parts += [f"{name} left: {why}" for name, why in sorted(self.server.failed.items())]
        elsewhere = f", or {self.pull_endpoint} if they join" if self.pull_endpoint != self.endpoint else ""
        return WeightSyncError(
            f"Policy version {version} must reach an actor at {self.endpoint}{elsewhere}, but none has it "
            f"within {timeout:g} s ({'; '.join(parts)}; publisher: {self._waiting_for}). See the actors' "
            "logs, or raise --weights.timeout."
        )

    # --- the publisher's thread ---

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._step()
                except WeightSyncError as error:  # Dead or slow members spoil an epoch at most.
                    self._give_up_epoch(error)
        except Exception as error:  # the thread's boundary: the next publish raises it
            with self.server.changed:
                self._failure = error
                self.server.changed.notify_all()
        finally:
            self._drop_link()
            self.server.close()
            self._stores = None

    def _step(self) -> None:
        changed = self._epoch_failed or self._next_members() != self._members
        if self._buffers.manifest is not None and changed:
            self._begin_epoch()
        # Only now: a new epoch must have ended the one of a failed broadcast before its buffers are reused.
        current = self._buffers.promote()
        if self._members and not self._session.formed:
            self._form()
        if current is None or not self._session.formed or current.version == self._sent_in_epoch:
            self.server.turn(IDLE_SECONDS)
        elif current.complete:
            self._send(current)
        else:
            time.sleep(PACKING_POLL_SECONDS)  # Less than the milliseconds in which a socket's wait counts.
            self.server.turn(0.0)

    def _next_members(self) -> list[Subscriber]:
        # Newcomers wait after a failure, and longer than making the last epoch kept the others waiting.
        there = self.server.members()
        stay = [x for x in there if x.held >= 0 or (x in self._members and not self._epoch_failed)]
        early = self._epoch_failed or self._sent_in_epoch < 0 or time.monotonic() < self._newcomers_from
        return stay if stay and early else there

    def _begin_epoch(self) -> None:
        if not self._members or (self._sent_in_epoch >= 0 and not self._epoch_failed):
            self._disturbed = time.monotonic()
        self._drop_link()
        self._members, self._sent_in_epoch = self._next_members(), -1
        self._epoch, self._epoch_failed = self._epoch + 1, False
        self.server.begin_epoch(self._epoch)
        if not self._members:
            self._failed_in_a_row = 0

    def _give_up_epoch(self, error: WeightSyncError) -> None:
        level = logging.INFO if self._closing else logging.WARNING
        _log.log(level, "Epoch %d (%s) ended: %s", self._epoch, _names(self._members), error)
        self._failed_in_a_row = min(self._failed_in_a_row + 1, 10)
        self._epoch_failed = True
        self._drop_link()
        until = time.monotonic() + min(1.0, POLL_SECONDS * 2**self._failed_in_a_row)
        while time.monotonic() < until and not self._closing:
            self.server.turn(POLL_SECONDS)

    def _drop_link(self) -> None:
        self._forget_store()
        self._session.drop()

    def _forget_store(self) -> None:
        # While it is there, torch's destructor of the store writes into it, which a full disk makes fatal.
        self._store_file.unlink(missing_ok=True)

    @property
    def _store_file(self) -> Path:
        return self._path.with_name(f"{self._path.name}.{self._epoch}")

    def _form(self) -> None:
        epoch, members = self._epoch, self._members
        patience = min(READY_SECONDS, self._deadline)
        self._waiting_for = f"forming the weight group (to: {_names(members)})"
        with process_status.waiting(waits.READY, patience, f" of epoch {epoch}"):
            late = self._await_answers(-1, patience)
        if late:
            raise WeightSyncError(f"left behind, did not answer: {_names(late)}.")
        prefix, size = self._store_prefix, 1 + len(members)
        store = f"{prefix}/{epoch}" if prefix else f"file://{self._store_file}"
        for rank, member in enumerate(members, start=1):
            self.server.send(member.peer, "form", epoch=epoch, rank=rank, size=size, store=store)

        def form() -> Link:
            opened, pair = interface.open_store(store, self._deadline), self._buffers.buffer_pair
            return self._transport.connect_root(opened, size, pair)

        with process_status.waiting(waits.FORMING, self._deadline, f", epoch {epoch}"):
            self._session.form("forming the weight group", form)

    def _send(self, snapshot: PackedVersion) -> None:
        version, index = snapshot.version, snapshot.buffer_index
        self._waiting_for = f"sending version {version} (to: {_names(self._members)})"
        with self._transport.side_stream():
            checksum = packing.checksum(self._buffers.buffer_pair[index])
        began = time.monotonic()
        if self._sent_in_epoch >= 0:
            self._disturbed = began
        header: dict[str, Any] = {"version": version, "buffer_index": index, "checksum": checksum}
        for member in self._members:
            self.server.send(member.peer, "send", epoch=self._epoch, **header)
        about = f" version {version}"
        with process_status.waiting(waits.BROADCAST, self._deadline, about):
            self._session.use("broadcasting" + about, lambda link: link.send(index))
        with process_status.waiting(waits.RECEIPTS, self._deadline, about):
            late = self._await_answers(version, self._deadline)
        if late:
            raise WeightSyncError(f"no receipt within {self._deadline:g} s from {_names(late)}.")
        ended = time.monotonic()
        seconds = ended - began
        self._first = version if self._first < 0 else self._first
        if self._sent_in_epoch < 0 and version != self._first:  # Not while a run's actors start.
            self._newcomers_from = max(ended, self._newcomers_from) + SERVED * (ended - self._disturbed)
        self._forget_store()  # All members used it, so all have formed it.
        self._sent_in_epoch, self._failed_in_a_row = version, 0
        self._waiting_for = "waiting for more actors"
        hosts = sum(not member.started for member in self._members)
        with self.server.changed:
            self._sent_seconds, self._sent_members, self._sent_hosts = seconds, len(self._members), hosts
            for member in self._members:
                member.held = version
            self.server.changed.notify_all()

    def _await_answers(self, version: int, seconds: float) -> list[Subscriber]:
        # About `version`; -1: the epoch. Late ones are left behind.
        until, expected = time.monotonic() + seconds, (self._epoch, version, "")
        while late := [member for member in self._members if member.answer != expected]:
            if reason := self._given_up():
                raise WeightSyncError(f"the wait for {_names(late)} was given up: {reason}.")
            if time.monotonic() > until:
                break
            self.server.turn(POLL_SECONDS)
        with self.server.changed:
            for member in late:
                self.server.leave_behind(member)
        return late

    def _given_up(self) -> str:
        # Why the current epoch has no future; empty while it has one.
        if self._closing:
            return "the publisher is closing"
        there = self.server.members()
        if gone := [member for member in self._members if member not in there]:
            return f"{_names(gone)} died or left"
        problems = (
            f"{x.name}: {x.answer[2]}" for x in self._members if x.answer[0] == self._epoch and x.answer[2]
        )
        return next(problems, "")


class Relay:
    """Relays versions to the actors of another host: once over the network, then through memory.

    Publishes the versions of a receiver that was built without tensors, and closes both.
    """

    def __init__(self, receiver: WeightReceiver, publisher: Publisher) -> None:
        self._receiver, self._publisher = receiver, publisher
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Announce that no version will follow, and stop. May be called twice."""
        self._closing.set()
        self._thread.join()
        self._receiver.close()
        self._publisher.close()

    def _run(self) -> None:
        version = -1
        try:
            while not (self._closing.is_set() or self._receiver.ended):
                self._receiver.wait_newer(version, RELAY_POLL)
                self._receiver.require_alive()
                version = self._receiver.hand_on(
                    version, lambda tensors, number: self._publisher.publish(WholeTensors(tensors), number)
                )
        except AsyncRLError as error:
            _log.warning("The actors of this host get no new weights: %s", error)
        except Exception:  # the thread's boundary: its actors end as those of a learner that is gone
            _log.exception("The actors of this host get no new weights")
        self._publisher.close()


def _serve_stores(address: str) -> tuple[TCPStore, str]:
    import socket

    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    try:
        listener = socket.create_server((address, 0), backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"--weights.between-hosts: the learner cannot listen at {address} ({error.strerror}), where "
            "hosts set up broadcasts. Use --weights.between-hosts tcp."
        ) from None
    port, more = int(listener.getsockname()[1]), {"is_master": True, "wait_for_workers": False}
    store = TCPStore(
        address, port, timeout=timedelta(seconds=5.0), master_listen_fd=listener.detach(), **more
    )
    return store, f"tcp://{address}:{port}"


def _names(members: Iterable[Subscriber]) -> str:
    return ", ".join(member.name for member in members) or "no member"

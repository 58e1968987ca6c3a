"""Receive the learner's versions, and swap the newest one into the policy between two decisions.

The receiver's thread handles the messages of the learner's socket (`weight_server`), also while it forms a
link, receives or fetches: a newer epoch or the end of the run interrupts these.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import zmq
from torch import Tensor

from asyncrl.errors import AttemptEnded, WeightSyncError, WireError
from asyncrl.messaging.framing import FramedMessage
from asyncrl.messaging.keys import ClientKeys
from asyncrl.messaging.sockets import LEAVE_SECONDS, LINGER_MS, Handshakes, WakeableSocket, open_dealer
from asyncrl.messaging.weight_messages import CHUNK, decode, encode
from asyncrl.observability import process_status, waits
from asyncrl.storage.run_owner import NO_RUN, RunIdentity
from asyncrl.weights import interface, packing
from asyncrl.weights.interface import (
    ABORT_SECONDS,
    PULL,
    ChannelClosed,
    Link,
    Named,
    Receiver,
    TransportSession,
)

IN_FLIGHT: Final = 8  # Pieces requested at the same time, at most
HEARTBEAT: Final = 0.5  # Seconds between two questions for a newer version
ASK_AGAIN: Final = 10.0  # Seconds without a piece until all are requested again
MAX_DAMAGED: Final = 3  # Damaged messages or versions in a row after which a receiver gives up
CLOSE_SECONDS: Final = 2 * ABORT_SECONDS  # Longest wait of close
MAX_REASON: Final = 2000  # Letters of a reason that is sent
_SLICE: Final = 0.1
_log = logging.getLogger(__name__)

Piece = tuple[int, int, int]  # Buffer, first byte and number of bytes


@dataclass
class _Set:
    buffers: packing.Buffers
    views: dict[str, Tensor]
    read: torch.cuda.Event | None = None
    """End of the last swap from this set; None on the CPU, and before the first."""


class _Closing(Exception): ...


class WeightReceiver(Receiver):
    """Receives over the learner's socket: by a transport, as a member of the weight group, or by pulling."""

    def __init__(
        self,
        transport: str,
        endpoint: str,
        name: str,
        tensors: Mapping[str, Tensor] | None,
        device: torch.device | str = "cpu",
        deadline: float = 60.0,
        security: ClientKeys | None = None,
        identity: RunIdentity = NO_RUN,
    ) -> None:
        """Join the channel; versions must have the shapes and dtypes of `tensors` (None: any)."""
        manifest, own = None if tensors is None else packing.build_manifest(tensors), torch.device(device)
        self._transport = None if transport == PULL else interface.build_transport(transport, own, deadline)
        buffers_on = self._transport.device if self._transport else torch.device("cpu")
        self._name, self._endpoint, self._manifest = name, endpoint, manifest
        self._device, self._deadline = buffers_on, deadline
        self._spare: _Set | None = None  # Destination of the next version, made when it comes
        self._complete: _Set | None = None  # The newest complete version
        # The next six are shared between the two threads and guarded by this condition.
        self._changed = threading.Condition()
        self._version, self._held = -1, -1
        self._state = f"waiting for the learner at {endpoint} to publish its first version"
        self._failure: Exception | None = None
        self.ended = False
        """True after the learner announced that no version will follow."""
        pid = os.getpid() if self._transport and endpoint.startswith("ipc") else 0
        self._greeting: dict[str, Any] = {
            "name": name,
            "member": int(self._transport is not None),
            "pid": pid,
            "started": process_status.started(pid) if pid else 0,
            "secret": identity.secret,
            "attempt": identity.attempt,
            "manifest": manifest.checksum if manifest else 0,
        }
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            routing_id = f"weights-{os.urandom(8).hex()}".encode()
            self._socket = open_dealer(self._context, endpoint, routing_id, security)
            self._handshakes = Handshakes(self._socket, endpoint, "server of weights")
            self._socket.connect(endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wakeable = WakeableSocket(self._socket)
        self._session = TransportSession(deadline, self._given_up, self._listen, self._wakeable.wake)
        self._inbox: deque[FramedMessage] = deque()
        self._asked_at, self._silent, self._listened_at = -math.inf, 0.0, time.monotonic()
        self._epoch, self._damaged = 0, 0  # Epoch 0: none, or it failed
        self._heard, self._closing = False, threading.Event()  # Whether the learner ever answered
        self._thread = threading.Thread(target=self._run, name="weights receiver", daemon=True)
        self._thread.start()

    def wait_for_first(self, deadline: float) -> int:
        """Wait for the first complete version."""
        until = time.monotonic() + deadline
        with self._changed:
            while self._version < 0:
                self.require_alive()
                if self.ended:
                    raise ChannelClosed(f"The learner ended the run before {self._name} had weights.")
                left = until - time.monotonic()
                if left <= 0:
                    raise WeightSyncError(
                        f"{self._name} waited for its first weights, at most {deadline:g} s, and has none: "
                        f"{self._state}. See the learner's log."
                    )
                self._changed.wait(left)
            return self._version

    def swap_into(self, tensors: Named) -> int:
        """Copy the newest complete version into tensors that hold an older one."""
        self.require_alive()
        if self._version <= self._held:
            return self._held
        assert self._manifest is not None  # Of a receiver that adopts one, versions are handed on.
        tensors = tensors() if callable(tensors) else tensors
        packing.require_same(self._manifest, packing.build_manifest(tensors), f"{self._name}'s swap")
        with self._changed:
            complete = self._complete
            assert complete is not None  # There is a version.
            packing.fill(tensors, complete.views)
            if self._device.type == "cuda":
                # `_spare_buffers` waits for this event before the next version is received into them.
                complete.read = torch.cuda.Event()
                complete.read.record(torch.cuda.current_stream(self._device))
            self._held = self._version
        return self._held

    def wait_newer(self, version: int, wait: float) -> None:
        """Wait until there is a newer version."""
        with self._changed:
            if self._version <= version:
                self._changed.wait(wait)

    def hand_on(self, version: int, action: Callable[[Mapping[str, Tensor], int], object]) -> int:
        """Call `action` with the newest complete version if it is newer than `version`; return its number."""
        with self._changed:
            if self._version > version:
                assert self._complete is not None  # It holds the version.
                action(self._complete.views, self._version)
                version = self._version
        return version

    def require_alive(self) -> None:
        """Raise the receiver's failure, after which no version comes."""
        if isinstance(self._failure, AttemptEnded):
            raise self._failure
        if self._failure is not None:
            raise WeightSyncError(str(self._failure)) from self._failure

    def close(self) -> None:
        """Leave and stop."""
        self._closing.set()
        self._wakeable.wake()
        self._thread.join(CLOSE_SECONDS)

    # --- the receiver's thread ---

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            while True:
                self._ask_newest()
                self._listen(_SLICE)
                while self._inbox:
                    self._handle(self._inbox.popleft())
        except _Closing:
            pass
        except Exception as error:  # the thread's boundary: the actor's next swap raises it
            failure = error
        try:
            self._leave(str(failure or "")[:MAX_REASON])
        finally:
            self._finish(failure)
            self._session.drop()
            self._socket.disable_monitor()
            self._context.destroy(LINGER_MS)

    def _leave(self, reason: str) -> None:
        # A connection that ends at once takes the messages with it that a busy learner has not read.
        until = time.monotonic() + (LEAVE_SECONDS if self._closing.is_set() and self._heard else 0.0)
        while not self._send("leave", reason=reason) and (left := until - time.monotonic()) > 0:
            self._socket.poll(int(1000 * left), zmq.POLLOUT)
        while (left := until - time.monotonic()) > 0 and self._socket.poll(int(1000 * left)):
            with contextlib.suppress(WireError):
                if decode(self._socket.recv_multipart()).kind == "closed":
                    return

    def _handle(self, message: FramedMessage) -> None:
        if message.kind == "layout":
            learner = packing.Manifest.from_json(bytes(message.payload))
            if self._manifest is None:
                self._manifest, self._greeting["manifest"] = learner, learner.checksum
            packing.require_same(learner, self._manifest, self._name)
        elif message.kind == "offer":
            self._fetch_offered(message["version"], message["checksum"])
            self._asked_at = -math.inf
        elif message.kind == "group":
            self._session.drop()
            self._epoch = message["epoch"]
            self._answer(-1)
        elif message.kind in ("form", "send") and message["epoch"] == self._epoch:
            try:
                self._form(message) if message.kind == "form" else self._receive(message)
            except WeightSyncError as error:
                self._session.drop()
                if self._damaged >= MAX_DAMAGED:
                    raise
                if not self._given_up():  # Otherwise the learner knows.
                    _log.warning(
                        "%s gives up epoch %d of the weight group: %s", self._name, self._epoch, error
                    )
                    self._answer(-1, str(error)[:MAX_REASON])
                self._epoch = 0

    # messages

    def _ask_newest(self) -> None:
        now = time.monotonic()
        if now - self._asked_at >= HEARTBEAT and self._send("newest", held=self._version, **self._greeting):
            self._asked_at = now

    def _send(self, kind: str, **fields: Any) -> bool:
        try:
            self._socket.send_multipart(encode(kind, **fields), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _answer(self, version: int, problem: str = "") -> None:
        self._send("answer", epoch=self._epoch, version=version, problem=problem)

    def _listen(self, seconds: float) -> None:
        if self._closing.is_set():
            raise _Closing
        came = self._wakeable.wait(seconds)
        self._handshakes.check()
        now = time.monotonic()
        # Not the clock's time alone: this process may have been stopped.
        self._silent = 0.0 if came else self._silent + min(now - self._listened_at, 2 * _SLICE)
        self._listened_at = now
        if self._silent > self._deadline:
            raise WeightSyncError(
                f"{self._name} had no answer from the learner at {self._endpoint} for {self._deadline:g} s "
                f"(--weights.timeout) and still acts with version {self._version}. The learner ended, or the "
                "network is down: see its log."
            )
        while came:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                message = decode([frame.buffer for frame in frames])
            except zmq.Again:
                return
            except WireError as error:
                self._record_damage(str(error))
                continue
            self._heard = True
            if message.kind == "closed":
                raise _Closing
            if message.kind == "ended":
                raise AttemptEnded(f"the learner at {self._endpoint}", message["attempt"])
            if message.kind == "refused":
                raise WeightSyncError(f"The learner at {self._endpoint} refused: {message['reason']}")
            if message.kind != "unchanged":
                self._inbox.append(message)

    def _record_damage(self, what: str) -> None:
        self._damaged += 1
        _log.warning("%s received damaged weights: %s", self._name, what)
        if self._damaged >= MAX_DAMAGED:
            raise WeightSyncError(
                f"{self._name} received damaged weights from {self._endpoint} {MAX_DAMAGED} times: {what} "
                "The network changes what it carries, or both sides do not run the same asyncrl."
            )

    # pull

    def _fetch_offered(self, version: int, checksum: int) -> None:
        if version <= self._version:
            return
        self._state = f"fetching version {version} from {self._endpoint}"
        if not self._fetch(version):
            return
        found = packing.checksum(self._spare_buffers())
        if found == checksum:
            self._damaged = 0
            self._accept(version)
        else:
            self._record_damage(f"version {version} has checksum {found:x}, expected {checksum:x}.")

    def _fetch(self, version: int) -> bool:
        """Fetch a version into the spare buffers; False if a newer one has replaced it."""
        into = [packing.as_bytes(buffer).numpy().data for buffer in self._spare_buffers()]
        missing = [
            (number, offset, min(CHUNK, len(view) - offset))
            for number, view in reversed(list(enumerate(into)))
            for offset in reversed(range(0, len(view), CHUNK))
        ]
        asked: dict[Piece, None] = {}
        quiet_since, damaged = time.monotonic(), self._damaged
        while missing or asked:
            while missing and len(asked) < IN_FLIGHT and self._request_piece(version, missing[-1]):
                asked[missing.pop()] = None
            self._listen(_SLICE)
            if not self._inbox and (time.monotonic() - quiet_since >= ASK_AGAIN or self._damaged > damaged):
                missing += asked
                asked, quiet_since, damaged = {}, time.monotonic(), self._damaged
            while self._inbox:
                quiet_since, message = time.monotonic(), self._inbox.popleft()
                if message.kind == "gone" and message["version"] == version:
                    return False
                if message.kind != "chunk" or message["version"] != version:
                    continue
                piece = (message["buffer"], message["offset"], len(message.payload))
                if piece in asked:  # Otherwise it was asked for, and came, twice.
                    del asked[piece]
                    into[piece[0]][piece[1] : piece[1] + piece[2]] = message.payload
        return True

    def _request_piece(self, version: int, piece: Piece) -> bool:
        buffer, offset, length = piece
        return self._send("bytes", version=version, buffer=buffer, offset=offset, length=length)

    # member of the weight group

    def _form(self, message: FramedMessage) -> None:
        epoch, rank, size, where = (message[name] for name in ("epoch", "rank", "size", "store"))
        transport = self._transport
        assert transport is not None  # The learner sends this to members only.
        self._state = f"forming epoch {epoch} of the weight group"

        def form() -> Link:
            return transport.connect_member(interface.open_store(where, self._deadline), rank, size)

        with process_status.waiting(waits.JOINING, self._deadline, f", epoch {epoch}"):
            self._session.form(self._state, form)
        self._state = f"member of epoch {epoch}, waiting for a version"

    def _receive(self, message: FramedMessage) -> None:
        version, index, transport = message["version"], message["buffer_index"], self._transport
        assert transport is not None
        assert self._session.formed  # `form` precedes `send`.
        with transport.side_stream():
            spare = self._spare_buffers()
        try:
            with process_status.waiting(waits.RECEIVING, self._deadline, f": version {version}"):
                self._session.use(f"receiving version {version}", lambda link: link.receive(index, spare))
        except BaseException:
            self._spare = None  # An abandoned broadcast may still write into these buffers.
            raise
        with transport.side_stream():
            found = packing.checksum(spare)
        # The learner reuses its buffers only after our receipt or after a newer `group`.
        if reason := self._given_up():
            raise WeightSyncError(f"Version {version} came too late: {reason}.")
        if found != message["checksum"]:
            self._damaged += 1
            raise WeightSyncError(
                f"{self._name} received version {version} with checksum {found:x}, expected "
                f"{message['checksum']:x}. The transport damages weights: choose another --weights.transport."
            )
        self._damaged = 0
        self._accept(version)
        self._answer(version)

    def _given_up(self) -> str:
        # Why work for this epoch is in vain; empty if it is not.
        self._listen(0.0)
        self._ask_newest()
        newest = max((x["epoch"] for x in self._inbox if x.kind == "group"), default=self._epoch)
        return f"the learner went on to epoch {newest}" if newest != self._epoch else ""

    # its buffers

    def _spare_buffers(self) -> packing.Buffers:
        if self._spare is None:
            assert self._manifest is not None
            buffers = packing.allocate(self._manifest, self._device)
            self._spare = _Set(buffers=buffers, views=packing.views_in(self._manifest, buffers))
        if self._spare.read is not None:
            torch.cuda.current_stream(self._device).wait_event(self._spare.read)
        return self._spare.buffers

    def _accept(self, version: int) -> None:
        # The spare buffers, which hold `version`, become the complete ones, unless it is not newer.
        with self._changed:
            if version > self._version:
                assert self._spare is not None  # It holds the version.
                self._spare, self._complete = self._complete, self._spare
                self._version = version
                self._changed.notify_all()

    def _finish(self, failure: Exception | None) -> None:
        with self._changed:
            self._failure, self.ended = failure, failure is None
            self._changed.notify_all()

"""The learner's authenticated socket: registrations, offers, receipts, and pieces of versions.

Members take part in the weight group (`publisher`); pullers are offered each version and fetch its pieces.
The publisher's thread owns all state; others read it under `changed`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import zmq

from asyncrl.errors import WireError
from asyncrl.messaging.framing import Buffer, FramedMessage
from asyncrl.messaging.keys import ServerKeys, admitting
from asyncrl.messaging.sockets import (
    LINGER_MS,
    ConnectionGuard,
    WakeableSocket,
    bind,
    bind_again,
    bind_router,
)
from asyncrl.messaging.weight_messages import CHUNK, MAX_PAYLOAD, decode, encode
from asyncrl.observability import process_status, waits
from asyncrl.storage.run_owner import NO_RUN, RunIdentity
from asyncrl.weights import packing
from asyncrl.weights.packing import DoubleBuffer

GOODBYE: Final = 2.0  # Seconds for receivers to read that the channel is closed
LAST_CALL: Final = 0.2  # The same without any receiver, for those that are just connecting
STOPPED_SECONDS: Final = 2.0  # A member halted for so long is left behind; a profiler halts one for less
MOST_LETTERS: Final = 100  # Longest name of an actor
LEFT_BEHIND: Final = "was left behind: it did not answer"
MOST_COPIES: Final = 4
"""Host copies kept at most. Beyond that the oldest is freed, and its readers begin again with the newest."""
_TAKEN: Final = ("newest", "bytes", "answer", "leave")
_CHECK_SECONDS: Final = 0.02
_AT_ONCE: Final = 64
_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Subscriber:
    """One registered receiver."""

    peer: bytes
    name: str
    member: int  # 1 if it takes part in the weight group; 0 if it pulls
    pid: int
    started: int  # process_status.started of a member on this host; 0 elsewhere, where silence decides
    manifest: int  # CRC-32 of the manifest that it has or was sent
    heard: float
    held: int = -1
    reading: int = -1  # Version that a puller was offered and has not asked after; -1: none
    offered_at: float = 0.0
    seconds: float = 0.0  # From a puller's last offer to its next question
    answer: tuple[int, int, str] = (0, -1, "")  # Epoch, version received, problem: a member's last answer
    behind: bool = False  # Left out of the group until it is heard again
    stopped_since: float | None = None


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Endpoint and identity of the socket."""

    listen: str = ""  # Second endpoint, for receivers elsewhere; port 0: any. Empty: none.
    security: ServerKeys | None = None  # Keys and allow-list; None if only this user reaches the endpoints
    silence: float = 30.0  # Seconds of silence after which a receiver elsewhere counts as gone
    identity: RunIdentity = NO_RUN
    store_address: str = ""  # IPv4 address for a TCPStore of remote links; empty: files


class WeightServer:
    """The socket and its receivers. Used by the publisher's thread, except `wake` and `pop_events`."""

    def __init__(self, path: Path, buffers: DoubleBuffer, settings: ServerSettings) -> None:
        self._buffers, self._settings = buffers, settings
        # Guards `subscribers` and `failed`; notified after every turn in which something happened.
        self.changed = threading.Condition()
        self.subscribers: dict[bytes, Subscriber] = {}
        self.failed: dict[str, str] = {}  # Name of a receiver that left after a failure -> its error
        self.sent_bytes = 0
        self.closing = False
        self._events: deque[str] = deque(maxlen=1000)
        self._checked_at = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._opened = ExitStack()
        self._opened.callback(self._context.destroy, LINGER_MS)
        try:
            self.endpoint = f"ipc://{path}"
            self._opened.enter_context(admitting(self._context, settings.security))
            self._socket = bind_router(self._context, self.endpoint, settings.security)
            self._guard = self._opened.enter_context(closing(ConnectionGuard(self._socket)))
            self.pull_endpoint = self.endpoint  # For receivers elsewhere.
            if settings.listen:
                bind(self._socket, settings.listen, settings.security)
                self.pull_endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # pyright: ignore[reportAttributeAccessIssue]
        except BaseException:
            self._opened.close()
            raise
        self._wakeable = WakeableSocket(self._socket)
        self.wake = self._wakeable.wake
        self.copies = HostVersions(buffers, self.wake)

    # --- the learner's thread ---

    def pop_events(self) -> list[str]:
        """Return and forget one line per remote receiver that joined or left."""
        with self.changed:
            lines = list(self._events)
            self._events.clear()
            return lines

    # --- the publisher's thread ---

    def members(self) -> list[Subscriber]:
        """List the members of the next epoch, in the order of their registrations."""
        return [each for each in self.subscribers.values() if each.member and not each.behind]

    def turn(self, seconds: float) -> None:
        """Handle messages for at most `seconds`, and forget receivers that are gone."""
        for each in self.subscribers.values():  # A version may have been promoted since the last turn.
            self._offer(each)
        came = self._wakeable.wait(seconds)
        with self.changed:
            for _ in range(_AT_ONCE if came else 0):
                try:
                    peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                self._guard.note(peer)
                self._handle(peer.bytes, [frame.buffer for frame in frames])
            if (now := time.monotonic()) - self._checked_at > _CHECK_SECONDS:
                self._checked_at = now
                self._check_receivers(now)
                bind_again(self._socket, self.endpoint)
            if all(each.member for each in self.subscribers.values()):
                self.copies.clear()
            self.changed.notify_all()

    def send(self, peer: bytes, kind: str, payload: Buffer | None = None, **fields: Any) -> bool:
        """Send without waiting; False if the receiver cannot take it now."""
        try:
            self._socket.send_multipart([peer, *encode(kind, payload, **fields)], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def begin_epoch(self, epoch: int) -> None:
        """Announce an epoch to all members, even to those left behind: it ends the last epoch for them."""
        for each in self.subscribers.values():
            if each.member and self._send_layout(each):
                self.send(each.peer, "group", epoch=epoch)

    def close(self) -> None:
        """Announce that no version will follow, and close."""
        self.closing = True
        try:
            for peer in self.subscribers:
                self.send(peer, "closed")
            began = time.monotonic()
            while time.monotonic() - began < (GOODBYE if self.subscribers else LAST_CALL):
                self.turn(_CHECK_SECONDS)
        finally:
            self._opened.close()

    def leave_behind(self, member: Subscriber) -> None:
        """Continue without a member until its next message."""
        if member in self.members():
            member.behind = True
            self._log_event(member, LEFT_BEHIND)

    def _handle(self, peer: bytes, frames: list[Buffer]) -> None:
        subscriber = self.subscribers.get(peer)
        try:
            message = decode(frames)
            if message.kind not in _TAKEN:
                raise WireError(f"the learner does not take {message.kind!r}.")
        except WireError as error:
            self._refuse(peer, str(error), str(error))
            return
        if subscriber is not None:
            subscriber.heard = time.monotonic()
        if message.kind == "leave":
            if subscriber is not None:
                if message["reason"]:
                    self.failed[subscriber.name] = message["reason"]
                self._forget(subscriber, "left")
            self.send(peer, "closed")
        elif self.closing:
            self.send(peer, "closed")
        elif message.kind == "newest":
            self._on_newest(peer, message)
        elif subscriber is None:
            if message.kind == "bytes":
                self.send(peer, "gone", version=message["version"])
        elif message.kind == "bytes":
            self._on_bytes(subscriber, message)
        else:
            subscriber.answer = message["epoch"], message["version"], message["problem"]

    def _refuse(self, peer: bytes, reason: str, why: str) -> None:
        waits.count(waits.WRONG_ENTRIES)
        _log.warning("refused a message about weights: %s", why)
        self.send(peer, "refused", reason=reason[:1000])

    def _on_newest(self, peer: bytes, message: FramedMessage) -> None:
        subscriber = self.subscribers.get(peer) or self._register(peer, message)
        if subscriber is None:
            return
        if subscriber.behind:
            subscriber.behind = False
            self._log_event(subscriber, "joined")
        if 0 <= subscriber.reading <= message["held"]:
            subscriber.seconds = time.monotonic() - subscriber.offered_at
        subscriber.reading = -1
        if not subscriber.member:  # A member's receipts count, once all have sent theirs.
            subscriber.held = message["held"]
        if not self._offer(subscriber):
            self.send(peer, "unchanged")

    def _register(self, peer: bytes, message: FramedMessage) -> Subscriber | None:
        name, identity = message["name"], self._settings.identity
        if not name.isprintable() or not 0 < len(name) <= MOST_LETTERS:
            self.send(peer, "refused", reason=f"a name has 1 to {MOST_LETTERS} letters that can be printed.")
            return None
        if not identity.knows(message["secret"]):
            why = f"{name!r} belongs to another run than this learner, or to none."
            self._refuse(peer, "this is the learner of another run.", why)
            return None
        if message["attempt"] < identity.attempt:
            self.send(peer, "ended", attempt=identity.attempt)
            return None
        about = {field: message[field] for field in ("name", "member", "pid", "started", "manifest")}
        new = Subscriber(peer=peer, heard=time.monotonic(), **about)
        for former in self.members():
            if new.member and not former.started and former.name == name:
                self._forget(former, "was replaced")  # On this host its end is noticed at once.
        self.subscribers[peer] = new
        self.failed.pop(name, None)
        self._log_event(new, "joined")
        return new

    def _send_layout(self, to: Subscriber) -> bool:
        # True if the receiver has the learner's manifest, or was sent it before whatever follows.
        manifest = self._buffers.manifest
        assert manifest is not None  # Of a version that was packed.
        if to.manifest != manifest.checksum:
            if not self.send(to.peer, "layout", manifest.to_json().encode()[:MAX_PAYLOAD]):
                return False
            to.manifest = manifest.checksum
        return True

    def _offer(self, puller: Subscriber) -> bool:
        # True if a newer version than the held one is offered now.
        if puller.member or puller.reading >= 0 or self._buffers.sending <= puller.held:
            return False
        copy = self.copies.newest({other.reading for other in self.subscribers.values()})
        if copy is None or copy.version <= puller.held or not self._send_layout(puller):
            return False
        if self.send(puller.peer, "offer", version=copy.version, checksum=copy.checksum):
            puller.reading, puller.offered_at = copy.version, time.monotonic()
        return puller.reading >= 0

    def _on_bytes(self, puller: Subscriber, message: FramedMessage) -> None:
        version, buffer, offset, length = (message[x] for x in ("version", "buffer", "offset", "length"))
        copy, peer = self.copies.by_number.get(version), puller.peer
        if copy is None or puller.reading != version:
            self.send(peer, "gone", version=version)
        elif not 0 <= buffer < len(copy.buffers) or not 0 < length <= CHUNK:
            self.send(peer, "refused", reason=f"there is no piece of {length} bytes of buffer {buffer}.")
        elif not 0 <= offset <= len(copy.buffers[buffer]) - length:
            self.send(peer, "refused", reason=f"buffer {buffer} has no {length} bytes at {offset}.")
        else:
            piece = copy.buffers[buffer][offset : offset + length]
            if self.send(peer, "chunk", piece, version=version, buffer=buffer, offset=offset):
                self.sent_bytes += length

    def _check_receivers(self, now: float) -> None:
        silent = f"was not heard of for {self._settings.silence:g} s"
        for each in list(self.subscribers.values()):
            if not each.started:
                if now - each.heard > self._settings.silence:
                    self._forget(each, LEFT_BEHIND if each.member else silent)
            elif process_status.is_stopped(each.pid):
                each.stopped_since = each.stopped_since or now
                if now - each.stopped_since > STOPPED_SECONDS:
                    self.leave_behind(each)
            elif process_status.is_gone(each.pid, each.started):
                self._forget(each, "died")
            else:
                each.stopped_since = None

    def _forget(self, subscriber: Subscriber, why: str) -> None:
        if self.subscribers.pop(subscriber.peer, None) is not None and not subscriber.behind:
            self._log_event(subscriber, why)

    def _log_event(self, subscriber: Subscriber, what: str) -> None:
        if not subscriber.started:
            kind = "other host" if subscriber.member else "joined actor"
            there = [each for each in self.subscribers.values() if not each.started and not each.behind]
            count = sum(each.member == subscriber.member for each in there)
            self._events.append(f"{subscriber.name} {what} ({count} {kind}{'' if count == 1 else 's'} now)")


# --- copies for pullers


@dataclass(frozen=True, kw_only=True)
class HostVersion:
    """One version in host memory."""

    version: int
    checksum: int
    buffers: list[memoryview]


class HostVersions:
    """Host copies of the newest versions, for pullers: each is made on a thread of its own, one at a time."""

    def __init__(self, buffers: DoubleBuffer, wake: Callable[[], None]) -> None:
        self._buffers, self._wake = buffers, wake
        cuda = buffers.device.type == "cuda"
        self._stream = torch.cuda.Stream(buffers.device) if cuda else None
        self._next: Future[HostVersion] | None = None
        self.by_number: dict[int, HostVersion] = {}

    def newest(self, wanted: set[int]) -> HostVersion | None:
        """Return the newest copy, and begin to copy a newer version; then only `wanted` copies stay."""
        if self._next is not None and self._next.done():
            copy, self._next = self._next.result(), None
            kept = sorted(self.by_number.keys() & wanted)[1 - MOST_COPIES :]
            self.by_number = {version: self.by_number[version] for version in kept} | {copy.version: copy}
        newest = max(self.by_number, default=-1)
        if self._next is None and self._buffers.sending > newest:
            self._next = Future()
            threading.Thread(target=self._copy, args=[self._next], name="weights copy", daemon=True).start()
        return self.by_number.get(newest)

    def clear(self) -> None:
        """Free all copies but that of the version being sent, which serves all pullers."""
        sending = self._buffers.sending
        self.by_number = {n: copy for n, copy in self.by_number.items() if n == sending}
        if (made := self._next) is not None and made.done():
            self._next = None if made.exception() or made.result().version != sending else made

    def _copy(self, result: Future[HostVersion]) -> None:
        try:
            aside = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
            with self._buffers.holding() as snapshot, aside:
                if snapshot.packed is not None:
                    snapshot.packed.synchronize()
                buffers = [b.to("cpu", copy=True) for b in self._buffers.buffer_pair[snapshot.buffer_index]]
            views = [packing.as_bytes(buffer).numpy().data for buffer in buffers]
            checksum = packing.checksum(buffers)
            result.set_result(HostVersion(version=snapshot.version, checksum=checksum, buffers=views))
        except Exception as error:  # the thread's boundary: the publisher's thread raises it
            result.set_exception(error)
        self._wake()

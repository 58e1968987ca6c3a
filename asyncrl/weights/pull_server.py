"""Serve the newest weights, piece by piece, to actors that joined from anywhere.

the learner's thread      asks for `versions_held`, `status`, `pop_events`, and closes; never waits
the server's thread       consumes   requests (`messaging/weight_messages.py`), versions of the publisher
                          produces   offers, pieces of a version
                          waits for  requests, at most 50 ms            ended by: any actor, close
                          parks      `newest` until there is a newer version, at most 1 s

A version is copied to host memory when the first actor asks for it, on this thread: without such actors there
is no copy, and `publish` costs the same with and without them. A copy lives as long as somebody reads it.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
import zmq

from asyncrl.errors import WeightSyncError, WireError
from asyncrl.messaging.keys import ServerKeys, admitting
from asyncrl.messaging.sockets import LINGER_MS, ConnectionGuard, bind_router
from asyncrl.messaging.weight_messages import CHUNK, MAX_PAYLOAD, Buffer, WeightMessage, decode, encode
from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import Metric
from asyncrl.storage.run_identity import NO_RUN, RunIdentity
from asyncrl.weights import packing
from asyncrl.weights.double_buffer import DoubleBuffer

MOST_COPIES: Final = 4
"""Versions kept at most. Beyond it the oldest goes, and whoever reads it begins again with the newest."""


@dataclass(frozen=True, kw_only=True)
class HostVersion:
    """One version."""

    version: int
    checksum: int
    """See `packing.checksum`."""
    buffers: list[memoryview]
    """The bytes of each buffer."""


class HostVersions:
    """The newest version that was asked for, and older ones that are still read."""

    def __init__(self, buffers: DoubleBuffer, device: torch.device) -> None:
        """Begin without copies; `device` is where the buffers are."""
        self._buffers = buffers
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copies: dict[int, HostVersion] = {}

    @property
    def versions(self) -> list[int]:
        """What is there, oldest first."""
        return sorted(self._copies)

    def newest(self, wanted: set[int]) -> HostVersion:
        """Return the version that is sent now. When it is copied for that, only `wanted` ones stay too."""
        with self._buffers.holding() as snapshot, self._aside():
            version = snapshot.version
            if version in self._copies:
                return self._copies[version]
            self._copies = {old: copy for old, copy in self._copies.items() if old in wanted}
            while len(self._copies) >= MOST_COPIES:
                del self._copies[min(self._copies)]
            if snapshot.packed is not None:
                snapshot.packed.synchronize()
            buffers = [b.to("cpu", copy=True) for b in self._buffers.buffer_pair[snapshot.buffer_index]]
        views = [packing.as_bytes(buffer).numpy().data for buffer in buffers]
        copy = HostVersion(version=version, checksum=packing.checksum(buffers), buffers=views)
        self._copies[version] = copy
        return copy

    def get(self, version: int) -> HostVersion | None:
        """Return a version that is there."""
        return self._copies.get(version)

    def clear(self) -> None:
        """Forget all."""
        self._copies.clear()

    def _aside(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


PARKED: Final = 1.0
"""Seconds until a question for a newer version is answered with `unchanged`: a sign that all is well."""
GOODBYE: Final = 2.0
"""Seconds the actors have to read that the channel is closed."""
MOST_LETTERS: Final = 100
"""Longest name of an actor: people see it on the console."""
_POLL_MS: Final = 50
_AT_ONCE: Final = 64
_LOGGED: Final = 100
_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Puller:
    """One actor that fetches its weights."""

    name: str
    heard: float
    held: int = -1
    reading: int = -1
    """Version it was offered and does not have yet; -1: none."""
    offered_at: float = 0.0
    parked_at: float | None = None
    """Since when its question waits for an answer."""
    seconds: float = 0.0
    """How long its last version took from the offer to its next question."""


@dataclass(frozen=True, kw_only=True)
class PullSettings:
    """How actors that join fetch the weights."""

    listen: str
    """Endpoint; port 0 lets the system choose."""
    security: ServerKeys | None
    """The server's keys and whom it admits; None for an endpoint that only this user reaches."""
    silence: float
    """Seconds without a request after which an actor counts as gone."""
    identity: RunIdentity = NO_RUN
    """Of the run; who belongs to another one is refused."""


class PullServer:
    """Serves pieces of versions. Everything is guarded by one lock, which is never held while waiting."""

    def __init__(self, buffers: DoubleBuffer, device: torch.device, settings: PullSettings) -> None:
        """Open the socket and begin to serve.

        Args:
            buffers: Of the publisher, which goes on sending from them.
            device: Where its buffers are.
            settings: Address, keys, and when an actor counts as gone.

        Raises:
            ConfigError: The endpoint is not allowed, or someone else has it.
        """
        self._buffers, self._silence, self._identity = buffers, settings.silence, settings.identity
        self._copies = HostVersions(buffers, device)
        self._lock = threading.Lock()
        self._pullers: dict[bytes, _Puller] = {}
        self._news: deque[str] = deque(maxlen=1000)
        self._sent_bytes = 0
        self._errors = 0
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._admission = ExitStack()
        try:
            self._admission.enter_context(admitting(self._context, settings.security))
            self._socket = bind_router(
                self._context, settings.listen, settings.security, prepare=self._watch_connections
            )
        except BaseException:
            self._destroy()
            raise
        self.endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # pyright: ignore[reportAttributeAccessIssue]
        """Where actors find it."""
        self._handlers: dict[str, Callable[[bytes, WeightMessage], None]] = {
            "newest": self._newest,
            "manifest": self._manifest,
            "bytes": self._bytes,
            "leave": self._leave,
        }
        self._thread = threading.Thread(target=self._run, name="weights pull server", daemon=True)
        self._thread.start()

    def _watch_connections(self, socket: zmq.Socket[bytes]) -> None:
        self._guard = self._admission.enter_context(closing(ConnectionGuard(socket)))

    # --- the learner's thread ---

    def versions_held(self) -> dict[str, int]:
        """Name of every actor that is there -> version it holds; -1 before the first.

        Raises:
            WeightSyncError: The server's thread broke down.
        """
        if self._failure is not None:
            raise WeightSyncError(
                f"The server of weights at {self.endpoint} broke down ({self._failure}): actors that joined "
                "get no new versions. Restart the run with --resume."
            ) from self._failure
        with self._lock:
            return {puller.name: puller.held for puller in self._pullers.values()}

    def status(self) -> dict[Metric, float]:
        """Return the newest metrics of actors that joined."""
        with self._lock:
            there = [puller for puller in self._pullers.values() if puller.held >= 0]
            return {
                m.WEIGHTS_JOINED: len(there),
                m.WEIGHTS_PULL_SECONDS: max((puller.seconds for puller in there), default=0.0),
                m.WEIGHTS_PULLED_BYTES: self._sent_bytes,
            }

    def pop_events(self) -> list[str]:
        """Return and forget one line for each actor that joined or went."""
        with self._lock:
            lines = list(self._news)
            self._news.clear()
            return lines

    def close(self) -> None:
        """Tell the actors that no version will follow, and stop. May be called twice."""
        self._closing.set()
        self._thread.join(2 * GOODBYE)
        self._destroy()

    def _destroy(self) -> None:
        self._admission.close()
        self._context.destroy(linger=LINGER_MS)

    # --- the server's thread ---

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
            for peer in self._pullers:
                self._send(peer, "closed")
            until = time.monotonic() + GOODBYE
            while self._pullers and time.monotonic() < until:
                self._turn()
        except Exception as error:  # the thread's boundary: the learner's next call raises it
            self._failure = error
        finally:
            self._guard.close()
            self._socket.close(LINGER_MS)

    def _turn(self) -> None:
        """Handle what came, answer who waits, forget who is gone."""
        self._socket.poll(_POLL_MS)
        for _ in range(_AT_ONCE):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._guard.note(peer)
            self._handle(peer.bytes, [frame.buffer for frame in frames])
        self._offer_parked()
        for peer, puller in list(self._pullers.items()):
            if time.monotonic() - puller.heard > self._silence:
                self._forget(peer, f"was not heard of for {self._silence:g} s")

    def _handle(self, peer: bytes, frames: list[Buffer]) -> None:
        try:
            message = decode(frames)
            if message.kind not in self._handlers:
                raise WireError(f"the learner does not take {message.kind!r}.")
        except WireError as error:
            self._note_error(str(error))
            self._send(peer, "refused", reason=str(error)[:1000])
            return
        if puller := self._pullers.get(peer):
            puller.heard = time.monotonic()
        if self._closing.is_set() and message.kind != "leave":
            self._send(peer, "closed")
        else:
            self._handlers[message.kind](peer, message)

    def _note_error(self, why: str) -> None:
        self._errors += 1
        if self._errors <= _LOGGED:
            _log.warning("refused a message about weights: %s", why)

    def _newest(self, peer: bytes, message: WeightMessage) -> None:
        """Note who asks and what it holds; the answer comes when there is something newer."""
        now, name = time.monotonic(), message["name"]
        if not name.isprintable() or not 0 < len(name) <= MOST_LETTERS:
            self._send(peer, "refused", reason=f"a name has 1 to {MOST_LETTERS} letters that can be printed.")
            return
        if not self._identity.knows(message["secret"]):
            self._note_error(f"{name!r} belongs to another run than this learner, or to none.")
            self._send(peer, "refused", reason="this is the learner of another run.")
            return
        if message["attempt"] < self._identity.attempt:
            self._send(peer, "ended", attempt=self._identity.attempt)
            return
        with self._lock:
            puller = self._pullers.get(peer)
            if puller is None:
                puller = self._pullers[peer] = _Puller(name=name, heard=now)
                self._news.append(f"{puller.name} joined ({self._count()})")
            if puller.reading >= 0 and message["held"] >= puller.reading:
                puller.seconds, puller.reading = now - puller.offered_at, -1
            puller.held, puller.parked_at = message["held"], now

    def _offer_parked(self) -> None:
        now, newest = time.monotonic(), self._buffers.sending
        for peer, puller in self._pullers.items():
            if puller.parked_at is None:
                continue
            if newest > puller.held and (manifest := self._buffers.manifest) is not None:
                copy = self._copies.newest({other.reading for other in self._pullers.values()})
                crc = zlib.crc32(manifest.to_json().encode())
                puller.reading, puller.offered_at, puller.parked_at = copy.version, now, None
                self._send(peer, "offer", version=copy.version, checksum=copy.checksum, manifest=crc)
            elif now - puller.parked_at >= PARKED:
                puller.parked_at = None
                self._send(peer, "unchanged")

    def _manifest(self, peer: bytes, message: WeightMessage) -> None:
        manifest = self._buffers.manifest if peer in self._pullers else None
        if manifest is None:
            self._send(peer, "gone", version=-1)
        else:
            self._send(peer, "layout", manifest.to_json().encode()[:MAX_PAYLOAD])

    def _bytes(self, peer: bytes, message: WeightMessage) -> None:
        version, buffer, offset, length = (message[x] for x in ("version", "buffer", "offset", "length"))
        puller, copy = self._pullers.get(peer), self._copies.get(version)
        if puller is None or copy is None or puller.reading != version:
            self._send(peer, "gone", version=version)
        elif not 0 <= buffer < len(copy.buffers) or not 0 < length <= CHUNK:
            self._send(peer, "refused", reason=f"there is no piece of {length} bytes of buffer {buffer}.")
        elif not 0 <= offset <= len(copy.buffers[buffer]) - length:
            self._send(peer, "refused", reason=f"buffer {buffer} has no {length} bytes at {offset}.")
        else:
            piece = copy.buffers[buffer][offset : offset + length]
            if self._send(peer, "chunk", piece, version=version, buffer=buffer, offset=offset):
                self._sent_bytes += length

    def _leave(self, peer: bytes, message: WeightMessage) -> None:
        self._forget(peer, "left")

    def _forget(self, peer: bytes, why: str) -> None:
        with self._lock:
            if (puller := self._pullers.pop(peer, None)) is not None:
                self._news.append(f"{puller.name} {why} ({self._count()})")
            if not self._pullers:
                self._copies.clear()

    def _count(self) -> str:
        count = len(self._pullers)
        return f"{count} joined actor{'' if count == 1 else 's'} now"

    def _send(self, peer: bytes, kind: str, payload: Buffer | None = None, **fields: Any) -> bool:
        """Send without waiting; False when the actor takes nothing now: it will ask again."""
        try:
            self._socket.send_multipart([peer, *encode(kind, payload, **fields)], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

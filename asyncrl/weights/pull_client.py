"""Fetch versions of the weights over ZeroMQ, piece by piece, for an actor that joined from anywhere.

swap_into (actor's thread)   copies the newest complete version; waits for nobody
the receiver's thread        consumes   offers and pieces from the learner's `pull_server`
                             produces   complete versions, in the spare buffers
                             waits for  an answer, at most the deadline     ended by: the learner, close

A request that is not answered is repeated. Time in which this process itself did not run does not count as
the learner's silence.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import zlib
from collections.abc import Mapping
from typing import Any, Final

import torch
import zmq
from torch import Tensor

from asyncrl.errors import AttemptEnded, WeightSyncError, WireError
from asyncrl.messaging.keys import ClientKeys, Handshakes
from asyncrl.messaging.sockets import LINGER_MS, open_dealer
from asyncrl.messaging.weight_messages import CHUNK, WeightMessage, decode, encode
from asyncrl.storage.run_identity import NO_RUN, RunIdentity
from asyncrl.weights import packing
from asyncrl.weights.swap_buffer import MAX_DAMAGED, BufferedReceiver, HandsOn

IN_FLIGHT: Final = 8
"""Pieces asked for at the same time: what queues is at most this many."""
ASK_AGAIN: Final = 10.0
"""Seconds without any answer until what was asked is asked again."""
CLOSE_SECONDS: Final = 10.0
"""Longest wait of `close`; saying good-bye takes up to 2 s when nobody listens."""
_SLICE: Final = 0.1
_log = logging.getLogger(__name__)

Piece = tuple[int, int, int]
"""Buffer, first byte and number of bytes."""


class _Closing(Exception):
    """This receiver is being closed, or the learner closed the channel."""


class PulledReceiver(BufferedReceiver):
    """Fetches versions. See `interface.Receiver`; build it with `build_pulled_receiver`."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        manifest: packing.Manifest,
        security: ClientKeys | None,
        deadline: float,
        identity: RunIdentity,
    ) -> None:
        self._identity = identity
        super().__init__(name, endpoint, manifest, torch.device("cpu"), deadline)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            routing_id = f"weights-{os.urandom(8).hex()}".encode()
            self._socket = open_dealer(self._context, endpoint, routing_id, security)
            tcp = endpoint.startswith("tcp")
            self._handshakes = Handshakes(self._socket, endpoint, "server of weights") if tcp else None
            self._socket.connect(endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._unanswered, self._damaged = 0.0, 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights puller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave and stop. See `interface.Receiver`."""
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)

    # --- the receiver's thread ---

    def _run(self) -> None:
        try:
            while True:
                self._fetch_newest()
        except _Closing:
            self._end()
        except Exception as error:  # the thread's boundary: the actor's next swap raises it
            self._fail(error)
        finally:
            self._socket.poll(LINGER_MS, zmq.POLLOUT)  # Requests for pieces may fill the queue.
            self._tell("leave")
            self._socket.disable_monitor()
            self._context.destroy(linger=LINGER_MS)

    def _fetch_newest(self) -> None:
        """Wait for a version newer than the one held and fetch it."""
        offer = self._ask(
            {"offer", "unchanged"},
            "newest",
            name=self._name,
            held=self._version,
            secret=self._identity.secret,
            attempt=self._identity.attempt,
        )
        if offer.kind == "unchanged" or offer["version"] <= self._version:
            return
        if offer["manifest"] != zlib.crc32(self._manifest.to_json().encode()):
            theirs = self._ask({"layout"}, "manifest")
            self._meet_manifest(packing.Manifest.from_json(bytes(theirs.payload)))
        self._state = f"fetching version {offer['version']} from {self._endpoint}"
        if not self._fetch(offer["version"]):
            return
        found = packing.checksum(self._room())
        if found == offer["checksum"]:
            self._damaged = 0
            self._accept(offer["version"])
        else:
            self._note_damage(
                f"version {offer['version']} has checksum {found:x}, expected {offer['checksum']:x}."
            )

    def _meet_manifest(self, theirs: packing.Manifest) -> None:
        """Compare the learner's manifest with this receiver's.

        Raises:
            WeightSyncError: They differ.
        """
        packing.require_same(theirs, self._manifest, self._name)

    def _fetch(self, version: int) -> bool:
        """Fetch all pieces of a version into the spare buffers. False: it is gone, a newer one is there."""
        into = [packing.as_bytes(buffer).numpy().data for buffer in self._room()]
        missing = [
            (number, offset, min(CHUNK, len(view) - offset))
            for number, view in reversed(list(enumerate(into)))
            for offset in reversed(range(0, len(view), CHUNK))
        ]
        asked: dict[Piece, None] = {}
        quiet, damaged = 0.0, self._damaged
        while missing or asked:
            while missing and len(asked) < IN_FLIGHT and self._tell_piece(version, missing[-1]):
                asked[missing.pop()] = None
            message = self._receive()
            if message is None:
                quiet += _SLICE
                if quiet >= ASK_AGAIN or self._damaged > damaged:
                    missing += asked
                    asked, quiet, damaged = {}, 0.0, self._damaged
                continue
            quiet = 0.0
            if message.kind == "gone" and message["version"] == version:
                return False
            if message.kind != "chunk" or message["version"] != version:
                continue
            piece = (message["buffer"], message["offset"], len(message.payload))
            if piece in asked:  # Otherwise it was asked for, and came, twice.
                del asked[piece]
                into[piece[0]][piece[1] : piece[1] + piece[2]] = message.payload
        return True

    def _tell_piece(self, version: int, piece: Piece) -> bool:
        buffer, offset, length = piece
        return self._tell("bytes", version=version, buffer=buffer, offset=offset, length=length)

    def _ask(self, answers: set[str], kind: str, **fields: Any) -> WeightMessage:
        """Ask until one of `answers` comes."""
        asked_at = -math.inf
        while True:
            now = time.monotonic()
            if now - asked_at >= ASK_AGAIN and self._tell(kind, **fields):
                asked_at = now
            message = self._receive()
            if message is not None and message.kind in answers:
                return message

    def _tell(self, kind: str, **fields: Any) -> bool:
        try:
            self._socket.send_multipart(encode(kind, **fields), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self) -> WeightMessage | None:
        """Return the next message, or None after a while.

        Raises:
            _Closing: There is nothing more to wait for.
            WeightSyncError: The learner is gone, refuses, or sends damaged messages.
            AttemptEnded: It belongs to a newer start of the run.
            ReplayError: It does not admit this process.
        """
        if self._closing.is_set():
            raise _Closing
        came = self._socket.poll(int(1000 * _SLICE))
        if self._handshakes is not None:
            self._handshakes.check()
        if not came:
            self._unanswered += _SLICE  # Not the clock's time: this process may have been stopped.
            if self._unanswered > self._deadline:
                raise WeightSyncError(
                    f"{self._name} had no answer from the learner at {self._endpoint} for "
                    f"{self._deadline:g} s (--weights.timeout) and still acts with version {self._version}. "
                    "The learner ended, or the network is down: see its log."
                )
            return None
        self._unanswered = 0.0
        frames = self._socket.recv_multipart(copy=False)
        try:
            message = decode([frame.buffer for frame in frames])
        except WireError as error:
            self._note_damage(str(error))
            return None
        if message.kind == "closed":
            raise _Closing
        if message.kind == "ended":
            raise AttemptEnded(f"the learner at {self._endpoint}", message["attempt"])
        if message.kind == "refused":
            raise WeightSyncError(f"The learner at {self._endpoint} refused a message: {message['reason']}")
        return message

    def _note_damage(self, what: str) -> None:
        self._damaged += 1
        _log.warning("%s received damaged weights: %s", self._name, what)
        if self._damaged >= MAX_DAMAGED:
            raise WeightSyncError(
                f"{self._name} received damaged weights from {self._endpoint} {MAX_DAMAGED} times: {what} "
                "The network changes what it carries, or both sides do not run the same asyncrl."
            )


class RelayedReceiver(HandsOn, PulledReceiver):
    """Fetches versions for others, whatever tensors they have. Build it with `build_relayed_receiver`."""

    def _meet_manifest(self, theirs: packing.Manifest) -> None:
        self._adopt_manifest(theirs)


def build_relayed_receiver(
    endpoint: str, name: str, security: ClientKeys | None, deadline: float, identity: RunIdentity
) -> RelayedReceiver:
    """Begin to fetch versions for other processes. See `build_pulled_receiver`.

    Raises:
        ConfigError: The endpoint cannot be used safely.
    """
    return RelayedReceiver(endpoint, name, packing.UNKNOWN, security, deadline, identity)


def build_pulled_receiver(
    endpoint: str,
    name: str,
    manifest_tensors: Mapping[str, Tensor],
    security: ClientKeys | None = None,
    deadline: float = 60.0,
    identity: RunIdentity = NO_RUN,
) -> PulledReceiver:
    """Begin to fetch versions from a run that this actor joins.

    Args:
        endpoint: Of the learner's pull server.
        name: The actor's name.
        manifest_tensors: The tensors that will be swapped, by name, any shapes and dtypes; only shape and
            dtype are read.
        security: This actor's keys, when the run has some.
        deadline: Seconds without an answer after which the learner counts as gone.
        identity: Of the run that it belongs to.

    Raises:
        ConfigError: The endpoint cannot be used safely.
    """
    manifest = packing.build_manifest(manifest_tensors)
    return PulledReceiver(endpoint, name, manifest, security, deadline, identity)

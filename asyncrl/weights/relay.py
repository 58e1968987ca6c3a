"""Hand the learner's versions on to the actors of another host: once over the network, then through memory.

learner --NCCL, or pieces over the socket--> this (one process per host) --shared memory--> its actors
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from asyncrl.errors import AsyncRLError
from asyncrl.weights.publisher import BroadcastPublisher
from asyncrl.weights.receiver import WeightReceiver

LOOK_EVERY: Final = 0.5
"""Seconds of a wait for a newer version, until the end of the run is looked for."""
_log = logging.getLogger(__name__)


class Relay:
    """Publishes the versions of a receiver, and closes both."""

    def __init__(self, receiver: WeightReceiver, publisher: BroadcastPublisher) -> None:
        """Begin to hand versions on; the receiver was built without tensors."""
        self._receiver, self._publisher = receiver, publisher
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Announce to the actors that no version will follow, and stop. May be called twice."""
        self._closing.set()
        self._thread.join()
        self._receiver.close()
        self._publisher.close()

    def _run(self) -> None:
        version = -1
        try:
            while not (self._closing.is_set() or self._receiver.ended):
                self._receiver.wait_newer(version, LOOK_EVERY)
                self._receiver.require_alive()
                version = self._receiver.hand_on(version, self._publisher.publish)
        except AsyncRLError as error:
            _log.warning("The actors of this host get no new weights: %s", error)
        except Exception:  # the thread's boundary: its actors end as those of a learner that is gone
            _log.exception("The actors of this host get no new weights")
        self._publisher.close()

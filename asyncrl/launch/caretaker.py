"""Looks after the children of a rank on a thread of its own, so that a long update delays no respawn.

the caretaker's thread   spawns and polls every child      ended by: `end`, after all children

The kernel ends a child together with the *thread* that spawned it, so this one spawns all, and lives as long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from asyncrl.errors import RunError
from asyncrl.launch.supervisor import State, Supervisor

LOOK_EVERY: Final = 0.05
"""Seconds between two looks."""


class Caretaker:
    """Supervisors and what their children are doing."""

    def __init__(self) -> None:
        """Begin without children."""
        self.members: list[Supervisor] = []
        self.states: dict[str, State] = {}
        """Name of a child -> what it is doing."""
        self.failure: RunError | None = None
        """A child died too often."""
        self._applicants: list[Callable[[], Supervisor]] = []
        self._refusal: Exception | None = None
        self._ending = False
        # Around everything above; held while children are spawned and polled, not while anybody waits.
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caretaker", daemon=True)
        self._thread.start()

    def hire(self, make: Callable[[], Supervisor]) -> None:
        """Spawn a child; raises what `make` raises."""
        with self._changed:
            self._applicants.append(make)
            while self._applicants:  # Ended by the thread, which spawns in milliseconds or fails.
                self._changed.wait(LOOK_EVERY)
            refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    def end(self, deadline: float) -> None:
        """Let the children end by themselves for `deadline` seconds in all, then end those that are left."""
        with self._changed:
            self._ending = True
        until = time.monotonic() + deadline
        for member in reversed(self.members):
            member.wait(max(0.0, until - time.monotonic()))
            member.stop(1.0)
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(LOOK_EVERY):
            with self._changed:
                self._spawn()
                if not self._ending and self.failure is None:
                    self._poll()

    def _spawn(self) -> None:
        for make in self._applicants:
            try:
                self.members.append(make())
                self.states[self.members[-1].name] = State.RUNNING
            except Exception as error:  # The thread's boundary: raised where it was asked for.
                self._refusal = error
        self._applicants.clear()
        self._changed.notify_all()

    def _poll(self) -> None:
        for member in self.members:
            try:
                self.states[member.name] = member.poll()
            except RunError as error:  # Raised where the rank looks next.
                self.failure = error
                return

"""Agree through one loopback TCPStore who takes part in the weight group, epoch by epoch.

Actors come and go; a group of a fixed set of members lives for one *epoch*. In order:

    learner (`WeightGroup`)                                    actor (`Membership`)
                                                          1  append itself to `joins`, under a fresh ticket
    2  read `joins`; set `offer` = epoch, members
                                                          3  find itself in it; set `e<epoch>/ready/<ticket>`
    4  all ready: set `e<epoch>/form`, form the link      5  see `form`, form the link
    6  set `e<epoch>/send/<k>`, send the buffers          7  receive, set `e<epoch>/took/<k>/<ticket>`
       (6 and 7 repeat with k = 0, 1, 2 ...)
    8  a registration, a failure: drop the link, 2        8  a newer offer: drop the link, 3; not in it: 1

Who sets a key that another waits for wakes the other (`WakeUpSocket`), so that each step takes well below a
millisecond; who missed that polls within IDLE_POLL_SECONDS.

A member that is not ready in time is left behind: it is absent from the next offer and registers again when
it can. A failed member sets `e<epoch>/broken`, so that the learner need not wait for its deadline. One that
died says nothing: NCCL would wait for it for ever. All are processes of this host, so the learner asks the
operating system.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from asyncrl.errors import WeightSyncError
from asyncrl.observability import process_status

_HOST = "127.0.0.1"


class WakeUpSocket:
    """A datagram socket on which a process waits. One thread waits; any thread may wake others or itself."""

    def __init__(self) -> None:
        """Bind to a port of the loopback device that the system chooses."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((_HOST, 0))
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.port: int = self._socket.getsockname()[1]
        """Where others send to."""

    def wait(self, seconds: float) -> bool:
        """Wait until woken, at most `seconds`. Returns whether that happened since the last wait."""
        if not self._poll.poll(1000 * seconds):
            return False
        with contextlib.suppress(BlockingIOError):  # All are read: one poll answers them all.
            while True:
                self._socket.recv(1)
        return True

    def wake(self, *ports: int) -> None:
        """Wake the processes at `ports`; 0 is nobody's."""
        for port in ports:
            if port:
                # Full, closed or gone: whoever is there polls later.
                with contextlib.suppress(OSError):
                    self._socket.sendto(b"!", (_HOST, port))

    def wake_all(self, ports: Iterable[int]) -> None:
        """Wake each of these processes once."""
        self.wake(*set(ports))

    def close(self) -> None:
        """Free the port."""
        self._socket.close()


POLL_SECONDS = 0.02
"""Pause between two polls of the store while an answer is expected."""
IDLE_POLL_SECONDS = 0.1
"""Pause between two polls of the store while nothing is expected and nobody wakes this process."""
READY_SECONDS = 2.0
"""Longest wait for the members' answer to an offer, which involves no weights."""
STOPPED_SECONDS = 2.0
"""A member whose process is halted for so long is left behind; a profiler halts one for less."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One registration of an actor."""

    name: str
    ticket: str
    refused: str = ""
    """Why the actor will not take part; empty for a proper member."""
    leaving: bool = False
    """Takes the registration of this ticket back."""
    pid: int = 0
    started: int = 0
    """See `process_status.started`; 0 where the system does not tell."""
    wake_up_port: int = 0
    """Of its `WakeUpSocket`."""


@dataclass(frozen=True, kw_only=True)
class EpochOffer:
    """One epoch as the learner announced it. The learner has rank 0, members[i] has rank i + 1."""

    epoch: int
    members: tuple[Member, ...]
    seen: int
    """How many registrations the learner had read."""


@dataclass(frozen=True, kw_only=True)
class VersionHeader:
    """What precedes a broadcast."""

    version: int
    buffer_index: int
    """Which of the learner's two buffer sets holds the version."""
    checksum: int


class WeightGroup:
    """The learner's view: who registered, who is a member of the current epoch. Used by one thread."""

    def __init__(self, store: Store, wake_up: WakeUpSocket) -> None:
        self._store, self._wake_up = store, wake_up
        self._seen = 0
        self.epoch = 0
        self.members: tuple[Member, ...] = ()
        """Who shall be in the next epoch."""
        self.offered: tuple[Member, ...] = ()
        """Who is in the current one."""
        self.refused: dict[str, str] = {}
        """Name of an actor that will not take part -> why."""
        self.changed = False
        """The members are not those of the last offer, or its epoch failed."""
        self._stopped_since: dict[str, float] = {}
        store.set("wake_up_port", str(wake_up.port))
        store.set("joins", "")

    def admit(self) -> bool:
        """Read new registrations, and leave behind who died. Returns whether there were registrations."""
        rows = self._store.get("joins").decode().splitlines()
        fresh, self._seen = rows[self._seen :], len(rows)
        for row in fresh:
            member = Member(**json.loads(row))
            if member.refused:
                self.refused[member.name] = member.refused
                continue
            self.refused.pop(member.name, None)
            # A name that registers again is an actor that was respawned: its former self is gone.
            gone = {other for other in self.members if other.name == member.name}
            if member.leaving:
                gone = {other for other in gone if other.ticket == member.ticket}
            staying = tuple(other for other in self.members if other not in gone)
            self.members = staying if member.leaving else (*staying, member)
            self.changed |= bool(gone) or not member.leaving
        if lost := [member for member in self.members if self._lost(member)]:
            self.exclude(lost)
        return bool(fresh)

    def offer(self) -> int:
        """Announce a new epoch of the current members and return it."""
        self.epoch += 1
        self.changed = False
        former, self.offered = self.offered, self.members
        members = [[member.name, member.ticket] for member in self.members]
        offer = {"epoch": self.epoch, "members": members, "seen": self._seen}
        self._store.set("offer", json.dumps(offer))
        self._wake(former + self.members)
        return self.epoch

    @property
    def gone(self) -> list[Member]:
        """List the members of this epoch that died, left or registered again since the offer."""
        return [member for member in self.offered if member not in self.members]

    def missing(self, what: str) -> list[Member]:
        """List the members that have not answered `what` in this epoch."""
        keys = {member: f"e{self.epoch}/{what}/{member.ticket}" for member in self.offered}
        return [member for member, key in keys.items() if not self._store.check([key])]

    def exclude(self, late: list[Member]) -> None:
        """Go on without `late`; they see it in the next offer and may register again."""
        self.members = tuple(member for member in self.members if member not in late)
        self.changed = True

    def _lost(self, member: Member) -> bool:
        """Whether a member's process is dead, or halted for too long."""
        if not member.started:
            return False
        if not process_status.is_stopped(member.pid):
            self._stopped_since.pop(member.ticket, None)
            return process_status.started(member.pid) != member.started
        since = self._stopped_since.setdefault(member.ticket, time.monotonic())
        return time.monotonic() - since > STOPPED_SECONDS

    def confirm(self) -> None:
        """Tell the members, all of which are ready, to form the link."""
        self._store.set(f"e{self.epoch}/form", "1")
        self._wake(self.offered)

    def announce(self, k: int, header: VersionHeader) -> None:
        """Tell the members that broadcast number `k` of this epoch begins."""
        value = {"version": header.version, "slot": header.buffer_index, "checksum": header.checksum}
        self._store.set(f"e{self.epoch}/send/{k}", json.dumps(value))
        self._wake(self.offered)

    def clean_up(self, k: int) -> None:
        """Delete the keys of broadcast `k`, which every member has taken."""
        for member in self.offered:
            self._store.delete_key(f"e{self.epoch}/took/{k}/{member.ticket}")
        self._store.delete_key(f"e{self.epoch}/send/{k}")

    def broken(self) -> str:
        """Return what a member reported as its failure in this epoch; empty when there is none."""
        key = f"e{self.epoch}/broken"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def announce_close(self, seconds: float) -> None:
        """Tell the members that this was all, and give them `seconds` to read it."""
        self._store.set("closed", "1")
        self._wake(self.members)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.admit()
            if all(self._store.check([f"bye/{member.ticket}"]) for member in self.members):
                return
            self._wake_up.wait(POLL_SECONDS)

    def _wake(self, members: Iterable[Member]) -> None:
        self._wake_up.wake_all(member.wake_up_port for member in members)


class Membership:
    """One actor's view: its registration and the offers it finds itself in. Used by one thread."""

    def __init__(self, store: Store, name: str, wake_up: WakeUpSocket) -> None:
        self._store, self._wake_up = store, wake_up
        self._learner_port = 0
        self.name = name
        self.ticket = ""
        self._index = -1
        self._raw = b""
        self._offer = EpochOffer(epoch=0, members=(), seen=0)

    def manifest(self) -> bytes:
        """Return the learner's manifest; empty while it has not published anything."""
        return self._store.get("manifest") if self._store.check(["manifest"]) else b""

    def register(self, refused: str = "") -> None:
        """Ask for a place in the next epoch, or (`refused`) tell why not."""
        self.ticket = secrets.token_hex(8)
        self._learner_port = int(self._store.get("wake_up_port"))
        row = self._append(refused=refused)
        rows = self._store.get("joins").decode().splitlines()
        self._index = rows.index(row)

    def leave(self) -> None:
        """Take the registration back, so that the learner need not find out by waiting."""
        if self.ticket:
            self._append(leaving=True)

    def offer(self) -> EpochOffer:
        """Return the newest offer; epoch 0 before the first."""
        raw = self._store.get("offer") if self._store.check(["offer"]) else b""
        if raw != self._raw:
            row = json.loads(raw)
            members = tuple(Member(name=name, ticket=ticket) for name, ticket in row["members"])
            self._raw, self._offer = raw, EpochOffer(epoch=row["epoch"], members=members, seen=row["seen"])
        return self._offer

    def rank(self, offer: EpochOffer) -> int:
        """Return this actor's rank in `offer`; 0 when it is not in it."""
        tickets = [member.ticket for member in offer.members]
        return tickets.index(self.ticket) + 1 if self.ticket in tickets else 0

    def excluded(self, offer: EpochOffer) -> bool:
        """Tell whether the learner went on without this actor.

        Raises:
            WeightSyncError: another actor took its name.
        """
        if self._index >= offer.seen or self.rank(offer):
            return False
        if any(member.name == self.name for member in offer.members):
            raise WeightSyncError(
                f"Two actors are called {self.name!r}, and the newer one took this one's place. "
                "Give each actor a name of its own."
            )
        return True

    def superseded(self, epoch: int) -> str:
        """Return why work for `epoch` is in vain; empty when it is not."""
        newest = self.offer().epoch
        return f"the learner went on to epoch {newest}" if newest != epoch else ""

    def ready(self, epoch: int) -> None:
        """Accept the offer of `epoch`."""
        self._tell(f"e{epoch}/ready/{self.ticket}", "1")

    def confirmed(self, epoch: int) -> bool:
        """Tell whether all members of `epoch` were ready."""
        return self._store.check([f"e{epoch}/form"])

    def header(self, epoch: int, k: int) -> VersionHeader | None:
        """Return the header of broadcast `k`, when it began."""
        key = f"e{epoch}/send/{k}"
        if not self._store.check([key]):
            return None
        told = json.loads(self._store.get(key))
        return VersionHeader(version=told["version"], buffer_index=told["slot"], checksum=told["checksum"])

    def took(self, epoch: int, k: int) -> None:
        """Tell the learner that broadcast `k` arrived complete."""
        self._tell(f"e{epoch}/took/{k}/{self.ticket}", "1")

    def report_failure(self, epoch: int, problem: str) -> None:
        """Tell the learner that this epoch cannot go on."""
        self._tell(f"e{epoch}/broken", f"{self.name}: {problem}")

    def is_closed(self) -> bool:
        """Tell whether the learner ended the channel, and let it know that this was read."""
        if not self._store.check(["closed"]):
            return False
        self._tell(f"bye/{self.ticket}", "1")
        return True

    def _tell(self, key: str, value: str) -> None:
        self._store.set(key, value)
        self._wake_up.wake(self._learner_port)

    def _append(self, **row: Any) -> str:
        pid, port = os.getpid(), self._wake_up.port
        process = {"pid": pid, "started": process_status.started(pid), "wake_up_port": port}
        text = json.dumps({"name": self.name, "ticket": self.ticket, **process, **row})
        store: Any = self._store
        store.append("joins", text + "\n")  # atomic, unlike a counter and a key that belongs to it
        self._wake_up.wake(self._learner_port)
        return text

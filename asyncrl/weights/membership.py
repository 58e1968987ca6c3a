"""Agree through one table who takes part in the weight group, epoch by epoch.

Actors come and go; a group of a fixed set of members lives for one *epoch*. In order:

    learner (`WeightGroup`)                                    actor (`Membership`)
    0  set `learner`: who it is
                                                          1  append itself to `joins`, under a fresh ticket
    2  read `joins`; set `offer` = epoch, members
                                                          3  find itself in it; set `e<epoch>.ready.<ticket>`
    4  all ready: set `e<epoch>.form`, form the link      5  see `form`, form the link
    6  set `e<epoch>.send.<k>`, send the buffers          7  receive, set `e<epoch>.took.<k>.<ticket>`
       (6 and 7 repeat with k = 0, 1, 2 ...)
    8  a registration, a failure: drop the link, 2        8  a newer offer: drop the link, 3; not in it: 1

Who sets a key that another waits for wakes the other (`WakeUp`), so that each step takes well below a
millisecond; who missed that, or is on another host, polls within IDLE_POLL_SECONDS.

A member that is not ready in time is left behind: it is absent from the next offer and registers again when
it can. A failed member sets `e<epoch>.broken`, so that the learner need not wait for its deadline. One that
died says nothing: NCCL would wait for it for ever. Where all are processes of this host (`Table.one_host`),
the learner asks the operating system, and the actors ask it whether the learner lives. Members of other hosts
set `alive.<ticket>` every BEAT_SECONDS, and who is not heard of for long is left behind.

An entry that is not what it should be is skipped and counted (`table_entries.read`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import WeightSyncError
from asyncrl.observability import process_status
from asyncrl.weights import table_entries
from asyncrl.weights.folder_table import FolderTable
from asyncrl.weights.packing import Manifest
from asyncrl.weights.table import Table, TableError, TableGone
from asyncrl.weights.table_entries import EpochOffer, LearnerProcess, Member, VersionHeader
from asyncrl.weights.wake_up import WakeUp

POLL_SECONDS = 0.02
"""Pause between two polls of the table while an answer is expected."""
IDLE_POLL_SECONDS = 0.1
"""Pause between two polls of the table while nothing is expected and nobody wakes this process."""
READY_SECONDS = 2.0
"""Longest wait for the members' answer to an offer, which involves no weights."""
STOPPED_SECONDS = 2.0
"""A member whose process is halted for so long is left behind; a profiler halts one for less."""
SILENT_SECONDS = 30.0
"""A member on another host that was not heard of for so long is left behind, unless it is told otherwise."""
BEAT_SECONDS = 0.5
"""How often a member says to another host that it lives."""
MAX_MANIFEST: Final = 64 << 20
"""Bytes of a manifest; one of 10,000 tensors has about 1 MB."""


class LearnerGone(TableGone):
    """The learner's process is not there any more."""


def connect(folder: Path) -> tuple[FolderTable, LearnerProcess]:
    """Reach the table of a learner in `folder`; returns it and who made it.

    Raises:
        WeightSyncError: there is no learner, or others can enter the folder.
    """
    try:
        table = FolderTable(folder)
    except TableGone as error:
        raise _no_learner(str(folder), str(error)) from None
    return table, learner_of(table)


def learner_of(table: Table) -> LearnerProcess:
    """Return who made a table.

    Raises:
        WeightSyncError: there is no learner.
    """
    try:
        raw = table.get("learner") or b""
        learner = table_entries.read(table, "learner", raw, table_entries.parse_learner) if raw else None
        if learner and not learner.gone:
            return learner
        why = "its process is gone" if learner else "it does not say who it is"
    except TableGone as error:
        why = str(error)
    raise _no_learner(table.endpoint, why)


def _no_learner(endpoint: str, why: str) -> WeightSyncError:
    return WeightSyncError(
        f"No learner publishes weights in {endpoint} ({why}). Is the learner still running?"
    )


class WeightGroup:
    """The learner's view: who registered, who is a member of the current epoch. Used by one thread."""

    def __init__(self, table: Table, wake_up: WakeUp, silence: float = SILENT_SECONDS) -> None:
        """Begin without members; `silence` is for those of other hosts, see `SILENT_SECONDS`."""
        self._table, self._wake_up, self._silence = table, wake_up, silence
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
        self._beats: dict[str, tuple[bytes, float]] = {}
        """Ticket of a member of another host -> its last sign of life, and when that was seen first."""
        me = LearnerProcess(**_own_process(table), wake_up=wake_up.name)
        table.set("learner", json.dumps(asdict(me)).encode())

    def admit(self) -> bool:
        """Read new registrations, and leave behind who died. Returns whether there were registrations."""
        fresh = self._table.read_lines("joins", self._seen)
        self._seen = fresh.end
        for line in fresh.lines:
            if member := table_entries.read(self._table, "joins", line, table_entries.parse_member):
                self._register(member, line)
        if lost := [member for member in self.members if self._lost(member)]:
            self.exclude(lost)
        return bool(fresh.lines)

    def _register(self, member: Member, line: bytes) -> None:
        if len(self.members) + len(self.refused) >= table_entries.MAX_MEMBERS and not member.leaving:
            self._table.note_wrong("joins", line, f"registers more than {table_entries.MAX_MEMBERS} actors")
            return
        if member.refused:
            self.refused[member.name] = member.refused
            return
        self.refused.pop(member.name, None)
        # A name that registers again is an actor that was respawned: its former self is gone.
        gone = {other for other in self.members if other.name == member.name}
        if member.leaving:
            gone = {other for other in gone if other.ticket == member.ticket}
        staying = tuple(other for other in self.members if other not in gone)
        self.members = staying if member.leaving else (*staying, member)
        self.changed |= bool(gone) or not member.leaving

    def offer(self) -> int:
        """Announce a new epoch of the current members and return it."""
        self.epoch += 1
        self.changed = False
        former, self.offered = self.offered, self.members
        members = [[member.name, member.ticket] for member in self.members]
        self._set("offer", {"epoch": self.epoch, "members": members, "seen": self._seen})
        self._wake(former + self.members)
        self._forget_earlier_epochs()
        return self.epoch

    @property
    def gone(self) -> list[Member]:
        """List the members of this epoch that died, left or registered again since the offer."""
        return [member for member in self.offered if member not in self.members]

    def missing(self, what: str) -> list[Member]:
        """List the members that have not answered `what` in this epoch."""
        keys = {member: f"e{self.epoch}.{what}.{member.ticket}" for member in self.offered}
        return [member for member, key in keys.items() if not self._table.check(key)]

    def exclude(self, late: list[Member]) -> None:
        """Go on without `late`; they see it in the next offer and may register again."""
        self.members = tuple(member for member in self.members if member not in late)
        self.changed = True

    def _lost(self, member: Member) -> bool:
        """Whether a member's process is dead, or halted for too long; of another host: not heard of."""
        if not self._table.one_host:
            return self._silent(member)
        if not member.started:
            return False
        if not process_status.is_stopped(member.pid):
            self._stopped_since.pop(member.ticket, None)
            return process_status.is_gone(member.pid, member.started)
        since = self._stopped_since.setdefault(member.ticket, time.monotonic())
        return time.monotonic() - since > STOPPED_SECONDS

    def _silent(self, member: Member) -> bool:
        beat, now = self._table.get(f"alive.{member.ticket}") or b"", time.monotonic()
        last, since = self._beats.get(member.ticket, (None, now))
        if beat != last:
            self._beats[member.ticket] = (beat, now)
            return False
        return now - since > self._silence

    def confirm(self) -> None:
        """Tell the members, all of which are ready, to form the link."""
        self._table.set(f"e{self.epoch}.form", b"1")
        self._wake(self.offered)

    def announce(self, k: int, header: VersionHeader) -> None:
        """Tell the members that broadcast number `k` of this epoch begins."""
        self._set(f"e{self.epoch}.send.{k}", asdict(header))
        self._wake(self.offered)

    def clean_up(self, k: int) -> None:
        """Delete the keys of broadcast `k`, which every member has taken."""
        for member in self.offered:
            self._table.delete(f"e{self.epoch}.took.{k}.{member.ticket}")
        self._table.delete(f"e{self.epoch}.send.{k}")

    def forget_link(self) -> None:
        """Delete the store of this epoch's link, which is formed or given up."""
        self._table.forget_link(self.epoch)

    def broken(self) -> str:
        """Return what a member reported as its failure in this epoch; empty when there is none."""
        raw = self._table.get(f"e{self.epoch}.broken") or b""
        return raw[: table_entries.LONGEST_TEXT].decode(errors="replace")

    def announce_close(self, seconds: float) -> None:
        """Tell the members that this was all, and give them `seconds` to read it."""
        self._table.set("closed", b"1")
        self._wake(self.members)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.admit()
            if all(self._table.check(f"bye.{member.ticket}") for member in self.members):
                return
            self._wake_up.wait(POLL_SECONDS)

    def _forget_earlier_epochs(self) -> None:
        """Delete what earlier epochs left in the table, also what a late member set since."""
        for key in self._table.list_keys():
            epoch = table_entries.epoch_of(key)
            if epoch is not None and epoch < self.epoch:
                self._table.delete(key)

    def _set(self, key: str, value: dict[str, Any]) -> None:
        self._table.set(key, json.dumps(value).encode())

    def _wake(self, members: Iterable[Member]) -> None:
        self._wake_up.wake_all(member.wake_up for member in members)


class Membership:
    """One actor's view: its registration and the offers it finds itself in. Used by one thread."""

    def __init__(self, table: Table, learner: LearnerProcess, name: str, wake_up: WakeUp) -> None:
        self._table, self._learner, self._wake_up = table, learner, wake_up
        self.name = name
        self.ticket = ""
        self._registered_at = 0
        self._beat, self._beat_at = 0, float("-inf")
        self._raw = b""
        self._offer = EpochOffer(epoch=0, members=(), seen=0)

    def manifest(self) -> Manifest | None:
        """Return the learner's manifest; None while it has not published anything.

        Raises:
            LearnerGone: it ended.
        """
        self._require_learner()
        raw = self._table.get("manifest", MAX_MANIFEST)
        if raw is None:
            return None
        try:
            return Manifest.from_json(raw)
        except WeightSyncError as error:
            self._table.note_wrong("manifest", raw, f"is wrong ({error})")
            return None

    def register(self, refused: str = "") -> None:
        """Ask for a place in the next epoch, or (`refused`) tell why not."""
        self.ticket = secrets.token_hex(8)
        self._registered_at = self._append(refused=refused[: table_entries.LONGEST_TEXT])

    def leave(self) -> None:
        """Take the registration back, so that the learner need not find out by waiting."""
        if self.ticket:
            self._append(leaving=True)

    def offer(self) -> EpochOffer:
        """Return the newest offer; epoch 0 before the first.

        It is asked for all the time, and so it is what tells a learner on another host that this lives.
        """
        self._say_alive()
        raw = self._table.get("offer") or b""
        if raw and raw != self._raw:
            self._raw = raw
            found = table_entries.read(self._table, "offer", raw, table_entries.parse_offer)
            self._offer = found or self._offer
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
        if self._registered_at > offer.seen or self.rank(offer):
            return False
        if any(member.name == self.name for member in offer.members):
            raise WeightSyncError(
                f"Two actors are called {self.name!r}, and the newer one took this one's place. "
                "Give each actor a name of its own."
            )
        return True

    def superseded(self, epoch: int) -> str:
        """Return why work for `epoch` is in vain; empty when it is not.

        Raises:
            LearnerGone: the learner ended.
        """
        self._require_learner()
        newest = self.offer().epoch
        return f"the learner went on to epoch {newest}" if newest != epoch else ""

    def ready(self, epoch: int) -> None:
        """Accept the offer of `epoch`."""
        self._tell(f"e{epoch}.ready.{self.ticket}", "1")

    def confirmed(self, epoch: int) -> bool:
        """Tell whether all members of `epoch` were ready."""
        return self._table.check(f"e{epoch}.form")

    def header(self, epoch: int, k: int) -> VersionHeader | None:
        """Return the header of broadcast `k`, when it began."""
        key = f"e{epoch}.send.{k}"
        raw = self._table.get(key)
        return table_entries.read(self._table, key, raw, table_entries.parse_header) if raw else None

    def took(self, epoch: int, k: int) -> None:
        """Tell the learner that broadcast `k` arrived complete."""
        self._tell(f"e{epoch}.took.{k}.{self.ticket}", "1")

    def report_failure(self, epoch: int, problem: str) -> None:
        """Tell the learner that this epoch cannot go on."""
        self._tell(f"e{epoch}.broken", f"{self.name}: {problem}"[: table_entries.LONGEST_TEXT])

    def is_closed(self) -> bool:
        """Tell whether the learner ended the channel, and let it know that this was read.

        Raises:
            LearnerGone: it ended without a word.
        """
        if not self._table.check("closed"):
            self._require_learner()
            return False
        # It was read, which is what counts here; the learner does not wait for long.
        with contextlib.suppress(TableError, TableGone):
            self._tell(f"bye.{self.ticket or 'nobody'}", "1")
        return True

    def _say_alive(self) -> None:
        now = time.monotonic()
        if not self._table.one_host and self.ticket and now - self._beat_at > BEAT_SECONDS:
            self._beat, self._beat_at = self._beat + 1, now
            self._table.set(f"alive.{self.ticket}", str(self._beat).encode())

    def _require_learner(self) -> None:
        if self._learner.gone:
            raise LearnerGone(f"the learner's process {self._learner.pid} is gone")

    def _tell(self, key: str, value: str) -> None:
        self._table.set(key, value.encode())
        self._wake_up.wake(self._learner.wake_up)

    def _append(self, **row: Any) -> int:
        me = Member(
            name=self.name,
            ticket=self.ticket,
            **_own_process(self._table),
            wake_up=self._wake_up.name,
            **row,
        )
        end = self._table.append("joins", json.dumps(asdict(me)).encode())
        self._wake_up.wake(self._learner.wake_up)
        return end


def _own_process(table: Table) -> dict[str, int]:
    """Say by what others of this host know this process; of another host nobody can ask for it."""
    pid = os.getpid()
    return {"pid": pid, "started": process_status.started(pid) if table.one_host else 0}

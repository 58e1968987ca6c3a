"""Everything the replay decides, in one thread and without sockets: episodes in, receipts and batches out.

Order of effects, which makes a kill at any moment harmless: a grant is in the ledger before the actor hears
of it; a group is a sealed file before its members are acknowledged; a use is in the ledger before the learner
gets the batch; a file that a resume gives up is deleted before the ledger says that its number is free.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl import metrics as m
from asyncrl.errors import DiskFull, WireError
from asyncrl.messaging.wire import scalars_of
from asyncrl.metrics import Metric
from asyncrl.records import Episode
from asyncrl.replay.disk import DiskWait
from asyncrl.replay.groups import ReadyGroup, number_of, ready_group
from asyncrl.replay.limiter import Limiter
from asyncrl.replay.outcomes import SuccessWindow, constant
from asyncrl.replay.ports import GroupGrant, Receipt, ReceiptStatus
from asyncrl.replay.recall import Session, recall
from asyncrl.replay.store import EpisodeStore
from asyncrl.replay.tally import Tally


class ReplayCore:
    """The store and the limiter, kept in step."""

    def __init__(
        self,
        store: EpisodeStore,
        limiter: Limiter,
        *,
        max_age: int = 0,
        warn: Callable[[str], None] = print,
    ) -> None:
        """Recover the books from the store's ledger and files.

        Args:
            store: The files.
            limiter: With empty books.
            max_age: Versions after which a closed group's file is deleted; 0: only for its size.
            warn: Receives a line when the disk is full.
        """
        self.store, self.limiter, self.max_age = store, limiter, max_age
        self.stopped = False
        """Whether the learner ended the run."""
        self.tally, self.session = Tally(), Session()
        self.disk = DiskWait(limiter.clock, warn)
        self._waiting: dict[str, float] = {}
        self._receipts: list[tuple[str, Receipt]] = []
        self._success = SuccessWindow()
        for entry in store.ledger.entries:
            recall(entry, limiter, self.tally, self.session)
        self._recover_ready()
        self._count_successes()

    @property
    def actors(self) -> dict[str, str]:
        """Every actor seen -> its session."""
        return self.session.actors

    def begin(self, session: str, version: int, *, in_turns: bool = False) -> None:
        """Note a learner at `version`. A new session starts or resumes the run; a known one reconnected.

        Args:
            session: The learner's, drawn at random.
            version: Its policy version.
            in_turns: See `Limiter.plan_resume`.
        """
        if session != self.session.learner:
            self._rewind(version, in_turns=in_turns)
            self.store.ledger.append(learner=session, version=version)
            self.limiter.begin(version)
            self.session.learner, self.session.request, self.session.batch = session, "", []
            self._count_successes()
        self.set_version(version)

    def hello(self, actor: str, session: str) -> None:
        """Note an actor. Under a new session it forgot the groups it was granted, so they are given up."""
        if self.actors.get(actor) != session:
            self.store.ledger.append(actor=actor, session=session)
            self.actors[actor] = session
            self.leave(actor)
        self.limiter.hear(actor)

    def leave(self, actor: str) -> None:
        """Give up what an actor did not finish: it went, or forgot. Others get the credit at once."""
        for number in self.limiter.unfinished(actor):
            self._drop(number, "dropped_deadline")
        self._waiting.pop(actor, None)

    def grant(self, actor: str, turn: int = -1) -> GroupGrant | None:
        """Grant a group to an actor, or None without credit or disk space. The same `turn` >= 0: the same."""
        self.actors.setdefault(actor, "")
        self.tend()
        granted = len(self.limiter.open)
        grant = self.limiter.grant(actor, turn, withhold=bool(self.disk.groups))
        if grant is not None and len(self.limiter.open) > granted:
            self.store.ledger.append(
                grant=grant.number, actor=actor, turn=turn, min_version=grant.min_version
            )
        return grant

    def admit(self, episode: Episode) -> Receipt:
        """Take an episode. When it decides about its siblings, their receipts follow by `take_receipts`."""
        receipt = self._judge(episode)
        number = number_of(episode.group_id)
        if receipt.status == "held" and self.limiter.complete(number):
            if self._seal(number, newest=episode.episode_id):
                receipt = Receipt(episode_id=episode.episode_id, status="stored")
        elif receipt.status != "held":
            decisions = len(episode.policy_versions) if receipt.status != "duplicate" else 0
            self.tally.add(receipt.status, 1, decisions)
            if receipt.status != "duplicate":
                self.store.ledger.append(refused=receipt.status, decisions=decisions)
            group = self.limiter.open.get(number)
            if group is not None and receipt.status.startswith("dropped"):
                # The group cannot become complete any more: its credit is worth more than its siblings.
                why: ReceiptStatus = "dropped_lag" if receipt.status == "dropped_lag" else "dropped_deadline"
                self._drop(number, why)
            elif group is not None and receipt.status == "duplicate":
                receipt = Receipt(episode_id=episode.episode_id, status="held")  # Known, but not yet durable.
        return receipt

    def take_receipts(self) -> list[tuple[str, Receipt]]:
        """Return and forget the receipts that are due, each with its actor."""
        due, self._receipts = self._receipts, []
        return due

    def sample(self, groups: int, version: int, request: str = "") -> list[list[Episode]] | None:
        """Give complete groups away, in the limiter's order, or None when there are too few.

        Args:
            groups: How many.
            version: The learner's; no decision is older than ``version - max_lag``.
            request: A repeated request gets the same batch again (its first answer may have been lost).

        Returns:
            Groups of episodes in the order of their members.
        """
        self.set_version(version)
        last = self.session
        if request and request == last.request and self.store.shards.keys() >= set(last.batch):
            again = [self.store.load(number) for number in last.batch]
            if None not in again:
                return [group for group in again if group is not None]
        while (numbers := self.limiter.pick(groups)) is not None:
            batch = [self.store.load(number) for number in numbers]
            sound = [group for group in batch if group is not None]
            if len(sound) == len(batch):
                self.store.ledger.append(used=numbers, request=request, version=version)
                self.limiter.use(numbers)
                self.session.request, self.session.batch = request, numbers
                self._trim()
                return sound
            for number, group in zip(numbers, batch, strict=True):
                if group is None:
                    self._drop(number, "dropped_invalid", stored=True)
        return None

    def set_version(self, version: int) -> None:
        """Note the learner's newest version; drop what it makes too old."""
        if version > self.limiter.version:
            self.limiter.version = version
            self._success.close()
        self.tend()

    def tend(self) -> None:
        """Give up what is overdue or too old; try again what the disk did not take. Call it often."""
        for number in self.limiter.stale():
            if number in self.limiter.used_at:
                self.limiter.retire(number)
            else:
                self._drop(number, "dropped_lag")
        for number in self.limiter.overdue():
            self._drop(number, "dropped_deadline")
        if self.disk.due:
            for number in sorted(self.disk.groups):
                if not self._seal(number):
                    break

    def report_waiting(self, actor: str, share: float) -> None:
        """Note the share of time an actor waited for credit."""
        self.limiter.hear(actor)
        self._waiting[actor] = min(1.0, max(0.0, share))

    def stop(self) -> None:
        """End the run."""
        self.stopped = True

    def status(self) -> dict[Metric, float]:
        """Read `replay/*` (without the lag of batches) and `time/actors_waiting`. Changes nothing."""
        readings = self.tally.readings()
        readings[m.GROUPS_READY] = float(len(self.limiter.ready))
        readings[m.GROUPS_IN_FLIGHT] = float(len(self.limiter.open))
        readings[m.FILTERED_GROUPS] = float(len(self.limiter.filtered))
        readings[m.REPLAY_BYTES] = float(self.store.total_bytes)
        readings[m.DISK_WAITING] = self.disk.seconds
        if self._success.last is not None:
            readings[m.REPLAY_SUCCESS] = self._success.last
        waiting = [share for actor, share in self._waiting.items() if not self.limiter.silent(actor)]
        if waiting:
            readings[m.ACTORS_WAITING] = sum(waiting) / len(waiting)
        return readings

    def contents(self) -> str:
        """Say in one line what the replay holds, for an error message."""
        held = sum(len(group.members) for group in self.limiter.open.values())
        filtered = f"{len(self.limiter.filtered)} filtered; " if self.limiter.filter_groups else ""
        waiting = f"{len(self.disk.groups)} groups wait for disk space; " if self.disk.groups else ""
        return (
            f"{len(self.limiter.ready)} groups ready, {len(self.limiter.open)} in flight with {held} episodes"
            f"; {waiting}{filtered}episodes dropped: {self.tally.reasons()}; actors seen: "
            f"{', '.join(sorted(self.actors)) or 'none'}; version {self.limiter.version}, "
            f"credit for {self.limiter.credit} more groups"
        )

    def close(self) -> None:
        """Let go of the folder."""
        self.store.close()

    def _judge(self, episode: Episode) -> Receipt:
        if episode.episode_id in self.store.episode_ids:
            return Receipt(episode_id=episode.episode_id, status="duplicate")
        try:
            scalars_of(episode)
        except WireError as error:
            return Receipt(episode_id=episode.episode_id, status="dropped_invalid", reason=str(error))
        return self.limiter.judge(episode)

    def _seal(self, number: int, newest: str = "") -> bool:
        """Store a complete group; False when the disk is full. The episode `newest` gets no receipt here."""
        group = self.limiter.open[number]
        members = list(group.members.values())
        try:
            shard = self.store.seal(number, members)
        except DiskFull as error:
            self.disk.failed(number, error)
            return False
        if self.disk.groups:
            self.disk.over(number)
            self.store.ledger.keep_spare()
        for sibling in members:
            self.tally.add("stored")
            if sibling.episode_id != newest:
                self._receipts.append((group.actor, Receipt(episode_id=sibling.episode_id, status="stored")))
        self.limiter.make_ready(number, ready_group(shard))
        self._success.add(shard.attributes["successes"], len(members))
        if self.limiter.filter_groups and constant(members):
            self._filter(number)
        self._trim()
        return True

    def _filter(self, number: int) -> None:
        shard = self.store.shards[number]
        successes = int(shard.attributes["successes"])
        self.store.ledger.append(filtered=number, newest_version=shard.newest_version, successes=successes)
        self.limiter.filter(number, shard.newest_version)
        self.session.filtered_successes[number] = successes

    def _drop(self, number: int, status: ReceiptStatus, stored: bool = False) -> None:
        stored = stored or number in self.limiter.ready
        shard = self.store.shards.get(number)
        group = self.limiter.drop(number, status)
        self.disk.over(number)
        episodes = list(group.members.values()) if group else []
        count = self.limiter.group_size if stored else len(episodes)
        decisions = sum(len(episode.policy_versions) for episode in episodes)
        if stored:
            decisions = shard.decisions if shard else 0
        self.tally.add(status, count, decisions)
        self.store.ledger.append(
            dropped=number, status=status, episodes=count, stored=stored, decisions=decisions
        )
        for episode in episodes:
            receipt = Receipt(episode_id=episode.episode_id, status=status, reason="its group was given up")
            self._receipts.append((group.actor if group else episode.actor, receipt))

    def _rewind(self, version: int, *, in_turns: bool) -> None:
        """Undo what a resume at `version` makes undone: see `Limiter.plan_resume`."""
        stored = self._stored()
        plan = self.limiter.plan_resume(version, stored, in_turns=in_turns)
        for number, uses in plan.ready.items():
            self.store.ledger.append(ready=number, **({"uses": uses} if uses else {}))
            self.limiter.take_back(number, uses)
            self.limiter.make_ready(number, stored[number])
        for number, status in plan.drop.items():
            was_stored = number not in self.limiter.open
            if status == "dropped_resume":
                self.store.remove(number)
            self._drop(number, status, stored=was_stored)

    def _stored(self) -> dict[int, ReadyGroup]:
        return {number: ready_group(shard) for number, shard in self.store.shards.items()}

    def _recover_ready(self) -> None:
        """Make the sealed groups ready that the ledger did not close; filter what a crash left unfiltered."""
        for number, group in self._stored().items():
            if number in self.limiter.closed:
                continue
            self.limiter.make_ready(number, group)
            if number in self.limiter.used_at:
                continue
            self.tally.add("stored", self.limiter.group_size)
            if self.limiter.filter_groups:
                episodes = self.store.load(number)
                if episodes is None:
                    self._drop(number, "dropped_invalid", stored=True)
                elif constant(episodes):
                    self._filter(number)
        for number in self.limiter.used_at.keys() - self.limiter.ready.keys() - self.limiter.closed.keys():
            self.limiter.retire(number)

    def _count_successes(self) -> None:
        """Count the complete groups whose newest decision is of the learner's version, after a restart."""
        self._success.restart()
        complete = {number: group.newest_version for number, group in self.limiter.ready.items()}
        for number, newest_version in (complete | self.limiter.filtered).items():
            if newest_version == self.limiter.version:
                shard = self.store.shards.get(number)
                successes = (
                    shard.attributes["successes"] if shard else self.session.filtered_successes[number]
                )
                self._success.add(successes, self.limiter.group_size)

    def _trim(self) -> None:
        """Delete closed groups that are too old or too much; what a repeated request may get again stays."""
        if not self.max_age and self.store.total_bytes <= self.store.max_bytes:
            return
        closed, again = self.limiter.closed, set(self.session.batch)
        expendable = {n: shard for n, shard in self.store.shards.items() if n in closed and n not in again}
        oldest = self.limiter.version - self.max_age
        self.store.trim(
            expendable, aged=[n for n, s in expendable.items() if self.max_age and s.newest_version < oldest]
        )

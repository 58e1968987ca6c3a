"""Everything the replay decides, in one thread and without sockets: episodes in, receipts and batches out.

Order of effects, which makes a kill at any moment harmless: a grant is in the ledger before the actor hears
of it; a group is a sealed file before its members are acknowledged; a use is in the ledger before the learner
gets the batch; a file that a resume gives up is deleted before the ledger says that its number is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl import metrics as m
from asyncrl.config import TrainConfig
from asyncrl.errors import WireError
from asyncrl.messaging.wire import scalars_of
from asyncrl.metrics import Metric
from asyncrl.records import Episode
from asyncrl.replay.limiter import Limiter, ReadyGroup, number_of
from asyncrl.replay.outcomes import SuccessWindow, constant
from asyncrl.replay.ports import GroupGrant, Receipt, ReceiptStatus
from asyncrl.replay.store import EpisodeStore

COUNTERS: dict[ReceiptStatus, Metric] = {
    "stored": m.EPISODES,
    "duplicate": m.DUPLICATES,
    "dropped_lag": m.DROPPED_LAG,
    "dropped_deadline": m.DROPPED_DEADLINE,
    "dropped_invalid": m.DROPPED_INVALID,
    "dropped_resume": m.DROPPED_RESUME,
}


def open_core(
    folder: Path,
    config: TrainConfig,
    warn: Callable[[str], None] = print,
) -> ReplayCore:
    """Open the replay of a run with its settings, recovering what is in `folder`."""
    store = EpisodeStore(
        folder,
        group_size=config.algorithm.group_size,
        max_bytes=int(config.replay.max_gigabytes * 1e9),
        warn=warn,
    )
    limiter = Limiter(
        group_size=config.algorithm.group_size,
        groups_per_update=config.algorithm.groups_per_update,
        max_lag=config.max_lag,
        group_deadline=config.replay.group_deadline,
        keep_video_every=config.replay.keep_video_every,
        filter_groups=config.algorithm.filter_groups,
    )
    return ReplayCore(store, limiter)


class ReplayCore:
    """The store and the limiter, kept in step."""

    def __init__(self, store: EpisodeStore, limiter: Limiter) -> None:
        """Recover the books from the store's ledger and files."""
        self.store, self.limiter = store, limiter
        self.stopped = False
        """Whether the learner ended the run."""
        self.actors: dict[str, str] = {}
        """Every actor seen -> its session."""
        self.counts: Counter[ReceiptStatus] = Counter()
        self._waiting: dict[str, float] = {}
        self._receipts: list[tuple[str, Receipt]] = []
        self._learner, self._request, self._batch = "", "", list[int]()
        self._success, self._successes = SuccessWindow(), dict[int, int]()
        for entry in store.ledger.entries:
            self._recall(entry)
        self._recover_ready()
        self._count_successes()

    def begin(self, session: str, version: int) -> None:
        """Note a learner at `version`. A new session starts or resumes the run; a known one reconnected."""
        if session != self._learner:
            self._rewind(version)
            self.store.ledger.append(learner=session, version=version)
            self._note_learner(session, version)
            self._count_successes()
        self.set_version(version)

    def hello(self, actor: str, session: str) -> None:
        """Note an actor. Under a new session it forgot the groups it was granted, so they are given up."""
        if self.actors.get(actor) != session:
            self.store.ledger.append(actor=actor, session=session)
            self.actors[actor] = session
            for number in [n for n, group in self.limiter.open.items() if group.actor == actor]:
                self._drop(number, "dropped_deadline")
        self.limiter.hear(actor)

    def grant(self, actor: str, turn: int = -1) -> GroupGrant | None:
        """Grant a group to an actor, or None without credit. The same `turn` >= 0 gets the same grant."""
        self.actors.setdefault(actor, "")
        self.tend()
        granted = len(self.limiter.open)
        grant = self.limiter.grant(actor, turn)
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
            self._seal(number, newest=episode.episode_id)
            receipt = Receipt(episode_id=episode.episode_id, status="stored")
        elif receipt.status != "held":
            self.counts[receipt.status] += 1
            if receipt.status != "duplicate":
                self.store.ledger.append(refused=receipt.status)
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
        """Give the oldest complete groups away, or None when there are too few.

        Args:
            groups: How many.
            version: The learner's; no decision is older than ``version - max_lag``.
            request: A repeated request gets the same batch again (its first answer may have been lost).

        Returns:
            Groups of episodes in the order of their members.
        """
        self.set_version(version)
        if request and request == self._request and self.store.shards.keys() >= set(self._batch):
            again = [self.store.load(number) for number in self._batch]
            if None not in again:
                return [group for group in again if group is not None]
        while (numbers := self.limiter.pick(groups)) is not None:
            batch = [self.store.load(number) for number in numbers]
            sound = [group for group in batch if group is not None]
            if len(sound) == len(batch):
                self.store.ledger.append(used=numbers, request=request, version=version)
                self._note_use(numbers, request)
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
        """Give up what is overdue or too old. Call it often."""
        for number in self.limiter.stale():
            self._drop(number, "dropped_lag")
        for number in self.limiter.overdue():
            self._drop(number, "dropped_deadline")

    def report_waiting(self, actor: str, share: float) -> None:
        """Note the share of time an actor waited for credit."""
        self.limiter.hear(actor)
        self._waiting[actor] = min(1.0, max(0.0, share))

    def stop(self) -> None:
        """End the run."""
        self.stopped = True

    def status(self) -> dict[Metric, float]:
        """Read `replay/*` (without the lag of batches) and `time/actors_waiting`. Changes nothing."""
        readings = {metric: float(self.counts[status]) for status, metric in COUNTERS.items()}
        readings[m.GROUPS_READY] = float(len(self.limiter.ready))
        readings[m.GROUPS_IN_FLIGHT] = float(len(self.limiter.open))
        readings[m.FILTERED_GROUPS] = float(len(self.limiter.filtered))
        readings[m.REPLAY_BYTES] = float(self.store.total_bytes)
        if self._success.last is not None:
            readings[m.REPLAY_SUCCESS] = self._success.last
        if self._waiting:
            readings[m.ACTORS_WAITING] = sum(self._waiting.values()) / len(self._waiting)
        return readings

    def contents(self) -> str:
        """Say in one line what the replay holds, for an error message."""
        held = sum(len(group.members) for group in self.limiter.open.values())
        dropped = {status: n for status, n in self.counts.items() if status.startswith("dropped")}
        filtered = f"{len(self.limiter.filtered)} filtered; " if self.limiter.filter_groups else ""
        reasons = ", ".join(f"{n} {status[8:]}" for status, n in sorted(dropped.items())) or "none"
        return (
            f"{len(self.limiter.ready)} groups ready, {len(self.limiter.open)} in flight with {held} episodes"
            f"; {filtered}episodes dropped: {reasons}; actors seen: "
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

    def _seal(self, number: int, newest: str) -> None:
        group = self.limiter.open[number]
        members = list(group.members.values())
        shard = self.store.seal(number, members)
        for sibling in members:
            self.counts["stored"] += 1
            if sibling.episode_id != newest:
                self._receipts.append((group.actor, Receipt(episode_id=sibling.episode_id, status="stored")))
        self.limiter.make_ready(number, shard.oldest_version, shard.newest_version)
        self._success.add(shard.attributes["successes"], len(members))
        if self.limiter.filter_groups and constant(members):
            self._filter(number)
        self._trim()

    def _filter(self, number: int) -> None:
        shard = self.store.shards[number]
        successes = int(shard.attributes["successes"])
        self.store.ledger.append(filtered=number, newest_version=shard.newest_version, successes=successes)
        self.limiter.filter(number, shard.newest_version)
        self._successes[number] = successes

    def _drop(self, number: int, status: ReceiptStatus, stored: bool = False) -> None:
        stored = stored or number in self.limiter.ready
        group = self.limiter.drop(number, status)
        episodes = list(group.members.values()) if group else []
        count = self.limiter.group_size if stored else len(episodes)
        self.counts[status] += count
        self.store.ledger.append(dropped=number, status=status, episodes=count, stored=stored)
        for episode in episodes:
            receipt = Receipt(episode_id=episode.episode_id, status=status, reason="its group was given up")
            self._receipts.append((group.actor if group else episode.actor, receipt))

    def _rewind(self, version: int) -> None:
        """Undo what a resume at `version` makes undone: see `Limiter.plan_resume`."""
        stored = self._stored()
        plan = self.limiter.plan_resume(version, stored)
        for number in plan.ready:
            self.store.ledger.append(ready=number)
            self.limiter.make_ready(number, stored[number].oldest_version, stored[number].newest_version)
        for number, status in plan.drop.items():
            was_stored = number not in self.limiter.open
            if status == "dropped_resume":
                self.store.remove(number)
            self._drop(number, status, stored=was_stored)

    def _stored(self) -> dict[int, ReadyGroup]:
        return {
            number: ReadyGroup(oldest_version=shard.oldest_version, newest_version=shard.newest_version)
            for number, shard in self.store.shards.items()
        }

    def _recover_ready(self) -> None:
        """Make the sealed groups ready that the ledger did not close; filter what a crash left unfiltered."""
        for number, group in self._stored().items():
            if number in self.limiter.closed:
                continue
            self.limiter.make_ready(number, group.oldest_version, group.newest_version)
            self.counts["stored"] += self.limiter.group_size
            if self.limiter.filter_groups:
                episodes = self.store.load(number)
                if episodes is None:
                    self._drop(number, "dropped_invalid", stored=True)
                elif constant(episodes):
                    self._filter(number)

    def _count_successes(self) -> None:
        """Count the complete groups whose newest decision is of the learner's version, after a restart."""
        self._success.restart()
        complete = {number: group.newest_version for number, group in self.limiter.ready.items()}
        for number, newest_version in (complete | self.limiter.filtered).items():
            if newest_version == self.limiter.version:
                shard = self.store.shards.get(number)
                successes = shard.attributes["successes"] if shard else self._successes[number]
                self._success.add(successes, self.limiter.group_size)

    def _note_learner(self, session: str, version: int) -> None:
        self.limiter.begin(version)
        self._learner, self._request, self._batch = session, "", []

    def _note_use(self, numbers: list[int], request: str) -> None:
        self.limiter.use(numbers)
        self._request, self._batch = request, numbers

    def _trim(self) -> None:
        closed, again = self.limiter.closed, set(self._batch)
        self.store.trim(number for number in self.store.shards if number in closed and number not in again)

    def _recall(self, entry: dict[str, Any]) -> None:
        """Repeat one decision of the ledger; its consequences have entries of their own."""
        match entry:
            case {"learner": str(session), "version": int(version)}:
                self._note_learner(session, version)
            case {"actor": str(actor), "session": str(session)}:
                self.actors[actor] = session
            case {"grant": int(number), "actor": str(actor), "turn": int(turn), "min_version": int(lowest)}:
                self.actors.setdefault(actor, "")
                self.limiter.reopen(number, actor, turn, lowest)
            case {"used": list(numbers), "request": str(request), "version": int(version)}:
                self.limiter.version = max(self.limiter.version, version)
                self._note_use(numbers, request)
                self.counts["stored"] += self.limiter.group_size * len(numbers)
            case {"filtered": int(number), "newest_version": int(version), "successes": int(successes)}:
                self.limiter.filter(number, version)
                self._successes[number] = successes
                self.counts["stored"] += self.limiter.group_size
            case {"ready": int(number)}:
                self.limiter.forget(number)
                self.counts["stored"] -= self.limiter.group_size  # Counted again when it is found or used.
            case {"refused": status} if status in COUNTERS:
                self.counts[status] += 1
            case {
                "dropped": int(number),
                "status": status,
                "episodes": int(count),
                "stored": bool(stored),
            } if status in COUNTERS:
                if stored and number not in self.limiter.closed:
                    self.counts["stored"] += count
                self.limiter.drop(number, status)
                self.counts[status] += count

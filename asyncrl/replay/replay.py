"""Everything the replay decides, without sockets: episodes in, receipts and batches out.

One thread decides; a second one may write the files (`writing.py`).

Order of effects, which makes a kill at any moment harmless: a grant is in the ledger before the actor hears
of it; a group is a sealed file before its members are acknowledged; a use is in the ledger before the learner
gets the batch; a file that a resume gives up is deleted before the ledger says that its number is free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from asyncrl.config.run import TrainConfig
from asyncrl.errors import WireError
from asyncrl.messaging.episode_codec import scalars_of
from asyncrl.observability import metrics_replay as m
from asyncrl.observability.metrics import Metric, reduce
from asyncrl.records import Episode
from asyncrl.replay.group_lifecycle import GroupLifecycle
from asyncrl.replay.groups import number_of
from asyncrl.replay.interface import GroupFailure, GroupGrant, Receipt, ReceiptStatus
from asyncrl.replay.limiter import Limiter
from asyncrl.replay.recovery import count_successes, recover, roll_back_to
from asyncrl.replay.store import EpisodeStore


def open_replay(folder: Path, config: TrainConfig, warn: Callable[[str], None] = print) -> Replay:
    """Open the replay of a run with its settings, recovering what is in `folder`.

    Raises:
        ReplayError: See `EpisodeStore`.
    """
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
        group_timeout=config.replay.group_timeout,
        silence=config.replay.heartbeat_timeout,
        keep_video_every=config.replay.keep_video_every,
        filter_groups=config.algorithm.filter_groups,
        uses=config.replay.max_reuse,
        order=config.replay.sampler,
        seed=config.seed,
        # The oldest checkpoint that is kept, while the next one is being written.
        horizon=config.checkpoint_every * (config.keep_checkpoints + 1),
    )
    return Replay(
        store,
        limiter,
        quarantine_after=config.replay.quarantine_after,
        max_age=config.replay.max_age_versions,
        warn=warn,
    )


class Replay:
    """The store and the limiter, kept in step."""

    def __init__(
        self,
        store: EpisodeStore,
        limiter: Limiter,
        *,
        max_age: int = 0,
        quarantine_after: int = 2,
        warn: Callable[[str], None] = print,
    ) -> None:
        """Recover the books from the store's ledger and files.

        Args:
            store: The files.
            limiter: With empty books.
            max_age: Versions after which a closed group's file is deleted; 0: only for its size.
            quarantine_after: Groups in which a start state may fail; see `Quarantine`.
            warn: Receives a line when the disk is full.
        """
        self._lifecycle = lifecycle = GroupLifecycle(
            store, limiter, max_age=max_age, quarantine_after=quarantine_after, warn=warn
        )
        self.store, self.limiter, self.disk = store, limiter, lifecycle.disk
        self.counters, self.session, self.quarantine = (
            lifecycle.counters,
            lifecycle.session,
            lifecycle.quarantine,
        )
        self.stopped = False
        """Whether the learner ended the run."""
        self._reports: dict[str, dict[Metric, float]] = {}
        """Actor -> what it last reported of itself."""
        recover(lifecycle)

    def write_in_background(self) -> None:
        """Write files in a thread of their own from now on; all receipts of a group follow later then."""
        self._lifecycle.write_in_background()

    @property
    def writing(self) -> bool:
        """Whether a group is on its way to the disk: call `maintain` soon."""
        return self._lifecycle.writing >= 0

    @property
    def actors(self) -> dict[str, str]:
        """Every actor seen -> its session."""
        return self.session.actors

    def begin(self, session: str, version: int, *, in_turns: bool = False) -> None:
        """Note a learner at `version`. A new session starts or resumes the run; a known one reconnected.

        Args:
            session: The learner's, drawn at random.
            version: Its policy version.
            in_turns: See `resumption.plan_resume`.
        """
        if session != self.session.learner:
            self._lifecycle.finish()
            roll_back_to(self._lifecycle, version, in_turns=in_turns)
            self.store.ledger.append(learner=session, version=version)
            self.limiter.begin(version)
            self.quarantine.begin()
            self.session.learner, self.session.request, self.session.batch = session, "", []
            count_successes(self._lifecycle)
        self.set_version(version)

    def hello(self, actor: str, session: str) -> None:
        """Note an actor. Under a new session it forgot the groups it was granted, so they are given up."""
        if self.actors.get(actor) != session:
            self.store.ledger.append(actor=actor, session=session)
            self.actors[actor] = session
            self.leave(actor)
        self.limiter.note_heartbeat(actor)

    def leave(self, actor: str) -> None:
        """Give up what an actor did not finish: it went, or forgot. Others get the credit at once."""
        self._lifecycle.finish()
        for number in self.limiter.unfinished(actor):
            self._lifecycle.drop(number, "dropped_deadline")
        self._reports.pop(actor, None)

    def grant(self, actor: str, request_number: int = -1) -> GroupGrant | None:
        """Grant a group to an actor, or None without credit, disk space or start state.

        The same `request_number` >= 0 gets the same grant.
        """
        self.actors.setdefault(actor, "")
        self.maintain()
        granted = len(self.limiter.open)
        grant = self.limiter.grant(
            actor, request_number, withhold=bool(self.disk.groups or self.quarantine.exhausted)
        )
        if grant is not None and len(self.limiter.open) > granted:
            self.store.ledger.append(
                grant=grant.number, actor=actor, turn=request_number, min_version=grant.min_version
            )
        return grant

    def admit(self, episode: Episode) -> Receipt:
        """Take an episode. When it decides about its siblings, their receipts follow by `take_receipts`."""
        number = number_of(episode.group_id)
        if self._lifecycle.writing == number:
            self._lifecycle.finish()
        receipt = self._verdict_on(episode)
        if receipt.status == "held" and self.limiter.complete(number):
            if self._lifecycle.take(number, newest=episode.episode_id):
                receipt = Receipt(episode_id=episode.episode_id, status="stored")
        elif receipt.status != "held":
            decisions = len(episode.policy_versions) if receipt.status != "duplicate" else 0
            self.counters.add(receipt.status, 1, decisions)
            if receipt.status != "duplicate":
                self.store.ledger.append(refused=receipt.status, decisions=decisions)
            group = self.limiter.open.get(number)
            if group is not None and receipt.status.startswith("dropped"):
                # The group cannot become complete any more: its credit is worth more than its siblings.
                why: ReceiptStatus = "dropped_lag" if receipt.status == "dropped_lag" else "dropped_deadline"
                self._lifecycle.drop(number, why)
            elif group is not None and receipt.status == "duplicate":
                receipt = Receipt(episode_id=episode.episode_id, status="held")  # Known, but not yet durable.
        return receipt

    def fail(self, failure: GroupFailure) -> None:
        """Give up a group that cannot be imagined: its credit returns. What is closed already stays so."""
        self._lifecycle.finish()
        if failure.number in self.limiter.open:
            self._lifecycle.drop(failure.number, "dropped_poisoned", about=self.quarantine.note(failure))

    @property
    def exhausted_reason(self) -> str:
        """Why no further group will ever be ready; empty while there is hope."""
        return "" if self.limiter.open else self.quarantine.exhausted

    def take_receipts(self) -> list[tuple[str, Receipt]]:
        """Return and forget the receipts that are due, each with its actor."""
        due, self._lifecycle.receipts = self._lifecycle.receipts, []
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
        if request and request == last.request and self.store.group_files.keys() >= set(last.batch):
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
                self._lifecycle.trim()
                return sound
            for number, group in zip(numbers, batch, strict=True):
                if group is None:
                    self._lifecycle.drop(number, "dropped_invalid", stored=True)
        return None

    def set_version(self, version: int) -> None:
        """Note the learner's newest version; drop what it makes too old."""
        if version > self.limiter.version:
            self._lifecycle.finish()
            self.limiter.advance(version)
            self._lifecycle.success.close()
        self.maintain()

    def maintain(self) -> None:
        """Give up what is overdue or too old; try again what the disk did not take. Call it often."""
        self._lifecycle.finish(wait=False)
        for number in self.limiter.stale():
            if number in self.limiter.used_at:
                self.limiter.close_used(number)
            else:
                self._lifecycle.drop(number, "dropped_lag")
        for number in self.limiter.overdue():
            self._lifecycle.drop(number, "dropped_deadline")
        if self.disk.due:
            for number in sorted(self.disk.groups):
                if not self._lifecycle.store_group(number):
                    break

    def report(self, actor: str, readings: Mapping[Metric, float]) -> None:
        """Note where an actor's time and memory go; a share is cut to [0, 1]."""
        self.limiter.note_heartbeat(actor)
        self._reports[actor] = {
            metric: min(1.0, max(0.0, value)) if metric.unit == "share" else value
            for metric, value in readings.items()
        }

    def stop(self) -> None:
        """End the run."""
        self.stopped = True

    def status(self) -> dict[Metric, float]:
        """Read `replay/*` (without the lag of batches) and what the actors report. Changes nothing."""
        readings = self.counters.readings()
        readings[m.GROUPS_READY] = float(len(self.limiter.ready))
        readings[m.GROUPS_IN_FLIGHT] = float(len(self.limiter.open))
        readings[m.FILTERED_GROUPS] = float(self.limiter.filtered_groups)
        readings[m.REPLAY_BYTES] = float(self.store.total_bytes)
        readings |= self.quarantine.readings()
        readings[m.DISK_WAITING] = self.disk.seconds
        if self._lifecycle.success.last is not None:
            readings[m.REPLAY_SUCCESS] = self._lifecycle.success.last
        heard = (report for actor, report in self._reports.items() if not self.limiter.timed_out(actor))
        return readings | reduce(heard)

    def contents(self) -> str:
        """Say in one line what the replay holds, for an error message."""
        held = sum(len(group.members) for group in self.limiter.open.values())
        filtered = f"{self.limiter.filtered_groups} filtered; " if self.limiter.filter_groups else ""
        waiting = f"{len(self.disk.groups)} groups wait for disk space; " if self.disk.groups else ""
        poisoned = self.quarantine.contents()
        return (
            f"{len(self.limiter.ready)} groups ready, {len(self.limiter.open)} in flight with {held} episodes"
            f"; {waiting}{filtered}{poisoned}episodes dropped: {self.counters.reasons()}; actors seen: "
            f"{', '.join(sorted(self.actors)) or 'none'}; version {self.limiter.version}, "
            f"credit for {self.limiter.credit} more groups"
        )

    def close(self) -> None:
        """Let go of the folder."""
        self._lifecycle.close()

    def _verdict_on(self, episode: Episode) -> Receipt:
        if self.store.holds(number_of(episode.group_id), episode.episode_id):
            return Receipt(episode_id=episode.episode_id, status="duplicate")
        try:
            scalars_of(episode)
        except WireError as error:
            return Receipt(episode_id=episode.episode_id, status="dropped_invalid", reason=str(error))
        return self.limiter.admit(episode)

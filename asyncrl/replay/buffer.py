"""Answer the actors and the learner, without sockets: grants, receipts and batches.

A kill at any moment is harmless: a grant or use is in the ledger before the peer gets it, a file is sealed
before its receipts, and a file that a resume gives up is deleted before its number is free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from asyncrl.observability import metrics_system as s
from asyncrl.observability.metrics import Metric, reduce
from asyncrl.records import Episode
from asyncrl.replay.admission import is_start_of
from asyncrl.replay.batch_chooser import BatchChooser
from asyncrl.replay.events import ActorStarted, LearnerStarted, Refused
from asyncrl.replay.groups import number_of
from asyncrl.replay.interface import ENDLESS, Filling, GroupFailure, GroupGrant, Receipt
from asyncrl.replay.lifecycle import GroupLifecycle
from asyncrl.replay.limiter import Limiter
from asyncrl.replay.state import ReplayState
from asyncrl.replay.store import EpisodeStore

MAX_FILTERED_BATCHES: Final = 10  # Times groups per update, filtered since the last one, that end the run
REFUSED_GROUPS: Final = 8  # Of an actor since it completed one, after which it is hopeless


class Replay:
    """Answers the actors and the learner of a run."""

    def __init__(self, store: EpisodeStore, limiter: Limiter, warn: Callable[[str], None] = print) -> None:
        self.store = store
        self.state = ReplayState(store.ledger, limiter, store.made_with)
        self.lifecycle = GroupLifecycle(store, self.state, warn)
        self.batches = BatchChooser(self.lifecycle, warn)
        self.stopped = False  # True once the learner ended the run
        self._decisions = 0.0
        self.lifecycle.recover()

    def begin(self, session: str, version: int, *, in_turns: bool = False) -> None:
        """Record a learner at `version`. A new session starts or resumes the run; a known one reconnected."""
        if session != self.state.learner:
            self.lifecycle.finish()
            self.batches.forget()
            self.lifecycle.roll_back(version, in_turns=in_turns)
            self.state.commit(LearnerStarted(learner=session, version=version))
            self.lifecycle.count_successes()
        ready, matches = self.state.limiter.ready, self.state.limiter.matches_run
        for number in [number for number, group in ready.items() if not matches(group)]:
            self.lifecycle.set_aside(number, "another world, group size, temperature or top-k than the run's")
        self.set_version(version)

    def hello(self, actor: str, session: str) -> None:
        """Record an actor. A new session does not know the previous one's groups: they are given up."""
        if self.state.limiter.actors[actor].session != session:
            self.state.commit(ActorStarted(actor=actor, session=session))
            self.leave(actor)
        self.state.limiter.record_heartbeat(actor)

    def leave(self, actor: str) -> None:
        """Give up an actor's unfinished groups; other actors get the credit at once."""
        limiter = self.state.limiter
        for number in [n for n, x in limiter.open.items() if x.actor == actor and not limiter.complete(n)]:
            self.lifecycle.drop(number, "dropped_deadline")
        limiter.proven.discard(actor)
        record = limiter.actors[actor]
        record.readings, record.refused = {}, 0

    def grant(self, actor: str, request_number: int = -1) -> GroupGrant | None:
        """Grant a group; a repeated request >= 0 gets the same grant. None without credit, space or start."""
        state = self.state
        self.maintain()
        if (grant := state.limiter.find_grant(actor, request_number)) is not None:
            return grant
        if self.lifecycle.disk.groups or state.quarantine.exhausted_reason:
            return None
        event = state.limiter.new_grant(actor, request_number)
        if event is None:
            return None
        state.commit(event)
        return state.limiter.open[event.grant].grant

    def was_given_up(self, actor: str, request_number: int) -> bool:
        """True if a request's group is no longer open: the request gets no second one."""
        limiter = self.state.limiter
        answered = 0 <= request_number <= limiter.actors[actor].answered
        return answered and limiter.find_grant(actor, request_number) is None

    def admit(self, episode: Episode, actor: str | None = None) -> Receipt:
        """Admit a sender's episode (None: unknown). `pop_receipts` has the receipts of complete groups."""
        number, limiter = number_of(episode.group_id), self.state.limiter
        if number in self.lifecycle.unwritten:  # Its problem could give the group up.
            self.lifecycle.finish()
        if self.store.holds(number, episode.episode_id):
            receipt = Receipt(episode_id=episode.episode_id, status="duplicate")
        else:
            receipt = limiter.admit(episode, actor)
        if receipt.status == "held":
            if limiter.complete(number):
                limiter.actors[limiter.open[number].actor].refused = 0
                self.lifecycle.store_soon(number)
        elif receipt.status == "duplicate":
            self.state.counters.add("duplicate")
            if number in limiter.open:
                receipt = Receipt(episode_id=episode.episode_id, status="held")  # Known, but not yet durable.
        else:
            decisions = len(episode.policy_versions)
            self.state.commit(Refused(refused=receipt.status, decisions=decisions, cause=receipt.cause or ""))
            of_this_grant = receipt.status != "dropped_outdated" and receipt.cause != "grant"
            if number in limiter.open and of_this_grant:
                # The group cannot become complete any more: its credit is worth more than its siblings.
                if receipt.status == "dropped_invalid":
                    self._drop_refused(number, receipt.reason)
                else:
                    self.lifecycle.drop(number, receipt.status)
        return receipt

    def _drop_refused(self, number: int, reason: str) -> None:
        name = self.state.limiter.open[number].actor
        actor = self.state.limiter.actors[name]
        actor.refused, actor.last_refusal = actor.refused + 1, f"group {number} of {name!r}: {reason[:500]}"
        self.lifecycle.drop(number, "dropped_deadline")

    def fail(self, failure: GroupFailure, actor: str | None = None) -> None:
        """Give up a group that an actor (None: unknown) was granted and cannot imagine."""
        if failure.number in self.lifecycle.unwritten:
            self.lifecycle.finish()
        limiter = self.state.limiter
        if not limiter.owns(failure.number, actor):
            group = limiter.open.get(failure.number)
            if group is not None and not group.granted_before:  # Else it may have been this actor's.
                self.state.commit(Refused(refused="dropped_invalid", cause="grant"))
            return
        left = self._starts_left(failure)
        if left < 0:
            known = limiter.episode_format.tasks
            why = f"start state {failure.start_state[:60]!r} is none of the run's {len(known) or 'simulator'}"
            self._drop_refused(failure.number, why)
            return
        self.lifecycle.drop(failure.number, "dropped_poisoned", failure=replace(failure, left=left))

    def _starts_left(self, failure: GroupFailure) -> int:
        """Count the start states left, by the actor's report if the run's are unknown; -1: unknown name."""
        found = self.state.limiter.episode_format
        if found.simulator is not None:
            return ENDLESS if is_start_of(found.simulator.name, failure.start_state) else -1
        if not found.tasks:
            return failure.left
        if failure.start_state not in found.tasks:
            return -1
        return len(found.tasks.keys() - set(self.state.quarantine.names))

    @property
    def exhausted_reason(self) -> str:
        """Reason why no further group will ever be ready; empty while one may be."""
        limiter = self.state.limiter
        heard = [name for name, actor in limiter.actors.items() if actor.heard_at > -math.inf]
        actors = [limiter.actors[name] for name in heard if not limiter.timed_out(name)]
        if actors and all(actor.refused >= REFUSED_GROUPS for actor in actors):
            return (
                f"Nothing that the actors imagine is admitted: of each of {len(actors)} actors "
                f"{REFUSED_GROUPS} groups in a row were refused (replay/refused_*), last "
                f"{actors[-1].last_refusal}. Actors and learner have other settings, models or code: start "
                "all with the run's config.json and files."
            )
        return "" if limiter.open else self.state.quarantine.exhausted_reason

    @property
    def filter_end_reason(self) -> str:
        """Reason why the filter ends the run (no failure); empty while a group may have a signal."""
        limiter, filtered = self.state.limiter, self.state.filtered
        ready, needed = len(limiter.ready), limiter.groups_per_update
        if filtered.groups < MAX_FILTERED_BATCHES * needed or ready >= needed:
            return ""
        found = f", and only {ready} of the {needed} groups of a batch differ" if ready else ""
        return (
            f"within each of the last {filtered.groups} groups all episodes scored the same "
            f"({filtered.succeeded} groups succeeded, {filtered.failed} failed){found}: there is nothing to "
            "learn. Leave --algorithm.filter-groups out, or use harder or easier --start-states"
        )

    @property
    def filling(self) -> Filling:
        """Progress of the next batch."""
        limiter = self.state.limiter
        whole = len(limiter.ready) + self.state.filtered.groups
        held = sum(len(group.members) for group in limiter.open.values())
        return Filling(
            groups=len(limiter.ready),
            episodes=whole * limiter.group_size + held,
            decisions=int(self._decisions),
        )

    def pop_receipts(self) -> list[tuple[str, Receipt]]:
        """Return and remove the receipts that are due, each with its actor."""
        due, self.lifecycle.receipts = self.lifecycle.receipts, []
        return due

    def choose(self, groups: int, version: int, request: str = "") -> list[int] | None:
        """Give complete groups away; a repeated request gets the same batch. See `BatchChooser.choose`."""
        self.set_version(version)
        return self.batches.choose(groups, request)

    def set_version(self, version: int) -> None:
        """Set the learner's newest version; drop the groups that it makes too old."""
        if version > self.state.limiter.version:
            self.state.limiter.advance(version)
            self.lifecycle.success.close()
        self.maintain()

    def maintain(self) -> None:
        """Give up overdue and old groups; retry those that wait for the disk. Call it often."""
        limiter = self.state.limiter
        self.lifecycle.finish(wait=False)
        for number in limiter.stale():
            if number not in self.lifecycle.unwritten:
                self.lifecycle.drop(number, "dropped_lag")
        for number in limiter.overdue():
            self.lifecycle.drop(number, "dropped_deadline")
        self.lifecycle.retry()

    def report(self, actor: str, metrics: Mapping[Metric, float]) -> None:
        """Record an actor's readings; a share is clipped to [0, 1]."""
        record = self.state.limiter.actors[actor]
        record.heard_at = self.state.limiter.clock()
        made = metrics.get(s.ACTOR_DECISIONS, 0.0) - record.readings.get(s.ACTOR_DECISIONS, 0.0)
        if made > 0:
            self._decisions += made
            record.progress_at = record.heard_at
        record.readings = {
            metric: min(1.0, max(0.0, value)) if metric.unit == "share" else value
            for metric, value in metrics.items()
        }

    def status(self) -> dict[Metric, float]:
        """Return `replay/*` (without the lag of batches) and the actors' readings."""
        state, limiter = self.state, self.state.limiter
        found = state.counters.metrics() | state.quarantine.metrics()
        found[s.GROUPS_READY] = float(len(limiter.ready))
        found[s.GROUPS_IN_FLIGHT] = float(len(limiter.open))
        found[s.FILTERED_GROUPS] = float(limiter.filtered_groups)
        found[s.REPLAY_BYTES] = float(self.store.total_bytes)
        found[s.DISK_WAITING] = self.lifecycle.disk.seconds
        if self.lifecycle.success.last is not None:
            found[s.REPLAY_SUCCESS] = self.lifecycle.success.last
        return found | reduce(x.readings for n, x in limiter.actors.items() if not limiter.timed_out(n))

    def contents(self) -> str:
        """Return one line about the contents, for an error message."""
        state, limiter = self.state, self.state.limiter
        held = sum(len(group.members) for group in limiter.open.values())
        filtered = f"{limiter.filtered_groups} filtered; " if limiter.filter_groups else ""
        full = len(self.lifecycle.disk.groups)
        waiting = f"{full} groups wait for {self.lifecycle.disk.wanted}; " if full else ""
        return (
            f"{len(limiter.ready)} groups ready, {len(limiter.open)} in flight with {held} episodes; "
            f"{waiting}{filtered}{state.quarantine.contents()}episodes dropped: {state.counters.reasons()}; "
            f"actors seen: {', '.join(sorted(limiter.actors)) or 'none'}; version {limiter.version}, "
            f"credit for {limiter.credit} more groups"
        )

    def close(self) -> None:
        """Close the folder."""
        self.batches.close()
        self.lifecycle.close()

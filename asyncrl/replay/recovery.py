"""The replay's state after an interruption: the ledger and the files in, the books as they have to be out.

`recover` when the process starts, `rewind` when a learner goes on from an earlier version than the books'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.replay.counters import constant
from asyncrl.replay.events import recall
from asyncrl.replay.group_lifecycle import Keeper
from asyncrl.replay.groups import ReadyGroup, ready_group
from asyncrl.replay.interface import ReceiptStatus

if TYPE_CHECKING:
    from asyncrl.replay.limiter import Limiter


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """What a learner that begins at an earlier version changes in the books."""

    ready: dict[int, tuple[int, ...]]
    """Groups used by updates that are lost, which wait to be used again -> versions of uses that count."""
    drop: dict[int, ReceiptStatus]
    """Groups to give up. The numbers with `dropped_resume` are granted again."""


def plan_resume(
    limiter: Limiter, version: int, stored: Mapping[int, ReadyGroup], *, in_turns: bool = False
) -> Resumption:
    """Say what has to change before a learner begins at `version`, as after a resume.

    The aim is that it sees what it would have seen without the interruption. What is open belongs to
    actors that are gone, what a later version imagined to updates that are lost: both are imagined again
    under the same numbers, which decide start states and seeds. What a lost update used, and this version
    may use, waits again. A group that also counting updates used was learned from: it is never dropped.

    That is exact down to `horizon` versions before the limiter's. Of older versions the books know only which
    groups were closed, and closed they stay: what a lost update of those versions used, filtered or dropped
    is neither used again nor imagined again under its number. The learner goes on with new groups instead,
    nothing is used twice, and nothing above the lag bound is used; but batches, start states, and the shares
    of successful and filtered groups are not those of the undisturbed run.

    Args:
        limiter: With the books before the resume.
        version: Where the learner goes on.
        stored: Groups whose files exist.
        in_turns: Actor and learner take turns: `version` imagines all its groups before one is used.
            When it had not completed them, all are imagined again: an episode's last digits depend on its
            neighbours in the actor's batch.
    """
    drop: dict[int, ReceiptStatus] = dict.fromkeys(limiter.open, "dropped_resume")
    ready = dict[int, tuple[int, ...]]()
    for number, filtered in limiter.filtered.items():
        if filtered.newest_version > version:
            drop[number] = "dropped_resume"
    for number, used_at in limiter.used_at.items():
        counting = tuple(at for at in used_at if at < version)
        if len(counting) < len(used_at):
            verdict = _verdict(stored.get(number), version, limiter.max_lag)
            if verdict is None:
                ready[number] = counting
            elif not counting:
                drop[number] = verdict
    for number, group in limiter.ready.items():
        verdict = _verdict(group, version, limiter.max_lag)
        if verdict is not None and not limiter.used_at.get(number):
            drop[number] = verdict
    kept = {number: stored[number].newest_version for number in {*ready, *limiter.ready} - drop.keys()}
    if in_turns and not _whole(limiter, {n: len(ready.get(n, limiter.used_at.get(n, ()))) for n in kept}):
        kept |= {number: filtered.newest_version for number, filtered in limiter.filtered.items()}
        for number, newest_version in kept.items():
            if newest_version == version:
                drop[number] = "dropped_resume"
    return Resumption(
        ready={number: ready[number] for number in sorted(ready.keys() - drop.keys())},
        drop=dict(sorted(drop.items())),
    )


def _whole(limiter: Limiter, uses: Mapping[int, int]) -> bool:
    """Whether the groups that are kept (number -> uses that count) are all that would have been granted."""
    left = sum(limiter.uses - count for count in uses.values())
    batch = limiter.groups_per_update
    return left >= (limiter.max_lag + 1) * batch and len(uses) >= batch


def _verdict(group: ReadyGroup | None, version: int, max_lag: int) -> ReceiptStatus | None:
    """Why a learner that begins at `version` may not use a group, or None when it may."""
    if group is None or group.newest_version > version:
        return "dropped_resume"
    return "dropped_lag" if version - group.oldest_version > max_lag else None


def recover(keeper: Keeper) -> None:
    """Fill empty books from the ledger, then look at the files."""
    for entry in keeper.store.ledger.read():
        recall(entry, keeper.limiter, keeper.tally, keeper.session)
        keeper.quarantine.recall(entry)
    _recover_ready(keeper)
    count_successes(keeper)


def rewind(keeper: Keeper, version: int, *, in_turns: bool) -> None:
    """Undo what a resume at `version` makes undone: see `plan_resume`."""
    store, limiter = keeper.store, keeper.limiter
    stored = _stored(keeper)
    plan = plan_resume(limiter, version, stored, in_turns=in_turns)
    for number, uses in plan.ready.items():
        store.ledger.append(ready=number, **({"uses": uses} if uses else {}))
        limiter.take_back(number, uses)
        limiter.make_ready(number, stored[number])
    for number, status in plan.drop.items():
        was_stored = number not in limiter.open
        if status == "dropped_resume":
            store.remove(number)
        keeper.drop(number, status, stored=was_stored)


def count_successes(keeper: Keeper) -> None:
    """Count the complete groups whose newest decision is of the learner's version."""
    keeper.success.restart()
    store, limiter = keeper.store, keeper.limiter
    for number, group in limiter.ready.items():
        if group.newest_version == limiter.version:
            keeper.success.add(store.shards[number].attributes["successes"], limiter.group_size)
    for filtered in limiter.filtered.values():
        if filtered.newest_version == limiter.version:
            keeper.success.add(filtered.successes, limiter.group_size)


def _stored(keeper: Keeper) -> dict[int, ReadyGroup]:
    return {number: ready_group(shard) for number, shard in keeper.store.shards.items()}


def _recover_ready(keeper: Keeper) -> None:
    """Make the sealed groups ready that the ledger did not close; filter what a crash left unfiltered."""
    limiter = keeper.limiter
    for number, group in _stored(keeper).items():
        if number in limiter.closed:
            continue
        limiter.make_ready(number, group)
        if number in limiter.used_at:
            continue
        keeper.tally.add("stored", limiter.group_size)
        if limiter.filter_groups:
            episodes = keeper.store.load(number)
            if episodes is None:
                keeper.drop(number, "dropped_invalid", stored=True)
            elif constant(episodes):
                keeper.filter(number)
    for number in [n for n in limiter.used_at if n not in limiter.ready and n not in limiter.closed]:
        limiter.retire(number)
    limiter.forget()

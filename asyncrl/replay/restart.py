"""The replay's state after an interruption: the ledger and the files in, the books as they have to be out.

`recover` when the process starts, `rewind` when a learner goes on from an earlier version than the books'.
"""

from __future__ import annotations

from asyncrl.replay.groups import ReadyGroup, ready_group
from asyncrl.replay.keeping import Keeper
from asyncrl.replay.outcomes import constant
from asyncrl.replay.recall import recall
from asyncrl.replay.resumption import plan_resume


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

"""Bring the replay's state back after an interruption, from the ledger and the files.

`recover` when the process starts, `roll_back_to` when a learner goes on from an earlier version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.replay.counters import has_no_signal
from asyncrl.replay.events import Dropped, Event, GroupSized, LedgerLost, Ready, read_events
from asyncrl.replay.groups import ReadyGroup, ready_group
from asyncrl.replay.interface import ReceiptStatus
from asyncrl.replay.lifecycle import GroupLifecycle

if TYPE_CHECKING:
    from asyncrl.replay.limiter import Limiter


@dataclass(frozen=True, kw_only=True)
class ResumePlan:
    """What a learner that begins at an earlier version changes."""

    ready: dict[int, tuple[int, ...]]
    """Groups used by updates that are lost, which wait to be used again -> versions of uses that count."""
    drop: dict[int, ReceiptStatus]
    """Groups to give up. The numbers with `dropped_resume` are granted again."""


def plan_resume(
    limiter: Limiter, version: int, stored: Mapping[int, ReadyGroup], *, in_turns: bool = False
) -> ResumePlan:
    """Say what has to change before a learner begins at `version`, as after a resume.

    The aim is that it sees what it would have seen without the interruption. What is open belongs to
    actors that are gone, what a later version imagined to updates that are lost: both are imagined again
    under the same numbers, which decide start states and seeds; so is what another world imagined, was drawn
    with another temperature or top-k, or has another group size, if these were changed for the resume. What a
    lost update used, and this version may use, waits again. A group that also counting updates used was
    learned from: it is never dropped.

    That is exact down to `horizon` versions before the limiter's. Of older versions it is known only which
    groups were closed, and closed they stay: what a lost update of those versions used, filtered or dropped
    is neither used again nor imagined again under its number. The learner goes on with new groups instead,
    nothing is used twice, and nothing above the lag bound is used; but batches, start states, and the shares
    of successful and filtered groups are not those of the undisturbed run.

    Nor is it exact for what a lost update dropped as too old, whose file is gone: it is imagined again by
    newer versions.

    Args:
        limiter: As it is before the resume.
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
            status = _drop_reason(limiter, stored.get(number), version)
            if status is None:
                ready[number] = counting
            elif not counting:
                drop[number] = status
    for number, group in limiter.ready.items():
        status = _drop_reason(limiter, group, version)
        if status is not None and not limiter.used_at.get(number):
            drop[number] = status
    kept = {number: stored[number].newest_version for number in {*ready, *limiter.ready} - drop.keys()}
    if in_turns and not _all_kept(limiter, {n: len(ready.get(n, limiter.used_at.get(n, ()))) for n in kept}):
        kept |= {number: filtered.newest_version for number, filtered in limiter.filtered.items()}
        for number, newest_version in kept.items():
            if newest_version == version:
                drop[number] = "dropped_resume"
    return ResumePlan(
        ready={number: ready[number] for number in sorted(ready.keys() - drop.keys())},
        drop=dict(sorted(drop.items())),
    )


def _all_kept(limiter: Limiter, uses: Mapping[int, int]) -> bool:
    """Whether the groups that are kept (number -> uses that count) are all that would have been granted."""
    left = sum(limiter.uses - count for count in uses.values())
    batch = limiter.groups_per_update
    return left >= (limiter.max_lag + 1) * batch and len(uses) >= batch


def _drop_reason(limiter: Limiter, group: ReadyGroup | None, version: int) -> ReceiptStatus | None:
    """Say why a learner that begins at `version` may not use a group, or None when it may."""
    if group is None or group.newest_version > version or not limiter.made_alike(group):
        return "dropped_resume"
    return limiter.too_old(group, version)


def recover(lifecycle: GroupLifecycle, lost_ledger: str = "") -> None:
    """Bring an empty state up to date: apply the ledger, then look at the files.

    Args:
        lifecycle: Of an empty state.
        lost_ledger: SHA-256 of lines that the ledger should begin with and does not; empty: it does.
    """
    state, aside = lifecycle.state, set[int]()
    for event in read_events(lifecycle.store.ledger.read()):
        state.apply(event)
        _note_aside(aside, event)
    for number in aside & lifecycle.store.group_files.keys():  # The process ended before it moved the file.
        lifecycle.store.set_aside(number)
    _recover_ready(lifecycle)
    state.limiter.end_recovery()
    if state.group_size != state.limiter.group_size:
        state.commit(GroupSized(size=state.limiter.group_size))
    if lost_ledger and lost_ledger not in state.lost_ledgers:
        _give_up_unrecorded(lifecycle, lost_ledger)
    count_successes(lifecycle)


def _note_aside(aside: set[int], event: Event) -> None:
    if isinstance(event, Dropped):
        (aside.add if event.status == "dropped_unusable" else aside.discard)(event.number)


def _give_up_unrecorded(lifecycle: GroupLifecycle, lost_ledger: str) -> None:
    """Give up what is stored, because the lines that said whether it was used are gone.

    An error would lose a run that can go on, and to believe what is left would train on groups twice. So all
    that was stored counts as used, and new groups are imagined. The last line notes that this was done.
    """
    state = lifecycle.state
    numbers = sorted(state.limiter.ready)
    for number in numbers:
        lifecycle.drop(number, "dropped_unrecorded", stored=True)
    state.commit(LedgerLost(digest=lost_ledger))
    lifecycle.tell(
        f"the replay's {lifecycle.store.ledger.path.name} is not what it was when the checkpoint was "
        f"written: lines are missing or changed. {len(numbers)} stored groups that may have been used are "
        "given up (replay/dropped_unrecorded), and new ones are imagined."
    )


def roll_back_to(lifecycle: GroupLifecycle, version: int, *, in_turns: bool) -> None:
    """Undo what a resume at `version` makes undone: see `plan_resume`.

    Args:
        lifecycle: As it is before the resume.
        version: Where the learner goes on.
        in_turns: See `plan_resume`.
    """
    state = lifecycle.state
    stored = _stored(lifecycle)
    plan = plan_resume(state.limiter, version, stored, in_turns=in_turns)
    other = [n for n in plan.drop if n in stored and not state.limiter.made_alike(stored[n])]
    if other:
        lifecycle.tell(
            f"{len(other)} stored groups were made in another world, or with another --algorithm.group-size, "
            "temperature or top-k: they are given up (replay/dropped_resume) and imagined again."
        )
    for number, uses in plan.ready.items():
        state.commit(Ready(number=number, uses=uses))
        state.make_ready(number, stored[number])
    for number, status in plan.drop.items():
        was_stored = number not in state.limiter.open
        lifecycle.drop(number, status, stored=was_stored)


def count_successes(lifecycle: GroupLifecycle) -> None:
    """Count the complete groups whose newest decision is of the learner's version."""
    lifecycle.success.restart()
    store, limiter = lifecycle.store, lifecycle.state.limiter
    for number, group in limiter.ready.items():
        if group.newest_version == limiter.version:
            size = group.size or limiter.group_size
            lifecycle.success.add(store.group_files[number].attributes["successes"], size)
    for filtered in limiter.filtered.values():
        if filtered.newest_version == limiter.version:
            lifecycle.success.add(filtered.successes, filtered.size)


def _stored(lifecycle: GroupLifecycle) -> dict[int, ReadyGroup]:
    return {number: ready_group(group_file) for number, group_file in lifecycle.store.group_files.items()}


def _recover_ready(lifecycle: GroupLifecycle) -> None:
    """Make the sealed groups ready that the ledger did not close; filter what a crash left unfiltered."""
    state, limiter = lifecycle.state, lifecycle.state.limiter
    for number, group in _stored(lifecycle).items():
        if limiter.is_closed(number):
            continue
        state.make_ready(number, group)
        if number not in limiter.used_at and limiter.filter_groups and limiter.made_alike(group):
            episodes = lifecycle.store.load(number)
            if episodes is None:
                lifecycle.drop(number, "dropped_invalid", stored=True)
            elif has_no_signal(episodes):
                lifecycle.filter(number)
    for number in [n for n in limiter.used_at if n not in limiter.ready and not limiter.is_closed(n)]:
        limiter.close_used(number)

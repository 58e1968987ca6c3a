"""Bring the replay's state back after an interruption, from the ledger and the files.

`recover` when the process starts, `roll_back_to` when a learner goes on from an earlier version.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.replay.events import Dropped, GroupSized, LedgerLost, Ready, read_events
from asyncrl.replay.group_file import GroupFile
from asyncrl.replay.groups import SuccessWindow, has_no_signal
from asyncrl.replay.interface import ReceiptStatus
from asyncrl.replay.lifecycle import GroupLifecycle
from asyncrl.replay.limiter import Limiter


def plan_resume(
    limiter: Limiter, version: int, stored: Mapping[int, GroupFile], *, in_turns: bool = False
) -> tuple[list[int], dict[int, ReceiptStatus]]:
    """Plan the changes before a learner begins at `version`, so that it sees what it would have seen.

    Open groups (their actors are gone), groups of later versions, and those of another world, sampling or
    group size are imagined again under the same numbers, which decide start states and seeds. Groups that a
    lost update used, and this version may use, wait again.

    That is exact down to `resume_window` versions before the limiter's: groups closed before stay closed, so
    batches, start states and shares differ, but nothing is used twice or above the lag bound. Nor is it exact
    for a group that a lost update dropped as too old: newer versions imagine it again.

    Returns:
        Groups to use again; and those to give up, where numbers with `dropped_resume` are granted again.
    """
    drop: dict[int, ReceiptStatus] = dict.fromkeys(limiter.open, "dropped_resume")
    ready = list[int]()
    for number, closed in limiter.closed.items():
        if closed.filtered is not None and closed.version > version:
            drop[number] = "dropped_resume"
        if closed.used and closed.version >= version:
            status = _drop_reason(limiter, stored.get(number), version)
            if status is None:
                ready.append(number)
            else:
                drop[number] = status
    for number, group in limiter.ready.items():
        status = _drop_reason(limiter, group, version)
        if status is not None:
            drop[number] = status
    kept = {number: stored[number].newest_version for number in {*ready, *limiter.ready} - drop.keys()}
    all_kept = len(kept) >= (limiter.max_lag + 1) * limiter.groups_per_update
    if in_turns and not all_kept:
        kept |= {n: closed.version for n, closed in limiter.closed.items() if closed.filtered is not None}
        for number, newest_version in kept.items():
            if newest_version == version:
                drop[number] = "dropped_resume"
    return sorted(set(ready) - drop.keys()), dict(sorted(drop.items()))


def _drop_reason(limiter: Limiter, group: GroupFile | None, version: int) -> ReceiptStatus | None:
    if group is None or group.newest_version > version or not limiter.matches_run(group):
        return "dropped_resume"
    return limiter.too_old(group, version)


def recover(lifecycle: GroupLifecycle, lost_ledger: str = "") -> None:
    """Bring an empty state up to date from the ledger and the files."""
    state, aside = lifecycle.state, set[int]()
    for event in read_events(lifecycle.store.ledger.read()):
        state.apply(event)
        if isinstance(event, Dropped):
            (aside.add if event.status == "dropped_unusable" else aside.discard)(event.dropped)
    for number in aside & lifecycle.store.group_files.keys():  # The process ended before it moved the file.
        lifecycle.store.set_aside(number)
    _recover_ready(lifecycle)
    state.limiter.end_recovery()
    if state.group_size != state.limiter.group_size:
        state.commit(GroupSized(group_size=state.limiter.group_size))
    if lost_ledger and lost_ledger not in state.lost_ledgers:
        _give_up_unrecorded(lifecycle, lost_ledger)
    count_successes(lifecycle)


def _give_up_unrecorded(lifecycle: GroupLifecycle, lost_ledger: str) -> None:
    """The lines about their uses are gone."""
    state = lifecycle.state
    numbers = sorted(state.limiter.ready)
    for number in numbers:
        lifecycle.drop(number, "dropped_unrecorded")
    state.commit(LedgerLost(ledger_lost=lost_ledger))
    lifecycle.notify(
        f"the replay's {lifecycle.store.ledger.path.name} is not what it was when the checkpoint was "
        f"written: lines are missing or changed. {len(numbers)} stored groups that may have been used are "
        "given up (replay/dropped_unrecorded), and new ones are imagined."
    )


def roll_back_to(lifecycle: GroupLifecycle, version: int, *, in_turns: bool) -> None:
    """Carry out `plan_resume`."""
    state = lifecycle.state
    stored = dict(lifecycle.store.group_files)
    ready, drop = plan_resume(state.limiter, version, stored, in_turns=in_turns)
    other = [n for n in drop if n in stored and not state.limiter.matches_run(stored[n])]
    if other:
        lifecycle.notify(
            f"{len(other)} stored groups were made in another world, or with another --algorithm.group-size, "
            "temperature or top-k: they are given up (replay/dropped_resume) and imagined again."
        )
    for number in ready:
        state.commit(Ready(ready=number))
        state.make_ready(number, stored[number])
    for number, status in drop.items():
        lifecycle.drop(number, status)


def count_successes(lifecycle: GroupLifecycle) -> None:
    """Count the complete groups whose newest decision is of the learner's version."""
    lifecycle.success = SuccessWindow()
    limiter = lifecycle.state.limiter
    for group in limiter.ready.values():
        if group.newest_version == limiter.version:
            lifecycle.success.add(group.attributes["successes"], group.attributes["group_size"])
    for closed in limiter.closed.values():
        if closed.filtered is not None and closed.version == limiter.version:
            lifecycle.success.add(closed.filtered.successes, closed.filtered.size)


def _recover_ready(lifecycle: GroupLifecycle) -> None:
    """Make the sealed groups ready that the ledger did not close; filter those that a crash left."""
    state, limiter = lifecycle.state, lifecycle.state.limiter
    for number, group in list(lifecycle.store.group_files.items()):
        if limiter.is_closed(number):
            continue
        state.make_ready(number, group)
        if limiter.filter_groups and limiter.matches_run(group):
            episodes = lifecycle.store.load(number)
            if episodes is None:
                lifecycle.drop(number, "dropped_invalid")
            elif has_no_signal(episodes):
                lifecycle.filter(number)

"""Table of the groups of a run, and counts of their episodes.

    apply_grant ──► open ──make_ready──► ready ──use──► closed, used
         ▲           │                     ├──filter──► closed: all returns are equal
         │           └────────drop─────────┴──────────► closed, dropped: too old, incomplete, not usable
         └─────────────────────────────────────────────── `to_grant_again`, under the same number

A resume reopens groups of lost updates: closed, used ──remove, make_ready──► ready.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, get_args

from asyncrl.observability import metrics_system as m
from asyncrl.observability.metrics import REGISTRY, Metric
from asyncrl.records import Episode, returns_differ
from asyncrl.replay.admission import sibling_difference
from asyncrl.replay.group_file import GroupFile
from asyncrl.replay.interface import GroupGrant, ReceiptStatus, RefusalCause

NO_VERSION: Final = 2**63 - 1  # Oldest version of a group without members
GRANTS_AGAIN: Final = 2  # Repeated grants of a number whose group its actors did not complete
DROPPED: Final = [status for status in get_args(ReceiptStatus) if status.startswith("dropped")]
EPISODES: Final[dict[ReceiptStatus, Metric]] = {
    "stored": m.EPISODES,
    "duplicate": m.DUPLICATES,
    **{status: REGISTRY[f"replay/{status}"] for status in DROPPED},
}
DECISIONS: Final = {status: REGISTRY[f"replay/{status}_decisions"] for status in DROPPED}
REFUSED: Final[dict[RefusalCause, Metric]] = {
    cause: REGISTRY[f"replay/refused_{cause}"] for cause in get_args(RefusalCause)
}


class GroupTable:
    """The groups of a run, changed by events, the learner's version and files.

    Numbers are granted in ascending order: a group below `next_number` is open, ready or closed.
    """

    def __init__(self, *, resume_window: int) -> None:
        self.resume_window = resume_window
        self.version = 0  # The learner's newest policy version
        self.used = 0  # Groups in all batches: the sampling cursor. A filtered group is in none.
        self.next_number = 0
        self.open: dict[int, OpenGroup] = {}
        self.ready: dict[int, GroupFile] = {}
        self.closed: dict[int, ClosedGroup] = {}
        self.to_grant_again: set[int] = set()  # Closed groups; their numbers go before any new one
        self._given_up: dict[int, int] = {}  # Number to grant again -> times that it was not completed
        self._filtered_before = 0
        self._forgotten: set[int] | None = set()  # The forgotten closed groups, until `end_recovery`.

    @property
    def filtered_groups(self) -> int:
        """Count of the groups whose episodes all had the same return, since the run began."""
        return self._filtered_before + sum(group.filtered is not None for group in self.closed.values())

    def is_closed(self, number: int) -> bool:
        """True if a group was used up, filtered or given up."""
        # While the ledger is read only groups that it closed count: a damaged line may hide a grant whose
        # file exists. Later, every file of a group that is not closed has made it ready.
        if self._forgotten is not None:
            return number in self.closed or number in self._forgotten
        return 0 <= number < self.next_number and number not in self.open and number not in self.ready

    def is_counted(self, number: int) -> bool:
        """True if the episodes of a stored group are counted: it is ready or closed."""
        return number in self.ready or self.is_closed(number)

    def end_recovery(self) -> None:
        """Finish recovery from the ledger and the files."""
        self.forget()
        self._forgotten = None

    def make_ready(self, number: int, group: GroupFile) -> None:
        """Make a stored group ready."""
        self.remove(number)
        self._given_up.pop(number, None)
        self.ready[number] = group

    def use(self, numbers: Sequence[int]) -> None:
        """Close groups that were given to the learner at `version`."""
        for number in numbers:
            self._close(number, ClosedGroup(answer="duplicate", version=self.version, used=True))
        self.used += len(numbers)

    def filter(self, number: int, newest_version: int, successes: int, size: int) -> None:
        """Close a stored group without a learning signal: its credit returns, it does not count as used."""
        closed = ClosedGroup(answer="duplicate", version=newest_version, filtered=(successes, size))
        self._close(number, closed)

    def drop(self, number: int, status: ReceiptStatus, *, stored: bool = False) -> None:
        """Give a group up, for good or to grant its number again (`grants_again`)."""
        again = self.grants_again(number, status)
        given_up = self._given_up.get(number, 0) + (status == "dropped_deadline")
        answer = "duplicate" if stored and status != "dropped_resume" else status
        self._close(number, ClosedGroup(answer=answer, version=self.version))
        if again:
            self.to_grant_again.add(number)
            self._given_up[number] = given_up

    def grants_again(self, number: int, status: ReceiptStatus) -> bool:
        """True if a number is granted again after its group is dropped for this reason.

        Otherwise start states with slow groups would be used less. A group that cannot be imagined or is not
        admitted would fail again; and a group may crash its actors, so the number of repetitions is bounded.
        """
        if status == "dropped_deadline":
            return self._given_up.get(number, 0) < GRANTS_AGAIN
        return status in ("dropped_resume", "dropped_lag")

    def _close(self, number: int, group: ClosedGroup) -> None:
        self.remove(number)
        self._given_up.pop(number, None)
        self.closed[number] = group

    def remove(self, number: int) -> None:
        """Forget everything about a group, also its use."""
        for groups in (self.open, self.ready, self.closed):
            groups.pop(number, None)
        self.to_grant_again.discard(number)
        if self._forgotten is not None:
            self._forgotten.discard(number)
        self.next_number = max(self.next_number, number + 1)

    def advance(self, version: int) -> None:
        """Set a newer version of the learner; forget everything that no resume has to undo."""
        self.version = version
        self.forget()

    def forget(self) -> None:
        """Forget groups closed more than `resume_window` versions ago; in recovery, keep their numbers."""
        before = self.version - self.resume_window
        for number in list(itertools.takewhile(lambda n: self.closed[n].version < before, self.closed)):
            self._filtered_before += self.closed.pop(number).filtered is not None
            if self._forgotten is not None:
                self._forgotten.add(number)


@dataclass(kw_only=True)
class OpenGroup:
    """A granted group that is not complete."""

    grant: GroupGrant
    actor: str
    request_number: int  # The actor's count of acquisitions; a repeated question gets the same grant
    granted_at: float
    granted_before: bool = False  # True if it was given up before; episodes of that grant may still come
    members: dict[int, Episode] = field(default_factory=dict)
    oldest_version: int = NO_VERSION

    def add(self, episode: Episode) -> None:
        """Add a member."""
        self.members[episode.member] = episode
        self.oldest_version = min(self.oldest_version, episode.oldest_version)

    def problem_with(self, episode: Episode) -> str | None:
        """Return why an episode cannot be added, or None if it can."""
        if episode.member in self.members:
            return f"member {episode.member} came twice, with different ids"
        return next(
            (problem for x in self.members.values() if (problem := sibling_difference(x, episode))), None
        )


@dataclass(frozen=True, kw_only=True)
class ClosedGroup:
    """A group that will not be used (any more)."""

    answer: ReceiptStatus  # Receipt of its late or repeated episodes
    version: int  # The learner's then; of a filtered group that of its newest decision
    used: bool = False
    filtered: tuple[int, int] | None = None  # Successes and episodes, all with the same return


def number_of(group_id: str) -> int:
    """Return the number in a `GroupGrant.group_id`, or -1 if it has none."""
    return int(group_id) if len(group_id) == 8 and group_id.isascii() and group_id.isdecimal() else -1


def has_no_signal(group: Sequence[Episode]) -> bool:
    """True if all episodes have the same return: compared with siblings, none is better."""
    returns = [episode.total_reward for episode in group]
    return not returns_differ(min(returns), max(returns), max(x.reward_size for x in group))


class EpisodeCounters:
    """Counts of episodes since the run began; the ledger carries them over a restart."""

    def __init__(self) -> None:
        self.episodes: Counter[str] = Counter()
        self.decisions: Counter[str] = Counter()
        self.refused: Counter[RefusalCause] = Counter()

    def add(self, status: ReceiptStatus, episodes: int = 1, decisions: int = 0) -> None:
        """Count episodes with one status; a negative number subtracts."""
        self.episodes[status] += episodes
        self.decisions[status] += decisions

    def metrics(self) -> dict[Metric, float]:
        """Return all counts."""
        episodes = {metric: float(self.episodes[status]) for status, metric in EPISODES.items()}
        decisions = {metric: float(self.decisions[status]) for status, metric in DECISIONS.items()}
        return episodes | decisions | {metric: float(self.refused[c]) for c, metric in REFUSED.items()}

    def reasons(self) -> str:
        """Return the numbers of dropped episodes by reason, as text."""
        dropped = {status: n for status, n in self.episodes.items() if status.startswith("dropped") and n}
        return ", ".join(f"{n} {status[8:]}" for status, n in sorted(dropped.items())) or "none"


@dataclass
class FilterStreak:
    """Groups that were filtered since the learner's last batch."""

    groups: int = 0
    succeeded: int = 0
    failed: int = 0

    def add(self, successes: int, size: int) -> None:
        """Count a group of `size` episodes, of which `successes` succeeded."""
        self.groups += 1
        self.succeeded += successes == size
        self.failed += not successes


@dataclass
class SuccessWindow:
    """Share of successful episodes among the groups completed at one version of the learner."""

    last: float | None = None  # Share at the version before, in [0, 1]; None if no group became complete
    successes: int = 0
    episodes: int = 0

    def add(self, successes: int, episodes: int) -> None:
        """Count a complete group."""
        self.successes += successes
        self.episodes += episodes

    def close(self) -> None:
        """Start the next version: the current share becomes the last one."""
        self.last = self.successes / self.episodes if self.episodes else None
        self.successes = self.episodes = 0

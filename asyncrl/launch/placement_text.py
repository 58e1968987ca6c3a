"""Reads the text of --placement: which ranks have which role. Pure.

auto                                a word, see `WORDS`
learner=0-1,actor=2-3               role=rank or role=first-last, in numbers of the whole job
learner=0-7@0,actor=0-7@1           the same in numbers of a host: the 0th and the 1st, in the order of ranks
"""

from __future__ import annotations

import re
from itertools import accumulate

from asyncrl.config.bounds import shown
from asyncrl.errors import ConfigError

ROLES = ("learner", "actor", "policy", "world")
WORDS = ("auto", "collocated", "disaggregated", "hybrid")
"""Placements that fit any number of ranks; see `placement._by_word`."""
MOST_RANKS = 4096
"""Ranks of one run: eight hosts have 64."""
EXAMPLE = "Write for example 'learner=0,actor=1-3' or 'learner=0-1,actor=2-3', or leave --placement out."
_ITEM = re.compile(r"(?:(?P<role>[a-z]+)=)?(?P<first>\d+)(?:-(?P<last>\d+))?(?:@(?P<host>\d+))?")


def read_ranks(text: str) -> dict[str, list[int]]:
    """Return the ranks of every role, ascending, counted over all hosts."""
    items = _items(text)
    before = (0, *accumulate(_sizes(items)))
    ranks: dict[str, list[int]] = {role: [] for role in ROLES}
    for role, named, host in items:
        first = before[host or 0]
        ranks[role] += range(first + named.start, first + named.stop)
    return {role: sorted(found) for role, found in ranks.items()}


def sizes_of_hosts(text: str) -> tuple[int, ...]:
    """Return how many ranks each host has by the text; nothing where it names no hosts.

    Raises:
        ConfigError: It cannot be read.

    >>> sizes_of_hosts("learner=0-1@0,actor=0-2@1"), sizes_of_hosts("learner=0,actor=1")
    ((2, 3), ())
    """
    return () if text in WORDS else _sizes(_items(text))


def span(first: int, count: int) -> str:
    """Write `count` ranks from `first` on.

    >>> span(0, 1), span(2, 2)
    ('0', '2-3')
    """
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


_Item = tuple[str, range, int | None]
"""Role, ranks of the host or, without one, of the job, and the host's number."""


def _items(text: str) -> list[_Item]:
    found: list[_Item] = []
    role = ""
    for item in text.replace(" ", "").split(","):
        match = _ITEM.fullmatch(item)
        role = (match and match["role"]) or role
        if match is None or not role:
            raise ConfigError(
                f"--placement is {text!r}, but {item!r} is not role=rank or role=first-last, nor is the text "
                f"one of {', '.join(WORDS)}. {EXAMPLE}"
            )
        if role not in ROLES:
            raise ConfigError(
                f"--placement names the role {role!r}, but there are only {', '.join(ROLES)}. {EXAMPLE}"
            )
        first, last = (_rank(match[name] or match["first"]) for name in ("first", "last"))
        if last < first:
            raise ConfigError(
                f"--placement has the range {item!r}, which ends before it begins. Use {last}-{first}."
            )
        found.append((role, range(first, last + 1), None if match["host"] is None else _rank(match["host"])))
    without = [named for _, named, host in found if host is None]
    if without and len(without) < len(found):
        raise ConfigError(
            f"--placement is {text!r}, which names the host of some ranks (@) and not of rank "
            f"{without[0].start}. Name it for all, or number all ranks over the whole job."
        )
    return found


def _sizes(items: list[_Item]) -> tuple[int, ...]:
    """Every rank has something to do, so the highest that is named is a host's last one."""
    hosts = [host for _, _, host in items if host is not None]
    stops = (
        [named.stop for _, named, host in items if host == number]
        for number in range(max(hosts, default=-1) + 1)
    )
    sizes = tuple(max(found, default=0) for found in stops)
    if sum(sizes) > MOST_RANKS:
        raise ConfigError(
            f"--placement names {sum(sizes)} ranks on {len(sizes)} hosts, but a run has at most "
            f"{MOST_RANKS}. {EXAMPLE}"
        )
    return sizes


def _rank(digits: str) -> int:
    # Only now a number: Python reads no more than 4,300 digits, and a range of as many ranks would be a list.
    if len(digits) > 9 or int(digits) >= MOST_RANKS:
        raise ConfigError(
            f"--placement names rank {shown(digits)}, but a run has at most {MOST_RANKS} ranks, counted from "
            f"0. {EXAMPLE}"
        )
    return int(digits)

"""Says which ranks of a job are on which host, and where other hosts reach the first one. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a job. Ranks are numbered host by host, and rank 0 is on the first one."""

    names: tuple[str, ...] = ("this host",)
    """What each is called, in the order of their ranks."""
    first_ranks: tuple[int, ...] = (0,)
    """Lowest rank of each."""
    size: int = 1
    """Number of ranks of the job."""
    addresses: tuple[str, ...] = ("",)
    """IPv4 address at which the other hosts reach each; empty with one host."""
    ports: tuple[int, ...] = (0,)
    """Of these addresses, open while the hosts meet; 0: none."""
    learners: tuple[int, ...] = (0,)
    """Numbers of the hosts that have learner ranks."""
    replay: str = ""
    """Address that the replay takes for ranks of other hosts; empty where there are none."""
    weights: str = ""
    """Address where these fetch weights; empty where there are none."""
    broadcasts: tuple[int, ...] = ()
    """Numbers of the hosts between which weights are broadcast, the first one's among them; empty: none."""
    placement: str = ""
    """What --placement became; rank 0 knows it, and on several hosts the others too."""

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> Hosts:
        """Return hosts that are known by their numbers of ranks alone.

        >>> Hosts.of_sizes((2, 3)).ranks(1)
        range(2, 5)
        """
        return cls(
            names=tuple(f"host {number}" for number in range(len(sizes))),
            first_ranks=(0, *accumulate(sizes[:-1])),
            size=sum(sizes),
            addresses=("",) * len(sizes),
            ports=(0,) * len(sizes),
        )

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return len(self.names) > 1

    def of(self, rank: int) -> int:
        """Return the number of a rank's host.

        >>> Hosts(names=("a", "b"), first_ranks=(0, 4), size=6).of(4)
        1
        """
        return bisect_right(self.first_ranks, rank) - 1

    def name_of(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return self.names[self.of(rank)]

    def ranks(self, number: int) -> range:
        """Return the ranks of host `number`.

        >>> Hosts(names=("a", "b"), first_ranks=(0, 4), size=6).ranks(1)
        range(4, 6)
        """
        return range((*self.first_ranks, self.size)[number], (*self.first_ranks, self.size)[number + 1])

    def to_row(self) -> dict[str, Any]:
        """Write it for JSON."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Hosts:
        """Read what `to_row` wrote."""
        fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in row.items()}
        return cls(**fields)

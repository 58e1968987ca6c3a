"""Settings of --monitor: what others can read of a run. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.config.bounds import Bounded
from asyncrl.observability.monitor_address import parse_address


@dataclass(frozen=True, kw_only=True)
class MonitorSettings(Bounded):
    """What others can read of a run over the network."""

    SECTION: ClassVar[str] = "monitor."

    listen: str = ""
    """HOST:PORT, or PORT for this host only, where the learner answers Prometheus (/metrics) and says whether
    the run makes progress (/healthz). Empty: nowhere. There is no key: docs/cluster.md says what can be
    read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.listen:
            parse_address(self.listen)

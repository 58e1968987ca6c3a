"""`asyncrl metrics [--waits]`: print the reference page of all metrics, or of all waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import tyro

from asyncrl.observability import metrics, waits


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Print the reference page of all metrics (docs/metrics.md)."""

    waits: bool = False
    """The page of all waits instead (docs/waits.md)."""


ARGUMENTS: Final = MetricsConfig
"""What the command takes; tab completion reads it too."""


def main(arguments: list[str]) -> int:
    """Print a page."""
    config = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl metrics")
    print(waits.as_markdown() if config.waits else metrics.as_markdown(), end="")
    return 0

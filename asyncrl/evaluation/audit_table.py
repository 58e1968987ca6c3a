"""Write what audits found as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from asyncrl.evaluation.audit import Audit, AuditedEpisode

ROWS: Final = {
    "imagined_success": "imagined success",
    "true_success": "true success of the same actions",
    "wrong": "wrong verdicts",
    "false": "false, of imagined successes",
    "missed": "missed, of true successes",
    "wrong_on_true_frames": "reward model wrong on the true frames",
}
"""What `Audit` counts, in words."""
SHORT: Final = ("imagined", "true", "wrong", "false", "missed", "reward wrong")


def table(head: str, audited: Mapping[str, Sequence[AuditedEpisode]]) -> str:
    """Write what was found: of one version in full, of several a row each."""
    found = {name: Audit.of(episodes) for name, episodes in audited.items()}
    if len(found) == 1:
        return "\n".join([head, *_whole(next(iter(found.values())))])
    width = max(map(len, found))
    titles = " ".join(f"{title:>21}" for title in SHORT)
    rows = [f"{'':<{width}} {titles} {'correlation':>12}"]
    for name, one in found.items():
        rates = (getattr(one, field_name) for field_name in ROWS)
        cells = " ".join(f"{rate.rate:7.1%} [{rate.low:4.0%}, {rate.high:4.0%}]" for rate in rates)
        rows.append(f"{name:<{width}} {cells} {_number(one.correlation):>12}")
    return "\n".join([head, *rows])


def _whole(audit: Audit) -> list[str]:
    width = max(map(len, ROWS.values()))
    rows = [f"{title:<{width}}  {getattr(audit, field_name)}" for field_name, title in ROWS.items()]
    rows.append(f"{'correlation of both successes':<{width}}  {_number(audit.correlation)}")
    numbers = "".join(f"{number:>7}" for number in range(1, 1 + len(audit.psnr)))
    decibels = "".join(f"{value:7.1f}" for value in audit.psnr)
    return [*rows, f"{'decision':<{width}}{numbers}", f"{'PSNR, dB':<{width}}{decibels}"]


def _number(value: float) -> str:
    """Write a share or a correlation; a dash where there is none."""
    return f"{'-':>6}" if math.isnan(value) else f"{value:6.3f}"

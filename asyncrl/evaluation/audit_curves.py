"""Write what audits of a run's checkpoints found as curves: in RUN/tensorboard/audit, by the policy version.

A folder below that of the training's curves, for TensorBoard reads the newest file of a folder only: one
written beside those of a run that goes on would end the run's own curves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from asyncrl.evaluation.audit import Audit
from asyncrl.observability import metrics_training as m
from asyncrl.observability.logger import write_curves as write_points
from asyncrl.observability.metrics import Metric

FOLDER: Final = Path("tensorboard", "audit")
_RATES: Final = {
    "imagined_success": m.AUDIT_IMAGINED_SUCCESS,
    "true_success": m.AUDIT_TRUE_SUCCESS,
    "wrong": m.AUDIT_WRONG,
    "false": m.AUDIT_FALSE,
    "missed": m.AUDIT_MISSED,
    "wrong_on_true_frames": m.AUDIT_REWARD_WRONG,
}


def metrics_of(audit: Audit) -> dict[Metric, float]:
    """Return what curves say of an audit; what is not a number is left out."""
    values: dict[Metric, float] = {}
    for name, metrics in _RATES.items():
        rate = getattr(audit, name)
        if rate.episodes:
            values |= {metrics.rate: rate.rate, metrics.low: rate.low, metrics.high: rate.high}
    if not math.isnan(audit.correlation):
        values[m.AUDIT_CORRELATION] = audit.correlation
    if audit.psnr:
        values[m.AUDIT_PSNR] = math.fsum(audit.psnr) / len(audit.psnr)
    return values


def write_curves(run_dir: Path, audits: Mapping[int, Audit], command: str) -> Path:
    """Write a file of curves; points of earlier audits from its first version on are void.

    Args:
        audits: Policy version -> what was found, at least one.

    Returns:
        Its folder.

    Raises:
        OSError: It cannot be written.
    """
    folder = run_dir / FOLDER
    write_points(folder, {version: metrics_of(audit) for version, audit in audits.items()}, command)
    return folder

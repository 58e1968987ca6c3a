"""Define what `asyncrl audit` writes about a run's checkpoints."""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncrl.observability.metrics import Metric, Reduction, define


class RateMetrics(NamedTuple):
    """A share and the ends of its 95 % interval."""

    rate: Metric
    low: Metric
    high: Metric


def _rate(name: str, meaning: str, advice: str) -> RateMetrics:
    ends = (
        define(
            f"audit/{name}_{end}",
            Reduction.LAST,
            "share",
            f"{what} end of the 95 % interval (Wilson) of `audit/{name}`.",
            "More audited episodes make it narrower.",
        )
        for end, what in (("low", "Lower"), ("high", "Upper"))
    )
    return RateMetrics(define(f"audit/{name}", Reduction.LAST, "share", meaning, advice), *ends)


IMAGINED_SUCCESS = _rate(
    "imagined_success",
    "Audited episodes that succeed in imagination, as training would have rewarded them.",
    "Compare it with `audit/true_success`: what it is higher by is promised and not kept.",
)
TRUE_SUCCESS = _rate(
    "true_success",
    "Audited episodes whose actions solve the task in the simulator.",
    "Rises over checkpoints. When it falls while `audit/imagined_success` rises, stop at its highest, or use "
    "--pace.every.",
)
WRONG = _rate(
    "verdict_wrong",
    "Audited episodes in which imagination and truth differ.",
    "Falls or stays. Rising: the policy goes where the world model has not been.",
)
FALSE = _rate(
    "false_success",
    "Of the imagined successes, those that are none.",
    "Falls or stays. Absent where nothing succeeded in imagination.",
)
MISSED = _rate(
    "missed_success",
    "Of the true successes, those that were not imagined.",
    "Falls or stays. Absent where nothing truly succeeded.",
)
REWARD_WRONG = _rate(
    "reward_wrong",
    "Audited episodes whose true frames the reward model judges unlike the simulator.",
    "Far below `audit/verdict_wrong`, or it is the reward model that must be fitted better.",
)
CORRELATION: Final = define(
    "audit/correlation",
    Reduction.LAST,
    "1",
    "Correlation (Pearson) of imagined and true success over the audited episodes.",
    "1 where imagination tells the truth, 0 where it tells nothing. Absent where one of both never changes.",
)
PSNR: Final = define(
    "audit/psnr",
    Reduction.LAST,
    "dB",
    "Likeness of imagined and true frames: mean of the decisions' means.",
    "High and flat over checkpoints. Longer episodes have less: later decisions drift.",
)

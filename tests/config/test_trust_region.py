"""The trust region is the narrower, the older samples may be."""

from __future__ import annotations

import pytest

from asyncrl.config.algorithm import CorrectionSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ReplaySettings
from asyncrl.errors import ConfigError


@pytest.mark.parametrize(
    ("max_lag", "synchronous", "chosen", "holds"),
    [
        (0, False, "auto", 0.2),
        (2, False, "auto", 0.2),
        (3, False, "auto", 0.02),
        (16, False, "auto", 0.02),
        (16, True, "auto", 0.2),
        (16, False, 0.1, 0.1),
        (16, False, 0.0, 0.0),
    ],
)
def test_auto_follows_from_the_lag_that_holds(max_lag, synchronous, chosen, holds) -> None:
    config = TrainConfig(
        synchronous=synchronous,
        replay=ReplaySettings(max_lag=max_lag),
        correction=CorrectionSettings(trust_region=chosen),
    )
    assert config.trust_region == holds


@pytest.mark.parametrize("wrong", [-0.1, 1.5, float("nan")])
def test_what_is_no_difference_of_probabilities_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match=r"--correction\.trust-region"):
        CorrectionSettings(trust_region=wrong)

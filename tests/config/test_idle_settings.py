"""A setting that cannot act in a recipe is named, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config.algorithm import AlgorithmSettings, CorrectionSettings, CriticSettings
from asyncrl.config.idle_settings import idle_settings

CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {}, {}, []),
    ({"clip_high": 0.5}, {}, {}, ["--algorithm.clip-high"]),
    ({"clip_high": 0.5, "minibatches": 2}, {}, {}, []),
    ({"clip_low": 0.1}, {"kind": "naive"}, {}, []),
    ({"clip_low": 0.1}, {"proximal": "log_linear"}, {}, []),
    ({"dual_clip": 5.0}, {"kind": "none"}, {}, ["--algorithm.dual-clip"]),
    ({"objective": "cispo", "dual_clip": 5.0, "epochs": 2}, {}, {}, ["--algorithm.dual-clip"]),
    ({"kl_estimator": "k3"}, {}, {}, ["--algorithm.kl-estimator"]),
    ({"kl_estimator": "k3", "kl_coef": 0.1}, {}, {}, []),
    ({"kind": "ppo", "baseline": "leave_one_out"}, {}, {}, ["--algorithm.baseline"]),
    ({}, {}, {"gamma": 0.5}, ["--critic.gamma"]),
    ({"kind": "ppo"}, {}, {"gamma": 0.5}, []),
    ({}, {"kind": "none", "max_weight": 3.0}, {}, ["--correction.max-weight"]),
    ({}, {"kind": "decoupled", "min_weight": 0.5}, {}, ["--correction.min-weight"]),
    ({}, {"kind": "gipo", "max_weight": 3.0, "sigma": 1.0}, {}, ["--correction.max-weight"]),
    ({}, {"sigma": 1.0}, {}, ["--correction.sigma"]),
    ({}, {"reject_low": 0.9}, {}, ["--correction.reject-low"]),
    ({}, {"reject": "episode", "reject_low": 0.9}, {}, []),
    ({}, {"kind": "mis"}, {}, ["--correction.kind mis"]),
    ({}, {"kind": "mis", "min_weight": 0.5}, {}, []),
    ({}, {"kind": "mine.corrections:Own", "max_weight": 3.0}, {}, []),
    ({}, {"kind": "none", "trust_region": 0.1}, {}, []),
]


@pytest.mark.parametrize(("algorithm", "correction", "critic", "named"), CASES)
def test_what_cannot_act_is_named(
    algorithm: dict[str, Any], correction: dict[str, Any], critic: dict[str, Any], named: list[str]
) -> None:
    lines = idle_settings(
        AlgorithmSettings(**algorithm), CorrectionSettings(**correction), CriticSettings(**critic)
    )
    assert len(lines) == len(named)
    assert all(line.startswith(name) for line, name in zip(lines, named, strict=True))

"""The benchmark of a round's cost runs to its end with small models, and its figures add up."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT
from support.pace_runs import PACE, write_models_and_base
from support.whole_runs import environment, left_over

SCRIPT = ROOT / "benchmarks" / "refit_cost.py"
CHOSEN = {"pace.episodes", "pace.every"}
"""What the benchmark sets itself."""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.render
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_a_run_is_watched_without_a_round_with_one_and_one_is_made_alone(tmp_path: Path) -> None:
    small = {name: value for name, value in PACE.items() if name not in CHOSEN}
    said = [f"--{name}={value}" for name, value in small.items()]
    flags = shlex.join([*write_models_and_base(tmp_path / "models"), *said])
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))[:2]]
    sizes = ["--episodes", "8", "--base-episodes", "0", "--groups", "1", "--turn", "6", "--minutes", "2"]
    where = ["--cores", *cores, "--json", str(tmp_path / "found.json")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "out"), *sizes, *where, f"--flags={flags}"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    calm, beside, calm_again, alone = found["turns"]
    assert [turn["name"] for turn in (calm, beside, alone)] == [
        "without a round",
        "with a round",
        "a round alone",
    ]
    assert not calm["parts"], "the fitter is stopped"
    assert not calm_again["parts"]
    for turn in (beside, alone):
        assert turn["over"]
        named = " ".join(turn["parts"])
        assert "playing true episodes" in named
        assert max(turn["parts"].values()) <= turn["seconds"] + 1
    assert alone["updates"] == 0, "nobody else runs"
    gaps = sum(turn["updates"] - 1 for turn in (calm, calm_again))
    rate = 3600 * gaps / sum(turn["between"] for turn in (calm, calm_again))
    assert found["kept"] == pytest.approx(beside["updates_per_hour"] / rate)
    assert "updates per hour with a round / without" in done.stdout
    assert left_over(tmp_path) == []

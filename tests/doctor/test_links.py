"""`asyncrl doctor` between two devices: real processes, a real broadcast, and pairs that hang or die."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.doctor.checks import Verdict
from asyncrl.doctor.links import Result, judge, measure
from support.link_members import PIDS, die, fail, hang


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PIDS, str(tmp_path))
    return tmp_path


def living(pids: Path) -> list[str]:
    """Process ids of children that have not ended."""
    found = []
    for path in pids.iterdir():
        status = Path("/proc") / path.name / "status"
        if status.exists() and "\nState:\tZ" not in status.read_text():
            found.append(path.name)
    return found


def test_pairs_that_hang_are_named_and_their_processes_killed(pids: Path) -> None:
    results = measure(["a", "b", "c"], 1, 1, pair_deadline=0.3, serve=hang)
    assert [result.pair for result in results] == ["a - b", "b - c", "a - c"]
    assert results[0].problem == "hangs (a gave no answer in time)"
    assert all(result.problem.startswith("hangs") for result in results)
    assert len(list(pids.iterdir())) == 6  # Two new children for every pair after the first.
    assert living(pids) == []
    finding = judge("GPU links", results, 1 << 26, "nccl")
    assert finding.verdict is Verdict.BROKEN
    assert "3 of 3 failed: a - b hangs" in finding.seen
    assert "NCCL_DEBUG=INFO" in finding.advice


@pytest.mark.parametrize(
    ("serve", "words"), [(die, "ended with code 7"), (fail, "no such device")], ids=["die", "fail"]
)
def test_a_process_that_cannot_is_named(pids: Path, serve: Any, words: str) -> None:
    (result,) = measure(["a", "b"], 1, 1, serve=serve)
    assert words in result.problem
    assert living(pids) == []


def test_pairs_without_time_are_named_and_not_begun(pids: Path) -> None:
    results = measure(["a", "b"], 1, 1, deadline=0.1, pair_deadline=1.0, serve=hang)
    assert results == [Result(pair="a - b", tested=False)]
    finding = judge("GPU links", results, 1 << 26, "nccl")
    assert finding.verdict is Verdict.WARNING
    assert "no time for a - b" in finding.seen


def test_the_slowest_pair_is_named() -> None:
    results = [Result(pair="a - b", rates=(300.0, 200.0)), Result(pair="a - c", rates=(20.0, 250.0))]
    finding = judge("GPU links", results, 1 << 26, "nccl")
    assert finding.verdict is Verdict.OK
    assert finding.seen == ("nccl, 64 MiB each way: lowest 20 GB/s (a - c); all: a - b 300/200, a - c 20/250")

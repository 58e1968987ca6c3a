"""Parts of a round at once: results, failures, what each is seen to do."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from asyncrl.config.run import TrainConfig
from asyncrl.errors import RunError
from asyncrl.observability import process_status
from asyncrl.pace.side_by_side import parts_at_once, side_by_side


def test_a_process_of_its_own_on_a_cpu_does_parts_at_once() -> None:
    assert parts_at_once(TrainConfig(), torch.device("cpu"))
    assert not parts_at_once(TrainConfig(inline=True), torch.device("cpu"))
    assert not parts_at_once(TrainConfig(), torch.device("cuda", 0))


def test_parts_that_wait_for_each_other_end_only_at_once() -> None:
    met = threading.Barrier(2, timeout=30)

    def part(result: int) -> int:
        met.wait()
        return result

    parts = {"one": lambda: part(1), "two": lambda: part(2)}
    assert side_by_side(parts, patience=0, at_once=True) == [1, 2]
    met = threading.Barrier(2, timeout=0.1)
    with pytest.raises(threading.BrokenBarrierError):
        side_by_side(parts, patience=0, at_once=False)


@pytest.mark.parametrize("together", [False, True])
def test_nothing_to_do_is_done_and_one_part_needs_no_thread(together: bool) -> None:
    assert side_by_side({}, patience=0, at_once=together) == []
    here = {"one": threading.get_ident}
    assert side_by_side(here, patience=0, at_once=together) == [threading.get_ident()]


@pytest.mark.parametrize("together", [False, True])
def test_parts_use_as_many_threads_as_their_caller(together: bool) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        parts = {"one": torch.get_num_threads, "two": torch.get_num_threads}
        assert side_by_side(parts, patience=0, at_once=together) == [1, 1]
    finally:
        torch.set_num_threads(before)


def test_the_first_failure_is_raised_when_all_have_ended() -> None:
    ended = list[str]()

    def slow() -> None:
        time.sleep(0.3)
        ended.append("slow")

    def broken(text: str) -> None:
        raise RunError(text)

    parts = {"bad": lambda: broken("first"), "slow": slow, "worse": lambda: broken("second")}
    with pytest.raises(RunError, match="first"):
        side_by_side(parts, patience=0, at_once=True)
    assert ended == ["slow"]


def test_every_part_is_seen_with_a_deadline_of_its_own(tmp_path: Path) -> None:
    process_status.publish_as(tmp_path, "fitter")
    seen = list[dict[str, float]]()
    met = threading.Barrier(2, timeout=30)

    def look() -> None:
        met.wait()
        (process,) = process_status.read(tmp_path)
        seen.append({one.what: one.allowed for one in process.activities})
        met.wait()

    def other() -> None:
        met.wait()
        met.wait()

    with process_status.activity("refitting world 3", 900):
        side_by_side({"the world": look, "its reward": other}, patience=60, at_once=True)
    assert seen == [{"refitting world 3": 900, "the world": 60, "its reward": 60}]
    (process,) = process_status.read(tmp_path)
    assert all(one.what not in ("the world", "its reward") for one in process.activities)

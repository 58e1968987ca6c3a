"""Neither a fitter that stands still in the middle of a round nor one that dies holds up a run."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from itertools import pairwise

import pytest

from asyncrl.observability import metrics_pace as m
from asyncrl.observability import process_status, waits
from asyncrl.pace import rounds
from support.pace_runs import Running, flags, write_models_and_base
from support.whole_runs import rows

pytestmark = [pytest.mark.render, pytest.mark.slow, pytest.mark.long, pytest.mark.multiprocess]
STOPPED = 20.0
"""Seconds."""
USUAL = 10.0
"""Seconds of the same run beforehand, with a fitter that works."""
OF_A_ROUND = ("playing", "judging", "refitting", "redrawing")


@dataclass(frozen=True)
class Seen:
    """What was seen of a run for some seconds."""

    updates_per_second: float
    longest_pause: float
    """Seconds in which no update was logged."""
    longest: dict[tuple[str, str], float]
    """Role and what a thread of it said that it did -> seconds, the longest that this was seen to last."""


def watch(run: Running, seconds: float) -> Seen:
    began = time.monotonic()
    counted, changes, longest = len(rows(run.folder)), [began], dict[tuple[str, str], float]()
    first = counted
    while (now := time.monotonic()) < began + seconds:
        assert run.process.poll() is None, run.process.communicate()
        if (newest := len(rows(run.folder))) > counted:
            counted = newest
            changes.append(now)
        for process in process_status.read(run.folder):
            for activity in process.activities:
                key = (process.role, activity.what)
                longest[key] = max(longest.get(key, 0.0), activity.seconds)
        time.sleep(0.2)
    changes.append(time.monotonic())
    pauses = [after - before for before, after in pairwise(changes)]
    rate = (counted - first) / (changes[-1] - began)
    return Seen(rate, max(pauses), longest)


def stop_in_a_round(run: Running, fitter: int) -> str:
    """Stop the fitter while it makes a round; return what it was doing."""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        os.kill(fitter, signal.SIGSTOP)
        (status,) = [one for one in process_status.read(run.folder) if one.role == "fitter"]
        if found := [a.what for a in status.activities if a.what.startswith(OF_A_ROUND)]:
            return found[0]
        os.kill(fitter, signal.SIGCONT)
        time.sleep(0.02)
    raise AssertionError(f"no round began: {status}")


@pytest.mark.timeout(300)
def test_training_goes_on_while_the_fitter_stands_still_and_when_it_dies(tmp_path) -> None:
    models = (tmp_path / "models", write_models_and_base(tmp_path / "models"))
    longer = {"pace.workers": 1, "pace.world-steps": 10, "pace.reward-steps": 8}
    with Running(tmp_path, flags(models, **longer)) as run:
        run.until(lambda: rounds.read(run.folder), "a round")
        usual = watch(run, USUAL)
        (fitter,) = run.pids("fitter")
        stood_at = stop_in_a_round(run, fitter)
        made, began = len(rounds.read(run.folder)), len(rows(run.folder))
        stopped = watch(run, STOPPED)
        later = rows(run.folder)[began:]
        assert len(rounds.read(run.folder)) == made, "it does stand still"
        assert stopped.longest["fitter", stood_at] > STOPPED
        os.kill(fitter, signal.SIGCONT)

        print(f"updates per second: {usual.updates_per_second:.2f}, stopped {stopped.updates_per_second:.2f}")
        assert stopped.updates_per_second > 0.75 * usual.updates_per_second, (usual, stopped)
        assert stopped.longest_pause < max(10.0, 3 * usual.longest_pause), (usual, stopped)
        others = {what for role, what in stopped.longest if role != "fitter"}
        assert others, "they say what they do"
        assert not {what for what in others if "fitter" in what or "refit" in what}, others
        assert not any(row.get(waits.FIRST_WORLD.metric.name) for row in later), "nobody waited for a world"
        assert all(row[m.WORLD_VERSION.name] == later[0][m.WORLD_VERSION.name] for row in later)
        run.until(lambda: len(rounds.read(run.folder)) > made, "the round comes to its end")
        run.replaced("fitter")
        made = len(rounds.read(run.folder))
        run.until(lambda: len(rounds.read(run.folder)) > made, "a round of the new fitter")
        last = rounds.read(run.folder)[-1]
        run.until(lambda: rows(run.folder)[-1].get(m.ROUND_VERSION.name, 0) >= last.version, "its row")
        said = run.end()
    for row in rounds.read(run.folder):
        assert (row.episodes, row.audited, row.version % 2) == (8, 4, 0)
    assert (run.folder / "checkpoints" / "best" / "state.json").is_file()
    for told in ("refit: true success", "refits accepted", "best, version"):
        assert told in said, said

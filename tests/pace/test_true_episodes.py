"""Where true episodes come from: seeds that nothing else has, and files that arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.pace.rounds import round_folder
from asyncrl.pace.true_episodes import ArrivingRecordings, unused_starts
from asyncrl.simulators.starts import HELD_OUT
from support.recorded import KITCHEN, recorded_spec, write_recorded

NOBODY: Any = None


@pytest.mark.parametrize("trials", [0, 50])
def test_no_start_is_played_twice_or_held_out(trials: int) -> None:
    spec = recorded_spec(16, trials=trials)
    rounds = [unused_starts(spec, episodes=7, spent=spent) for spent in (0, 7, 14)]
    seeds = [start.seed for made in rounds for start in made]
    if not trials:
        assert len(set(seeds)) == 21
    assert min(seeds) >= 0.6 * HELD_OUT - len(KITCHEN)
    assert max(seeds) < HELD_OUT
    assert all(len(made) == 7 for made in rounds)


def test_seeds_end_before_the_held_out_ones() -> None:
    with pytest.raises(ConfigError, match="held-out seeds"):
        unused_starts(recorded_spec(16, trials=0), episodes=10, spent=int(0.4 * HELD_OUT))


def test_a_round_takes_the_files_that_arrived_since_the_last_one(tmp_path: Path) -> None:
    incoming, run = tmp_path / "robot", tmp_path / "run"
    incoming.mkdir()
    source, spec = ArrivingRecordings(incoming, run), recorded_spec(16)
    assert not source.ready(1)
    write_recorded(incoming, spec, (9, 9))
    (incoming / "part-00001.h5").write_bytes(b"half a file")
    assert source.ready(2)
    assert not source.ready(3)
    assert "not a recording" in source.refused["part-00001.h5"]
    round_folder(run, 6).parent.mkdir(parents=True)
    source.collect(round_folder(run, 6), NOBODY, 2, 0)
    assert [path.name for path in round_folder(run, 6).iterdir()] == ["part-00000.h5"]
    assert not source.ready(1), "a file is used once"
    write_recorded(incoming, spec, (9,), part=1)
    assert source.ready(1)
    assert source.refused == {}
    again = ArrivingRecordings(incoming, run)
    assert again.ready(1)
    assert not again.ready(2)


def test_recordings_of_held_out_starts_are_refused(tmp_path: Path, monkeypatch) -> None:
    write_recorded(tmp_path / "robot", recorded_spec(16), (9, 9))
    monkeypatch.setattr("asyncrl.pace.true_episodes.HELD_OUT", 1)
    with pytest.raises(ConfigError, match="seed 1, but those from 1 on are held out"):
        ArrivingRecordings(tmp_path / "robot", tmp_path).ready(1)

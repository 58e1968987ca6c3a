"""No free file descriptor: the replay waits as for a full disk, names the remedy, and finds no damage."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.errors import OutOfFiles
from asyncrl.observability import metrics_system as s
from asyncrl.observability import signals
from asyncrl.replay.buffer import Replay
from asyncrl.replay.group_file import GroupFile, read_group_file
from asyncrl.replay.store import EpisodeStore
from support.replay import Clock, fill, group_of, load, make_limiter, open_store, read_batch


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open no file at all, not even with what a reserve gives back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_file_that_cannot_be_opened_now_is_neither_damaged_nor_moved_away(tmp_path, monkeypatch) -> None:
    store = open_store(tmp_path, warnings := [])
    store.enter(store.write(0, group_of(0)))
    for _ in range(2):
        with no_descriptors(), pytest.raises(OutOfFiles, match=r"Too many open files.*ulimit -n"):
            load(store, 0)
    assert not (tmp_path / "quarantine").exists()
    assert warnings == []
    assert len(load(store, 0)) == 2
    path = store.group_files[0].path
    store.close()

    def read_without_descriptors(path: Path) -> GroupFile:
        with no_descriptors():
            return read_group_file(path)

    monkeypatch.setattr("asyncrl.replay.store.read_group_file", read_without_descriptors)
    with pytest.raises(OutOfFiles):
        open_store(tmp_path)
    monkeypatch.undo()
    assert path.exists()
    again = open_store(tmp_path)
    assert set(again.group_files) == {0}
    again.close()


def test_groups_wait_for_descriptors_and_none_is_lost(tmp_path: Path) -> None:
    clock, lines = Clock(), list[str]()
    store = EpisodeStore(tmp_path, group_size=2, max_bytes=10**9)
    replay = Replay(store, make_limiter(max_lag=1, per_update=2, clock=clock), warn=lines.append)
    replay.begin("learner", 0)
    assert [replay.grant("actor-0", turn).number for turn in range(2)] == [0, 1]  # type: ignore[union-attr]
    with no_descriptors():
        assert fill(replay, 0, (0,)) == ["held", "held"]
        assert fill(replay, 1, (0,)) == ["held", "held"]
    assert len(lines) == 1
    assert lines[0].startswith("replay: waiting for files to open, actors get no new groups: ")
    assert "ulimit -n" in lines[0]
    assert "disk space" not in lines[0]
    assert "2 groups wait for files to open" in replay.contents()
    clock.now += 100.0
    replay.maintain()
    assert replay.status()[s.DISK_WAITING] == pytest.approx(100.0)
    assert lines[1] == "replay: goes on after 100.0 s without files to open"
    with no_descriptors():
        assert read_batch(replay, 2, 0, "request") is None
        assert read_batch(replay, 2, 0, "request") is None
    assert len(lines) == 3, "said once"
    assert "the learner gets no batch" in lines[2]
    assert [len(group) for group in read_batch(replay, 2, 0, "request") or ()] == [2, 2]
    assert not (tmp_path / "quarantine").exists()


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert signals.raise_limit() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

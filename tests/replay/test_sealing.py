"""Files written beside the loop: no receipt before a file is durable; no free file descriptor."""

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.errors import OutOfFiles, ReplayError
from asyncrl.observability import metrics_system as m
from asyncrl.observability import metrics_system as s
from asyncrl.observability import signals
from asyncrl.replay.buffer import Replay
from asyncrl.replay.group_file import GroupFile, read_group_file
from asyncrl.replay.interface import ENDLESS, GroupFailure
from asyncrl.replay.store import EpisodeStore
from asyncrl.storage.atomic import flush
from support.episodes import make_episode
from support.replay import Clock, fill, group_of, load, make_limiter, open_store, read_batch


class Gate:
    """`atomic.flush` that waits until it is opened; then it syncs, or fails with `error`."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.error: OSError | None = None

    def __call__(self, path: Path) -> None:
        assert self._open.wait(20)
        if self.error is not None:
            raise self.error
        flush(path)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def replay(tmp_path: Path) -> Iterator[Replay]:
    store = EpisodeStore(tmp_path, group_size=2, max_bytes=10**9)
    replay = Replay(store, make_limiter(max_lag=1, clock=Clock()), warn=lambda line: None)
    replay.begin("learner", 0)
    replay.hello("actor-0", "s")
    for turn in range(4):
        replay.grant("actor-0", turn)
    replay.lifecycle.write_in_background()
    yield replay
    replay.close()


@pytest.fixture
def gate(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr("asyncrl.storage.atomic.flush", gate)
    yield gate
    gate.open()


def finished(replay: Replay) -> list[str]:
    """What the receipts say once nothing is on its way any more."""
    while replay.lifecycle.unwritten:
        replay.maintain()
    return [receipt.status for _, receipt in replay.pop_receipts()]


def test_the_loop_goes_on_while_a_group_is_written_and_no_receipt_comes_before_it_is_durable(
    replay: Replay, gate: Gate
) -> None:
    assert fill(replay, 0, (0,)) == ["held", "held"]
    replay.maintain()
    assert replay.admit(make_episode(1, 0, versions=(0,))).status == "held"
    assert replay.lifecycle.unwritten
    assert replay.admit(make_episode(1, 1, versions=(0,))).status == "held"
    assert fill(replay, 2, (0,)) == ["held", "held"], "nothing waits for the disk"
    assert replay.pop_receipts() == []
    assert not replay.store.group_files
    gate.open()
    assert finished(replay) == ["stored"] * 6
    assert list(replay.store.group_files) == list(replay.state.limiter.ready) == [0, 1, 2]


@pytest.mark.parametrize("event", ["new version", "actor again"])
def test_what_would_give_a_group_up_leaves_it_to_its_file(replay: Replay, gate: Gate, event: str) -> None:
    """It is acknowledged whatever comes meanwhile; too old by then, it is dropped as a stored one."""
    fill(replay, 0, (0,))
    fill(replay, 1, (0,))
    if event == "new version":
        replay.set_version(2)
    else:
        replay.hello("actor-0", "t")
    replay.maintain()
    assert set(replay.state.limiter.open) >= {0, 1}
    gate.open()
    assert finished(replay) == ["stored"] * 4
    too_old = event == "new version"
    assert set(replay.state.limiter.ready) == (set() if too_old else {0, 1})
    assert replay.status()[m.DROPPED_LAG] == (4 if too_old else 0)
    assert replay.status()[m.EPISODES] == 4


@pytest.mark.parametrize("event", ["learner again", "same member again", "failed"])
def test_what_could_give_the_group_up_waits_for_its_file(replay: Replay, gate: Gate, event: str) -> None:
    fill(replay, 0, (0,))
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    if event == "learner again":
        replay.begin("other learner", 0)
    elif event == "failed":
        replay.fail(
            GroupFailure(number=0, member=0, cause="world", start_state="s", reason="nan", left=ENDLESS)
        )
    else:
        assert replay.admit(make_episode(0, 1, versions=(0, 0))).status == "duplicate"
    opener.join()
    assert not replay.lifecycle.unwritten
    assert 0 in replay.state.limiter.ready
    assert [receipt.status for _, receipt in replay.pop_receipts()][:2] == ["stored", "stored"]


def test_a_disk_that_is_full_beside_the_loop_is_waited_for(replay: Replay, gate: Gate) -> None:
    gate.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fill(replay, 0, (0,))
    gate.open()
    assert finished(replay) == []
    assert replay.lifecycle.disk.groups == {0}
    gate.error = None
    assert isinstance(replay.state.limiter.clock, Clock)
    replay.state.limiter.clock.now += 1.0
    assert finished(replay) == []
    replay.maintain()
    assert finished(replay) == ["stored", "stored"]


def test_a_broken_disk_ends_the_loop(replay: Replay, gate: Gate) -> None:
    gate.error = OSError(errno.EIO, os.strerror(errno.EIO))
    fill(replay, 0, (0,))
    gate.open()
    with pytest.raises(ReplayError, match="could not be written"):
        finished(replay)


def test_closing_finishes_what_was_begun(replay: Replay, gate: Gate, tmp_path: Path) -> None:
    fill(replay, 0, (0,))
    gate.open()
    replay.close()
    store = EpisodeStore(tmp_path, group_size=2, max_bytes=10**9)
    assert list(store.group_files) == [0]


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

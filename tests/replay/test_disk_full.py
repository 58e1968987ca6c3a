"""A full disk: nothing acknowledged is lost, nothing new is granted, and work goes on when space returns."""

import errno
import os
from pathlib import Path

import pytest

from asyncrl.errors import DiskFull
from asyncrl.observability import metrics_system as m
from asyncrl.replay.buffer import Replay
from asyncrl.replay.lifecycle import DiskWait
from asyncrl.replay.store import EpisodeStore
from support.episodes import make_episode
from support.replay import Clock, fill, make_limiter


class Disk:
    """A disk that has space or has none."""

    full = False

    def allocate(self, handle: int, offset: int, size: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(os, "posix_fallocate", disk.allocate)
    return disk


def test_a_full_disk_holds_groups_back_and_loses_none(tmp_path: Path, disk: Disk) -> None:
    clock, lines = Clock(), list[str]()
    limiter = make_limiter(max_lag=1, per_update=2, clock=clock)
    replay = Replay(EpisodeStore(tmp_path, group_size=2, max_bytes=10**9), limiter, warn=lines.append)
    replay.begin("learner", 0)
    assert [replay.grant("actor-0", turn).number for turn in range(3)] == [0, 1, 2]  # type: ignore[union-attr]
    assert fill(replay, 0, (0,)) == ["held", "held"]
    disk.full = True
    assert fill(replay, 1, (0,)) == ["held", "held"]
    assert fill(replay, 2, (0,)) == ["held", "held"]
    assert replay.admit(make_episode(1, 0, versions=(0,))).status == "held", "sent again: known, not durable"
    assert replay.grant("actor-0", 3) is None
    assert replay.grant("actor-0", 2) is not None, "what was granted stays granted"
    assert "2 groups wait for disk space" in replay.contents()
    replay.pop_receipts()
    for _ in range(30):  # Far beyond the deadline of groups.
        clock.now += 10.0
        replay.maintain()
    assert len(lines) == 1
    assert "waiting for disk space" in lines[0]
    assert replay.status()[m.DISK_WAITING] == pytest.approx(300.0)
    assert not list(tmp_path.glob("*.tmp"))
    assert replay.pop_receipts() == []
    disk.full = False
    clock.now += 31.0
    replay.maintain()
    assert {receipt.status for _, receipt in replay.pop_receipts()} == {"stored"}
    assert sorted(replay.state.limiter.ready) == [0, 1, 2]
    assert replay.grant("actor-0", 3) is not None
    assert replay.status()[m.DISK_WAITING] == pytest.approx(331.0)
    assert len(lines) == 2
    replay.close()
    assert sorted(EpisodeStore(tmp_path, group_size=2, max_bytes=10**9).group_files) == [0, 1, 2]


def test_a_group_too_old_stops_waiting(tmp_path: Path, disk: Disk) -> None:
    store = EpisodeStore(tmp_path, group_size=2, max_bytes=10**9)
    replay = Replay(store, make_limiter(max_lag=0, per_update=1, clock=Clock()), warn=lambda _: None)
    replay.begin("learner", 0)
    replay.grant("actor-0")
    disk.full = True
    fill(replay, 0, (0,))
    assert replay.lifecycle.disk.groups == {0}
    replay.set_version(1)
    assert not replay.lifecycle.disk.groups
    assert replay.status()[m.DROPPED_LAG] == 2


def test_an_attempt_is_made_once_a_second(tmp_path: Path) -> None:
    clock = Clock()
    wait = DiskWait(clock, lambda _: None)
    for _ in range(3):
        wait.failed(0, DiskFull("no space"))
        clock.now += 0.5
        assert not wait.due
        clock.now += 0.5
        assert wait.due

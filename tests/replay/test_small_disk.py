"""A disk that is really full: a tmpfs of 8 MB, mounted in a namespace of its own where that is allowed.

Each scene is a function of this module that runs in a child process with the small disk's folder.
"""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from asyncrl.errors import DiskFull, ReplayError
from asyncrl.observability import metrics_system as m
from asyncrl.records import Episode
from asyncrl.replay import sealed_file
from asyncrl.replay.buffer import Replay
from asyncrl.replay.events import SPARE_BYTES, Ledger
from asyncrl.replay.group_file import read_group
from asyncrl.replay.lifecycle import DiskWait
from asyncrl.replay.store import EpisodeStore
from support.episodes import assert_same, make_episode
from support.replay import Clock, fill, make_limiter
from support.small_disk import free, leave, play_on_a_small_disk

PAGE = 4096


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Callable[[Path], None]], str]:
    """Play a scene on a small disk; returns what it printed."""
    return lambda scene: play_on_a_small_disk(scene, tmp_path)


def open_files(folder: Path) -> list[str]:
    """Files in `folder` that this process holds open, deleted ones too."""
    found = []
    for handle in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(handle.readlink()))
        except FileNotFoundError:  # The one that lists them.
            continue
    return [path for path in found if path.startswith(str(folder))]


def every_amount_of_free_space(disk: Path) -> None:
    """A group is stored whole or not at all, whatever is free; also when nobody asked before."""
    members = [make_episode(0, member, versions=(0,) * 5, image=40) for member in range(2)]
    store = EpisodeStore(disk / "replay", group_size=2, max_bytes=10**9, warn=print)
    for ask in (True, False):
        if not ask:
            never = ModuleType("os")
            never.__dict__.update(os.__dict__, posix_fallocate=lambda handle, offset, length: None)
            sealed_file.os = never  # pyright: ignore[reportPrivateImportUsage]
        outcomes = []
        for pages in range(48):
            leave(disk, pages * PAGE)
            outcomes.append(seals(store, members, pages * PAGE))
        assert outcomes == sorted(outcomes), "with more space than was enough it is enough"
        print(f"enough with {outcomes.index(True) * PAGE} bytes free, not with less; asked first: {ask}")
    store.close()


def seals(store: EpisodeStore, members: list[Episode], space: int) -> bool:
    """Try to seal group 0 and delete it again; when it cannot be stored, nothing of it is left."""
    before = open_files(store.folder)
    names = sorted(path.name for path in store.folder.iterdir())
    try:
        group_file = store.enter(store.write(0, members))
    except DiskFull:
        assert not store.group_files
        assert sorted(path.name for path in store.folder.iterdir()) == names
        assert free(store.folder) == space, "space is lost to a file that is still open"
        assert open_files(store.folder) == before
        return False
    for found, made in zip(read_group(group_file.path), members, strict=True):
        assert_same(found, made)
    store.remove(0)
    return True


def test_a_group_is_stored_whole_or_not_at_all_whatever_is_free(play: Callable[..., str]) -> None:
    assert play(every_amount_of_free_space).count("enough with") == 2


def the_ledger_fills_the_disk(disk: Path) -> None:
    """Lines are durable until the spare space is used up too; then it says so, and no line is lost."""
    ledger = Ledger(disk / "ledger.log", print)
    spare = disk / "ledger.spare"
    leave(disk, PAGE)
    written, line = 0, "x" * 1000
    while spare.exists():
        ledger.append(refused=line, n=written)
        written += 1
    assert 1 <= written <= 6
    written = append_until_refused(ledger, line, written)
    size = (disk / "ledger.log").stat().st_size
    assert SPARE_BYTES - 4 * PAGE < size < SPARE_BYTES + 4 * PAGE
    ledger.close()
    again = Ledger(disk / "ledger.log", print)
    assert [entry["n"] for entry in list(again.read())] == list(range(written))
    assert not spare.exists() or not spare.stat().st_size
    (disk / "ballast").unlink()
    again.keep_spare()
    assert spare.stat().st_size == SPARE_BYTES
    again.append(refused="after")
    again.close()
    assert list(Ledger(disk / "ledger.log", print).read())[-1] == {"refused": "after"}


def append_until_refused(ledger: Ledger, line: str, begin: int) -> int:
    """Append lines; the number of the one that the disk did not take."""
    for n in range(begin, 5000):
        try:
            ledger.append(refused=line, n=n)
        except ReplayError:
            return n
    raise AssertionError("the disk never became full")


def test_the_ledger_uses_its_spare_space_and_loses_no_line(play: Callable[..., str]) -> None:
    play(the_ledger_fills_the_disk)


def a_new_run_without_space(disk: Path) -> None:
    """A run that cannot begin says what to do, and begins once there is space."""
    leave(disk, 0)
    with pytest.raises(ReplayError, match="disk space"):
        EpisodeStore(disk / "replay", group_size=2, max_bytes=10**9)
    (disk / "ballast").unlink()
    EpisodeStore(disk / "replay", group_size=2, max_bytes=10**9).close()


def test_a_run_that_finds_no_space_says_so(play: Callable[..., str]) -> None:
    play(a_new_run_without_space)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))


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

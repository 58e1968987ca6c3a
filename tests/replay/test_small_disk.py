"""A disk that is really full: a tmpfs of 8 MB, mounted in a namespace of its own where that is allowed.

Each scene is a function of this module that runs in a child process with the small disk's folder.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from asyncrl.commands.replay import main as run_inspection
from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ReplaySettings
from asyncrl.errors import DiskFull, ReplayError
from asyncrl.launch.roles import open_run_replay
from asyncrl.messaging.sockets import ipc_endpoint, private_folder
from asyncrl.observability import metrics_system as m
from asyncrl.records import Episode
from asyncrl.replay import sealed_file
from asyncrl.replay.client import ZmqActorPort, ZmqLearnerPort
from asyncrl.replay.events import SPARE_BYTES, Ledger
from asyncrl.replay.group_file import read_group
from asyncrl.replay.server import serve_replay
from asyncrl.replay.store import EpisodeStore
from support.episodes import assert_same, make_episode
from support.small_disk import free, leave, play_on_a_small_disk

PAGE = 4096
WIDE = TrainConfig(
    algorithm=AlgorithmSettings(group_size=2, groups_per_update=16),
    replay=ReplaySettings(max_lag=1, group_timeout=60.0),
)


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


class Actor:
    """Imagines groups, `left` more, as long as it runs; knows which episodes were acknowledged."""

    def __init__(self, endpoint: str, name: str, left: int) -> None:
        self.pushed: dict[str, tuple[int, int]] = {}
        """Episode id -> group and member."""
        self.acknowledged: set[str] = set()
        self.left = left
        self._stop, self._name = threading.Event(), name
        self._port = ZmqActorPort(endpoint, name)
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while not self._stop.is_set():
            if not self.left:
                self._port.serve()
            for grant in self._port.acquire_groups(1, 0.05) if self.left else ():
                self.left -= 1
                for member in range(2):
                    episode = big(grant.number, member, actor=self._name)
                    self.pushed[episode.episode_id] = (grant.number, member)
                    self._port.push(episode)
            self.acknowledged = self.pushed.keys() - self._port._outbox._items.keys()

    def stop(self) -> None:
        self._stop.set()
        self.thread.join(20)
        self._port.close(10.0)


def big(number: int, member: int, actor: str = "actor-0") -> Episode:
    """An episode of about 200 kB."""
    return make_episode(number, member, versions=(0,) * 5, image=105, actor=actor)


def wait_for(what: Callable[[], bool], name: str, deadline: float = 30.0) -> float:
    """Seconds until `what` holds."""
    begin = time.monotonic()
    while not what():
        assert time.monotonic() - begin < deadline, f"waited {deadline:g} s for {name}"
        time.sleep(0.02)
    return time.monotonic() - begin


def two_actors_fill_the_disk(disk: Path) -> None:
    lines, stop, ready, folder = list[str](), threading.Event(), threading.Event(), disk / "replay"
    ballast = leave(disk, 3 << 20)  # Its thirteen hold all groups of this scene.
    endpoint = ipc_endpoint(private_folder())
    replay = open_run_replay(folder, WIDE, lines.append)
    served = threading.Thread(
        target=serve_replay,
        args=(replay, endpoint),
        kwargs={"stop_event": stop, "ready": ready.set},
        daemon=True,  # A scene that fails ends at once.
    )
    served.start()
    assert ready.wait(10)
    learner = ZmqLearnerPort(endpoint)
    learner.status()
    # 20 groups fill the disk; 4 more stay within the credit of 32, however late the writer finds it full.
    actors = [Actor(endpoint, f"actor-{n}", left=10) for n in range(2)]
    wait_for(lambda: learner.status()[m.DISK_WAITING] > 1.0, "a full disk")
    for actor in actors:
        actor.left = 2
    granted = replay.state.limiter.next_number
    held = [number for number in replay.state.limiter.open if replay.state.limiter.complete(number)]
    assert held
    assert len(lines) == 1
    assert "waiting for disk space, actors get no new groups" in lines[0]
    assert "--replay.max-gigabytes" in lines[0]
    check_readable(folder, actors)
    wait_for(lambda: learner.status()[m.DISK_WAITING] > 4.0, "a longer wait")
    assert replay.state.limiter.next_number == granted, "nothing is granted while the disk is full"
    assert set(held) <= replay.state.limiter.open.keys(), "nothing that was held is given up"

    ballast.unlink()
    resumed = wait_for(lambda: replay.state.limiter.next_number > granted, "work after space returned")
    print(f"goes on {resumed:.2f} s after space returned")
    wait_for(lambda: any("goes on after" in line for line in lines), "the message that it goes on")
    wait_for(lambda: replay.store.group_files.keys() >= set(held), "the groups that waited")
    for actor in actors:
        actor.stop()
    learner.close()
    stop.set()
    served.join(20)
    check_readable(folder, actors)
    assert run_inspection(["verify", str(folder)]) == 0


def check_readable(folder: Path, actors: list[Actor]) -> None:
    """Every acknowledged episode is in a sealed file, bit for bit."""
    acknowledged = {x: actor.pushed[x] for actor in actors for x in actor.acknowledged}
    assert acknowledged, "a check of nothing"
    for episode_id, (number, member) in acknowledged.items():
        found = read_group(folder / f"group-{number:08d}.h5")[member]
        assert found.episode_id == episode_id
        assert found.frames.tobytes() == big(number, member).frames.tobytes()


def test_actors_fill_the_disk_and_go_on_when_space_returns(tmp_path: Path) -> None:
    said = play_on_a_small_disk(two_actors_fill_the_disk, tmp_path, size="16m")
    assert float(said.split("goes on ")[1].split()[0]) < 10.0


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

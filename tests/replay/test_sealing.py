"""Files written beside the loop: the same books as without it, and no receipt before a file is durable."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.errors import ReplayError
from asyncrl.replay.replay import Replay
from asyncrl.replay.store import EpisodeStore, sync
from support.episodes import make_episode
from support.replay import Clock, fill, make_limiter


class Gate:
    """`store.sync` that waits until it is opened; then it syncs, or fails with `error`."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.error: OSError | None = None

    def __call__(self, path: Path) -> None:
        assert self._open.wait(20)
        if self.error is not None:
            raise self.error
        sync(path)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Replay]:
    store = EpisodeStore(tmp_path, group_size=2, max_bytes=10**9)
    core = Replay(store, make_limiter(max_lag=1, clock=Clock()), warn=lambda line: None)
    core.begin("learner", 0)
    core.hello("actor-0", "s")
    for turn in range(4):
        core.grant("actor-0", turn)
    core.write_in_background()
    yield core
    core.close()


@pytest.fixture
def gate(core: Replay, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr("asyncrl.replay.store.sync", gate)
    yield gate
    gate.open()


def finished(core: Replay) -> list[str]:
    """What the receipts say once nothing is on its way any more."""
    while core.writing:
        core.maintain()
    return [receipt.status for _, receipt in core.take_receipts()]


def test_no_receipt_before_the_file_is_durable(core: Replay, gate: Gate) -> None:
    assert fill(core, 0, (0,)) == ["held", "held"]
    core.maintain()
    assert core.writing
    assert core.take_receipts() == []
    assert not core.store.group_files
    gate.open()
    assert finished(core) == ["stored", "stored"]
    assert list(core.store.group_files) == list(core.state.limiter.ready) == [0]


def test_the_loop_goes_on_while_a_group_is_written(core: Replay, gate: Gate) -> None:
    fill(core, 0, (0,))
    assert core.admit(make_episode(1, 0, versions=(0,))).status == "held"
    assert core.writing
    gate.open()
    assert core.admit(make_episode(1, 1, versions=(0,))).status == "held"
    assert 0 in core.store.group_files, (
        "at most one complete group is in memory beside the one that is written"
    )
    assert finished(core) == ["stored"] * 4


@pytest.mark.parametrize("event", ["new version", "actor again", "learner again", "same member again"])
def test_what_could_give_the_group_up_waits_for_its_file(core: Replay, gate: Gate, event: str) -> None:
    fill(core, 0, (0,))
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    if event == "new version":
        core.set_version(1)
    elif event == "actor again":
        core.hello("actor-0", "t")
    elif event == "learner again":
        core.begin("other learner", 0)
    else:
        assert core.admit(make_episode(0, 1, versions=(0, 0))).status == "duplicate"
    opener.join()
    assert not core.writing
    assert 0 in core.state.limiter.ready
    assert [receipt.status for _, receipt in core.take_receipts()][:2] == ["stored", "stored"]


def test_a_disk_that_is_full_beside_the_loop_is_waited_for(core: Replay, gate: Gate) -> None:
    gate.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fill(core, 0, (0,))
    gate.open()
    assert finished(core) == []
    assert core.lifecycle.disk.groups == {0}
    gate.error = None
    assert isinstance(core.state.limiter.clock, Clock)
    core.state.limiter.clock.now += 1.0
    assert finished(core) == []
    core.maintain()
    assert finished(core) == ["stored", "stored"]


def test_a_broken_disk_ends_the_loop(core: Replay, gate: Gate) -> None:
    gate.error = OSError(errno.EIO, os.strerror(errno.EIO))
    fill(core, 0, (0,))
    gate.open()
    with pytest.raises(ReplayError, match="could not be written"):
        finished(core)


def test_closing_finishes_what_was_begun(core: Replay, gate: Gate, tmp_path: Path) -> None:
    fill(core, 0, (0,))
    gate.open()
    core.close()
    store = EpisodeStore(tmp_path, group_size=2, max_bytes=10**9)
    assert list(store.group_files) == [0]
    store.close()

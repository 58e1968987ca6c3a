"""A ledger that is not what the checkpoint says it was: what is stored counts as used, once, and is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ReplaySettings
from asyncrl.launch.roles import open_run_replay
from asyncrl.observability import metrics_system as m
from asyncrl.replay.interface import RunStart
from asyncrl.replay.replay import Replay
from asyncrl.replay_tools.verify import Verify
from asyncrl.storage.atomic import Checksum, begins_with, checksum_of_lines
from support.replay import fill, read_batch

CONFIG = TrainConfig(
    algorithm=AlgorithmSettings(group_size=2, groups_per_update=1),
    replay=ReplaySettings(max_lag=2, group_timeout=60.0),
)


def opened(folder: Path, ledger: Checksum | None, said: list[str] | None = None) -> Replay:
    warn = print if said is None else said.append
    return open_run_replay(folder, CONFIG, warn, start=RunStart(ledger=ledger))


def begun(folder: Path) -> Checksum:
    """Groups 0 and 1 were used by updates 0 and 1, group 2 is ready; the checkpoint is that of version 2."""
    replay = opened(folder, None)
    replay.begin("before", 0)
    for version in range(2):
        while (grant := replay.grant("actor-0")) is not None:
            fill(replay, grant.number, (version,))
            if grant.number >= 2:
                break
        assert read_batch(replay, 1, version) is not None
    ledger = checksum_of_lines(folder / "ledger.log")
    replay.close()
    assert ledger is not None
    return ledger


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.rindex(b'"used"') + 1] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "delete": lambda path: path.unlink(),
    "shorten": lambda path: path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4])),
    "flip": flip,
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_nothing_that_was_stored_before_is_used_again(tmp_path: Path, damage: str) -> None:
    ledger = begun(tmp_path)
    stored = sorted(path.name for path in tmp_path.glob("group-*.h5"))
    DAMAGE[damage](tmp_path / "ledger.log")
    said: list[str] = []
    replay = opened(tmp_path, ledger, said)
    assert not replay.state.limiter.ready
    assert replay.status()[m.DROPPED_UNRECORDED] > 0
    replay.begin("resumed", 2)
    assert read_batch(replay, 1, 2) is None
    line = next(line for line in said if "ledger.log is not what it was when the checkpoint" in line)
    assert "stored groups that may have been used are given up" in line

    grant = replay.grant("actor-0")
    assert grant is not None
    assert f"group-{grant.number:08d}.h5" not in stored
    assert fill(replay, grant.number, (2,)) == ["held", "held"]
    given_up = replay.status()[m.DROPPED_UNRECORDED]
    replay.close()

    said.clear()
    replay = opened(tmp_path, ledger, said)  # Respawned: what came since is not given up.
    assert sorted(replay.state.limiter.ready) == [grant.number]
    assert replay.status()[m.DROPPED_UNRECORDED] == given_up
    assert not [line for line in said if "checkpoint" in line]
    batch = read_batch(replay, 1, 2)
    assert batch is not None
    assert int(batch[0][0].group_id) == grant.number
    replay.close()
    if damage != "flip":  # `verify` names the damaged line.
        assert Verify(path=tmp_path).run() == 0


def test_a_lost_update_brings_nothing_back_that_the_lost_lines_may_have_used(tmp_path: Path) -> None:
    """The lines that are left say that group 1 was used by an update after the checkpoint: it stays so."""
    ledger = begun(tmp_path)
    path = tmp_path / "ledger.log"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    replay = opened(tmp_path, ledger)
    replay.begin("resumed", 0)
    assert not replay.state.limiter.ready


def test_an_untouched_ledger_that_grew_loses_nothing(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    replay = opened(tmp_path, ledger)
    assert sorted(replay.state.limiter.ready) == [2]
    replay.begin("resumed", 2)
    assert read_batch(replay, 1, 2) is not None
    assert replay.status()[m.DROPPED_UNRECORDED] == 0


def test_without_a_checkpoint_that_knows_the_ledger_nothing_is_given_up(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "ledger.log").unlink()
    replay = opened(tmp_path, None)
    assert sorted(replay.state.limiter.ready) == [0, 1, 2]


def test_only_whole_lines_are_summed_up(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert checksum_of_lines(path) is None
    for content in (b"", b"torn", b"one\n", b"one\ntorn", b"x" * 3_000_000 + b"\ny\ntorn"):
        path.write_bytes(content)
        found = checksum_of_lines(path)
        assert found is not None
        assert found.bytes == content.rfind(b"\n") + 1
        assert begins_with(path, found)
        path.write_bytes(content + b"more\n")
        assert begins_with(path, found)
        if found.bytes:
            path.write_bytes(b"?" + content[1:])
            assert not begins_with(path, found)
            path.write_bytes(content[: found.bytes - 1])
            assert not begins_with(path, found)
    path.unlink()
    assert not begins_with(path, Checksum(bytes=1, sha256="0" * 64))

"""Rows and curves on a disk that is full, slow or gone: the learner goes on, and what is lost is counted."""

import errno
import io
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from asyncrl.observability import background_file, process_status, waits
from asyncrl.observability import metrics_system as s
from asyncrl.observability import metrics_training as m
from asyncrl.observability.background_file import BackgroundFile
from asyncrl.observability.logger import MetricsLogger
from support.small_disk import leave, play_on_a_small_disk
from support.waiting import PATIENCE, wait_for
from support.whole_runs import rows


class Disk:
    """Writes, unless it shall fail; then it first takes a part, as a full disk does. Or it hangs."""

    def __init__(self) -> None:
        self.error = 0
        self.answers = threading.Event()
        self.answers.set()
        self.failures = 0

    def write(self, file: int, content: bytes) -> int:
        assert self.answers.wait(2 * PATIENCE)
        if self.error:
            self.failures += 1
            if self.failures % 2:
                return os.write(file, content[: len(content) // 2])
            raise OSError(self.error, os.strerror(self.error))
        return os.write(file, content)


def record(number: int) -> bytes:
    return f"record {number} {'.' * 80}\n".encode()


def opened(path: Path, disk: Disk, said: list[str], limit: int = 1 << 20) -> BackgroundFile:
    return BackgroundFile(path, "rows", limit=limit, lost=waits.LOST_ROWS, tell=said.append, write=disk.write)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails_for_a_while_costs_nothing_but_time(tmp_path: Path, number: int) -> None:
    disk, said = Disk(), list[str]()
    file = opened(tmp_path / "deep" / "rows", disk, said)
    file.add(record(0))
    assert file.settle(PATIENCE)
    disk.error = number
    for i in range(1, 100):
        file.add(record(i))
    began = time.monotonic()
    wait_for(lambda: disk.failures >= 4)
    assert not file.settle(PATIENCE), "while records are late nobody waits for them"
    assert len(said) == 1
    assert f"rows are late: {tmp_path}/deep/rows cannot be written ({os.strerror(number)})" in said[0]
    assert (tmp_path / "deep" / "rows").read_bytes() == record(0), "what was written in part is taken back"
    disk.error = 0
    wait_for(lambda: len(said) == 2)
    assert time.monotonic() - began < PATIENCE
    assert said[1] == "rows are written again; 0 were lost"
    file.close(PATIENCE)
    assert (tmp_path / "deep" / "rows").read_bytes() == b"".join(map(record, range(100)))
    assert waits.wait_metrics()[s.LOST_ROWS] == 0


@pytest.mark.usefixtures("counted")
def test_what_does_not_fit_into_memory_is_lost_and_counted_and_the_rest_is_whole(tmp_path: Path) -> None:
    disk, said = Disk(), list[str]()
    disk.answers.clear()
    file = opened(tmp_path / "rows", disk, said, limit=10 * len(record(10)))
    began = time.monotonic()
    for i in range(10, 30):
        file.add(record(i))
    assert time.monotonic() - began < 1.0
    assert waits.wait_metrics()[s.LOST_ROWS] == 10
    disk.answers.set()
    assert file.settle(PATIENCE)
    file.add(record(30))
    file.close(PATIENCE)
    kept = (tmp_path / "rows").read_bytes().splitlines(keepends=True)
    assert kept == [record(i) for i in (*range(10, 20), 30)]


@pytest.mark.usefixtures("counted")
def test_a_disk_that_never_answers_is_told_once_and_holds_up_neither_adding_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_file, "STALLED_SECONDS", 0.2)
    disk, said = Disk(), list[str]()
    disk.answers.clear()
    file = opened(tmp_path / "rows", disk, said)
    began = time.monotonic()
    file.add(record(0))
    assert not file.settle(0.3)
    for i in range(1, 50):
        file.add(record(i))
    assert not file.settle(PATIENCE), "not waited for again"
    (row,) = (x for x in process_status.read(tmp_path)[0].activities if x.thread == "writer of rows")
    assert row.what == "writing rows"
    file.close(0.3)
    assert time.monotonic() - began < 5.0
    assert "the disk does not answer" in said[0]
    assert said[1:] == [f"50 rows were not written to {tmp_path}/rows: the disk took none of them"]
    assert waits.wait_metrics()[s.LOST_ROWS] == 50
    disk.answers.set()


@pytest.mark.timeout(30)
def test_a_named_pipe_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows")
    said = list[str]()
    file = opened(tmp_path / "rows", Disk(), said)
    file.add(record(0))
    wait_for(lambda: len(said) == 1)
    assert "cannot be written (" in said[0]
    file.close(1.0)


def logged_without_space(disk: Path) -> None:
    """A full disk for a while: every update goes on, and in the end all of them are in both files."""
    stream = io.StringIO()
    with MetricsLogger(disk, updates=1000, stream=stream) as log:
        log.write(1, {m.GRAD_NORM: 1.0})
        leave(disk, 0)
        slowest = 0.0
        for step in range(2, 202):
            began = time.monotonic()
            log.write(step, {m.GRAD_NORM: float(step), m.APPROX_KL: 0.5})
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 3.0, slowest
        wait_for(lambda: stream.getvalue().count("are late") == 2)
        assert "rows of metrics.jsonl are late" in stream.getvalue()
        assert "curves are late" in stream.getvalue()
        assert "No space left on device" in stream.getvalue()
        (disk / "ballast").unlink()
        wait_for(lambda: stream.getvalue().count("written again; 0 were lost") == 2)
        log.write(202, {m.GRAD_NORM: 1.0})
    assert stream.getvalue().count("are late") == 2, "each is said once"
    assert [row["step"] for row in rows(disk)] == list(range(1, 203))
    assert steps_of_curves(disk) == list(range(1, 203))


def test_a_disk_that_was_full_for_a_while_holds_up_no_update(tmp_path: Path) -> None:
    play_on_a_small_disk(logged_without_space, tmp_path)


def steps_of_curves(run: Path) -> list[int]:
    """The updates of the run's event file, which has to be whole, read as TensorBoard does."""
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import masked_crc32c

    (path,) = (run / "tensorboard").iterdir()
    content, steps = path.read_bytes(), []
    while content:
        length = int.from_bytes(content[:8], "little")
        message, content = content[12 : 12 + length], content[12 + length :]
        assert int.from_bytes(content[:4], "little") == masked_crc32c(message)
        content = content[4:]
        event = event_pb2.Event.FromString(message)
        assert event.wall_time > 0
        steps += [event.step] * bool(event.summary.value)
    return steps


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))

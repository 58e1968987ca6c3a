"""The weights' table is a private folder: what is in it is read like a wire, and nothing of it is fatal."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.errors import WeightSyncError
from asyncrl.observability import metrics_system as m
from asyncrl.observability import process_status, waits
from asyncrl.weights.folder_table import MAX_READ, FolderTable, TableError, TableGone
from asyncrl.weights.membership import connect
from asyncrl.weights.publisher import BroadcastPublisher, build_publisher
from asyncrl.weights.receiver import build_receiver
from support.descriptors import no_descriptors
from support.processes import FORKS
from support.weights import PATIENCE, Actor, channel_folder, policy, raw, swap_until

GARBAGE = (
    b"{",
    b"null",
    b"[1, 2]",
    b'"text"',
    b"\xff\xfe not UTF-8",
    b"[" * 60_000,
    b'{"name": "a"}',
    b'{"name": "a", "ticket": "0123456789abcdef", "pid": 1, "started": 0, "wake_up": "../../x"}',
    b'{"name": "a", "ticket": "../x", "pid": 1, "started": 0, "wake_up": ""}',
    b'{"name": "a", "ticket": "0123456789abcdef", "pid": -1, "started": 0, "wake_up": ""}',
    b'{"name": "a", "ticket": "0123456789abcdef", "pid": NaN, "started": 0, "wake_up": ""}',
    b'{"name": "a", "ticket": "0123456789abcdef", "pid": 1e30, "started": true, "wake_up": ""}',
    b'{"name": "a", "ticket": "0123456789abcdef", "pid": ' + b"9" * 5000 + b', "started": 0, "wake_up": ""}',
    b'{"name": {}, "ticket": "0123456789abcdef", "pid": 1, "started": 0, "wake_up": ""}',
    b'{"name": "a", "ticket": "0123456789abcdef", "pid": 1, "started": 0, "wake_up": "", "more": 1}',
    b'{"epoch": 3, "members": {"a": 1}, "seen": 0}',
    b'{"epoch": "3", "members": [], "seen": 0}',
    b'{"epoch": 3, "members": [["a", "b", "c"]], "seen": 0}',
    b'{"epoch": 3, "members": [["a", 7]], "seen": Infinity}',
    b'{"version": 3, "buffer_index": 2, "checksum": 0}',
    b'{"version": -3, "buffer_index": 1, "checksum": 0}',
)


@pytest.fixture
def folder() -> Iterator[Path]:
    with channel_folder() as folder:
        yield folder


@pytest.fixture
def table(folder: Path) -> FolderTable:
    return FolderTable.make(folder)


@pytest.fixture
def publisher(folder: Path) -> Iterator[BroadcastPublisher]:
    channel = build_publisher("gloo", folder, deadline=1.0)
    yield channel
    channel.close()


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has counts, which begin at 0."""
    monkeypatch.setattr(process_status, "_own_file", None)
    monkeypatch.setattr(process_status, "_early", {})
    process_status.publish_as(tmp_path, "learner-0")


def wrong_entries() -> float:
    return waits.wait_metrics()[m.WRONG_ENTRIES]


# --- the table ---


def test_values_are_set_replaced_and_deleted_whole(table: FolderTable) -> None:
    assert table.get("offer") is None
    assert not table.check("offer")
    table.set("offer", b"one")
    table.set("offer", b"two\n\0")
    assert table.get("offer") == b"two\n\0"
    assert table.check("offer")
    assert table.list_keys() == ["offer"]
    table.delete("offer")
    table.delete("offer")
    assert (table.get("offer"), table.list_keys()) == (None, [])
    assert list(table.folder.iterdir()) == []


def test_a_reader_sees_the_old_value_or_the_new_one_never_a_part(table: FolderTable) -> None:
    values = [bytes([number]) * 50_000 for number in range(100)]
    table.set("offer", values[0])
    writer = threading.Thread(target=lambda: [table.set("offer", value) for value in values])
    writer.start()
    seen = set()
    while writer.is_alive():
        seen.add(table.get("offer"))
    writer.join()
    assert seen <= set(values)
    assert len(seen) > 1


def test_lines_of_several_processes_do_not_mix_and_each_is_told_where_its_own_ends(folder: Path) -> None:
    table = FolderTable.make(folder)

    writers = [FORKS.Process(target=append_lines, args=(folder, name)) for name in range(3)]
    for writer in writers:
        writer.start()
    lines, end, until = [], 0, time.monotonic() + PATIENCE
    while len(lines) < 600 and time.monotonic() < until:
        found = table.read_lines("joins", end)
        assert found.end - end <= MAX_READ
        lines, end = [*lines, *found.lines], found.end
    for writer in writers:
        writer.join(PATIENCE)
    assert {len(line) for line in lines} == {300}
    for name in range(3):
        mine = [line.split()[1] for line in lines if line.startswith(b"%d " % name)]
        assert mine == [b"%d" % number for number in range(200)]
    last = table.append("joins", b"last")
    assert table.read_lines("joins", end).end == last


def append_lines(folder: Path, name: int) -> None:
    """Append 200 lines of 300 bytes that are known by `name` and their number."""
    table = FolderTable(folder)
    for number in range(200):
        table.append("joins", f"{name} {number} ".encode().ljust(300, b"."))


def test_an_unfinished_line_waits_and_does_not_spoil_the_next_one(table: FolderTable) -> None:
    (table.folder / "joins").write_bytes(b"whole\nunfin")
    found = table.read_lines("joins", 0)
    assert (found.lines, found.end) == ((b"whole",), 6)
    table.append("joins", b"next")
    assert table.read_lines("joins", found.end).lines == (b"unfin", b"next")


@pytest.mark.timeout(20)
@pytest.mark.usefixtures("counted")
def test_what_is_no_regular_file_or_too_long_is_no_value_and_counted_once(table: FolderTable) -> None:
    elsewhere = table.folder.parent / "elsewhere"
    elsewhere.write_bytes(b"of another")
    (table.folder / "link").symlink_to(elsewhere)
    os.mkfifo(table.folder / "pipe")
    (table.folder / "folder").mkdir()
    with (table.folder / "long").open("wb") as file:
        file.truncate(1 << 40)  # Reading it would take all memory.
    for key in ("link", "pipe", "folder", "long"):
        for _ in range(3):  # Readers poll.
            assert table.get(key) is None, key
    assert wrong_entries() == 4
    (table.folder / "lines").write_bytes(b"x" * (MAX_READ + 10) + b"\n{}\n")
    first = table.read_lines("lines", 0)
    assert first.lines == ()
    assert table.read_lines("lines", first.end).lines == (b"x" * 10, b"{}")
    assert wrong_entries() == 5
    table.set("folder", b"now a value")
    table.set("link", b"now a value")
    assert table.get("folder") == table.get("link") == b"now a value"
    assert elsewhere.read_bytes() == b"of another"


def test_a_folder_that_is_gone_or_open_to_others_is_told(table: FolderTable, tmp_path: Path) -> None:
    shutil.rmtree(table.folder)
    for action in (
        lambda: table.get("offer"),
        lambda: table.set("offer", b""),
        lambda: table.check("offer"),
        lambda: table.append("joins", b""),
        lambda: table.read_lines("joins", 0),
        lambda: table.delete("offer"),
        lambda: FolderTable(table.folder),
    ):
        with pytest.raises(TableGone):
            action()
    tmp_path.chmod(0o750)
    with pytest.raises(WeightSyncError, match="mode 0700"):
        FolderTable(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(WeightSyncError, match="mode 0700"):
        FolderTable(tmp_path / "link")


def test_an_operating_system_that_refuses_is_named_with_a_remedy(table: FolderTable) -> None:
    for action in (lambda: table.get("a"), lambda: table.set("a", b""), lambda: table.append("a", b"")):
        table.set("a", b"1")
        with no_descriptors(), pytest.raises(TableError, match=r"Too many open files.*ulimit -n"):
            action()


# --- the channel in it ---


@pytest.mark.usefixtures("counted")
def test_garbage_among_the_registrations_is_counted_and_stops_nobody(publisher: BroadcastPublisher) -> None:
    """One such line ended the run: 'The weight publisher broke down (Expecting value ...)'."""
    publisher.publish(policy(0, elements=10), 0)
    joins = Path(publisher.endpoint) / "joins"
    with joins.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in GARBAGE))
        file.write(b"x" * (3 * MAX_READ) + b"\n\n\n" + b'{"name": "unfinished')
    first = build_receiver("gloo", publisher.endpoint, "actor-0", policy(0, elements=10))
    assert first.wait_for_first(PATIENCE) == 0
    publisher.publish(policy(1, elements=10), 1)
    tensors = policy(0, elements=10)
    assert swap_until(first, tensors, 1) == 1
    assert raw(tensors) == raw(policy(1, elements=10))
    assert wrong_entries() >= len(GARBAGE)
    assert publisher.status()[m.WEIGHTS_MEMBERS] == 1
    first.close()


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("key", ["offer", "e1.send.0", "e1.broken", "e1.form", "manifest"])
def test_garbage_in_any_entry_costs_an_epoch_at_most(publisher: BroadcastPublisher, key: str) -> None:
    publisher.publish(policy(0, elements=10), 0)
    first = build_receiver("gloo", publisher.endpoint, "actor-0", policy(0, elements=10))
    assert first.wait_for_first(PATIENCE) == 0
    folder = Path(publisher.endpoint)
    for content in GARBAGE:
        (folder / "part").write_bytes(content)
        (folder / "part").replace(folder / key)
        time.sleep(0.002)
    table, learner = connect(folder)
    assert learner.pid == os.getpid()
    table.delete(key) if key.startswith("e1") else None
    second = None
    if key != "manifest":  # Which is written once, and who has it does not read it again.
        second = build_receiver("gloo", publisher.endpoint, "actor-1", policy(0, elements=10))
        assert second.wait_for_first(PATIENCE) == 0
    publisher.publish(policy(1, elements=10), 1)
    for each in filter(None, (first, second)):
        tensors = policy(0, elements=10)
        assert swap_until(each, tensors, 1) == 1
        assert raw(tensors) == raw(policy(1, elements=10))
        each.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_of_the_host_reads_and_writes_nothing(publisher: BroadcastPublisher) -> None:
    """Uid 65534 read a registration and wrote into the store, which ended the run."""
    publisher.publish(policy(0, elements=10), 0)
    receiver = build_receiver("gloo", publisher.endpoint, "actor-0", policy(0, elements=10))
    assert receiver.wait_for_first(PATIENCE) == 0
    for attempt in ("ls {0}", "cat {0}/joins", "echo garbage >> {0}/joins", "echo 1 > {0}/closed"):
        command = ["sh", "-c", attempt.format(publisher.endpoint)]
        done = subprocess.run(command, capture_output=True, text=True, user=65534, cwd="/", timeout=PATIENCE)
        assert done.returncode != 0
        assert "Permission denied" in done.stderr, done.stderr
        assert done.stdout == ""
    publisher.publish(policy(1, elements=10), 1)
    assert swap_until(receiver, policy(0, elements=10), 1) == 1
    receiver.close()


def test_neither_end_is_ended_by_a_want_of_descriptors(publisher: BroadcastPublisher) -> None:
    publisher.publish(policy(0, elements=10), 0)
    receiver = build_receiver("gloo", publisher.endpoint, "actor-0", policy(0, elements=10))
    assert receiver.wait_for_first(PATIENCE) == 0
    with no_descriptors():
        publisher.publish(policy(1, elements=10), 1)
        time.sleep(0.5)
    publisher.publish(policy(2, elements=10), 2)
    tensors = policy(0, elements=10)
    assert swap_until(receiver, tensors, 2) == 2
    assert raw(tensors) == raw(policy(2, elements=10))
    receiver.close()


@pytest.mark.parametrize("how", ["killed", "folder removed"])
def test_a_learner_that_is_gone_is_noticed_at_once(how: str, folder: Path) -> None:
    learner = Actor()
    try:
        endpoint = learner.ask(folder)
        receiver = build_receiver("gloo", str(endpoint), "actor-0", policy(0), deadline=5.0)
        receiver._deadline = 0.0
        assert receiver.wait_for_first(PATIENCE) == 0
        if how == "killed":
            learner.signal(signal.SIGKILL)
        else:
            folder.rename(folder.with_name("elsewhere"))
        gone = time.monotonic()
        receiver._thread.join(PATIENCE)
        assert time.monotonic() - gone < 1.0
        with pytest.raises(WeightSyncError, match=f"actor-0 lost the learner at {folder} "):
            receiver.swap_into(policy(0))
        assert how != "killed" or list(folder.glob("w-*")), "only the learner's own socket is left"
    finally:
        learner.end()


def test_an_epochs_files_go_with_it(publisher: BroadcastPublisher) -> None:
    folder = Path(publisher.endpoint)
    publisher.publish(policy(0, elements=10), 0)
    for name in ("actor-0", "actor-1", "actor-2"):
        receiver = build_receiver("gloo", publisher.endpoint, name, policy(0, elements=10))
        assert receiver.wait_for_first(PATIENCE) == 0
        receiver.close()
    publisher.publish(policy(1, elements=10), 1)
    newest, until = publisher._weight_group, time.monotonic() + PATIENCE
    while (newest.offered or list(folder.glob("e[0-9]*"))) and time.monotonic() < until:
        time.sleep(0.01)
    assert newest.epoch >= 4
    assert not list(folder.glob("e[0-9]*"))
    assert json.loads((folder / "offer").read_bytes())["members"] == []
    assert not list(folder.glob(".*")), "nothing unfinished is left"
    assert len(list(folder.glob("w-*"))) == 1

"""A line of the ledger is believed only behind the one before it; the page of the replay's format holds."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.replay.events import (
    Dropped,
    Ledger,
    read_entries,
    read_events,
    read_line,
    require_ledger,
    write_line,
)
from asyncrl.replay.store import EpisodeStore
from asyncrl.storage.atomic import Checksum, begins_with, checksum_of_lines
from support.pages import run_program
from support.table_policy import episode

Lines = list[bytes]


def write(path: Path, count: int, begin: int = 0) -> Lines:
    ledger = Ledger(path, print)
    for number in range(begin, begin + count):
        ledger.append(ready=number)
    ledger.close()
    return path.read_bytes().splitlines(keepends=True)


def read(path: Path) -> tuple[list[int], list[str]]:
    """The numbers that are believed, and the damage that is reported."""
    warnings = list[str]()
    return [entry["ready"] for entry in read_entries(path, warnings.append)], warnings


def test_one_changed_bit_in_a_line_does_not_make_up_for_one_in_the_checksum_before() -> None:
    line, before = write_line({"ready": 1}, b"0123abcd"), b"0123abcd"
    assert read_line(line, before) == {"ready": 1}
    for place, bit, digit, other in itertools.product(range(12), range(8), range(8), range(4)):
        changed, digits = bytearray(line), bytearray(before)
        changed[place] ^= 1 << bit
        digits[digit] ^= 1 << other
        with pytest.raises(ValueError, match="checksum"):
            read_line(bytes(changed), bytes(digits))


def other_digits(line: bytes) -> bytes:
    return line[:-11] + (b"00000000" if line[-11:-3] != b"00000000" else b"11111111") + line[-3:]


CHANGES: dict[str, tuple[Callable[[Lines, Lines], Lines], list[int], list[int]]] = {
    "a changed line": (
        lambda own, _: [*own[:2], own[2].replace(b":2,", b":7,"), *own[3:]],
        [0, 1, 3, 4, 5],
        [3],
    ),
    "a changed checksum": (lambda own, _: [*own[:2], other_digits(own[2]), *own[3:]], [0, 1, 4, 5], [3, 4]),
    "no JSON": (lambda own, _: [*own[:2], b"no json\n", *own[3:]], [0, 1, 4, 5], [3, 4]),
    "a line twice": (lambda own, _: [*own[:3], own[2], *own[3:]], [0, 1, 2, 3, 4, 5], [4]),
    "an earlier line again": (lambda own, _: [*own[:4], own[1], *own[4:]], [0, 1, 2, 3, 4, 5], [5]),
    "a range again, which only its first line gives away": (
        lambda own, _: [*own[:4], *own[1:]],
        [0, 1, 2, 3, 2, 3, 4, 5],
        [5],
    ),
    "two lines in the wrong order": (
        lambda own, _: [*own[:2], own[3], own[2], *own[4:]],
        [0, 1, 2, 5],
        [3, 5],
    ),
    "a missing line": (lambda own, _: [*own[:2], *own[3:]], [0, 1, 4, 5], [3]),
    "the first line missing": (lambda own, _: own[1:], [2, 3, 4, 5], [1]),
    "a line from another ledger": (
        lambda own, other: [*own[:3], other[3], *own[3:]],
        [0, 1, 2, 3, 4, 5],
        [4],
    ),
    "another ledger's end": (lambda own, other: [*own[:3], *other[3:]], [0, 1, 2, 14, 15], [4]),
    "a line of replay.json": (
        lambda own, _: [write_line({"ready": 99}) + b"\n", *own],
        [0, 1, 2, 3, 4, 5],
        [1],
    ),
    "a torn end": (lambda own, _: [*own[:5], own[5][:-1]], [0, 1, 2, 3, 4], []),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_follow_is_skipped_and_reported(tmp_path: Path, name: str) -> None:
    change, believed, reported = CHANGES[name]
    own, other = write(tmp_path / "ledger.log", 6), write(tmp_path / "other.log", 6, begin=10)
    path = tmp_path / "ledger.log"
    path.write_bytes(b"".join(change(own, other)))
    found, warnings = read(path)
    assert found == believed
    assert len(warnings) == len(reported)
    for line, warning in zip(reported, warnings, strict=True):
        assert f"line {line} is damaged or out of place and was skipped" in warning


@pytest.mark.parametrize("end", [b"", b"no json\n", b'no json\n{"torn', b"\n", b"\n\n", b'{"torn'])
def test_what_is_appended_behind_any_end_is_believed(tmp_path: Path, end: bytes) -> None:
    for count in (0, 1, 3):
        path = tmp_path / f"{count}.log"
        write(path, count)
        path.write_bytes(path.read_bytes() + end)
        write(path, 2, begin=count)
        found, warnings = read(path)
        assert found == list(range(count + 2))
        assert len(warnings) == end.count(b"\n")


def test_lines_of_earlier_versions_are_read_and_unknown_or_wrong_ones_are_skipped() -> None:
    old = {"dropped": 3, "status": "dropped_unrecorded", "episodes": 2, "stored": True}
    unknown = [
        {"ledger_lost": "0" * 64},
        {},
        old | {"episodes": "2"},
        old | {"status": "held"},
        old | {"episodes": True},
        old | {"stored": 1},
        {"used": [True], "request": "r", "version": 1},
        {"ready": -9},
    ]
    warnings = list[str]()
    assert list(read_events([*unknown, old], warnings.append)) == [
        Dropped(dropped=3, status="dropped_invalid", episodes=2, stored=True)
    ]
    assert len(warnings) == 6, "all but those of unknown kinds are named"
    assert "'used': [True]" in warnings[4]


def test_a_line_that_the_disk_refused_is_not_gone_on_from(tmp_path, monkeypatch) -> None:
    """The first attempt to write fails for lack of space; the second uses the spare space."""
    ledger, failures = Ledger(tmp_path / "ledger.log", print), [OSError(28, "No space left on device")]
    genuine = ledger._write

    def fail_once(line: bytes) -> None:
        if failures:
            raise failures.pop()
        genuine(line)

    monkeypatch.setattr(ledger, "_write", fail_once)
    for number in range(3):
        ledger.append(ready=number)
    ledger.close()
    assert read(tmp_path / "ledger.log") == ([0, 1, 2], [])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "shortened": lambda path: path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2])),
    "changed": lambda path: path.write_bytes(path.read_bytes().replace(b":2,", b":7,")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_ledger_is_known_by_its_lines_at_the_checkpoint(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "ledger.log"
    write(path, 4)
    at_checkpoint = checksum_of_lines(path)
    write(path, 1, begin=4)
    path.write_bytes(path.read_bytes() + b'{"torn')
    require_ledger(path, at_checkpoint)
    require_ledger(path, None)
    DAMAGE[damage](path)
    with pytest.raises(ConfigError, match=r"ledger\.log is not what it was .*--policy"):
        require_ledger(path, at_checkpoint)


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


def test_the_page_is_enough_to_read_an_episode(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, group_size=2, max_bytes=1 << 30)
    members = [
        episode(group=7, member=0, rows=(3, 4), success_at=10, versions=(5, 6)),
        episode(group=7, member=1, rows=(1, 2, 5)),
    ]
    path = store.enter(store.write(7, members)).path
    store.close()
    done = run_program(str(path))
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].split()[0] == members[0].episode_id
    assert "lift the red block success 0" in said[0]
    assert "return 1.0 versions [5, 6]" in said[1]
    assert "'frames': ((2, 2, 2, 3), 'uint8')" in said[2]
    assert "'rewards': ((2, 8), 'float32')" in said[2]
    assert said[3].endswith("truncated 1")
    assert "'tokens': ((3, 8, 7), 'int32')" in said[5]
    assert "'final_frame': ((2, 2, 3), 'uint8')" in said[5]


def test_the_page_finds_a_damaged_file(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, group_size=2, max_bytes=1 << 30)
    members = [episode(group=7, member=member, rows=(3, 4)) for member in range(2)]
    path = store.enter(store.write(7, members)).path
    store.close()
    content = path.read_bytes()
    place = content.index(np.ascontiguousarray(members[0].logprobs).tobytes())
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    done = run_program(str(path))
    assert done.returncode != 0
    assert "AssertionError: logprobs" in done.stderr


def test_the_page_is_enough_to_read_a_ledger_and_to_find_what_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    ledger = Ledger(path, print)
    for number in range(7):
        ledger.append(ready=number)
    ledger.close()
    lines = path.read_bytes().splitlines(keepends=True)
    stray, changed = lines[0], lines[4].replace(b":4,", b":7,")
    path.write_bytes(b"".join([*lines[:3], stray, lines[3], changed, b"no json\n", *lines[5:]]))
    done = run_program(str(path), place=1)
    assert done.returncode == 0, done.stderr
    skipped = [int(line.split()[0]) for line in done.stdout.splitlines() if line.endswith("skipped")]
    assert len(done.stdout.splitlines()) == 9
    assert skipped == [4, 6, 7, 8]
    warnings = list[str]()
    read = [entry["ready"] for entry in read_entries(path, warnings.append)]
    assert read == [0, 1, 2, 3, 6]
    assert all(f"line {number} " in warning for number, warning in zip(skipped, warnings, strict=True))

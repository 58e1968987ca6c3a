"""Files of a run: regular ones, of a bounded size; a link never decides what is changed."""

from __future__ import annotations

import io
import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.storage.atomic import replacing, write_text
from asyncrl.storage.untrusted import (
    make_folder,
    open_regular,
    read_bytes,
    read_lines,
    read_text,
    remove,
)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


KINDS: dict[str, Callable[[Path], object]] = {
    "a named pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": a_socket,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR, os.O_WRONLY | os.O_APPEND]
)
def test_what_is_no_file_is_refused_at_once_and_named(
    kind: str, flags: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # The path of a socket is short.
    KINDS[kind](Path("here"))
    with pytest.raises(OSError, match=f"it is {kind}, where a file is expected: move it away"):
        open_regular(Path("here"), flags)


def test_a_device_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="a device, where a file is expected"):
        read_bytes(tmp_path / "zero")


def test_a_link_is_read_but_never_written(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "link").symlink_to("outside")
    assert read_text(tmp_path / "link") == "mine"
    for flags in (os.O_WRONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_APPEND):
        with pytest.raises(OSError, match="it is a link, where a file is expected"):
            open_regular(tmp_path / "link", flags)
    assert (tmp_path / "outside").read_text() == "mine"


def test_what_is_absent_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
    os.close(open_regular(tmp_path / "new", os.O_WRONLY | os.O_CREAT))
    assert (tmp_path / "new").read_bytes() == b""


def test_a_file_of_terabytes_is_refused_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 8 * 2**40)
    with pytest.raises(OSError, match=f"it has {8 * 2**40} bytes, more than the limit of 1000"):
        read_bytes(tmp_path / "huge", 1000)


def test_reading_takes_the_memory_of_the_file_and_not_of_the_limit(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        assert len(read_bytes(tmp_path / "small", 2**34)) == 1000
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_long_lines_are_passed_over_in_bounded_memory() -> None:
    text = b"one\n" + b"x" * 10_000_000 + b"\nthree\n" + b"four"
    file = io.BytesIO(text)
    tracemalloc.start()
    try:
        found = list(read_lines(file, 1000))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert found == [(1, b"one\n"), (2, None), (3, b"three\n"), (4, b"four")]


def test_a_folder_of_a_run_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    with pytest.raises(OSError, match="file is a file, where a folder is expected"):
        make_folder(tmp_path / "file")
    with pytest.raises(OSError, match="link is a link, so that what is written would lie elsewhere"):
        make_folder(tmp_path / "link")


def test_removing_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("mine")
    for name, target in (("folder.tmp", "elsewhere"), ("file.tmp", "elsewhere/file"), ("none.tmp", "none")):
        (tmp_path / name).symlink_to(target)
        remove(tmp_path / name)
        assert not (tmp_path / name).is_symlink()
    remove(tmp_path / "absent")
    assert (tmp_path / "elsewhere" / "file").read_text() == "mine"


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "link to a file"])
def test_an_atomic_write_is_not_misled_by_what_has_its_unfinished_name(kind: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    part = tmp_path / "config.json.tmp"
    {
        "folder": lambda: (part.mkdir(), (part / "inside").write_text("")),
        "link": lambda: part.symlink_to(outside),
        "pipe": lambda: os.mkfifo(part),
        "link to a file": lambda: part.symlink_to(outside / "file"),
    }[kind]()
    write_text(tmp_path / "config.json", "new")
    assert (tmp_path / "config.json").read_text() == "new"
    assert (outside / "file").read_text() == "mine"


def test_nothing_is_published_into_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("mine")
    (tmp_path / "final").symlink_to("elsewhere")
    with pytest.raises(NotADirectoryError), replacing(tmp_path / "final") as part:
        part.mkdir()
    assert (tmp_path / "elsewhere" / "file").read_text() == "mine"

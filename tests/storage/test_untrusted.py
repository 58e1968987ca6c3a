"""Files of unknown origin: regular ones, JSON; a link never decides what is changed."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.errors import CheckpointError
from asyncrl.storage.atomic import read_json, replacing, write_text
from asyncrl.storage.untrusted import (
    check_types,
    make_folder,
    open_regular,
    parse_json,
    read_bytes,
    read_json_lines,
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
def test_what_is_no_file_is_refused_at_once_and_named(kind: str, flags: int, tmp_path, monkeypatch) -> None:
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
    assert read_bytes(tmp_path / "link") == b"mine"
    for flags in (os.O_WRONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_APPEND):
        with pytest.raises(OSError, match="it is a link, where a file is expected"):
            open_regular(tmp_path / "link", flags)
    assert (tmp_path / "outside").read_text() == "mine"


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


REFUSED = {
    "Infinity": (b'{"a": Infinity}', "Infinity, which is not in JSON"),
    "NaN": (b'{"a": NaN}', "NaN, which is not in JSON"),
    "a float beyond all": (b'{"a": 1e999}', "the number 1e999, which is too large"),
    "10^30": (b'{"a": 1' + b"0" * 30 + b"}", "which is too large"),
    "5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "which is too large"),
    "-2^63": (b'{"a": -9223372036854775808}', "which is too large"),
    "a list deeper than the stack": (b"[" * 200_000 + b"]" * 200_000, "nested too deeply"),
    "no UTF-8": (b'{"caf\xe9": 1}', "utf-8"),
    "half a character": (b'{"a": "\\ud800"}', "surrogates not allowed"),
    "a key twice": (b'{"a": 1, "b": {"c": 1, "\\u0063": 2}}', "it has a key twice, of .'c'."),
    "a mark of the byte order": (b'\xef\xbb\xbf{"a": 1}', "BOM"),
    "another type": (b"[1]", "it holds a list, expected a dict"),
    "nothing": (b"", "Expecting value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_again_is_refused(name: str) -> None:
    raw, why = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        parse_json(raw)


def test_types_are_named() -> None:
    expected = {"step": int, "rate": float, "name": (str, type(None))}
    check_types({"step": 1, "rate": 2, "name": None, "other": []}, expected)
    for wrong, why in (
        ({"step": True, "rate": 1.0, "name": ""}, "step is True, expected int"),
        ({"step": 1, "rate": "x" * 100, "name": ""}, r"rate is 'x+\.\.\., expected float or int"),
        ({"step": 1, "rate": 1.0}, "name is missing"),
    ):
        with pytest.raises(ValueError, match=why):
            check_types(wrong, expected)


def test_rows_that_are_none_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n[1]\ncaf\xe9\n' + b"1" * 2_000_000 + b'\n{"step": NaN}\n{"step": 2}\n{"step": 3}'
    )
    for _ in range(2):
        assert list(read_json_lines(path)) == [{"step": 1}, {"step": 2}]
    lines = [record.getMessage().split(" is damaged")[0] for record in caplog.records]
    assert lines == [f"{path}: line {number}" for number in (2, 3, 4, 5)]
    path.write_text('{"step": true}\n{"step": 1.0}\n{}\n{"step": 2}\n')
    assert list(read_json_lines(path, {"step": int})) == [{"step": 2}]
    assert "line 1 is damaged and left out: step is True, expected int" in caplog.text
    assert list(read_json_lines(tmp_path / "absent")) == []


def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(b'{"a": Infinity}')
    with pytest.raises(CheckpointError, match=r"state\.json is not JSON \(.*\)\. Copy the folder again"):
        read_json(tmp_path / "state.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(CheckpointError, match=r"folder\.json cannot be read: it is a folder"):
        read_json(tmp_path / "folder.json")

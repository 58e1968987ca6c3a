"""The index is a cache: with it opening is quick, without it or against it the files decide."""

import json
import os
import zlib
from pathlib import Path

import pytest

from asyncrl.errors import ReplayError
from asyncrl.replay import store as store_module
from asyncrl.replay.group_file import read_group, read_group_file
from support.replay_store import group_of, open_store


@pytest.fixture
def read_from_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were opened to learn what is in them."""
    names: list[str] = []

    def noting(path: Path) -> object:
        names.append(path.name)
        return read_group_file(path)

    monkeypatch.setattr(store_module, "read_group_file", noting)
    return names


def three_groups(folder: Path) -> None:
    store = open_store(folder)
    for number in range(3):
        store.store_group(number, group_of(number))
    store.close()


def test_a_second_opening_reads_no_file(tmp_path: Path, read_from_files: list[str]) -> None:
    three_groups(tmp_path)
    store = open_store(tmp_path)
    assert read_from_files == []
    assert store.group_files == {n: read_group_file(tmp_path / f"group-{n:08d}.h5") for n in range(3)}
    assert store.total_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.h5"))
    assert store.group_files[1].decisions == 3
    store.close()


@pytest.mark.parametrize("damage", ["missing", "torn", "garbage", "flipped", "empty", "folder"])
def test_what_the_index_lacks_is_read_from_the_files(
    tmp_path: Path, read_from_files: list[str], damage: str
) -> None:
    three_groups(tmp_path)
    expected = {n: read_group_file(tmp_path / f"group-{n:08d}.h5") for n in range(3)}
    index = tmp_path / "index.log"
    whole = index.read_bytes()
    if damage in ("missing", "folder"):
        index.unlink()
    if damage == "folder":
        index.mkdir()
    else:
        index.write_bytes(
            {
                "missing": b"",
                "torn": whole[:-20],
                "garbage": os.urandom(5000) + b"\n[]\n00000000 {}\n",
                "flipped": whole[:100] + bytes([whole[100] ^ 1]) + whole[101:],
                "empty": b"",
            }[damage]
        )
    warnings: list[str] = []
    store = open_store(tmp_path, warnings)
    assert store.group_files == expected
    assert len(read_from_files) == (1 if damage in ("torn", "flipped") else 3)
    assert len(warnings) == (damage == "folder")
    store.close()
    if damage != "folder":
        read_from_files.clear()
        open_store(tmp_path).close()
        assert read_from_files == [], "it was written anew"


def test_a_stale_entry_never_wins_over_its_file(tmp_path: Path, read_from_files: list[str]) -> None:
    three_groups(tmp_path)
    (tmp_path / "group-00000002.h5").unlink()
    os.utime(tmp_path / "group-00000001.h5", ns=(1, 1))
    store = open_store(tmp_path)
    assert sorted(store.group_files) == [0, 1]
    assert read_from_files == ["group-00000001.h5"]
    store.close()
    assert len((tmp_path / "index.log").read_bytes().splitlines()) == 2


def test_a_well_formed_lie_is_found_when_the_group_is_loaded(tmp_path: Path) -> None:
    three_groups(tmp_path)
    lines = (tmp_path / "index.log").read_bytes().splitlines()
    entry = json.loads(lines[1][9:])
    entry["attributes"]["oldest_version"] += 1
    text = json.dumps(entry).encode()
    lines[1] = b"%08x %b" % (zlib.crc32(text), text)
    (tmp_path / "index.log").write_bytes(b"\n".join(lines) + b"\n")
    warnings: list[str] = []
    store = open_store(tmp_path, warnings)
    assert store.load(1) is None
    assert "not the file that it was" in warnings[0]
    assert store.load(2) is not None
    store.close()


def test_checksums_are_verified_on_every_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    path = store.store_group(0, group_of(0)).path
    assert store.load(0) is not None
    whole, found = path.read_bytes(), path.stat()
    for name in ("frames", "tokens"):
        array = group_of(0)[0].frames if name == "frames" else group_of(0)[0].sample["tokens"]
        at = whole.index(array.tobytes())
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))  # As a bit that flips on the disk.
        with pytest.raises(ReplayError, match=f"checksum of {name}"):
            store.read(store.group_files[0])
        assert read_group(path, ("rewards",))[0].frames.size == 0, "only arrays that are read are verified"
    store.close()

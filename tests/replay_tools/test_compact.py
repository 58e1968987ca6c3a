"""`asyncrl replay compact`: smaller files with the same episodes, for every reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from asyncrl.commands.replay import main as run_inspection
from asyncrl.errors import CodecMissing
from asyncrl.replay import sealed_file
from asyncrl.replay.group_file import read_group
from asyncrl.replay_tools import files
from asyncrl.storage import atomic
from asyncrl.storage.untrusted import dataset_in
from support.episodes import assert_same
from support.group_damage import craft_group
from support.pages import run_program
from support.recorded_run import IDS, episode_of, open_store
from support.replay import load

CLOSED, WAITS = (0, 1, 3), 2
"""The groups of `make_run` that were used, filtered or dropped; the one that waits."""


def file_of(run: Path, number: int) -> Path:
    return run / "replay" / f"group-{number:08d}.h5"


def compact(run: Path, *flags: str) -> int:
    return run_inspection(["compact", str(run), *flags])


def test_closed_groups_are_compressed_and_every_episode_stays_as_it_was(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inode = file_of(run_dir, WAITS).stat().st_ino
    assert compact(run_dir) == 0
    assert "compressed 3 of 4 groups with gzip" in capsys.readouterr().out
    for number in range(4):
        assert files.is_compressed(file_of(run_dir, number)) == (number in CLOSED)
        for member, found in enumerate(read_group(file_of(run_dir, number))):
            assert_same(found, episode_of(number, member))
    assert file_of(run_dir, WAITS).stat().st_ino == inode, "a group that waits is not touched"
    assert not list((run_dir / "replay").glob("*.tmp"))
    assert compact(run_dir) == 0
    assert "compressed 0 of 4 groups" in capsys.readouterr().out
    assert compact(run_dir, "--all") == 0
    assert files.is_compressed(file_of(run_dir, WAITS))


def test_only_the_images_are_compressed(run_dir: Path) -> None:
    def attributes(file: h5py.File) -> str:
        """Types too."""
        return repr([(k, np.array(v)) for x in (file, *file.values()) for k, v in x.attrs.items()])

    with h5py.File(file_of(run_dir, 0)) as file:
        before = attributes(file)
    compact(run_dir)
    with h5py.File(file_of(run_dir, 0)) as file:
        assert attributes(file) == before
        assert {name for name in map(str, file) if dataset_in(file, name).chunks} == set(files.IMAGES[:3])
        frames = dataset_in(file, "frames")
        assert frames.chunks == (4, *frames.shape[1:]), "up to 8 images"


def test_every_reader_works_on_a_compacted_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [["list"], ["show", "0123"], ["stats", "--json"], ["verify"]]

    def said() -> list[str]:
        found = []
        for name, *rest in commands:
            assert run_inspection([name, str(run_dir), *rest]) == 0
            found.append(capsys.readouterr().out)
        return found

    before = said()
    assert compact(run_dir) == 0
    capsys.readouterr()
    assert said() == before
    out = run_dir / "out"
    out.mkdir()
    assert run_inspection(["video", str(run_dir), "0123", "--out", str(out)]) == 0
    assert run_inspection(["sheet", str(run_dir), "--out", str(out / "sheet.png")]) == 0
    assert run_inspection(["export", str(run_dir), "--format", "robomimic", "--out", str(out / "x.h5")]) == 0
    store = open_store(run_dir)
    assert sorted(store.group_files) == [0, 1, 2, 3]
    for number in (3, 0, 2, 0):
        for member, found in enumerate(load(store, number)):
            assert_same(found, episode_of(number, member))


def test_a_stranger_reads_a_compacted_file(run_dir: Path) -> None:
    compact(run_dir)
    done = run_program(str(file_of(run_dir, 0)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(IDS[0][0])


def test_small_arrays_of_a_compacted_file_need_no_decoder(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compact(run_dir)
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda number: False)
    found = read_group(file_of(run_dir, 0), ["rewards"])
    assert found[0].rewards.tobytes() == episode_of(0, 0).rewards.tobytes()


def test_a_live_run_is_left_alone(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(run_dir)
    assert compact(run_dir) == 2
    assert "written by a live run" in capsys.readouterr().err
    store.close()
    assert not any(files.is_compressed(file_of(run_dir, number)) for number in range(4))


def test_a_damaged_file_is_reported_and_left(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of(run_dir, 0)
    content = path.read_bytes()
    place = content.index(episode_of(0, 0).frames.tobytes())
    damaged = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    path.write_bytes(damaged)
    assert compact(run_dir) == 1
    said = capsys.readouterr()
    assert "checksum of frames does not match" in said.err
    assert "cannot be read (1)" in said.out
    assert path.read_bytes() == damaged
    assert files.is_compressed(file_of(run_dir, 1)), "the others are compressed"


def test_what_was_written_wrongly_never_replaces_a_file(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, before = files._copy, file_of(run_dir, 0).read_bytes()

    def wrong(old: h5py.File, new: h5py.File) -> None:
        copy(old, new)
        dataset_in(new, "frames")[0, 0, 0] ^= 1

    monkeypatch.setattr(files, "_copy", wrong)
    assert compact(run_dir) == 1
    assert "checksum of frames does not match" in capsys.readouterr().err
    assert file_of(run_dir, 0).read_bytes() == before
    assert not list((run_dir / "replay").glob("*.tmp"))


def test_a_full_disk_leaves_the_old_file(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    before = file_of(run_dir, 0).read_bytes()
    monkeypatch.setattr(atomic, "flush", full)
    assert compact(run_dir) == 2
    assert "Free disk space" in capsys.readouterr().err
    assert file_of(run_dir, 0).read_bytes() == before
    assert not list((run_dir / "replay").glob("*.tmp"))


def test_a_file_whose_codec_is_not_installed_is_not_taken_for_damaged(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compact(run_dir)
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda number: False)
    monkeypatch.setattr(sealed_file, "find_spec", lambda name: None)
    store = open_store(run_dir)
    with pytest.raises(CodecMissing, match=r"asyncrl\[compression\]"):
        load(store, 0)
    assert file_of(run_dir, 0).exists(), "it is not moved to quarantine"


@pytest.mark.parametrize("codec", ["zstd", "lz4", "blosc"])
def test_files_that_earlier_versions_compressed_otherwise_are_read(run_dir: Path, codec: str) -> None:
    plugin = pytest.importorskip("hdf5plugin")
    kind = {"zstd": plugin.Zstd, "lz4": plugin.LZ4, "blosc": plugin.Blosc}[codec]

    def repack(file: Any) -> None:
        values, about = file["frames"][...], dict(file["frames"].attrs)
        del file["frames"]
        file.create_dataset("frames", data=values, chunks=(4, *values.shape[1:]), **kind())
        file["frames"].attrs.update(about)

    craft_group(file_of(run_dir, 0), repack)
    for member, found in enumerate(read_group(file_of(run_dir, 0))):
        assert_same(found, episode_of(0, member))

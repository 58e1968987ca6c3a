"""Files of groups whose images an earlier version compressed are read."""

from pathlib import Path
from typing import Any

import h5py
import pytest

from asyncrl.errors import CodecMissing
from asyncrl.replay import sealed_file
from asyncrl.replay.group_file import read_group
from support.episodes import assert_same
from support.group_damage import craft_group
from support.pages import run_program
from support.recorded_run import IDS, episode_of, open_store
from support.replay import load


def compress(run: Path, codec: str = "gzip") -> Path:
    """Rewrite the frames of group 0."""
    path, options = run / "replay" / "group-00000000.h5", dict[str, Any](compression=4)
    if codec != "gzip":
        plugin = pytest.importorskip("hdf5plugin")
        options = dict({"zstd": plugin.Zstd, "lz4": plugin.LZ4, "blosc": plugin.Blosc}[codec]())

    def repack(file: Any) -> None:
        values, about = file["frames"][...], dict(file["frames"].attrs)
        del file["frames"]
        file.create_dataset("frames", data=values, chunks=(4, *values.shape[1:]), **options)
        file["frames"].attrs.update(about)

    craft_group(path, repack)
    return path


@pytest.mark.parametrize("codec", ["gzip", "zstd", "lz4", "blosc"])
def test_compressed_files_are_read(run_dir: Path, codec: str) -> None:
    for member, found in enumerate(read_group(compress(run_dir, codec))):
        assert_same(found, episode_of(0, member))
    for member, found in enumerate(load(open_store(run_dir), 0)):
        assert_same(found, episode_of(0, member))


def test_a_stranger_reads_a_compressed_file(run_dir: Path) -> None:
    done = run_program(str(compress(run_dir)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(IDS[0][0])


def test_without_its_codec_small_arrays_are_read_and_no_file_is_taken_for_damaged(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compress(run_dir)
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda number: False)
    monkeypatch.setattr(sealed_file, "find_spec", lambda name: None)
    found = read_group(path, ["rewards"])
    assert found[0].rewards.tobytes() == episode_of(0, 0).rewards.tobytes()
    with pytest.raises(CodecMissing, match=r"asyncrl\[compression\]"):
        load(open_store(run_dir), 0)
    assert path.exists(), "it is not moved to quarantine"

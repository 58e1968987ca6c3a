"""The store: what was acknowledged is readable, what is readable is whole."""

import dataclasses
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from asyncrl.errors import ReplayError
from asyncrl.records import EndReason
from asyncrl.replay.group_file import read_group, read_group_file
from support import child_environment
from support.episodes import assert_same, make_episode, simulated, with_chain
from support.group_damage import append_footer
from support.replay import group_of, load, open_store


def test_a_group_comes_back_exactly(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.enter(store.write(3, group_of(3)[::-1]))
    store.close()
    store = open_store(tmp_path)
    loaded = load(store, 3)
    for one, other in zip(loaded, group_of(3), strict=True):
        assert_same(one, other)
    group_file = store.group_files[3]
    assert (group_file.oldest_version, group_file.newest_version) == (3, 4)
    assert group_file.successes == 1
    assert all(store.holds(3, episode.episode_id) for episode in loaded)


def test_the_sample_of_any_policy_comes_back_exactly(tmp_path: Path) -> None:
    group = [with_chain(episode) for episode in group_of(3)]
    with closing(open_store(tmp_path)) as store:
        path = store.enter(store.write(3, group)).path
    with closing(open_store(tmp_path)) as store:
        loaded = load(store, 3)
    for one, other in zip(loaded, group, strict=True):
        assert_same(one, other)
    (light, _), whole = read_group(path, ("noise_steps", "rewards")), group[0]
    assert light.sample["noise_steps"].tolist() == whole.sample["noise_steps"].tolist()
    assert (light.sample["denoising_chain"].size, light.sample["denoising_chain"].dtype) == (0, np.float32)
    file: Any
    with h5py.File(path, "r") as file:
        assert file.attrs["schema_version"] == 2
        assert file["denoising_chain"].attrs["letters"] == b"N,3,4,6"
        assert file["checksums"].dtype.names[:5] == (
            "frames", "denoising_chain", "noise_steps", "kept", "logprobs",
        )  # fmt: skip


@pytest.mark.parametrize("name", ["tokens", "noise_steps"])
def test_a_file_with_other_arrays_than_its_schema_version_says_is_damaged(tmp_path: Path, name: str) -> None:
    with closing(open_store(tmp_path)) as store:
        group = group_of(0) if name == "tokens" else [with_chain(episode) for episode in group_of(0)]
        path = store.enter(store.write(0, group)).path
    with h5py.File(path, "r+") as file:
        file.attrs["schema_version"] = 2 if name == "tokens" else 1
    append_footer(path)
    with pytest.raises(ReplayError, match="not those of its schema version"):
        read_group(path)


def test_any_hdf5_tool_reads_a_file_without_our_types(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    path = store.enter(store.write(0, group_of(0))).path
    store.close()
    file: Any
    with h5py.File(path, "r") as file:
        assert file.attrs["format"] == b"asyncrl-replay"
        assert file.attrs["schema_version"] == 1, "of action tokens"
        assert file["tokens"].attrs["letters"] == b"N,8,7"
        assert file["tokens"].attrs["unit"] == b"action bin"
        assert file["frames"].shape == (3, 4, 4, 3)
        assert file["final_frame"].shape == (2, 4, 4, 3)
        assert file["frames"].attrs["letters"] == b"N,H,W,3"
        assert file["episodes"]["N_end"].tolist() == [1, 3]
        assert file["episodes"]["M_end"].tolist() == [0, 16]
        for dataset in file.values():
            kinds = {dataset.dtype[name].kind for name in dataset.dtype.names or ()} or {dataset.dtype.kind}
            assert kinds <= set("iufS")
            assert dataset.compression is None


def test_checksums_are_verified_on_every_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    path = store.enter(store.write(0, group_of(0))).path
    assert load(store, 0)
    whole, found = path.read_bytes(), path.stat()
    for name in ("frames", "tokens"):
        array = group_of(0)[0].frames if name == "frames" else group_of(0)[0].sample["tokens"]
        at = whole.index(array.tobytes())
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))  # As a bit that flips on the disk.
        with pytest.raises(ReplayError, match=f"checksum of {name}"):
            read_group(path)
        assert read_group(path, ("rewards",))[0].frames.size == 0, "only arrays that are read are verified"


def test_unfinished_files_are_removed(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (tmp_path / "group-00000007.h5.tmp").write_bytes(b"half")
    store = open_store(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))
    assert not store.group_files


def test_the_oldest_expendable_groups_are_deleted_beyond_the_limit(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    size = store.enter(store.write(0, group_of(0))).size
    for number in (1, 2, 3):
        store.enter(store.write(number, group_of(number)))
    store.max_bytes = 2 * size
    assert store.trim([3, 1, 0]) == [0, 1]
    assert store.trim([3]) == []
    assert sorted(p.name for p in tmp_path.glob("*.h5")) == ["group-00000002.h5", "group-00000003.h5"]


def test_two_writers_exclude_each_other(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ReplayError, match="another process"):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


def test_another_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    path = store.enter(store.write(0, group_of(0))).path
    store.close()
    monkeypatch.setattr("asyncrl.episode_layout.STORED_SCHEMA_VERSIONS", (8, 9))
    with pytest.raises(ReplayError, match="schema_version 1, this asyncrl reads 8 and 9"):
        read_group_file(path)


WRITER = """
import sys
from pathlib import Path
from support.replay import group_of, load, open_store
store = open_store(Path(sys.argv[1]))
for number in range(max(store.group_files, default=-1) + 1, 100_000):
    store.enter(store.write(number, group_of(number, image=48)))
    print(number, flush=True)
"""


def test_a_writer_killed_at_any_moment_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    """Ten kills of the same folder's writer; the moments follow from the writer's own progress."""
    moments, acknowledged = random.Random(0), set[int]()
    for _ in range(10):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, env=child_environment()
        )
        assert writer.stdout is not None
        for _ in range(moments.randint(1, 6)):
            acknowledged.add(int(writer.stdout.readline()))
        multiprocessing.Event().wait(moments.uniform(0, 0.02))  # Into the middle of the next file.
        writer.kill()
        acknowledged |= {int(line) for line in writer.stdout if line.endswith(b"\n")}
        writer.stdout.close()
        writer.wait(10)
    warnings: list[str] = []
    store = open_store(tmp_path, warnings)
    assert not warnings
    assert not (tmp_path / "quarantine").exists()
    assert acknowledged <= store.group_files.keys()
    assert len(store.group_files) - len(acknowledged) <= 10, (
        "at most one stored, not yet acknowledged, per kill"
    )
    for number in store.group_files:
        loaded = load(store, number)
        np.testing.assert_array_equal(loaded[1].video, group_of(number, image=48)[1].video)


def test_episodes_of_a_simulator_come_back_exactly_under_the_third_schema_version(tmp_path: Path) -> None:
    ends: tuple[EndReason, ...] = ("success", "terminated")
    group = [
        simulated(make_episode(3, i, versions=(3, 3), video=i == 1), steps=9 + i, end=end)
        for i, end in enumerate(ends)
    ]
    with closing(open_store(tmp_path)) as store:
        path = store.enter(store.write(3, group)).path
    with closing(open_store(tmp_path)) as store:
        assert store.group_files[3].successes == 1
        loaded = load(store, 3)
    for one, other in zip(loaded, group, strict=True):
        assert_same(one, other)
    light, _ = read_group(path, ("rewards",))
    assert (light.steps, light.end_reason, light.states.size) == (9, "success", 0)  # type: ignore[union-attr]
    file: Any
    with h5py.File(path, "r") as file:
        assert file.attrs["schema_version"] == 3
        assert file["episodes"]["steps_taken"].tolist() == [9, 10]
        assert file["more_frames"].attrs["letters"] == b"N,V,H,W,3"
        assert (file["final_more_frames"].shape, file["final_state"].shape) == ((2, 1, 4, 4, 3), (2, 3))


def test_a_file_with_worlds_and_weights_of_an_earlier_version_is_read_without_them(tmp_path: Path) -> None:
    stored = Path(__file__).parents[1] / "data" / "group_schema_4.h5"
    shutil.copy(stored, tmp_path / "group-00000003.h5")
    with closing(open_store(tmp_path)) as store:
        assert store.group_files[3].world_version == 2
        loaded = load(store, 3)
    for member, one in enumerate(loaded):
        made = make_episode(3, member, versions=(3, 3), success=True)
        assert_same(one, dataclasses.replace(made, world_version=2))

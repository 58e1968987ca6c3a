"""Damaged messages and files end in the one error, or arrive as they were."""

import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import pytest

from asyncrl.errors import ReplayError
from asyncrl.messaging.wire import KINDS, decode
from asyncrl.replay.events import read_entries
from asyncrl.replay.group_file import read_group, read_group_file
from asyncrl.replay.store import read_meta
from support.mutations import (
    FORGED,
    checksum_of_group,
    content,
    damaged_file,
    judge,
    mutated,
    valid_files,
    valid_messages,
)


@pytest.fixture
def _traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("_traced")
def test_a_damaged_message_is_refused_or_unchanged() -> None:
    pool, rng = valid_messages(), random.Random(0)
    genuine = {content(decode(frames)) for frames in pool}
    seen: Counter[tuple[str, str]] = Counter()
    for _ in range(3000):
        name, frames = mutated(rng, pool)
        seen[name, judge(frames, genuine, forged=name in FORGED)] += 1
    assert {decode(frames).kind for frames in pool} == KINDS.keys()
    assert sum(seen.values()) == 3000
    assert seen["forge", "refused"] > 100
    assert seen["forge", "accepted"] > 0, "an extreme but legal number, as it was said"
    assert seen["misplace", "refused"] > 100
    assert seen["misplace", "accepted"] > 0, "the sample in another order, or what is the same"


def test_a_damaged_group_file_is_refused_or_unchanged(tmp_path: Path) -> None:
    files, rng, path = valid_files(tmp_path), random.Random(1), tmp_path / "group-damaged.h5"
    genuine = {checksum_of_group(read_group(tmp_path / f"group-{n}.h5")) for n in range(3)}
    refused = 0
    for _ in range(300):
        _, whole = damaged_file(rng, "group", files)
        path.write_bytes(whole)
        try:
            read_group_file(path)
            assert checksum_of_group(read_group(path)) in genuine
        except ReplayError:
            refused += 1
    assert refused > 200


def test_a_damaged_ledger_gives_only_lines_that_were_written(tmp_path: Path) -> None:
    files, rng, path = valid_files(tmp_path), random.Random(2), tmp_path / "damaged.log"
    genuine, warned = list(read_entries(tmp_path / "ledger.log", print)), list[str]()
    assert len(genuine) == 42
    for _ in range(500):
        path.write_bytes(damaged_file(rng, "ledger", files)[1])
        before, entries = len(warned), list(read_entries(path, warned.append))
        assert all(entry in genuine for entry in entries)
        assert len(warned) > before or entries == genuine[: len(entries)], "what changed is reported"
    assert len(warned) > 300


def test_a_damaged_replay_json_is_refused_or_unchanged(tmp_path: Path) -> None:
    files, rng = valid_files(tmp_path), random.Random(3)
    (tmp_path / "replay.json").write_bytes(files["meta"][0])
    genuine, refused = read_meta(tmp_path), 0
    for _ in range(500):
        (tmp_path / "replay.json").write_bytes(damaged_file(rng, "meta", files)[1])
        try:
            assert read_meta(tmp_path) == genuine
        except ReplayError:
            refused += 1
    assert refused > 400


def test_hdf5_never_sees_a_file_whose_structure_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libhdf5 itself may crash on one, so no exception handler would help."""
    whole, path = valid_files(tmp_path)["group"][0], tmp_path / "damaged.h5"
    path.write_bytes(whole)
    file: Any
    with h5py.File(path) as file:
        arrays = [file[name] for name in file if name not in ("group", "episodes", "checksums")]
        values = [range(x.id.get_offset(), x.id.get_offset() + x.nbytes) for x in arrays if x.size]

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("HDF5 opened it")

    monkeypatch.setattr("h5py.File", opened)
    path.write_bytes(whole)
    with pytest.raises(AssertionError, match="HDF5 opened it"):
        read_group_file(path)
    for place in [*range(0, 600, 13), *range(len(whole) - 200, len(whole), 7)]:
        if any(place in of_array for of_array in values):
            continue  # Its own checksum covers it.
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        for read in (read_group_file, read_group):
            with pytest.raises(ReplayError, match="damaged"):
                read(path)
    for length in (0, 1, 27, 28, 1000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ReplayError, match="damaged"):
            read_group_file(path)


def test_a_replay_folder_of_the_earlier_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "replay.json").write_text('{"format": "asyncrl-replay", "format_version": 2}')
    with pytest.raises(ReplayError, match="format_version 2, this asyncrl reads 3"):
        read_meta(tmp_path)

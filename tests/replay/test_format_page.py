"""A stranger reads the replay with h5py alone, by the programs that docs/replay_format.md prints."""

from pathlib import Path

import numpy as np

from asyncrl.replay.events import Ledger, read_entries
from asyncrl.replay.store import EpisodeStore
from support.pages import run_program
from support.table_policy import episode


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

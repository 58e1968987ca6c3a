"""How each start of a run came about, and checkpoints whose files were changed."""

import json
import os
import platform
import random
import socket
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
from test_checkpoint import STATE_FILE, begin, load, save, trained

from asyncrl import __version__
from asyncrl.errors import CheckpointError
from asyncrl.storage import checkpoint
from asyncrl.storage.atomic import Checksum, checksum_of_lines
from asyncrl.storage.checkpoint import CHECKSUMS, OWN_CHECKSUM, Checkpoints
from asyncrl.storage.run_folder import git_state, read_starts, record_start


def record(run_dir, *, attempt=1, version=0, command="asyncrl train --seed 3"):
    told = []
    record_start(run_dir, attempt=attempt, command=command, version=version, tell=told.append)
    return told


def test_a_start_says_command_host_versions_and_time_and_a_resume_adds_one(tmp_path):
    assert record(tmp_path) == []
    assert record(tmp_path, attempt=2, version=5) == []
    first, start = read_starts(tmp_path)
    assert (first["attempt"], start["attempt"]) == (1, 2)
    assert (start["command"], start["from_update"]) == ("asyncrl train --seed 3", 5)
    assert start["host"] == socket.gethostname()
    assert start["versions"].items() >= {"asyncrl": __version__, "python": platform.python_version()}.items()
    assert {"torch", "transformers", "numpy"} <= start["versions"].keys()
    assert datetime.fromisoformat(first["began"]) <= datetime.fromisoformat(start["began"])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[]", "it holds a list"),
        ("{", "Expecting"),
        *((text, "no list of starts") for text in ('{"format": 1}', '{"format": 2, "starts": []}')),
        ('{"format": 1, "starts": [3]}', "no list of starts"),
    ],
)
def test_a_damaged_file_is_said_and_left_as_it_is(tmp_path, content, why):
    (tmp_path / "provenance.json").write_text(content)
    with pytest.raises(ValueError, match=why):
        read_starts(tmp_path)
    assert why in record(tmp_path)[0]
    assert (tmp_path / "provenance.json").read_text() == content


def test_a_file_that_cannot_be_read_is_said_and_does_not_end_the_run(tmp_path):
    os.mkfifo(tmp_path / "provenance.json")
    (told,) = record(tmp_path)
    assert "a named pipe" in told
    assert told.endswith("The run goes on without")


def git(folder, *arguments):
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *names, "-C", folder, *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def test_the_commit_of_a_checkout_and_whether_files_differ_from_it(tmp_path, monkeypatch):
    assert git_state(tmp_path) == ("", False)
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == ("", False)  # Nothing is committed.
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "a")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    (tmp_path / "new.py").write_text("untracked files are no change")
    assert git_state(tmp_path) == (commit, False)
    (tmp_path / "a.py").write_text("2")
    assert git_state(tmp_path) == (commit, True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == ("", False), "without git"


NAMES = ["model.safetensors", STATE_FILE, "random-00000.safetensors"]


def flip_bit(path: Path, seed: int) -> None:
    content, draw = bytearray(path.read_bytes()), random.Random(seed)
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


@pytest.mark.parametrize("name", NAMES)
def test_one_flipped_bit_in_any_file_is_noticed_and_named(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, trained(1), 1)
    checkpoint.verify(folder)
    whole = (folder / name).read_bytes()
    for seed in range(20):
        flip_bit(folder / name, seed)
        expected = (
            rf"{name} cannot be read: its content is not what was written.*Delete the folder update_000001"
        )
        with pytest.raises(CheckpointError, match=expected):
            checkpoint.verify(folder)
        (folder / name).write_bytes(whole)
    checkpoint.verify(folder)


def test_who_loads_without_having_verified_notices_too(tmp_path: Path) -> None:
    folder = save(tmp_path, trained(1), 1)
    path = folder / STATE_FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # A number of a tensor: the file is as readable as before.
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"its content is not what was written.*update_000001"):
        load(folder)


def test_a_flipped_bit_in_state_json_is_noticed(tmp_path: Path) -> None:
    folder = save(tmp_path, trained(1), 1)
    path = folder / "state.json"
    whole, meant = path.read_bytes(), json.loads(path.read_text())
    noticed = 0
    for seed in range(400):
        flip_bit(path, seed)
        try:
            checkpoint.verify(folder)
        except CheckpointError:
            noticed += 1
        else:
            assert json.loads(path.read_text()) == meant, "it says the same as before"
        path.write_bytes(whole)
    assert noticed > 380


@pytest.mark.parametrize("key", [CHECKSUMS, OWN_CHECKSUM])
def test_a_checkpoint_without_its_checksums_is_refused(tmp_path: Path, key: str) -> None:
    path = save(tmp_path, trained(1), 1) / "state.json"
    state = json.loads(path.read_text())
    del state[key]
    path.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=rf"state\.json cannot be read: {key} is missing"):
        checkpoint.verify(path.parent)


def test_the_policy_alone_can_be_verified(tmp_path: Path) -> None:
    folder = save(tmp_path, trained(1), 1)
    flip_bit(folder / STATE_FILE, 0)
    checkpoint.verify(folder, policy_only=True)
    flip_bit(folder / "model.safetensors", 0)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        checkpoint.verify(folder, policy_only=True)


def test_a_checkpoint_says_what_the_ledger_was(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.log"
    ledger.write_bytes(b"one\ntwo\nthr")
    checkpoints = Checkpoints(tmp_path, keep=3, ledger=ledger)
    folder = begin(checkpoints, trained(1), 1)
    checkpoints.finish()
    found = checkpoint.recorded_ledger(folder)
    assert found == checksum_of_lines(ledger)
    assert isinstance(found, Checksum)
    assert found.bytes == 8
    ledger.unlink()
    folder = begin(checkpoints, trained(1), 2)
    checkpoints.finish()
    assert checkpoint.verify(folder) is None


def test_a_file_outside_of_the_folder_is_not_looked_at(tmp_path: Path) -> None:
    folder = save(tmp_path, trained(1), 1)
    path = folder / "state.json"
    state = json.loads(path.read_text())
    for name in ("../../secret", "/etc/hostname"):
        forged = state | {"files": {name: 5}, CHECKSUMS: {name: "0" * 64}}
        path.write_text(json.dumps(forged | {OWN_CHECKSUM: checkpoint._digest_of_state(forged)}))
        with pytest.raises(CheckpointError, match="does not lie in the folder"):
            checkpoint.verify(folder)

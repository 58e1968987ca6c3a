"""A checkpoint whose files were changed is not resumed: the file is named, and what to do."""

import json
import random
from pathlib import Path

import pytest
from test_checkpoint import STATE_FILE, begin, load, save, trained

from asyncrl.errors import CheckpointError
from asyncrl.storage import checkpoint
from asyncrl.storage.atomic import Checksum, checksum_of_lines
from asyncrl.storage.checkpoint import CHECKSUMS, OWN_CHECKSUM, Checkpoints

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

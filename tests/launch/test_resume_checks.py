"""What a resume finds in a folder: damaged checkpoints, lost ledgers, foreign groups, another group size."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from asyncrl import cli
from asyncrl.observability import metrics_system as m
from asyncrl.replay.store import EpisodeStore
from asyncrl.replay_tools.episodes import find_group
from support.tiny_models import write_models
from support.whole_runs import rows

INLINE, PROCESSES = ["--inline"], ["--placement", "auto"]


@pytest.fixture(scope="module")
def first_half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two updates, with two batches ahead, of tiny random models."""
    folder = tmp_path_factory.mktemp("run")
    flags = [*write_models(folder), "--run-dir", str(folder / "run"), "--updates", "2", "--inline"]
    assert cli.run("train", [*flags, "--replay.max-lag", "2", "--checkpoint-every", "1"]) == 0
    return folder / "run"


@pytest.fixture
def run(first_half: Path, tmp_path: Path) -> Path:
    return shutil.copytree(first_half, tmp_path / "run")


def resume(run: Path, *more: str, updates: int = 4) -> int:
    return cli.run("train", ["--run-dir", str(run), "--resume", "--updates", str(updates), *more])


def used(ledger: Path) -> list[int]:
    entries = [json.loads(line) for line in ledger.read_text().splitlines()]
    return [number for entry in entries for number in entry.get("used", [])]


def test_a_flipped_bit_ends_a_resume_with_the_file_and_the_remedy(run: Path, capsys) -> None:
    folder = run / "checkpoints" / "update_000002"
    (state,) = folder.glob("state/*.safetensors")
    changed = bytearray(state.read_bytes())
    changed[-3] ^= 1
    state.write_bytes(changed)
    assert resume(run, *INLINE) == 2
    said = capsys.readouterr().err
    assert f"{state.name} cannot be read" in said
    assert "Delete the folder update_000002; --resume then continues" in said
    shutil.rmtree(folder)  # As the error says.
    assert resume(run, *INLINE, updates=3) == 0
    assert rows(run)[-1]["step"] == 3


def test_a_deleted_ledger_ends_a_resume_with_the_file_and_the_remedy(run: Path, capsys) -> None:
    (run / "replay" / "ledger.log").unlink()
    assert resume(run, *INLINE) == 2
    said = capsys.readouterr().err
    assert "replay/ledger.log is not what it was when the checkpoint was written" in said
    assert "asyncrl train --policy RUN/checkpoints/update_N" in said


@pytest.mark.parametrize(
    "kind", [INLINE, pytest.param(PROCESSES, marks=pytest.mark.slow)], ids=["inline", "processes"]
)
def test_a_foreign_group_ends_neither_the_learner_nor_a_resume(run: Path, kind: list[str], capfd) -> None:
    number = min(
        {int(path.stem[6:]) for path in (run / "replay").glob("group-*.h5")}
        - set(used(run / "replay" / "ledger.log"))
    )
    pictures = {
        "frames": np.zeros((1, 8, 8, 3), np.uint8),
        "final_frame": np.zeros((8, 8, 3), np.uint8),
        "video": np.zeros((0, 8, 8, 3), np.uint8),
    }
    made = [dataclasses.replace(episode, **pictures) for episode in find_group(run / "replay", number)]
    store = EpisodeStore(run / "replay", group_size=2, max_bytes=10**9)
    store.remove(number)
    store.enter(store.write(number, made))
    store.close()
    assert resume(run, *kind) == 0
    said = capfd.readouterr().out
    assert said.count(f"group {number} is set aside, the learner cannot use it") == 1, said
    assert number not in used(run / "replay" / "ledger.log")[2:]
    assert (run / "replay" / "set_aside" / f"group-{number:08d}.h5").exists()
    assert rows(run)[-1][m.DROPPED_UNUSABLE.name] == 2
    assert resume(run, *kind, updates=5) == 0
    assert "is set aside" not in capfd.readouterr().out


def test_a_resume_with_another_group_size_goes_on(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert resume(run, *INLINE, "--algorithm.group-size", "3") == 0
    said = capfd.readouterr().out
    assert (
        said.count("stored groups were made in another world, or with another --algorithm.group-size") == 1
    ), said
    last = rows(run)[-1]
    assert last["step"] == 4
    assert last[m.DROPPED_RESUME.name] > 0
    assert last[m.DROPPED_UNUSABLE.name] == last[m.DROPPED_INVALID.name] == 0

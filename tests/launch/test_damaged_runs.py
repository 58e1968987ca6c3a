"""Damaged folders of runs: a resume goes on or says in a sentence what to do; nothing outside is touched."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.config.run import load_file
from asyncrl.errors import AsyncRLError
from asyncrl.launch import rank
from asyncrl.launch.console import successes, update_rows
from asyncrl.launch.job import Hosts, Job
from asyncrl.observability import process_status
from asyncrl.observability.logger import cut_rows_after
from asyncrl.observability.signals import StopFlag
from asyncrl.storage import run_folder
from support.run_folders import contents
from support.tiny_models import write_models
from support.whole_runs import exit_code

Damage = Callable[[Path, Path], None]
"""Is given the folder of a run that ended well, and a neighbour, which nothing that is done may change."""
NOT_UTF8 = b'{"caf\xe9": 1}\n'


def make_neighbour(folder: Path) -> Path:
    """Make the folder that must stay as it is: a file, and folders named as those of a run."""
    for name in ("file", "folder/file.tmp", "folder/processes/actor-0", "folder/update_000001/state.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("this belongs to somebody else\n")
    return folder


def put(place: str, make: Callable[[Path, Path], object]) -> Damage:
    """Put something in the place of what is there; "newest/": in the newest checkpoint."""

    def damage(run: Path, neighbour: Path) -> None:
        newest = max((run / "checkpoints").glob("update_??????"))
        path = newest / place.removeprefix("newest/") if place.startswith("newest/") else run / place
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        make(path, neighbour)

    return damage


def pipe(place: str) -> Damage:
    return put(place, lambda path, _: os.mkfifo(path))


def file(place: str, content: bytes = b"a file") -> Damage:
    return put(place, lambda path, _: path.write_bytes(content))


def folder(place: str) -> Damage:
    return put(place, lambda path, _: path.mkdir())


def link(place: str, target: str) -> Damage:
    return put(place, lambda path, neighbour: path.symlink_to(neighbour / target))


def number(place: str, name: str, value: bytes) -> Damage:
    """Put `value` in the place of a number of a JSON file."""

    def damage(run: Path, _: Path) -> None:
        (path,) = run.glob(place)
        changed, count = re.subn(rb'("%s": ?)\d+' % name.encode(), rb"\g<1>" + value, path.read_bytes())
        assert count == 1
        path.unlink()
        path.write_bytes(changed)

    return damage


def rows(line: bytes) -> Damage:
    """Put a line between the rows."""

    def damage(run: Path, _: Path) -> None:
        lines = (run / "metrics.jsonl").read_bytes().splitlines(True)
        (run / "metrics.jsonl").write_bytes(b"".join([lines[0], line, *lines[1:]]))

    return damage


GROUP, LEDGER, STATE = "replay/group-00000001.h5", "replay/ledger.log", "checkpoints/update_??????/state.json"
HUGE_NUMBER = b"1" + b"0" * 30
GOES_ON: dict[str, tuple[Damage, ...]] = {
    "pipes and folders": (pipe(GROUP), pipe("metrics.jsonl.tmp"), folder("checkpoints/update_000004.tmp")),
    "files and links": (
        link("config.json.tmp", "file"),
        link("checkpoints/update_000004.tmp", "folder"),
        rows(b"caf\xe9\n" + NOT_UTF8),
    ),
    "a group that is none": (file(GROUP, b"not HDF5"), rows(b'{"step": ' + HUGE_NUMBER + b"}\n")),
}
"""Damages of one folder, each of which a resume would survive alone."""
REFUSED: dict[str, tuple[Damage, str]] = {
    "a pipe of rows": (pipe("metrics.jsonl"), "metrics.jsonl is a named pipe"),
    "a pipe of a ledger": (pipe(LEDGER), "ledger.log is a named pipe"),
    "a folder": (folder("replay/replay.json"), "replay.json is a folder"),
    "a file of logs": (file("logs"), "logs is a file, where a folder"),
    "a file of a checkpoint": (file("checkpoints/update_000009"), "Delete the folder update_000009"),
    "a ledger elsewhere": (link(LEDGER, "file"), "ledger.log is a link"),
    "logs elsewhere": (link("logs", "folder"), "logs is a link"),
    "settings that are infinite": (
        number("config.json", "updates", b"Infinity"),
        "Infinity, which is not in JSON",
    ),
    "settings that are too large": (number("config.json", "updates", HUGE_NUMBER), "which is too large"),
    "settings that are no text": (file("config.json", NOT_UTF8), "not valid json"),
    "a version that is infinite": (number(STATE, "version", b"Infinity"), "Infinity, which is not in JSON"),
    "a state that is no text": (file("newest/state.json", NOT_UTF8), "state.json cannot be read"),
}
DAMAGES = {**GOES_ON, **{name: (damage,) for name, (damage, _) in REFUSED.items()}}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three updates, with its newest checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    flags = [*write_models(folder), "--inline", "--updates", "3", "--checkpoint-every", "1"]
    more = ["--keep-checkpoints", "1", "--run-dir", str(folder / "run")]
    assert cli.run("train", [*flags, *more]) == 0
    return folder / "run"


def damaged(name: str, original: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A damaged copy of the run, and its neighbour, which must not change."""
    run, neighbour = shutil.copytree(original, tmp_path / "run"), make_neighbour(tmp_path / "neighbour")
    for damage in DAMAGES[name]:
        damage(run, neighbour)
    return run, neighbour


def resumed(name: str, original: Path, tmp_path: Path) -> tuple[int, Path]:
    """Damage a copy of the run and resume it; the code, and the copy."""
    run, neighbour = damaged(name, original, tmp_path)
    before = contents(neighbour)
    code = exit_code(["--run-dir", str(run), "--resume", "--updates", "4"])
    assert contents(neighbour) == before
    return code, run


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", GOES_ON)
def test_a_resume_goes_on_in_spite_of(name: str, original: Path, tmp_path: Path) -> None:
    code, run = resumed(name, original, tmp_path)
    assert code == 0
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert cli.run("replay", ["verify", str(run)]) in (0, 1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", REFUSED)
def test_a_resume_is_refused_in_a_sentence_because_of(name: str, original: Path, tmp_path, capsys) -> None:
    code, _ = resumed(name, original, tmp_path)
    assert code in (1, 2)
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert REFUSED[name][1] in said


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "place", ["lock", "identity.json", "newest/state.json", LEDGER, "replay/replay.json"]
)
@pytest.mark.parametrize("damage", [folder, pipe, partial(file, content=b'{"attempt": true}')])
def test_damaged_files_of_state_are_found_before_models_are_loaded(
    place, damage, original, tmp_path, capsys, monkeypatch
) -> None:
    run, flags = shutil.copytree(original, tmp_path / "run"), ["--resume", "--updates", "4"]
    damage(place)(run, tmp_path)
    if place == "lock" and isinstance(damage, partial):  # Its text is for people; the next owner writes it.
        run_folder.check_free(replace(load_file(run / "config.json"), resume=True, run_dir=str(run)))
        return
    monkeypatch.setattr("asyncrl.launch.build.load_models", lambda *_: pytest.exit("models were loaded"))
    monkeypatch.setattr("asyncrl.launch.job.run_of_earlier_start", lambda _: run)
    config = load_file(original / "config.json")
    with pytest.raises(AsyncRLError, match=Path(place).name):  # Of a run that torchrun starts again.
        rank.lead(config, Job(), Hosts(), StopFlag())
    for more in ([], ["--dry-run"]):
        assert exit_code(["--run-dir", str(run), *flags, *more]) in (1, 2)
        said = capsys.readouterr().err.replace("│", " ")
        assert Path(place).name in said
        assert "Traceback" not in said


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", DAMAGES)
def test_every_command_that_looks_into_a_replay_ends_well(name: str, original: Path, tmp_path: Path) -> None:
    run, neighbour = damaged(name, original, tmp_path)
    before = contents(neighbour)
    for command in ("verify", "list", "stats"):
        assert cli.run("replay", [command, str(run)]) in (0, 1, 2)
    # This process is the one that trained; 3: finished, 4: stopped, where the last row cannot be read.
    assert cli.run("status", [str(run)]) in (0, 1, 2, 3, 4)
    assert contents(neighbour) == before


def test_damaged_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n{"step": "two"}\ncaf\xe9\n'
        + b"9" * 2_000_000
        + b'\n[]\n{"step": 2}\n{"step": 3}\n{"st'
    )
    assert cut_rows_after(path, 2) == 4  # Not the torn last one, which a crash leaves.
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert cut_rows_after(path, 2) == 0
    path.write_bytes(b'{"env/success_once": 0.5}\ncaf\xe9\n{"env/success_once": "x"}\n[1]\n')
    assert successes(update_rows(path)) == [0.5, 0.0], "nor do they keep the summary from being printed"


@pytest.mark.parametrize("place", ["processes/actor-0", "processes/.actor-1.7"])
def test_a_pipe_among_the_states_of_processes_is_passed_over(place: str, tmp_path: Path) -> None:
    process_status.publish_as(tmp_path, "learner-0")
    os.mkfifo(tmp_path / place)
    assert [process.role for process in process_status.read(tmp_path)] == ["learner-0"]


def test_a_process_without_a_number_is_dead_and_gets_no_signal(tmp_path: Path) -> None:
    process_status.publish_as(tmp_path, "learner-0")
    whole = (tmp_path / "processes" / "learner-0").read_bytes()
    (tmp_path / "processes" / "actor-0").write_bytes(whole[:8] + bytes(16) + whole[24:])
    assert [process.alive for process in process_status.read(tmp_path)] == [False, True]

"""A run that is alive is harmed by no second one, copied folder or actor of an earlier start."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from asyncrl.replay.store import PATTERN
from support.tiny_models import write_models
from support.whole_runs import ACTOR, PATIENCE, TRAIN, Program, environment, free_port, left_over, reach, rows


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [
        *write_models(tmp_path_factory.mktemp("models")),
        "--device",
        "cpu",
        "--checkpoint-every",
        "1",
        "--keep-checkpoints",
        "100000",
    ]


def contents(folder: Path) -> dict[str, bytes]:
    """What a resume would change first."""
    names = ("config.json", "sockets", "identity.json", "lock")
    return {name: (folder / name).read_bytes() for name in names}


def train(tmp_path: Path, *more: str) -> tuple[int, str]:
    done = subprocess.run(
        [*TRAIN, *more], env=environment(tmp_path), capture_output=True, text=True, timeout=PATIENCE
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.multiprocess
@pytest.mark.timeout(240)
def test_a_run_that_is_alive_is_left_alone(flags: list[str], tmp_path: Path) -> None:
    runs, endpoint = tmp_path / "runs", f"tcp://127.0.0.1:{free_port()}"
    run, listen = runs / "a", ["--replay.listen", endpoint]
    first = Program(
        tmp_path, "first", [*TRAIN, *flags, *listen, "--run-dir", str(run), "--updates", "100000"]
    )
    try:
        reach(run, 2, first.process, PATIENCE)
        before = contents(run)

        code, said = train(tmp_path, "--resume", "--run-dir", str(run))
        assert code == 2, said
        assert f"{run} is in use by process " in said

        code, said = train(tmp_path, "--resume", "--run-dir", f"{runs}/{{time}}")
        assert code == 2, said
        assert f"there is no run to resume in {runs}. {run} is in use by process " in said

        code, said = train(tmp_path, *flags, *listen, "--run-dir", str(runs / "b"))
        assert code == 2, said
        assert f"--replay.listen is {endpoint}, but it cannot be opened (Address already in use)" in said
        assert not (runs / "b").exists()

        shutil.copytree(run, runs / "copy", ignore=shutil.ignore_patterns("*.tmp", "checkpoints"))
        shutil.copytree(
            run / "checkpoints" / "update_000001", runs / "copy" / "checkpoints" / "update_000001"
        )
        code, said = train(
            tmp_path, "--resume", "--run-dir", str(runs / "copy"), "--replay.listen", "", "--updates", "1"
        )
        assert code in (0, 2), said  # It has made more updates already.
        assert contents(run) == before
        assert Path(before["sockets"].decode()).is_dir(), "the copy names the folder, and did not delete it"

        reached = len(rows(run))
        reach(run, reached + 2, first.process, PATIENCE)
        first.process.send_signal(signal.SIGINT)
        first.ends()
    finally:
        first.process.kill()
    assert left_over(tmp_path) == []


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_a_note_of_sockets_that_names_another_folder_deletes_nothing(
    flags: list[str], tmp_path: Path
) -> None:
    run, precious = tmp_path / "run", tmp_path / "asyncrl-precious"
    precious.mkdir()
    (precious / "thesis").write_text("mine")
    assert train(tmp_path, *flags, "--run-dir", str(run), "--updates", "1")[0] == 0
    (run / "sockets").write_text(str(precious))
    code, said = train(tmp_path, "--resume", "--run-dir", str(run), "--updates", "2")
    assert code == 0, said
    assert (precious / "thesis").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(400)
def test_an_actor_that_outlives_a_killed_learner_joins_the_resumed_run(
    flags: list[str], tmp_path: Path
) -> None:
    run, endpoint = tmp_path / "run", f"tcp://127.0.0.1:{free_port()}"
    alone = ["--placement", "learner=0", "--replay.listen", endpoint, "--run-dir", str(run)]
    programs = [
        Program(tmp_path, "first", [*TRAIN, *flags, *alone, "--updates", "100000", "--checkpoint-every", "4"])
    ]
    try:
        programs[0].until(f"--keys {run}/keys")
        join = [*ACTOR, "--join", endpoint, "--keys", f"{run}/keys", "--name", "far", "--device", "cpu"]
        programs.append(Program(tmp_path, "far", [*join, "--threads", "1"]))
        reach(run, 7, programs[0].process, PATIENCE)
        programs[0].process.kill()
        programs[0].process.wait(10)
        lost = [row["step"] for row in rows(run)]
        time.sleep(3.0)  # The actor goes on imagining with versions that the resumed run never had.
        programs.append(Program(tmp_path, "again", [*TRAIN, "--resume", "--run-dir", str(run)]))
        programs[1].until("belongs to start 2 of the run")
        programs[2].until("far joined")
        began = rows(run)[-1]["step"]
        reach(run, int(max(lost)) + 2, programs[2].process, PATIENCE)
        assert began <= max(lost)
        programs[2].process.send_signal(signal.SIGINT)
        programs[2].ends()
        assert "far: the run is over" in programs[1].ends()
    finally:
        for program in programs:
            program.process.kill()
    assert [row["step"] for row in rows(run)] == list(range(1, len(rows(run)) + 1))
    assert list((run / "replay").glob(PATTERN))
    assert left_over(tmp_path) == []

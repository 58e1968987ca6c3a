"""One run from its first moment to its resume: monitored, left alone, killed, stopped."""

import http.client
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.launch import endpoints
from asyncrl.launch.job import Hosts
from asyncrl.observability import process_status
from asyncrl.replay.store import PATTERN
from asyncrl.storage import checkpoint, run_owner
from asyncrl.storage.run_folder import read_starts
from support.tiny_models import write_models
from support.whole_runs import ACTOR, PATIENCE, TRAIN, Program, free_port, left_over, reach, rows

CONTENTS = ("config.json", "sockets", "identity.json", "lock")
"""Files that a resume would change first."""


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    models = write_models(tmp_path_factory.mktemp("models"))
    return [*models, "--device", "cpu", "--checkpoint-every", "1", "--keep-checkpoints", "100000"]


class Living:
    """A run that goes on until it is asked to stop."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.folder, self.run, self.said = folder, folder / "runs" / "a", folder / "said.txt"
        self.monitor, self.endpoint = free_port(), f"tcp://127.0.0.1:{free_port()}"
        more = ["--updates", "100000", "--seed", "7", "--actor.success-threshold", "0.5"]
        more += ["--monitor.listen", str(self.monitor), "--replay.listen", self.endpoint]
        command = [*TRAIN, *flags, *more, "--run-dir", str(self.run)]
        self.process = Program(folder, "said", command).process

    def get(self, path: str) -> tuple[int, str]:
        """Ask the monitor."""
        connection = http.client.HTTPConnection("127.0.0.1", self.monitor, timeout=PATIENCE)
        try:
            connection.request("GET", path)
            found = connection.getresponse()
            return found.status, found.read().decode()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def living(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    """The tests that use it follow one another, and the last one stops it."""
    made = Living(tmp_path_factory.mktemp("life"), flags)
    yield made
    made.process.kill()
    made.process.wait(PATIENCE)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_is_monitored_from_its_first_moment(living: Living) -> None:
    values, until = dict[str, float](), time.monotonic() + PATIENCE
    while values.get("asyncrl_run_update", 0) < 2:
        assert living.process.poll() is None, living.said.read_text()
        assert time.monotonic() < until, values
        time.sleep(0.1)
        try:
            status, text = living.get("/metrics")
        except ConnectionRefusedError:  # It loads its models.
            continue
        assert status == 200
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        for name, _, value in lines:
            values[name.partition("{")[0]] = values[name] = float(value)
    for name, role in (("learner-0", "learner"), ("actor-0", "actor"), ("replay", "replay")):
        assert values[f'asyncrl_process_up{{name="{name}",role="{role}",run="a"}}'] == 1
    assert values["asyncrl_weights_version"] >= 1
    status, text = living.get("/healthz")
    assert (status, json.loads(text)["healthy"]) == (200, True)
    assert f"http://127.0.0.1:{living.monitor}/metrics" in living.said.read_text()


@pytest.mark.multiprocess
def test_a_run_that_is_alive_is_left_alone(living: Living, flags: list[str], capsys) -> None:
    run, runs, endpoint = living.run, living.run.parent, living.endpoint
    reach(run, 2, living.process, PATIENCE)
    before = {name: (run / name).read_bytes() for name in CONTENTS}
    for arguments, words in (
        (["--resume", "--run-dir", str(run)], f"{run} is in use by process "),
        (
            ["--resume", "--run-dir", f"{runs}/{{time}}"],
            f"there is no run to resume in {runs}. {run} is in use by process ",
        ),
        (
            [*flags, "--replay.listen", endpoint, "--run-dir", str(runs / "b")],
            f"--replay.listen is {endpoint}, but it cannot be opened (Address already in use)",
        ),
    ):
        assert cli.run("train", arguments) == 2
        assert words in capsys.readouterr().err
    assert not (runs / "b").exists()

    while checkpoint.latest(run) is None:  # Written in the background.
        time.sleep(0.05)
    copy = living.folder / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("*.tmp", "checkpoints"))
    first = Path("checkpoints", "update_000001")
    shutil.copytree(run / first, copy / first)
    more = ["--inline", "--replay.listen", "", "--monitor.listen", "", "--updates", "1"]
    assert cli.run("train", ["--resume", "--run-dir", str(copy), *more]) in (0, 2)
    assert {name: (run / name).read_bytes() for name in CONTENTS} == before
    assert Path(before["sockets"].decode()).is_dir(), "the copy names the folder, and did not delete it"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_actor_that_is_killed_comes_back_ctrl_c_leaves_a_checkpoint_and_resume_goes_on(living) -> None:
    run, process = living.run, living.process
    reach(run, 1, process, PATIENCE)
    (actor,) = (one for one in process_status.read(run) if one.role == "actor-0" and one.alive)
    os.kill(actor.pid, signal.SIGKILL)
    # More updates than the lag bound lets the learner make with what the killed one had imagined.
    reach(run, len(rows(run)) + 6, process, PATIENCE)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # What a terminal does: every process of the group gets it.
    assert process.wait(30) == 0, living.said.read_text()
    assert time.monotonic() - began < 10
    said = living.said.read_text()
    assert re.search(r"actor-\d died and came back \(respawn 1\)", said), said
    assert "Traceback" not in said
    assert f"asyncrl train --run-dir {run} --resume" in said
    reached = len(rows(run))
    assert checkpoint.latest(run) == run / "checkpoints" / f"update_{reached:06d}"
    assert left_over(living.folder) == []
    assert list((living.folder / "tmp").glob("asyncrl-*")) == []
    with pytest.raises(ConnectionRefusedError):
        living.get("/healthz")
    (start,) = read_starts(run)
    assert start["command"].startswith("asyncrl train ")

    again = ["--run-dir", str(run), "--resume", "--updates", str(reached + 2)]
    assert "seed 7" in Program(living.folder, "again", [*TRAIN, *again]).ends(), "settings are kept"
    assert [row["step"] for row in rows(run)] == list(range(1, reached + 3))
    assert checkpoint.latest(run) == run / "checkpoints" / f"update_{reached + 2:06d}"
    assert left_over(living.folder) == []


def test_a_note_of_sockets_that_names_another_folder_deletes_nothing(tmp_path: Path) -> None:
    (precious := tmp_path / "asyncrl-precious").mkdir()
    (precious / "thesis").write_text("mine")
    (precious / "identity").write_text("another secret")
    (tmp_path / endpoints.SOCKETS).write_text(str(precious))
    identity = run_owner.next_attempt(tmp_path)
    with endpoints.opened(Hosts(), tmp_path, identity) as (folder, endpoint):
        assert endpoint == f"ipc://{folder}/replay"
    assert not folder.exists()
    assert (precious / "thesis").read_text() == "mine"
    (left := tmp_path / "asyncrl-left").mkdir()
    (left / "identity").write_text(identity.secret)
    (tmp_path / endpoints.SOCKETS).write_text(str(left))
    with endpoints.opened(Hosts(), tmp_path, replace(identity, attempt=2)):
        assert not left.exists(), "a killed start's own folder goes"


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(400)
def test_an_actor_that_outlives_a_killed_learner_joins_the_resumed_run(flags: list[str], tmp_path) -> None:
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

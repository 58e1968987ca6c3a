"""`asyncrl pace`: its rounds end the same however often the command line was ended and given again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.commands import pace
from asyncrl.errors import AsyncRLError, RunError
from asyncrl.replay.group_file import read_group
from asyncrl.storage import checkpoint
from support.tiny_models import write_models
from support.whole_runs import environment, exit_code, left_over

pytestmark = pytest.mark.render
ROUNDS = 2


class Killed(BaseException):
    """Stands for the end of the process."""


class Commands:
    """Runs the commands of stages in this process, and ends before one of them leaves its output."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.left = 1000

    def __call__(self, arguments: Sequence[str]) -> None:
        out = Path(arguments[arguments.index("--out") + 1]) if "--out" in arguments else None
        if not self.left:
            if out is not None:
                out.mkdir(exist_ok=True)
                (out / "half.h5").write_bytes(b"half of a file")
            raise Killed
        self.left -= 1
        self.calls.append(list(arguments))
        assert cli.run(arguments[0], list(arguments[1:])) == 0, arguments
        if "--json" in arguments:
            self.judge(Path(arguments[-1]))

    def judge(self, path: Path) -> None:
        """Random models are wrong by chance: the refitted world of round 1 is made the better one."""
        content = json.loads(path.read_text())
        wrong = "round-001" in str(path) and path.name == "part-old.json"
        content["audits"][0]["wrong"]["rate"] = float(wrong)
        path.write_text(json.dumps(content))


def flags(folder: Path, out: Path) -> list[str]:
    fits = ["--world-steps", "1", "--reward-steps", "1", "--fit-flags=--batch 2"]
    rounds = ["--rounds", str(ROUNDS), "--round-updates", "1", "--episodes", "2", "--audit-episodes", "2"]
    return ["--out", str(out), *rounds, *fits, "--workers", "1", "--inline", *write_models(folder)]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rounds_that_end_at_any_stage_continue(tmp_path, monkeypatch, capsys) -> None:
    commands = Commands()
    monkeypatch.setattr(pace, "run_command", commands)
    shown = ["--out", str(tmp_path / "expert"), "--episodes", "48", "--workers", "1", "--image-size", "64"]
    assert cli.run("collect", shown) == 0
    arguments = [*flags(tmp_path / "models", tmp_path / "whole"), "--data", str(tmp_path / "expert")]
    assert cli.run("pace", arguments) == 0
    whole = commands.calls
    assert [call[0] for call in whole] == ["train", "collect", "fit", "fit", "audit", "audit"] * ROUNDS
    assert "new\n" in capsys.readouterr().out

    refitted = str(tmp_path / "whole/round-001/world")
    trains = [call for call in whole if call[0] == "train"]
    worlds = [call[call.index("--world", call.index("--updates")) + 1] for call in trains]
    assert worlds == [str(tmp_path / "models/world"), refitted]
    assert "--resume" in trains[1]
    groups = sorted((tmp_path / "whole/run/replay").glob("group-*.h5"))
    versions = {episode.world_version for group in groups for episode in read_group(group)}
    assert {0, 1} <= versions, "an episode keeps the version of its world"

    arguments[arguments.index("--out") + 1] = str(tmp_path / "ended")
    ends = 0
    while True:
        commands.left, commands.calls = 3, []
        try:
            assert cli.run("pace", arguments) == 0
            break
        except Killed:
            ends += 1
    assert ends >= ROUNDS
    for number in range(1, ROUNDS + 1):
        audits = [
            pace.rates_of(tmp_path / run / f"round-{number:03d}" / name)
            for name in ("old.json", "new.json")
            for run in ("whole", "ended")
        ]
        assert audits[0] == audits[1]
        assert audits[2] == audits[3]
    last = [
        (checkpoint.kept(tmp_path / run / "run")[ROUNDS] / "model.safetensors").read_bytes()
        for run in ("whole", "ended")
    ]
    assert last[0] == last[1]

    assert cli.run("pace", [*arguments, "--episodes", "3"]) == 2
    assert "was begun with episodes 2, not 3" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_sigterm_ends_the_stage_too(tmp_path) -> None:
    arguments = [*flags(tmp_path / "models", tmp_path / "out"), "--round-updates", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncrl", "pace", *arguments],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics, until = tmp_path / "out/run/metrics.jsonl", time.monotonic() + 60
    while not metrics.is_file() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 143, said + errors
    assert "stopped during `asyncrl train`. The same command line continues." in errors
    assert checkpoint.latest(tmp_path / "out/run") is not None, "what was learned is saved"
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--resume"], "--resume is set by `asyncrl pace`"),
        (["--updates", "3"], "--updates is set by `asyncrl pace`"),
        (["--world", "tabletop_true"], "it is a simulator or a class of your own"),
        (["--no-such-flag", "3"], "no-such-flag"),
        (["--out", "."], "holds other files"),
    ],
)
def test_what_cannot_work_is_refused_at_once(tmp_path, monkeypatch, capsys, more, sentence) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis.txt").write_text("mine")
    assert exit_code(["--out", str(tmp_path / "out"), *more], "pace") == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "rate", ['"0.5"', "true", "null", "NaN", "[0.5]", '0.5}, "true_success": {"rate": 1']
)
def test_an_audit_that_is_none_is_refused(tmp_path: Path, rate: str) -> None:
    shown = ", ".join(f'"{name}": {{"rate": 0.5}}' for name in ("imagined_success", "wrong"))
    (tmp_path / "old.json").write_text(f'{{"audits": [{{{shown}, "true_success": {{"rate": {rate}}}}}]}}')
    with pytest.raises(AsyncRLError, match=r"old\.json is no"):
        pace.rates_of(tmp_path / "old.json")


def test_a_command_that_fails_is_named() -> None:
    with pytest.raises(RunError, match=r"asyncrl fit nothing` ended with exit code 2"):
        pace.run_command(["fit", "nothing"])


def test_a_signal_behind_the_end_of_a_command_shows_no_traceback(monkeypatch) -> None:
    wait = subprocess.Popen.wait

    def interrupted(child: subprocess.Popen[bytes]) -> int:
        monkeypatch.setattr(subprocess.Popen, "wait", wait)
        child.wait()
        raise KeyboardInterrupt(signal.SIGHUP)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt) as ended:
        pace.run_command(["--version"])
    assert ended.value.__notes__ == ["stopped during `asyncrl --version`. The same command line continues."]


def test_a_second_command_of_the_same_folder_is_refused(tmp_path, capsys, monkeypatch) -> None:
    arguments, refused = flags(tmp_path / "models", tmp_path / "out"), list[int]()

    def second(_: object) -> None:
        monkeypatch.setattr(pace, "run_command", lambda _: pytest.fail("a stage of the second command began"))
        refused.append(cli.run("pace", arguments))
        raise RunError("the first one ends here")

    monkeypatch.setattr(pace, "run_command", second)
    assert cli.run("pace", arguments) == 1
    assert refused == [2]
    assert "is in use by process" in capsys.readouterr().err

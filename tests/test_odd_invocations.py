"""Odd ways to call asyncrl end in a sentence and a code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl import cli
from support.folder_damage import contents
from support.odd_invocations import CALLS, TINY, filled_in, make_files, policy_of_many_layers
from support.tiny_models import flags_of, write_models

WORKS = (f"{TINY} --seed ١٢",)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Odd files, and models with a run of one update."""
    base = tmp_path_factory.mktemp("odd")
    models = base / "models"
    models.mkdir()
    flags = [*write_models(models), "--inline", "--updates", "1", "--run-dir", str(models / "run")]
    assert cli.run("train", flags) == 0
    make_files(base / "files")
    policy_of_many_layers(models / "policy", base / "files" / "policy_layers")
    return base / "files", models


def unchanged(models: Path) -> dict[str, tuple[int, int, str]]:
    """What no call may change. This process goes on saying in the run's folder what it does."""
    return {name: found for name, found in contents(models).items() if not name.startswith("run/processes")}


def called(name: str, folders: tuple[Path, Path], new: Path) -> int:
    """The exit code of an invocation."""
    work, models = folders
    arguments = list(filled_in(name, work, models, new, flags_of(models)))
    try:
        return cli.run(arguments[0], arguments[1:])
    except SystemExit as end:  # How tyro refuses a flag.
        return int(end.code or 0)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", CALLS[::2], ids=[call[:100] for call in CALLS[::2]])
def test_an_odd_call_ends_in_a_sentence(
    name: str,
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    models = folders[1]
    monkeypatch.chdir(tmp_path)
    before = unchanged(models)
    code = called(name, folders, tmp_path)
    said = capfd.readouterr()
    assert code in (0, 1, 2) or (name.startswith("status") and code in (3, 4))
    assert code or name in WORKS or not name.startswith("train")
    assert code == 0 or said.err or said.out
    assert "Traceback" not in said.err
    assert unchanged(models) == before


EXPECTED = {
    "train --placement learner=0-99999999999": "a run has at most 4096 ranks",
    "train --placement learner=0-3000,actor=3001": "--placement names 3001 learner ranks",
    "train {w}/bytes.toml": "not valid toml",
    "train {w}/deep.json": "nested too deeply",
    "train {w}/pipe.toml": "it is a named pipe",
    "replay prune {m}/run --dry-run --keep-gigabytes nan": "--keep-gigabytes is nan",
    "replay prune {m}/run --dry-run --keep-gigabytes inf": "--keep-gigabytes is inf",
    "evaluate tabletop --workers 0": "--workers is 0, but it must be at least 1",
    "collect --out {n}/new --workers 0": "--workers is 0, but it must be at least 1",
    "collect --out {w}/file": "file is a file, where a folder is expected",
    "collect --out {w}/file/below": "cannot be made (Not a directory)",
    f"{TINY} --world {{w}}/index_infinity": "which is not in JSON",
    f"{TINY} --policy {{w}}/policy_layers": "llm_layers is 1000000000",
    f"{TINY} --start-states {{w}}/bomb.npy": "nothing in a file is ever executed",
    f"{TINY} --start-states {{w}}/bomb.h5": "bytes, but the file has at most",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_sentence_says_what_is_wrong(
    name: str,
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert called(name, folders, tmp_path) in (1, 2)
    said = " ".join(capfd.readouterr().err.replace("│", " ").split())
    assert EXPECTED[name] in said


@pytest.mark.parametrize("port", ["99999", "0", "9" * 5000, "http"])
def test_a_port_that_is_none_is_said_before_anything_starts(port: str, tmp_path: Path) -> None:
    arguments = ["--run-dir", str(tmp_path / "run")]
    code = f"from asyncrl import cli; raise SystemExit(cli.run('train', {arguments!r}))"
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.environ.update({json.dumps(environ)}); {code}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "MASTER_PORT is" in done.stderr
    assert not (tmp_path / "run").exists()

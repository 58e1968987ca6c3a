"""Odd ways to call asyncrl end in a sentence and a code."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from asyncrl import cli
from support.pth import write_bomb
from support.run_folders import contents
from support.tiny_models import flags_of, write_models
from support.whole_runs import exit_code

HUGE: Final = "1" + "0" * 40
DIGITS: Final = "9" * 5000
"""More than Python reads."""
LONG: Final = "x" * 300
DEEP: Final = 100_000
TINY: Final = "train {flags} --inline --updates 1 --run-dir {n}/fresh"
"""A run that would work: tiny models, one update."""
PLACEMENTS: Final = (
    *("learner=0-99999999999", "learner=0,actor=1-99999999999", f"learner={DIGITS}", "learner=0-4096"),
    *("actor=0", "learner=", "learner=-1", "learner=0,learner=0", "learner=0,actor=5-1", "x" * 5000, ",,,"),
    *("②=1", "learner=0,critic=1", "learner=0-3000,actor=3001"),
)
FOLDERS: Final = (
    *(LONG, "{w}/" + "y/" * 2500, "{w}/file", "{w}/file/below", "{w}/pipe", "{w}/circle", "{w}/\udcff"),
    "/proc/1/x",
)
FILES: Final = (
    *("deep_table.toml", "folder.toml", "pipe.toml", "circle.toml", "none.toml", "surrogate.json"),
    "numbers.json",
)
"""Others are in tests/config/test_bounds.py."""
OF_REPLAY: Final = (
    *(
        f"prune {{m}}/run --dry-run --keep-gigabytes {value}"
        for value in ("nan", "inf", "-inf", "1e308", "-1")
    ),
    *(f"list {{m}}/run --limit {value}" for value in ("-1", HUGE)),
    *(f"list {place}" for place in (LONG, "{w}/pipe", "{w}/file", f"{{m}}/run --version {HUGE}")),
    *(f"show {{m}}/run {LONG}", "show {m}/run 0 0", f"export {{m}}/run --out {LONG}"),
    *("verify {w}/circle", "verify \udcff", f"imagine {{m}}/run {HUGE}"),
)
CALLS: Final = (
    *(f"{TINY} --seed {value}" for value in (HUGE, "1e400", "nan", DIGITS, "%20", "0x10", "١٢")),
    *(f"{TINY} --algorithm.dual-clip {value}" for value in ("nan", "1e308", "9" * 20)),
    *(f"train --placement {text}" for text in PLACEMENTS),
    *(f"{TINY} --run-dir {folder}" for folder in FOLDERS),
    *(f"train --run-dir {folder} --resume" for folder in (LONG, "{w}", "/dev/null")),
    *(f"train {{w}}/{file}" for file in FILES),
    *(
        f"{TINY} --{part} {place}"
        for part in ("policy", "world", "start-states", "reward")
        for place in (LONG, "{w}/pipe", "{w}/file", "{w}/folder")
    ),
    *(f"{TINY} --world {{w}}/{name}" for name in ("index_infinity", "index_deep")),
    *(f"{TINY} --policy {{w}}/{name}" for name in ("policy_infinity", "policy_layers")),
    f"{TINY} --start-states {{w}}/bomb.npy",
    *(f"collect --out {place}" for place in ("{w}/file", "{w}/file/below", "{w}/pipe", LONG)),
    *(f"replay {text}" for text in OF_REPLAY),
    *("keys {w}/file", f"keys {LONG}", "keys {n}/new --clients ../x", f"status {LONG}", "status {w}/pipe"),
    *("status {w}/folder", "status {m}/run --stacks", "nothing", "\udcff"),
)


def make_files(folder: Path) -> None:
    """Make the odd files."""
    folder.mkdir()
    for name in ("index_infinity", "index_deep", "policy_infinity", "policy_layers", "folder.toml", "folder"):
        (folder / name).mkdir()
    for name in ("pipe", "pipe.toml"):
        os.mkfifo(folder / name)
    for name in ("circle", "circle.toml"):
        (folder / name).symlink_to(name)
    files = {
        "file": b"a file",
        "deep_table.toml": b"x = " + b"{a=" * 5000 + b"1" + b"}" * 5000,
        "numbers.json": b'{"updates": ' + DIGITS.encode() + b"}",
        "surrogate.json": b'{"policy": "\\ud800"}',
        "index_infinity/model.safetensors.index.json": b'{"weight_map": {"a": Infinity}}',
        "index_deep/model.safetensors.index.json": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        "policy_infinity/config.json": b'{"format": Infinity}',
        "policy_infinity/model.safetensors": b"",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    write_bomb(folder / "bomb.npy")


def policy_of_many_layers(policy: Path, folder: Path) -> None:
    """Copy a policy's folder, and let its config.json claim a billion layers."""
    shutil.copytree(policy, folder, dirs_exist_ok=True)
    fields = json.loads((folder / "config.json").read_text())
    fields["asyncrl"]["llm_layers"] = 10**9
    (folder / "config.json").write_text(json.dumps(fields))


def filled_in(call: str, work: Path, models: Path, new: Path, flags: list[str]) -> Iterator[str]:
    """Return the words of a call with the folders and the flags of a run with tiny models in them."""
    for word in call.split():
        part = word.replace("%20", " ")
        if part == "{flags}":
            yield from flags
        else:
            yield part.replace("{w}", str(work)).replace("{m}", str(models)).replace("{n}", str(new))


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
    return exit_code(arguments[1:], arguments[0])


EXPECTED = {
    "train --placement learner=0-99999999999": "is not role=rank or role=first-last",
    "train --placement learner=0-3000,actor=3001": "--placement names 3001 learner ranks",
    "train {w}/pipe.toml": "it is a named pipe",
    "replay prune {m}/run --dry-run --keep-gigabytes nan": "--keep-gigabytes is nan",
    "replay prune {m}/run --dry-run --keep-gigabytes inf": "--keep-gigabytes is inf",
    "evaluate tabletop --workers 0": "--workers is 0, but it must be at least 1",
    "collect --out {n}/new --workers 0": "--workers is 0, but it must be at least 1",
    f"{TINY} --run-dir {{w}}/file": "file is a file",
    "collect --out {w}/file": "file is a file, where a folder is expected",
    "collect --out {w}/file/below": "cannot be made (Not a directory)",
    f"{TINY} --world {{w}}/index_infinity": "which is not in JSON",
    f"{TINY} --policy {{w}}/policy_layers": "llm_layers is 1000000000",
    f"{TINY} --start-states {{w}}/bomb.npy": "nothing in a file is ever executed",
}
"""Call -> its sentence."""


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", dict.fromkeys([*CALLS, *EXPECTED]), ids=lambda call: call[:100])
def test_an_odd_call_ends_in_a_sentence(name, folders, tmp_path, monkeypatch, capfd) -> None:
    models = folders[1]
    monkeypatch.chdir(tmp_path)
    before = unchanged(models)
    code = called(name, folders, tmp_path)
    said = capfd.readouterr()
    assert code in (0, 1, 2) or (name.startswith("status") and code in (3, 4))
    assert code or name in WORKS or not name.startswith("train")
    assert code == 0 or said.err or said.out
    assert "Traceback" not in said.err
    assert EXPECTED.get(name, "") in " ".join(said.err.replace("│", " ").split())
    assert unchanged(models) == before


@pytest.mark.parametrize("port", ["http", "9" * 5000], ids=["a word", "long"])
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

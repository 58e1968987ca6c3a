"""Tab completion: bash, with the script that `asyncrl completion bash` prints, completes the program."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.commands.small import script

ASK = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(( $# - 1 ))
COMPREPLY=()
"$(complete -p asyncrl | sed 's/.*-F \\([^ ]*\\) .*/\\1/')"
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""Calls the function that bash has for asyncrl, as bash does when TAB is pressed behind the last word."""


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "asyncrl.bash"
    path.write_text(script("bash"))
    return path


def completed(line: str, bash_script: Path, folder: Path) -> list[str]:
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", str(bash_script), *line.split(" ")],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return sorted(done.stdout.split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("mine.toml", "minutes.txt", "config.json"):
        (tmp_path / name).touch()
    (tmp_path / "models").mkdir()
    return tmp_path


EXPECTED = {
    "asyncrl tr": ["train"],
    "asyncrl re": ["recordings", "replay"],
    "asyncrl replay ex": ["export"],
    "asyncrl fit ": ["decoder", "keyframes", "policy", "reward", "starts", "world"],
    "asyncrl train --pla": ["--placement"],
    "asyncrl train --inline --algorithm.group": ["--algorithm.group-size", "--algorithm.groups-per-update"],
    "asyncrl train --dry": ["--dry-run"],
    "asyncrl train --no-d": [],
    "asyncrl train --no-i": ["--no-inline"],
    "asyncrl train --help": ["--help", "--help-all"],
    "asyncrl train --algorithm.kind ": ["grpo", "ppo"],
    "asyncrl train --device c": ["cpu", "cuda"],
    "asyncrl train mi": ["mine.toml"],
    "asyncrl train mine.toml --updates 3 mi": ["mine.toml"],
    "asyncrl train ": ["config.json", "mine.toml", "models"],
    "asyncrl doctor --js": ["--json"],
    "asyncrl train --policy mod": ["models"],
    "asyncrl status mi": ["mine.toml", "minutes.txt"],
    "asyncrl evaluate --episodes": ["--episodes"],
    "asyncrl replay list --un": ["--unused"],
    "asyncrl status --no": [],
    "asyncrl runs gc --": ["--help", "--json", "--keep-checkpoints", "--yes"],
    "asyncrl train --nothing": [],
}


@pytest.mark.parametrize("line", EXPECTED)
def test_bash_completes(line: str, bash_script: Path, folder: Path) -> None:
    assert completed(line, bash_script, folder) == EXPECTED[line]


def test_bash_completes_every_command(bash_script: Path, folder: Path) -> None:
    assert completed("asyncrl ", bash_script, folder) == sorted(cli.COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_every_shell_is_printed_and_says_each_flag_on_a_line(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run("completion", [shell]) == 0
    lines = capsys.readouterr().out.splitlines()
    (spec,) = [line for line in lines if line.lstrip().startswith("COMPLETION_SPEC = ")]
    assert "--hang-timeout" in spec
    assert not re.search(r"\\+n", spec)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input="\n".join(lines), text=True, timeout=60, check=True)


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.run("completion", ["tcsh"])
    assert left.value.code == 2
    assert "Expected one of ('bash', 'zsh', 'fish')" in " ".join(
        capsys.readouterr().err.replace("│", "").split()
    )

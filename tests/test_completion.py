"""Tab completion: bash, with the script that `asyncrl completion bash` prints, completes the program."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
from functools import cache

import pytest

from asyncrl import cli

ASK = """
source /dev/stdin
COMP_WORDS=("$@")
COMP_CWORD=$(( $# - 1 ))
COMPREPLY=()
"$(complete -p asyncrl | sed 's/.*-F \\([^ ]*\\) .*/\\1/')"
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""Calls the function that bash has for asyncrl, as bash does when TAB is pressed behind the last word."""


@cache
def script(shell: str) -> str:
    with contextlib.redirect_stdout(written := io.StringIO()):
        assert cli.run("completion", [shell]) == 0
    return written.getvalue()


EXPECTED = {
    "asyncrl ": ["--help", "-h", *sorted(cli.COMMANDS)],
    "asyncrl re": ["recordings", "replay"],
    "asyncrl replay ex": ["export"],
    "asyncrl fit ": ["--help", "-h", "decoder", "keyframes", "policy", "reward", "starts", "world"],
    "asyncrl train --inline --algorithm.group": ["--algorithm.group-size", "--algorithm.groups-per-update"],
    "asyncrl train --no-i": ["--no-inline"],
    "asyncrl train --algorithm.kind ": ["grpo", "ppo"],
    "asyncrl status --no": [],
    "asyncrl runs --": ["--help", "--json"],
}


@pytest.mark.parametrize("line", EXPECTED)
def test_bash_completes(line: str) -> None:
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", *line.split(" ")],
        input=script("bash"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    assert sorted(done.stdout.split()) == EXPECTED[line]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_every_shell_says_each_flag_on_a_line(shell: str) -> None:
    (spec,) = re.findall("^COMPLETION_SPEC = .*", script(shell), re.MULTILINE)
    assert "--hang-timeout" in spec
    assert not re.search(r"\\+n", spec)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script(shell), text=True, timeout=60, check=True)

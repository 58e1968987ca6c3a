"""The scripts that are shell and Python at once: every way of starting them runs the same Python."""

import json
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT
from support.whole_runs import environment

SCRIPTS = ROOT / "torchrun_scripts"
POLYGLOTS = ("train.sh", "evaluate.sh")
PROBE = """
import json, os, sys, uuid
from pathlib import Path
seen = [int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["OMP_NUM_THREADS"], sys.argv[1:]]
Path(sys.argv[1], uuid.uuid4().hex).write_text(json.dumps(seen))
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


def shell_lines(name: str) -> str:
    """The script down to the line where bash hands over."""
    lines = (SCRIPTS / name).read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if line.startswith('"exec"'))
    return "".join(lines[: last + 1])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_way_of_starting_reaches_python_once_per_rank_with_the_arguments(tmp_path):
    script = tmp_path / "probe train.sh"
    script.write_text(shell_lines("train.sh") + PROBE)
    script.chmod(0o755)
    ways = {
        "torchrun": [*TORCHRUN, str(script)],
        "torchrun-2": [*TORCHRUN, "--nproc-per-node=2", str(script)],
        "bash-2": ["bash", str(script)],
        "itself": [str(script)],
        "torchrun-bash-2": [*TORCHRUN, "--nproc-per-node=2", "--no-python", "bash", str(script)],
    }
    environ = environment(tmp_path) | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    running = {}
    for way, command in ways.items():
        (tmp_path / way).mkdir()
        arguments = [str(tmp_path / way), "--updates", "3", "two words", "$HOME"]
        nproc = {"NPROC": "2"} if way == "bash-2" else {}
        running[way] = subprocess.Popen(
            [*command, *arguments], env=environ | nproc, stderr=subprocess.PIPE, text=True
        )
    for way, process in running.items():
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, f"{way}: {errors}"
        ranks = 2 if way.endswith("-2") else 1
        arguments[0] = str(tmp_path / way)
        seen = sorted(json.loads(path.read_text()) for path in (tmp_path / way).iterdir())
        assert seen == [[rank, ranks, "1", arguments] for rank in range(ranks)], way


@pytest.mark.parametrize("name", POLYGLOTS)
def test_the_real_scripts_are_python_and_executable(name, tmp_path):
    py_compile.compile(str(SCRIPTS / name), cfile=str(tmp_path / "out.pyc"), doraise=True)
    assert os.access(SCRIPTS / name, os.X_OK)


def test_both_scripts_hand_over_in_the_same_way():
    train, evaluate = (shell_lines(name) for name in POLYGLOTS)
    assert train.replace("${NPROC:-1}", "1") == evaluate


@pytest.mark.parametrize("name", POLYGLOTS)
def test_the_real_scripts_answer_help_when_bash_runs_as_a_rank(name):
    """RANK is set, so bash starts Python only, and that finds the package beside the script."""
    answer = subprocess.run(
        ["bash", str(SCRIPTS / name), "--help"],
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "1", "PYTHON_EXEC": sys.executable, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stderr
    assert f"usage: asyncrl {name.removesuffix('.sh')}" in answer.stdout


def test_a_child_process_that_imports_the_script_again_starts_nothing():
    program = f"import runpy; runpy.run_path({str(SCRIPTS / 'train.sh')!r}, run_name='__mp_main__')\n"
    program += "import sys; assert not any(name.startswith('asyncrl') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=20)

"""Scripts that are shell and Python at once, and those of Slurm with stand-ins for Slurm and torchrun."""

import json
import os
import py_compile
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from support import ROOT
from support.whole_runs import PATIENCE, TORCHRUN, environment

SCRIPTS = ROOT / "torchrun_scripts"
POLYGLOTS = ("train.sh", "evaluate.sh")
PROBE = """
import json, os, sys, uuid
from pathlib import Path
seen = [int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["OMP_NUM_THREADS"], sys.argv[1:]]
Path(sys.argv[1], uuid.uuid4().hex).write_text(json.dumps(seen))
"""


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


BATCH = ("slurm_train.sbatch", "slurm_nodes.sbatch")
NODES = [f"node-{number}" for number in (1, 2, 3)]
# One write a line: srun and torchrun note at the same time.
NOTE = 'printf -v line " <%s>" "$@"; printf "%s\\n" "${0##*/}$line" >> "$CALLS"\n'
FAKE_TORCHRUN = """
# One rank, a child that ends in order when it is asked to; torchrun itself would end it after 30 s.
trap 'echo "torchrun was asked" >> "$CALLS"' TERM
bash -c 'trap "echo the rank was asked >> \\"$CALLS\\"; exit 0" TERM; echo ready >> "$CALLS"
         for ((i = 0; i < 600; i++)); do sleep 0.1 & wait $!; done' &
[[ ${QUICK:-} ]] && { kill -KILL $!; exit "$QUICK"; }
wait $!
"""
AWAIT_TASKS = """
code=0
for task in "${tasks[@]}"; do
    while kill -0 "$task" 2> /dev/null; do wait "$task" && last=0 || last=$?; done
    ((last)) && code=$last
done
exit "$code"
"""
"""End of an srun: waits for all `tasks`, also when a signal ends a wait, with the last code that is not 0."""
FAKES = {
    "torchrun": NOTE + FAKE_TORCHRUN,
    "scontrol": NOTE + '[[ $1 == show ]] && printf "%s\\n" node-1 node-2 node-3; exit 0',
    # On every node the command that follows srun's own flags; USR1 is handed on, TERM ends the step.
    "srun": NOTE
    + """
while [[ $1 != bash ]]; do shift; done
for number in 1 2 3; do SLURMD_NODENAME=node-$number "$@" & tasks+=($!); done
trap 'kill -USR1 "${tasks[@]}"' USR1
trap 'kill -KILL "${tasks[@]}"; exit 143' TERM
"""
    + AWAIT_TASKS,
}


@pytest.fixture
def job(tmp_path):
    """Environment of a Slurm job whose programs only write down how they were called."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, body in FAKES.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "ASYNCRL"))}
    return kept | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "4711",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "16",
        "SLURM_JOB_NODELIST": "node-[1-3]",
        "SLURM_NNODES": "3",
        "HOME": str(tmp_path),
    }


def calls(job):
    path = Path(job["CALLS"])
    return path.read_text().splitlines() if path.exists() else []


def until(job, line, process, times=1):
    deadline = time.monotonic() + PATIENCE
    while calls(job).count(line) < times:
        assert process.poll() is None, calls(job)
        assert time.monotonic() < deadline, calls(job)
        time.sleep(0.02)


def run(job, script, *arguments, **more):
    """Start a script whose torchrun ends at once; returns its exit code and what it called."""
    done = subprocess.run(
        ["bash", SCRIPTS / script, *arguments],
        env=job | {"QUICK": "0"} | more,
        timeout=PATIENCE,
        capture_output=True,
        text=True,
    )
    return done, [line for line in calls(job) if line.startswith("torchrun <")]


def test_torchrun_gets_one_rank_for_each_gpu_and_the_arguments(job, tmp_path):
    arguments = ("configs/a b.toml", "--run-dir", str(tmp_path / "a"), "--seed", "3")
    done, (started,) = run(job, "slurm_train.sbatch", *arguments)
    assert done.returncode == 0, done.stderr
    begin = "torchrun <--standalone> <--local-addr> <127.0.0.1> <--nproc-per-node> <4> <--max-restarts> <0>"
    assert started == f"{begin} <{SCRIPTS}/train.sh>" + "".join(f" <{text}>" for text in arguments)


def test_every_node_starts_torchrun_of_one_job_with_the_arguments(job, tmp_path):
    arguments = ("configs/a b.toml", "--run-dir", str(tmp_path / "a"), "--seed", "3")
    done, started = run(job, "slurm_nodes.sbatch", *arguments)
    assert done.returncode == 0, done.stderr
    begin = "torchrun <--nnodes> <3> <--nproc-per-node> <4> <--rdzv-backend> <c10d>"
    begin += " <--rdzv-endpoint> <node-1:29500> <--rdzv-id> <4711-0> <--local-addr> <{}> <--max-restarts> <0>"
    rest = f" <{SCRIPTS}/train.sh>" + "".join(f" <{text}>" for text in arguments)
    assert sorted(started) == [begin.format(node) + rest for node in NODES]
    (step,) = [line for line in calls(job) if line.startswith("srun ")]
    # srun takes none of them over from sbatch, and ends with each of its nodes.
    flags = ("nodes=3", "ntasks-per-node=1", "no-kill", "kill-on-bad-exit=0", "cpus-per-task=16")
    assert all(f"<--{flag}>" in step for flag in flags)


@pytest.mark.parametrize(("visible", "ranks"), [("4,7", "2"), ("", "4")])
def test_a_node_has_as_many_ranks_as_slurm_gave_the_job_gpus_there(job, tmp_path, visible, ranks):
    """A node may be shared, and some of its GPUs another job's."""
    more = {"CUDA_VISIBLE_DEVICES": visible, "ASYNCRL_PORT": "4000", "SLURM_RESTART_COUNT": "2"}
    _, started = run(job, "slurm_nodes.sbatch", "--run-dir", str(tmp_path / "a"), **more)
    assert len(started) == 3
    assert all(f"<--nproc-per-node> <{ranks}>" in line for line in started)
    assert all("<--rdzv-endpoint> <node-1:4000> <--rdzv-id> <4711-2>" in line for line in started)


@pytest.mark.parametrize("script", BATCH)
def test_a_job_without_a_run_folder_is_refused(job, script):
    done, started = run(job, script, "configs/a.toml")
    assert (done.returncode != 0, started) == (True, [])
    assert "name the run: --run-dir" in done.stderr


@pytest.mark.parametrize("script", BATCH)
@pytest.mark.parametrize("form", ["--run-dir {}", "--run-dir={}"])
def test_a_job_that_slurm_starts_again_goes_on_from_its_checkpoint(job, tmp_path, script, form):
    folder = tmp_path / "a"
    (folder / "checkpoints" / "update_000005").mkdir(parents=True)
    _, started = run(job, script, *form.format(folder).split(), SLURM_RESTART_COUNT="1")
    assert started
    assert all(line.endswith(" <--resume>") for line in started)


def test_a_job_that_slurm_starts_again_before_a_checkpoint_begins_in_an_empty_folder(job, tmp_path):
    folder = tmp_path / "a"
    (folder / "checkpoints" / "update_000005.tmp").mkdir(parents=True)
    _, (started,) = run(job, "slurm_train.sbatch", "--run-dir", str(folder), SLURM_RESTART_COUNT="2")
    assert "--resume" not in started
    assert not folder.exists()
    assert (tmp_path / "a.start-2" / "checkpoints").is_dir()


def test_a_first_start_never_touches_a_folder_that_is_there_and_a_run_that_fails_fails_the_job(job, tmp_path):
    (tmp_path / "a").mkdir()
    done, (started,) = run(job, "slurm_train.sbatch", "--run-dir", str(tmp_path / "a"), QUICK="7")
    assert "--resume" not in started  # And asyncrl refuses a folder that is not empty.
    assert (tmp_path / "a").is_dir()
    assert done.returncode == 7
    assert [line for line in calls(job) if "requeue" in line] == []


@pytest.mark.parametrize(("script", "nodes"), [(BATCH[0], 1), (BATCH[1], 3)])
@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_asks_the_ranks_to_save_and_usr1_puts_the_job_back_into_the_queue(
    job, tmp_path, script, nodes, number, requeued
):
    process = subprocess.Popen(["bash", SCRIPTS / script, "--run-dir", str(tmp_path / "a")], env=job)
    until(job, "ready", process, nodes)
    process.send_signal(number)
    assert process.wait(PATIENCE) == 0
    assert calls(job).count("the rank was asked") == nodes
    assert "torchrun was asked" not in calls(job)  # It would give the ranks 30 s.
    assert [line for line in calls(job) if "requeue" in line] == ["scontrol <requeue> <4711>"] * requeued


def directives(script):
    """`#SBATCH` lines of a script: name -> value."""
    lines = re.findall(r"^#SBATCH (--[\w-]+)(?:=(.*))?$", (SCRIPTS / script).read_text(), re.M)
    return dict(lines)


def test_the_scripts_ask_slurm_for_the_same_but_the_number_of_nodes_and_what_one_of_them_may_end():
    one, several = map(directives, BATCH)
    assert {name for name in one if one[name] != several[name]} == {"--nodes"}
    assert several.keys() - one.keys() == {"--no-kill"}
    assert not one.keys() - several.keys()
    assert {"--requeue", "--signal", "--open-mode"} <= one.keys()


def test_the_flags_that_the_scripts_pass_to_torchrun_exist():
    known = {text for action in get_args_parser()._actions for text in action.option_strings}
    for script in ("slurm_train.sbatch", "slurm_node.sh"):
        text = re.sub(r"\\\n\s*", " ", (SCRIPTS / script).read_text())
        passed = re.findall(r"(?<=\s)--[a-z][\w.-]*", " " + text.partition("ask_ranks torchrun ")[2])
        assert len(passed) > 3
        assert set(passed) <= known, script

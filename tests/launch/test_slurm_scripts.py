"""The Slurm scripts with stand-ins for Slurm, torchrun and asyncrl: what they start, and what signals do."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from asyncrl.commands.actor import main as actor_main
from asyncrl.commands.keys import main as keys_main
from asyncrl.config.run import TrainConfig
from support import ROOT
from support.whole_runs import PATIENCE

SCRIPTS = ROOT / "torchrun_scripts"
BATCH = ("slurm_train.sbatch", "slurm_nodes.sbatch")
PAGE = ROOT / "docs" / "cluster.md"
# One write a line: srun and torchrun note at the same time.
NOTE = 'printf -v line " <%s>" "$@"; printf "%s\\n" "${0##*/}$line" >> "$CALLS"\n'
TORCHRUN = """
# One rank, a child that ends in order when it is asked to; torchrun itself would end it after 30 s.
trap 'echo "torchrun was asked" >> "$CALLS"' TERM
bash -c 'trap "echo the rank was asked >> \\"$CALLS\\"; exit 0" TERM; echo ready >> "$CALLS"
         for ((i = 0; i < 600; i++)); do sleep 0.1 & wait $!; done' &
[[ ${QUICK:-} ]] && { kill -KILL $!; exit "$QUICK"; }
wait $!
"""
FAKES = {
    "torchrun": NOTE + TORCHRUN,
    "scontrol": NOTE + '[[ $1 == show ]] && printf "%s\\n" node-1 node-2 node-3; exit 0',
    "srun": NOTE,
    "asyncrl": NOTE,
    "hostname": 'echo "10.0.0.5 fe80::1"',
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
        "HOME": str(tmp_path),
    }


def calls(job):
    try:
        with Path(job["CALLS"]).open() as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def until(job, line, process):
    deadline = time.monotonic() + PATIENCE
    while line not in calls(job):
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


@pytest.mark.parametrize("script", BATCH)
def test_torchrun_gets_one_rank_for_each_gpu_and_the_arguments(job, tmp_path, script):
    done, (started,) = run(job, script, "configs/a b.toml", "--run-dir", str(tmp_path / "a"), "--seed", "3")
    assert done.returncode == 0, done.stderr
    begin = "torchrun <--standalone> <--local-addr> <127.0.0.1> <--nproc-per-node> <4> <--max-restarts> <0>"
    begin += f" <{SCRIPTS}/train.sh>"
    assert started.startswith(f"{begin} <configs/a b.toml> <--run-dir> <{tmp_path / 'a'}> <--seed> <3>")
    assert "--resume" not in started


def test_the_other_nodes_join_with_keys_at_the_first_ones_address(job, tmp_path):
    _, (started,) = run(job, "slurm_nodes.sbatch", "--run-dir", str(tmp_path / "a"))
    keys = tmp_path / ".asyncrl" / "slurm-keys"
    assert started.endswith(f"<--replay.listen> <tcp://10.0.0.5:5555> <--replay.keys> <{keys}>")
    made = f"asyncrl <keys> <{keys}> <--clients> <learner> <actor-0> <actor-1> <actor-2> <actor-3> <far>"
    assert made in calls(job)
    (joined,) = [line for line in calls(job) if line.startswith("srun ")]
    assert "<--nodes=2>" in joined
    assert "<-x> <node-1>" in joined
    assert "<--no-kill>" in joined  # A step without it ends with each of its nodes.
    assert "<--cpus-per-task=16>" in joined  # srun does not take it over from sbatch.


@pytest.mark.parametrize(("visible", "used"), [("4,7", ["4", "7"]), ("", ["0", "1", "2", "3"])])
def test_actors_take_the_gpus_that_slurm_gave_the_job_on_their_node(job, tmp_path, visible, used):
    """A node may be shared, and its first GPUs another job's."""
    programs = Path(job["PATH"].partition(":")[0])
    node = f'while [[ $1 != bash ]]; do shift; done; CUDA_VISIBLE_DEVICES={visible} exec "$@"'
    (programs / "srun").write_text(f"#!/usr/bin/env bash\n{node}\n")
    where = 'echo "$CUDA_VISIBLE_DEVICES ${@: -1}" >> "$CALLS"'
    (programs / "asyncrl").write_text(f"#!/usr/bin/env bash\n[[ $1 != actor ]] || {where}\n")
    (programs / "hostname").write_text("#!/usr/bin/env bash\necho node-2\n")
    run(job, "slurm_nodes.sbatch", "--run-dir", str(tmp_path / "a"), ASYNCRL_ADDRESS="10.0.0.5")
    expected = {f"{device} node-2-{number}" for number, device in enumerate(used)}
    deadline = time.monotonic() + PATIENCE
    while not expected <= set(calls(job)):
        assert time.monotonic() < deadline, calls(job)
        time.sleep(0.02)
    assert sum("node-2-" in line for line in calls(job)) == len(used)


@pytest.mark.parametrize("script", BATCH)
def test_a_job_without_a_run_folder_is_refused(job, script):
    done, started = run(job, script, "configs/a.toml")
    assert done.returncode != 0
    assert "name the run: --run-dir" in done.stderr
    assert started == []


@pytest.mark.parametrize("script", BATCH)
@pytest.mark.parametrize("form", ["--run-dir {}", "--run-dir={}"])
def test_a_job_that_slurm_starts_again_goes_on_from_its_checkpoint(job, tmp_path, script, form):
    folder = tmp_path / "a"
    (folder / "checkpoints" / "update_000005").mkdir(parents=True)
    _, (started,) = run(job, script, *form.format(folder).split(), SLURM_RESTART_COUNT="1")
    assert started.endswith(" <--resume>")


def test_a_job_that_slurm_starts_again_before_a_checkpoint_begins_in_an_empty_folder(job, tmp_path):
    folder = tmp_path / "a"
    (folder / "checkpoints" / "update_000005.tmp").mkdir(parents=True)
    _, (started,) = run(job, "slurm_train.sbatch", "--run-dir", str(folder), SLURM_RESTART_COUNT="2")
    assert "--resume" not in started
    assert not folder.exists()
    assert (tmp_path / "a.start-2" / "checkpoints").is_dir()


def test_a_first_start_never_touches_a_folder_that_is_there(job, tmp_path):
    (tmp_path / "a").mkdir()
    _, (started,) = run(job, "slurm_train.sbatch", "--run-dir", str(tmp_path / "a"))
    assert "--resume" not in started  # And asyncrl refuses a folder that is not empty.
    assert (tmp_path / "a").is_dir()


def test_a_run_that_fails_fails_the_job_and_does_not_go_back_into_the_queue(job, tmp_path):
    done, _ = run(job, "slurm_train.sbatch", "--run-dir", str(tmp_path / "a"), QUICK="7")
    assert done.returncode == 7
    assert [line for line in calls(job) if "requeue" in line] == []


@pytest.mark.parametrize("script", BATCH)
@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_asks_the_ranks_to_save_and_usr1_puts_the_job_back_into_the_queue(
    job, tmp_path, script, number, requeued
):
    process = subprocess.Popen(["bash", SCRIPTS / script, "--run-dir", str(tmp_path / "a")], env=job)
    until(job, "ready", process)
    process.send_signal(number)
    assert process.wait(PATIENCE) == 0
    assert "the rank was asked" in calls(job)
    assert "torchrun was asked" not in calls(job)  # It would give the ranks 30 s.
    assert [line for line in calls(job) if "requeue" in line] == ["scontrol <requeue> <4711>"] * requeued


@pytest.mark.parametrize("name", [*BATCH, "slurm_common.sh"])
def test_the_slurm_scripts_are_valid_shell(name):
    subprocess.run(["bash", "-n", str(SCRIPTS / name)], check=True, timeout=20)


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


@pytest.mark.parametrize("script", BATCH)
def test_the_page_says_what_the_scripts_ask_for(script):
    page = PAGE.read_text()
    for name, value in directives(script).items():
        if name in ("--requeue", "--no-kill", "--signal", "--open-mode", "--time"):
            assert f"`{name}{f'={value}' if value else ''}`" in page
    for variable in ("ASYNCRL_KEYS", "ASYNCRL_ADDRESS", "ASYNCRL_PORT"):
        assert f"`{variable}`" in page
        assert variable in (SCRIPTS / "slurm_nodes.sbatch").read_text()


def flags_of(config, prefix=""):
    for name, value in vars(config).items():
        flag = prefix + name.replace("_", "-")
        yield from flags_of(value, f"{flag}.") if hasattr(value, "__dataclass_fields__") else [f"--{flag}"]


def help_of(main, capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    return set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out))


def test_the_flags_that_the_scripts_pass_exist(capsys):
    known = {
        "train": set(flags_of(TrainConfig())),
        "asyncrl actor": help_of(actor_main, capsys),
        "asyncrl keys": help_of(keys_main, capsys),
    }
    known["train"] |= {
        "--standalone",
        "--local-addr",
        "--nproc-per-node",
        "--max-restarts",
    }  # Of torchrun itself.
    for script in BATCH:
        text = re.sub(r"\\\n\s*", " ", (SCRIPTS / script).read_text())
        for line in text.splitlines():
            if line.startswith("#"):
                continue
            for command in ("asyncrl actor", "asyncrl keys"):
                if command in line:
                    passed = set(re.findall(r"(?<=\s)--[a-z][\w.-]*", line.partition(command)[2]))
                    assert passed
                    assert passed <= known[command], script
            if "run_in_job torchrun" in line:
                assert set(re.findall(r"(?<=\s)--[a-z][\w.-]*", line)) <= known["train"], script

"""The classes of docs/extending.md, which the repository does not know, do all that built-in ones do."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.messaging.keys import create_keys
from asyncrl.observability import metrics_system as m
from asyncrl.observability import process_status
from support.pages import files_of, importable, text_of, write_files
from support.whole_runs import Program, exit_code, free_port, left_over, reach, rows

WORLD = "my_robot.world:ShiftWorld@models/world"
REWARD = "my_robot.reward:MiddleReward"
FLOW = "my_robot.flow:FlowPolicy@models/flow"
TOKENS = "my_robot.policy:TokenPolicy@models/tokens"
SIMULATOR = "my_robot.simulator:DotSimulator"
CORRECTION = "my_robot.correction:Softened"
ENVIRONMENT = ["--world", WORLD, "--reward", REWARD, "--reward-settings", "full=255"]
SMALL = [
    *("--start-states", "starts.h5", "--actor.success-threshold", "0.6", "--actor.slots", "16"),
    *("--algorithm.group-size", "4", "--algorithm.groups-per-update", "4", "--device", "cpu"),
    *("--correction.kind", CORRECTION, "--correction.settings", "width=0.5"),
]


def write_package(folder: Path) -> Path:
    """Write the package, and initial models with start states as the page makes them."""
    write_files("extending.md", folder)
    (folder / "my_robot" / "__init__.py").touch()
    program = text_of("extending.md").split('python -c "\n')[1].split('"\n')[0]
    starts = """
import numpy as np
from asyncrl.records import StartState
from asyncrl.worlds.start_states import save_start_states
from my_robot.simulator import TASK, DotSimulator
from asyncrl.simulators.interface import random_start
simulator, none = DotSimulator(), np.zeros((0, 32, 32, 3), np.uint8)
save_start_states(Path("starts.h5"), [
    StartState(name=f"seed-{seed}", task=TASK, frame=seen.images[0, 0], context_frames=none,
               context_actions=np.zeros((0, 7), np.float32))
    for seed in range(64)
    for seen in [simulator.reset([0], [random_start(simulator.spec, seed)])]
])
"""
    subprocess.run([sys.executable, "-c", program + starts], cwd=folder, check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("outside"))


@pytest.fixture
def outside(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the package, from which its classes can be imported."""
    yield from importable(package, monkeypatch)


def test_the_page_has_an_example_of_every_part_and_none_is_longer_than_80_lines() -> None:
    files = files_of("extending.md")
    assert sorted(files) == [
        f"my_robot/{name}.py" for name in ("correction", "flow", "policy", "reward", "simulator", "world")
    ]
    assert all(len(text.splitlines()) <= 80 for text in files.values())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["policy", TOKENS], r"act: 4 steps of 2 numbers, sample tokens int32\[2, 4, 2\]"),
        (["policy", FLOW, "--settings", "sigma=0.3"], r"sample denoising_chain float32\[2, 5, 4, 2\]"),
        (["world", WORLD], r"imagine: frames uint8\[2, 4, 32, 32, 3\]"),
        (["reward", REWARD, "--settings", "full=200"], r"score: float32\[2, 4\] in \[0, 1\]"),
        (["simulator", SIMULATOR], r"reset: everything follows from the start"),
        (["policy", "tabletop"], r"save, load: \d+ tensors come back bit for bit"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_what_keeps_its_protocol_is_said_to(arguments: list[str], line: str, outside: Path, capsys) -> None:
    assert cli.run("check", arguments) == 0
    said = capsys.readouterr().out
    assert re.search(f"^ok  .*{line}", said, re.M), said
    assert said.endswith(f"keeps the protocol of its kind, {arguments[0]}\n")


def test_a_policy_without_tokens_learns_in_a_world_of_ones_own(outside: Path, tmp_path, capsys) -> None:
    """True success of the page's flow-matching policy, before and after 30 updates in the page's world."""

    def true_success(of: str) -> int:
        evaluate = [of, "--simulator", SIMULATOR, "--episodes", "128", "--workers", "1"]
        assert cli.run("evaluate", evaluate) == 0
        found = re.search(r"all tasks .* (\d+)/128", capsys.readouterr().out)
        assert found
        return int(found[1])

    before = true_success(FLOW)
    sizes = ["--actor.slots", "64", "--algorithm.group-size", "8", "--algorithm.groups-per-update", "8"]
    learn = ["--optimizer.learning-rate", "2e-3", "--updates", "30", "--run-dir", str(tmp_path / "run")]
    assert cli.run("train", ["--inline", "--policy", FLOW, *ENVIRONMENT, *SMALL, *sizes, *learn]) == 0
    said = capsys.readouterr().out
    assert (
        f"asyncrl evaluate my_robot.flow:FlowPolicy@{tmp_path}/run --simulator package.module:Class" in said
    )
    after = true_success(f"my_robot.flow:FlowPolicy@{tmp_path}/run")
    assert after > before + 20, f"{before} -> {after} of 128"


def test_a_resumed_run_takes_its_classes_from_the_command_line_only(outside: Path, tmp_path, capsys) -> None:
    run = ["--inline", "--run-dir", str(tmp_path / "run")]
    named = ["--policy", TOKENS, "--world", WORLD, "--reward", REWARD, "--correction.kind", CORRECTION]
    first = [*run, "--updates", "1", "--checkpoint-every", "1", *ENVIRONMENT, *SMALL, "--policy", TOKENS]
    assert cli.run("train", first) == 0
    again = [*run, "--resume", "--updates", "2"]
    assert cli.run("train", again) == 2
    said = capsys.readouterr().err
    assert "Code is named on the command line only" in said
    assert f"--policy {TOKENS}" in said
    assert cli.run("train", [*again, *named]) == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


def test_a_group_of_ones_own_parts_is_imagined_again_with_those_that_are_named_once_more(
    outside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, named = tmp_path / "run", ["--policy", FLOW, "--world", WORLD, "--reward", REWARD]
    learn = ["--inline", "--updates", "1", "--imagination.fixed-shape", "--run-dir", str(run)]
    assert cli.run("train", [*learn, *ENVIRONMENT, *SMALL, "--policy", FLOW]) == 0
    again = ["imagine", str(run), "0", "--device", "cpu"]
    assert cli.run("replay", again) == 2
    said = capsys.readouterr().err
    assert "Code is named on the command line only" in said
    assert f"--policy {FLOW}" in said
    assert cli.run("replay", [*again, *named]) == 0
    assert "4 members: 4 equal" in capsys.readouterr().out


WRONG = """
import torch
from dataclasses import replace
from my_robot.flow import FlowPolicy
from my_robot.policy import TokenPolicy
from my_robot.reward import MiddleReward
from my_robot.world import ShiftWorld

class Blind:
    pass

class Short(TokenPolicy):
    def act(self, inputs, sampling, seeds):
        acted = super().act(inputs, sampling, seeds)
        return replace(acted, logprob=acted.logprob.sum(2))

class Forgetful(FlowPolicy):
    def act(self, inputs, sampling, seeds):
        return replace(super().act(inputs, sampling, seeds), sample={})

class Frozen(TokenPolicy):
    def evaluate(self, *arguments, **more):
        with torch.no_grad():
            return super().evaluate(*arguments, **more)

class Grey(ShiftWorld):
    def imagine(self, state, actions, noise_seeds):
        frames, after = super().imagine(state, actions, noise_seeds)
        return frames[..., 0], after

class Generous(MiddleReward):
    def score(self, frames, tasks):
        return super().score(frames, tasks) + 2
"""
MODELS = {"policy": TOKENS, "world": WORLD, "reward": REWARD}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policy", "wrong:Absent@models/tokens"], "module 'wrong' has no attribute 'Absent'"),
        (
            ["--policy", "nowhere.at_all:Policy@models/tokens"],
            "No module named 'nowhere'. Write package.module:Class, put its folder on PYTHONPATH",
        ),
        (["--policy", "wrong:Blind@models/tokens"], "wrong:Blind, which lacks load, save, saved_tensors"),
        (
            ["--policy", "wrong:Short@models/tokens"],
            "wrong:Short, whose act().logprob is float32[2, 4], expected float32[2, 4, 2]",
        ),
        (
            ["--policy", "wrong:Forgetful@models/flow"],
            "act().sample is [], expected the arrays of sample_arrays",
        ),
        (["--policy", "wrong:Frozen@models/tokens"], "evaluate().logprob is without gradient, expected"),
        (
            ["--world", "wrong:Grey@models/world"],
            "wrong:Grey, whose imagine()[0] is uint8[2, 4, 32, 32], expected uint8[2, 4, 32, 32, 3]",
        ),
        (["--reward", "wrong:Generous"], "wrong:Generous, whose score is (2.0"),
        (["--correction.kind", "tsi"], "nothing of that kind is called so. Perhaps you meant 'tis'"),
        (["--correction.kind", "wrong:Blind"], "wrong:Blind, which lacks weights"),
        (["--lora.rank", "4"], "--lora.rank is 4, but TokenPolicy has no lora_layers"),
        (["--algorithm.kind", "ppo"], "--algorithm.kind is ppo, but TokenPolicy has no critic"),
        (
            ["--policy", "tabletop"],
            "--policy makes 8 steps of 7 numbers per decision, but --world takes 4 of 2",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_one_sentence_and_leaves_no_run(flags, said, outside, tmp_path, capsys) -> None:
    (outside / "wrong.py").write_text(WRONG)
    correct = [text for kind, name in MODELS.items() for text in (f"--{kind}", name)]
    command = ["--inline", *correct, *SMALL, "--run-dir", str(tmp_path / "run"), *flags]
    assert exit_code(command) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_actors_of_ones_own_classes_are_killed_join_and_resume(package: Path, tmp_path, monkeypatch) -> None:
    run, keys = tmp_path / "run", tmp_path / "keys"
    create_keys(keys, ["learner", "actor-1", "far"])
    asyncrl = [sys.executable, "-m", "asyncrl"]
    others = filter(None, [os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), *others]))
    models = ["--policy", FLOW, *ENVIRONMENT]
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    secure = ["--replay.listen", endpoint, "--replay.keys", str(keys)]
    placed = [*models, *SMALL, "--placement", "learner=0,actor=1"]
    train = [*asyncrl, "train", *placed, "--run-dir", str(run), *secure]
    programs: list[Program] = []

    def start(name: str, command: list[str]) -> Program:
        programs.append(Program(tmp_path, name, command, cwd=package))
        return programs[-1]

    try:
        first = start("first", [*train, "--updates", "100000", "--checkpoint-every", "5"])
        first.until("more actors can join")
        far = ["actor", "--join", endpoint, "--keys", str(keys), "--name", "far", "--device", "cpu"]
        refused = start("refused", [*asyncrl, *far])
        assert "Code is named on the command line only" in refused.ends(2)
        joined = start("far", [*asyncrl, *far, "--policy", FLOW, "--world", WORLD, "--reward", REWARD])
        first.until("far joined")
        (actor,) = [one for one in process_status.read(run) if one.role == "actor-1" and one.alive]
        os.kill(actor.pid, signal.SIGKILL)
        first.until("actor-1 died and came back (respawn 1)")
        reach(run, len(rows(run)) + 3, first.process, 60)
        first.process.send_signal(signal.SIGINT)
        first.process.wait(60)  # torchrun's own exit code after Ctrl-C is 1.
        assert "stopped after" in first.said()
        assert "far: the run is over" in joined.ends()
        reached = len(rows(run))
        assert all(row[m.LAG_MAX.name] <= 2 for row in rows(run))
        start("again", [*train, "--resume", "--updates", str(reached + 3)]).ends()
        assert [row["step"] for row in rows(run)] == list(range(1, reached + 4))
    finally:
        for program in programs:
            program.process.kill()
    assert left_over(tmp_path) == []

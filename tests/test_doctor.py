"""`asyncrl doctor`: what it says about a machine, and the exit code that follows."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import zmq

from asyncrl import doctor
from asyncrl.doctor import Finding, Verdict, check_package, exchange, render

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_it_asks_for_the_versions_of_pyproject():
    needed = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    assert [f"{name}>={lowest}" for name, lowest in doctor.NEEDED.items()] == [
        x.split(",")[0] for x in needed
    ]


def test_lines_stand_under_each_other():
    findings = [
        Finding(name="Python", verdict=Verdict.OK, text="3.11.7"),
        Finding(name="shipped files", verdict=Verdict.BROKEN, text="incomplete"),
        Finding(name="OpenGL", verdict=Verdict.WARNING, text="none"),
    ]
    assert [render(finding) for finding in findings] == [
        "Python        ok       3.11.7",
        "shipped files BROKEN   incomplete",
        "OpenGL        warning  none",
    ]


def test_a_missing_package_comes_with_the_command_that_installs_it():
    finding = check_package("no-such-package-anywhere", "1.2")
    assert finding.verdict is Verdict.BROKEN
    assert finding.text == "not installed. Install it with: pip install 'no-such-package-anywhere>=1.2'"


def test_an_old_package_is_told_apart_from_a_new_one_by_number_not_by_text():
    assert check_package("numpy", "1.9").verdict is Verdict.OK
    too_old = check_package("numpy", "1000.0")
    assert too_old.verdict is Verdict.BROKEN
    assert "is too old. Update it with: pip install 'numpy>=1000.0'" in too_old.text


def test_a_socket_that_cannot_be_opened_is_an_error(tmp_path):
    exchange(f"ipc://{tmp_path}/works")
    with pytest.raises(zmq.ZMQError):
        exchange(f"ipc://{tmp_path}/no-such-folder/x")


def test_the_report_names_everything_and_its_code_follows_from_it(capsys):
    code = doctor.doctor()
    lines = capsys.readouterr().out.splitlines()
    names = [re.split(r" (?:ok|warning|BROKEN) ", line)[0].strip() for line in lines[:-2]]
    expected = [
        "Python",
        *doctor.NEEDED,
        "devices",
        "OpenGL",
        "CPU cores",
        "memory",
        "free disk",
        "shipped files",
    ]
    assert [name for name in names if name != "torchvision"] == [*expected, "sockets"]
    broken = [name for name, line in zip(names, lines, strict=False) if " BROKEN " in line]
    verdict = f"Training cannot run: {', '.join(broken)}." if broken else "Training can run: asyncrl train"
    assert (lines[-1], code) == (verdict, int(bool(broken)))


def test_missing_shipped_files_end_in_exit_code_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("asyncrl.assets.ASSETS", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert doctor.doctor() == 1
    assert "rebuild them with torchrun_scripts/rebuild_assets.sh" in capsys.readouterr().out


def test_a_broken_torchvision_is_a_warning_that_says_how_to_remove_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    doctor.doctor()
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("torchvision")]
    assert line.startswith(
        "torchvision   warning  is installed but does not fit torch (operator torchvision::nms"
    )
    assert line.endswith("pip uninstall torchvision")

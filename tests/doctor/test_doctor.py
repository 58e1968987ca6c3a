"""`asyncrl doctor`: its report, its exit code, and what it says about packages, machine and devices."""

import importlib.metadata
import json
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from asyncrl import cli
from asyncrl.commands import doctor as command
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import WeightSettings
from asyncrl.doctor import checks, gpus, host, models
from asyncrl.doctor.checks import Check, Examination, Finding, Verdict, check_package, render, run_check
from asyncrl.worlds.start_states import save_start_states
from support.doctor_sizes import sizes
from support.tiny_models import start_state, write_models

GIB = 2**30


def placed(number: int = 0, **settings: Any) -> Finding:
    """What is said of a placement on host `number`."""
    return gpus.check_placement(Examination(config=TrainConfig(**settings), host=number))


def crash(_: Examination) -> Finding:
    raise RuntimeError("the driver said no")


def leave(_: Examination) -> Finding:
    sys.exit(3)


def test_it_asks_for_the_packages_of_the_installation_and_of_an_extra() -> None:
    assert {"torch", "mujoco", "h5py"} <= {needed.name for needed in checks.requirements()}
    assert "mani-skill==3.0.1" in [f"{one.name}{one.specifier}" for one in checks.requirements("maniskill")]


def test_lines_stand_under_each_other() -> None:
    assert all(len(check.name) < 14 for check in checks.CHECKS)
    findings = [
        Finding(name="Python", verdict=Verdict.OK, seen="3.11.7"),
        Finding(name="shipped files", verdict=Verdict.BROKEN, seen="incomplete.", advice="Rebuild them."),
        Finding(name="OpenGL", verdict=Verdict.WARNING, seen="none"),
    ]
    assert [render(finding) for finding in findings] == [
        "Python        ok       3.11.7",
        "shipped files BROKEN   incomplete. Rebuild them.",
        "OpenGL        warning  none",
    ]


@pytest.mark.parametrize(
    ("check", "words"), [(crash, "RuntimeError: the driver said no"), (leave, "SystemExit: 3")]
)
def test_a_check_that_crashes_is_a_finding_of_its_own(check, words) -> None:
    finding = run_check("links", lambda: check(Examination(config=TrainConfig())), 5.0)
    assert finding is not None
    assert (finding.name, finding.verdict) == ("links", Verdict.BROKEN)
    assert finding.seen == f"cannot be checked: {words}"


def test_a_check_that_hangs_is_left_behind_and_named_while_it_hangs(capsys, monkeypatch) -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(60)

    monkeypatch.setattr(checks, "PROGRESS_AFTER", 0.02)
    monkeypatch.setattr(checks, "PROGRESS_EVERY", 0.05)
    finding = run_check("disk", hang, 0.2)
    assert finding is not None
    assert (finding.verdict, finding.seen) == (Verdict.BROKEN, "the check did not end within 0.2 s.")
    said = capsys.readouterr().err.splitlines()
    assert said == ["disk: still looking, for at most 0 s"] * len(said)
    assert 2 <= len(said) <= 4
    hurried = run_check("disk", hang, 0.01, hurried=True)
    release.set()
    assert hurried == Finding(
        name="disk",
        verdict=Verdict.WARNING,
        seen="not known after 10 s in all.",
        advice="`asyncrl doctor --long` looks longer.",
    )


def test_without_long_the_doctor_takes_ten_seconds(capsys, monkeypatch) -> None:
    """A check hangs, and each after it has a moment; those that take long are named and not begun."""
    release = threading.Event()
    monkeypatch.setattr(checks, "QUICK", 0.2)
    monkeypatch.setattr(checks, "requirements", list)
    rows = [Check(name=name, where="", long=name == "links") for name in ("models", "links", "memory")]
    monkeypatch.setattr(checks, "CHECKS", rows)
    monkeypatch.setattr("asyncrl.commands.doctor.CHECKS", rows)
    monkeypatch.setattr(checks, "_call", lambda where, examination: release.wait(60))
    assert cli.run("doctor", []) == 0
    release.set()
    said = capsys.readouterr().out
    assert (
        "models        warning  not known after 0.2 s in all. `asyncrl doctor --long` looks longer." in said
    )
    assert said.endswith("Not tried: links (--long).\nTraining can run: asyncrl train\n")


def test_the_report_names_everything_and_its_code_follows_from_it(capsys, tmp_path) -> None:
    code = cli.run("doctor", ["--long", "--device", "cpu", "--run-dir", str(tmp_path / "run")])
    lines = capsys.readouterr().out.splitlines()
    names = [re.split(r" (?:ok|warning|BROKEN) ", line)[0].strip() for line in lines[:-2]]
    silent = {"torchvision", "network"}
    expected = [check.name for check in checks.CHECKS if check.name not in silent]
    expected[-1] = "CPU link"
    found = [name for name in names if name != "torchvision"]
    assert found == ["settings", "Python", *(needed.name for needed in checks.requirements()), *expected]
    broken = [name for name, line in zip(names, lines, strict=False) if " BROKEN " in line]
    verdict = f"Training cannot run: {', '.join(broken)}." if broken else "Training can run: asyncrl train"
    assert (lines[-1], code) == (verdict, int(bool(broken)))
    assert re.search(
        r"gloo, 8 MiB each way: lowest [\d.e+]+ GB/s \(cpu process 0 - cpu process 1\)", " ".join(lines)
    )
    assert broken == []
    assert list(tmp_path.iterdir()) == []  # Nothing is left behind, and no run was begun.


def test_json_is_a_list_of_findings_and_nothing_else(capsys, monkeypatch) -> None:
    light = (Check(name="memory", where="host:check_memory"), Check(name="no", where="host:missing"))
    monkeypatch.setattr(checks, "CHECKS", light)
    assert command.main(["--updates", "3", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert all(row.keys() == {"name", "verdict", "seen", "advice"} for row in rows)
    assert rows[0]["seen"] == "--updates 3: grpo, 3 updates, policy tabletop, world tabletop"
    assert [row["verdict"] for row in rows[-2:]] == ["ok", "BROKEN"]
    assert "AttributeError" in rows[-1]["seen"]


def test_settings_that_cannot_work_end_with_code_2(capsys, tmp_path) -> None:
    assert cli.run("doctor", [str(tmp_path / "missing.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        cli.run("doctor", ["--updates", "0"])
    assert left.value.code == 2


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("3.3.7", ""),
        ("3.3.10+cpu", ""),  # By number, not by text.
        ("3.4.0", "3.4.0 does not work; <3.4,>=3.3.7 does."),
        ("3.1.6", "3.1.6 does not work; <3.4,>=3.3.7 does."),
        (None, "not installed."),
    ],
)
def test_a_package_that_does_not_fit_comes_with_the_command_that_installs_it(
    version: str | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version:
        monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    finding = check_package(Requirement("no-such-package-anywhere>=3.3.7,<3.4"))
    assert (finding.verdict is Verdict.BROKEN, finding.seen) == (bool(problem), problem or version)
    if problem:
        assert finding.advice == "Install it with: pip install 'no-such-package-anywhere<3.4,>=3.3.7'"


def test_a_broken_torchvision_is_a_warning_that_says_how_to_remove_it(tmp_path, monkeypatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    finding = checks.check_torchvision(Examination(config=TrainConfig()))
    assert finding is not None
    assert finding.verdict is Verdict.WARNING
    assert finding.seen.startswith("is installed but does not fit torch (operator torchvision::nms")
    assert finding.advice.endswith("pip uninstall torchvision")


def test_models_that_do_not_fit_are_named(tmp_path) -> None:
    write_models(tmp_path)
    folders = TrainConfig(policy=str(tmp_path / "policy"), world=str(tmp_path / "world"))
    fitting = Examination(config=replace(folders, start_states=str(tmp_path / "starts.h5")))
    finding = models.check_models(fitting)
    assert finding.verdict is Verdict.OK, finding
    assert "8 start states" in finding.seen
    assert "64 pixels" in finding.seen
    save_start_states(tmp_path / "small.h5", [start_state(0, 32)])
    wrong = Examination(config=replace(folders, start_states=str(tmp_path / "small.h5")))
    finding = models.check_models(wrong)
    assert finding.verdict is Verdict.BROKEN
    assert "(32, 32, 3)" in finding.seen
    assert wrong.sizes is None
    (tmp_path / "world" / "reward.json").unlink()
    assert models.check_models(fitting).verdict is Verdict.BROKEN


SIZES = sizes(GIB, float32_masters=4 * GIB, version=2 * GIB, environment=8 * GIB, frame=1)


def test_memory_is_counted_for_each_role() -> None:
    config, two = TrainConfig(), "learner=0-1,actor=1-2"
    placement = host.placement_of(TrainConfig(placement=two))
    needs = [gpus.rank_needs(config, SIZES, placement, rank) // GIB for rank in range(3)]
    # Weights, gradient and moments are shared by two learners; rank 0 packs two versions, an actor has two.
    assert needs == [(4 + 12) // 2 + 2 * 2, (4 + 12) // 2 + 1 + 8 + 2 * 2, 1 + 8 + 2 * 2]
    frozen = replace(SIZES, unsharded=2 * GIB)  # Both learners have these.
    assert gpus.rank_needs(config, frozen, placement, 0) // GIB == 2 + (2 + 12) // 2 + 2 * 2


def test_models_that_do_not_fit_the_memory_are_a_warning_with_numbers(monkeypatch) -> None:
    small = TrainConfig(device="cpu")
    examination = Examination(config=small)
    assert gpus.check_device_memory(examination) is None  # The sizes are not known.
    examination.sizes = sizes(0)
    fits = gpus.check_device_memory(examination)
    assert fits is not None
    assert fits.verdict is Verdict.OK
    examination.sizes = replace(SIZES, environment=2**60)
    finding = gpus.check_device_memory(examination)
    assert finding is not None
    assert finding.verdict is Verdict.WARNING
    assert f"{(2**60 + 25 * GIB) / GIB:.2f} of" in finding.seen


def test_a_placement_is_judged_as_training_would() -> None:
    fine = placed(device="cpu", placement="learner=0,actor=1")
    assert fine.verdict is Verdict.OK
    assert fine.seen == "rank 0 (learner) on cpu, rank 1 (actor) on cpu; weights by shared_memory"
    for settings, words in (
        ({"placement": "learner=0,actor=2"}, "rank 1 nothing to do"),
        ({"placement": "learner=0"}, "names no actor"),
        ({"placement": "learner=0-16,actor=17", "device": "cpu"}, "--algorithm.groups-per-update"),
        ({"device": "cpu", "weights": WeightSettings(transport="nccl")}, "--weights.transport is nccl"),
        *([] if torch.cuda.is_available() else [({"device": "cuda"}, "--device is cuda")]),
    ):
        finding = placed(**settings)
        assert finding.verdict is Verdict.BROKEN
        assert words in finding.seen


SEVERAL = "learner=0-1@0,actor=0-2@1,actor=0-1@2"


@pytest.mark.parametrize(
    ("number", "seen"),
    [
        (0, "rank 0 (learner) on cpu, rank 1 (learner) on cpu; weights by shared_memory, between hosts by "),
        (1, "rank 2 (actor) on cpu, rank 3 (actor) on cpu, rank 4 (actor) on cpu; weights by "),
        (2, "rank 5 (actor) on cpu, rank 6 (actor) on cpu; weights by shared_memory"),
    ],
)
def test_of_several_hosts_a_placement_is_judged_for_this_one(number: int, seen: str) -> None:
    finding = placed(number, device="cpu", placement=SEVERAL)
    assert finding.verdict is Verdict.OK
    assert finding.seen.startswith(f"host {number} of 3: {seen}")


def test_of_several_hosts_only_what_this_one_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(placement=SEVERAL)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    shared = placed(1, placement=SEVERAL)
    assert shared.verdict is Verdict.WARNING
    assert "rank 2 (actor) on cuda:0" in shared.seen
    assert shared.seen.endswith("3 ranks share 2 GPU(s).")
    assert placed(2, placement=SEVERAL).verdict is Verdict.OK
    needs = [gpus.rank_needs(config, SIZES, host.placement_of(config), rank) for rank in range(2, 5)]
    monkeypatch.setattr(gpus, "free_on", lambda name: 2**50)
    memory = gpus.check_device_memory(Examination(config=config, host=1, sizes=SIZES))
    assert memory is not None
    assert f"cuda:0: {(needs[0] + needs[2]) / GIB:.2f} of" in memory.seen
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    learners = placed(placement=SEVERAL)
    assert "names 2 learner ranks on host 0, which has 1 GPU(s)" in learners.seen
    for placement, number, words in (
        (SEVERAL, 3, "--host is 3, but --placement learner=0-1@0"),
        ("learner=0,actor=0", 1, "names 1 host(s), counted from 0"),
    ):
        finding = placed(number, placement=placement)
        assert finding.verdict is Verdict.BROKEN
        assert words in finding.seen
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    no_gpu = placed(1, placement=SEVERAL, weights=WeightSettings(between_hosts="nccl"))
    assert "NCCL takes a GPU of each host" in no_gpu.seen


def test_missing_shared_memory_is_a_warning(tmp_path) -> None:
    examination = Examination(config=TrainConfig())
    assert host.check_shared_memory(examination, tmp_path, gpus=2).verdict is Verdict.OK
    for without_space in (tmp_path / "none", Path("/dev/pts")):
        finding = host.check_shared_memory(examination, without_space, gpus=2)
        assert finding.verdict is Verdict.WARNING
        assert "--shm-size" in finding.advice
        assert host.check_shared_memory(examination, without_space, gpus=1).verdict is Verdict.OK

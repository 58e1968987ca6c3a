"""The comparison of the worlds runs from recordings to its table at the smallest size, and is continued."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl import cli
from asyncrl.rewards.model import ResNetReward, save_reward
from asyncrl.rewards.resnet import RewardConfig, build_network
from asyncrl.simulators.rendering import find_backend
from asyncrl.simulators.tabletop.scene import TASKS
from asyncrl.worlds.opensora.action_range import ActionRange
from asyncrl.worlds.opensora.autoencoder import FrameVae, VaeConfig
from asyncrl.worlds.opensora.stdit3 import STDiT3, STDiT3Config
from asyncrl.worlds.opensora.world import OpenSoraWorld, save_world
from support import ROOT
from support.tiny_models import SIZE, write_models

CELLS = 9


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with every program that it starts noted in `ran`; evaluations run in this process."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = import_module("worlds_compared")
    real = module.program

    def program(limit: float, log: Path, command: str, *arguments: str) -> None:
        module.ran.append((command, log.name))
        if command == "train":  # only a main thread takes signals
            real(limit, log, command, *arguments)
        else:
            assert cli.run(command, list(arguments)) == 0

    monkeypatch.setattr(module, "ran", [], raising=False)
    monkeypatch.setattr(module, "program", program)
    return module


def write_opensora(folder: Path) -> None:
    """A tiny OpenSora world with random weights, and a reward model."""
    torch.manual_seed(0)
    edge = ActionRange(low=(-1.0,) * 7, high=(1.0,) * 7)
    parts = STDiT3(STDiT3Config.tiny()), FrameVae(VaeConfig.tiny())
    save_world(folder, OpenSoraWorld(*parts, edge, image_size=SIZE))
    reward = RewardConfig.tiny(tasks=tuple(TASKS))
    save_reward(folder, ResNetReward(build_network(reward), reward))


def rows_of(printed: str) -> list[list[str]]:
    """Cells of the Markdown table's rows, without its titles."""
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.render
@pytest.mark.timeout(240)
def test_the_worlds_are_compared_and_what_is_missing_is_made_again(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if find_backend() is None:
        pytest.skip("no OpenGL library")
    write_models(tmp_path)
    write_opensora(tmp_path / "opensora")
    small = "--device cpu --actor.slots 4 --actor.max-decisions 1 --algorithm.group-size 2"
    more = "--algorithm.groups-per-update 1 --updates 1 --checkpoint-every 1"
    out = tmp_path / "out"
    flags = {"recorded": 2, "horizons": 8, "slots": 2, "rounds": 1, "episodes": 2, "workers": 1, "seeds": 3}
    asked = ["run", str(out), *[part for name, value in flags.items() for part in (f"--{name}", str(value))]]
    asked += ["--worlds", str(tmp_path / "world"), str(tmp_path / "opensora"), f"--flags={small} {more}"]
    asked += ["--policy", str(tmp_path / "policy"), "--start-states", str(tmp_path / "starts.h5")]
    monkeypatch.setattr(sys, "argv", ["benchmark", *asked])

    code = benchmark.main()

    rows = rows_of(capsys.readouterr().out)
    assert [(row[0], row[5]) for row in rows] == [
        ("(before training)", ""),
        ("world", "3"),
        ("opensora", "3"),
    ]
    assert {len(row) for row in rows} == {CELLS}
    assert code == int("no" in (rows[1][-1], rows[2][-1]))
    quality = json.loads((out / "opensora.quality.json").read_text())
    assert rows[2][1] == f"{quality['picture'][0]['psnr']:.1f}"
    assert len([name for name, _ in benchmark.ran if name == "train"]) == 2
    assert len([name for name, _ in benchmark.ran if name == "evaluate"]) == 6

    benchmark.ran.clear()
    (out / "opensora.seed3.greedy.json").unlink()
    speed = (out / "speed.json").read_text()
    assert benchmark.main() == code
    assert benchmark.ran == [("evaluate", "opensora.seed3.greedy.log")]
    assert (out / "speed.json").read_text() == speed
    assert rows_of(capsys.readouterr().out) == rows


def test_a_run_counts_as_apart_only_above_the_whole_interval_before(
    benchmark: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def answer(name: str, rate: float, low: float, high: float) -> None:
        for how in ("sampled", "greedy"):
            content = {"overall": {"rate": rate, "low": low, "high": high}}
            (tmp_path / f"{name}.{how}.json").write_text(json.dumps(content))

    answer("before", 0.4, 0.34, 0.46)
    (tmp_path / "speed.json").write_text(json.dumps({"one": 12.34}))
    picture = [
        {"horizon": 8, "psnr": 25.0, "psnr_vae": 30.0},
        {"horizon": 32, "psnr": 21.5, "psnr_vae": 30.1},
    ]
    verdict = {"imagined_precision": 0.9, "imagined_recall": 0.8}
    (tmp_path / "one.quality.json").write_text(json.dumps({"picture": picture, "reward": verdict}))
    answer("one.seed0", 0.6, 0.54, 0.66)
    assert benchmark.table(tmp_path) == 0
    (row,) = rows_of(capsys.readouterr().out)[1:]
    after = "60.0 [54.0, 66.0]"
    assert row == ["one", "25.0 / 21.5", "30.0 / 30.1", "90 / 80", "12.3", "0", after, after, "yes"]
    answer("one.seed1", 0.5, 0.45, 0.55)
    assert benchmark.table(tmp_path) == 1
    printed = capsys.readouterr().out
    assert rows_of(printed)[2][4:] == ["", "1", "50.0 [45.0, 55.0]", "50.0 [45.0, 55.0]", "no"]
    assert "steps 1-8 / 9-32, dB" in printed
    assert "1 of 2 runs apart: the claim does not hold" in printed

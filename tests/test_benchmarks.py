"""Benchmarks of speed run to their last line on a laptop, without the minutes that compilation takes."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from asyncrl.config.run import AlgorithmSettings, TrainConfig
from asyncrl.launch.policies import build_learning_policy
from asyncrl.records import problem_with
from support import ROOT

SMALLEST = {
    "learner_speed": ["--tiny", "--device", "cpu", "--rows", "2", "--lora", "4"],
    "policy_speed": ["--tiny", "--device", "cpu", "--rows", "2", "--lora", "4"],
}
LAST = {
    "learner_speed": r"forward and backward, compiled, padded +2 .*%.*%",
    "policy_speed": r"log-probs of acting against evaluating: mean per token",
}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", sorted(SMALLEST))
def test_a_benchmark_ends_with_its_table(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module(name)
    monkeypatch.setattr(benchmark, "compile_blocks", lambda *_, **__: None, raising=False)
    monkeypatch.setattr(sys, "argv", [name, *SMALLEST[name]])
    benchmark.main()
    assert re.search(LAST[name], capsys.readouterr().out)


def test_the_episodes_of_the_overhead_benchmark_are_what_a_replay_would_admit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module("learner_overhead")
    config = replace(TrainConfig(), algorithm=AlgorithmSettings(group_size=2, groups_per_update=1))
    policy = build_learning_policy(config, torch.device("cpu"))
    ((one, other),) = benchmark.make_groups(policy, config, benchmark.Settings())
    assert (one.member, other.member) == (0, 1)
    assert [problem_with(episode) for episode in (one, other)] == [None, None]

"""Benchmarks of speed run to their last line on a laptop, without the minutes that compilation takes."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from asyncrl.policies.openvla.policy import load_policy
from asyncrl.simulators.libero.tasks import INSTRUCTIONS
from asyncrl.worlds.start_states import load_start_states
from support import ROOT
from support.episodes import make_episode
from support.replay import grant_group, make_limiter, make_replay

SMALLEST = {
    "learner_speed": ["--tiny", "--device", "cpu", "--rows", "2", "--kept-rows", "2", "--lora", "4"],
    "learner_updates": ["--tiny", "--device", "cpu", "--rows", "4", "--lora", "4", "--groups", "2",
                        "--decisions", "1", "--rounds", "1"],
    "policy_speed": ["--tiny", "--device", "cpu", "--rows", "2", "--lora", "4"],
}  # fmt: skip
LAST = {
    "learner_speed": r"forward and backward, compiled, padded +2 .*%.*%",
    "learner_updates": r"whole update +\d+\n(.*\n)+\nupdate: kernels are counted on a GPU only",
    "policy_speed": r"log-probs of acting against evaluating: mean per token",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SMALLEST))
def test_a_benchmark_ends_with_its_table(name: str, monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module(name)
    monkeypatch.setattr(benchmark, "compile_blocks", lambda *_, **__: None, raising=False)
    monkeypatch.setattr(sys, "argv", [name, *SMALLEST[name]])
    benchmark.main()
    assert re.search(LAST[name], capsys.readouterr().out)


CLASSES = {
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "matrix products",
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc": "convolutions",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention",
    "triton_red_fused__to_copy_add_mul_native_layer_norm_3": "fused by the compiler",
    "Memcpy DtoD (Device -> Device)": "copies",
    "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "between devices",
    "kernel_that_nobody_knows": "other",
}


def test_the_time_of_kernels_is_shared_out_and_the_rest_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    times = import_module("measuring")
    assert {name: times.class_of(name) for name in CLASSES} == CLASSES
    spans = [("a_gemm", 0, 40), ("triton_x", 30, 50), ("a_gemm", 60, 90), ("triton_y", 65, 70)]
    found = [times.Kernel(name=name, start=start, end=end) for name, start, end in spans]
    assert times.busy(found) == 80  # 0 to 50 and 60 to 90, whatever ran at the same time.
    assert times.shares(found) == {"matrix products": 70, "fused by the compiler": 25, "idle": 10}
    assert list(times.shares(found)) == ["matrix products", "fused by the compiler", "idle"]


@pytest.mark.slow
def test_the_models_of_full_runs_are_written_by_a_plain_command(tmp_path: Path) -> None:
    """As a user calls it: nothing of the tests is on the path of modules, and LIBERO's words are known."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "benchmarks" / "full_size.py"), str(tmp_path), "--scale", "tiny"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    policy, world = done.stdout.split()[-2:]
    tokenizer = load_policy(policy).tokenizer
    assert all(tokenizer.ids(task) for task in INSTRUCTIONS["libero_spatial"])
    assert len(load_start_states(Path(world) / "dataset", image_size=256)) == 40 + 20  # Key frames too.


def test_a_learner_that_works_off_a_backlog_does_not_count_as_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates of 64 decisions within 4 s each, while the actors make 32 of them each time."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module("asynchrony")
    row = {"time/groups_per_minute": 60.0, "env/episode_len": 16.0, "time/learner_waiting": 0.0}
    row |= {"time/actors_waiting": 0.0}
    rows = [row | {"time": 100.0 + 4 * n, "actor/decisions": 200.0 + 32 * n} for n in range(3)]
    found = benchmark.outcome("asynchronous", rows, 4, {}, 12.0)
    assert found.learned_per_hour == pytest.approx(60 * 60 * 4 * 16)
    assert found.imagined_per_hour == pytest.approx(3600 / 4 * 32 * 8)
    assert found.steps_per_hour == found.imagined_per_hour
    came_back = [*rows[:2], rows[2] | {"actor/decisions": 210.0}]
    assert benchmark.outcome("asynchronous", came_back, 4, {}, 12.0).steps_per_hour == found.learned_per_hour


@pytest.mark.parametrize("change", [0, 1])
def test_a_run_whose_frames_never_change_imagined_nothing(monkeypatch, tmp_path, change: int) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module("asynchrony")
    replay = make_replay(tmp_path / "replay", make_limiter(group_size=2, max_lag=3))
    assert grant_group(replay.state.limiter, "actor-0") is not None
    for member in range(2):
        episode = make_episode(0, member, group_size=2, versions=(0, 0))
        frames = np.full_like(episode.frames, 7)
        frames[1, 0, 0, 0] += change * member
        assert replay.admit(replace(episode, frames=frames)).status in ("held", "stored")
    assert benchmark.imagines(tmp_path) is bool(change)

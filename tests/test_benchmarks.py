"""Benchmarks of speed run to their last line on a laptop, without the minutes that compilation takes."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tyro
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.episode_layout import problem_with
from asyncrl.errors import RunError
from asyncrl.fitting.loading import load_recordings
from asyncrl.fitting.worlds.interface import load_fitted
from asyncrl.launch.policies import build_learning_policy
from asyncrl.policies.action_tokens import BINS
from asyncrl.policies.interface import PolicyInputs
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.memory import PROMPT
from asyncrl.policies.openvla.parallel import OpenVLAOFT
from asyncrl.policies.openvla.policy import load_policy
from asyncrl.rewards.libero_tasks import SUITES
from asyncrl.storage.asset_paths import world_folder
from asyncrl.worlds.start_states import load_start_states
from support import ROOT
from support.episodes import make_episode
from support.recorded import recorded_spec, write_recorded
from support.replay import grant_group, make_limiter, make_replay
from support.whole_runs import TORCHRUN, environment

SMALLEST = {
    "learner_speed": ["--tiny", "--device", "cpu", "--rows", "2", "--kept-rows", "2", "--lora", "4"],
    "learner_updates": ["--tiny", "--device", "cpu", "--rows", "4", "--lora", "4", "--groups", "2",
                        "--decisions", "1", "--rounds", "1"],
    "policy_speed": ["--tiny", "--device", "cpu", "--rows", "2", "--lora", "4"],
}  # fmt: skip
LAST = {
    "learner_speed": r"forward and backward, compiled, padded +2 .*%.*%",
    "learner_updates": r"10 +0\.\d+% +0\.\d+% +\d+\.\d+% +\d+\.\d+%",
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


def forward_flops(config: OpenVLAOFTConfig) -> float:
    """Count the FLOPs of a decision's matrix products, convolutions and attention."""
    with torch.device("meta"):
        policy = OpenVLAOFT(config)
        policy.restore_buffers()
        inputs = PolicyInputs(
            pixels=torch.empty(1, config.image_size, config.image_size, 3, dtype=torch.uint8),
            input_ids=torch.ones(1, PROMPT, dtype=torch.int64),
            attention_mask=torch.ones(1, PROMPT, dtype=torch.int64),
            padded=False,
            proprio=None,
        )
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            policy.readout(inputs)
    return counter.get_total_flops() + 2 * config.slots * config.llm_width * BINS


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "passes"), [("4", 2), ("0", 3)])
def test_the_utilisation_of_updates_counts_what_teaches(
    lora: str, passes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module("learner_updates")
    peak = 1e10
    monkeypatch.setattr("asyncrl.learner.throughput.peak_flops", lambda *_: peak)
    flags = [*SMALLEST["learner_updates"], "--no-ways", "--lora", lora, "--json", str(tmp_path / "found")]
    monkeypatch.setattr(sys, "argv", ["learner_updates", *flags])
    with sdpa_kernel(SDPBackend.MATH):  # What others compute on a CPU is not counted.
        benchmark.main()
    [[_, _, seconds, ratio, used, of_passes]] = json.loads((tmp_path / "found").read_text())["updates"]
    teaching = 8  # One of two groups, one decision an episode.
    least = passes * teaching * forward_flops(OpenVLAOFTConfig.tiny()) / peak
    assert float(used.rstrip("%")) / 100 == pytest.approx(least / float(seconds), rel=0.05)
    assert float(of_passes.rstrip("%")) / float(used.rstrip("%")) == pytest.approx(float(ratio), rel=0.01)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_that_torchrun_starts_are_timed_together_and_one_speaks(tmp_path: Path) -> None:
    flags = [*SMALLEST["learner_updates"], "--no-ways", "--lora", "0"]
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "2", str(ROOT / "benchmarks" / "learner_updates.py"), *flags],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("16 decisions on each of 2 ranks") == 1
    assert len(re.findall(r"^one step  as it is / passes alone +\d", done.stdout, re.MULTILINE)) == 1


def small_learner_speed(monkeypatch: pytest.MonkeyPatch, *flags: str) -> Any:
    """The benchmark as its smallest command line with further flags calls it, without a compiler."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module("learner_speed")
    monkeypatch.setattr(benchmark, "compile_blocks", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["learner_speed", *SMALLEST["learner_speed"], *flags])
    return benchmark


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_8_bit_products_are_compared_with_those_of_stored_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_learner_speed(monkeypatch, "--float8").main()
    line = re.search(r"compiled +2 +[\d.]+ +[\d.]+ +([\d.]+) +([\d.]+) +([\d.]+)", capsys.readouterr().out)
    assert line is not None
    cosine, error = float(line[2]), float(line[3])
    assert 0.95 < cosine < 1
    assert 0 < error < 0.3


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_pass_is_timed_before_and_after_other_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = small_learner_speed(monkeypatch, "--sizes")
    seen = list[tuple[int, bool]]()

    def noted(policy: Any, given: Any) -> Any:
        seen.append((len(given.input_ids), given.padded))
        return original(policy, given)

    original = benchmark.passes
    monkeypatch.setattr(benchmark, "passes", noted)
    benchmark.main()
    assert seen == [(2, False), (2, False), (1, False), (2, True), (2, False), (2, True)]
    printed = capsys.readouterr().out
    ratios = re.findall(r"^(?:its own|and .*?|one only.*?) +2 +[\d.]+ +([\d.]+)$", printed, re.MULTILINE)
    assert len(ratios) == 5
    assert ratios[0] == "1.000"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_layers_that_keep_what_they_need_are_timed_beside_those_that_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_learner_speed(monkeypatch, "--recomputed", "--kept-rows", "2").main()
    lines = re.findall(r"^(one in \d|none) +2 +[\d.]+ +([\d.]+) ", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, _ in lines] == ["one in 1", "one in 2", "one in 4", "none"]
    assert lines[0][1] == "1.000"
    assert all(float(ratio) > 0 for _, ratio in lines)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_benchmark_of_the_published_worlds_measures_all_of_its_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module("published_worlds_speed")
    compiled: list[int] = []
    monkeypatch.setattr(benchmark, "compile_world", lambda _, rows: compiled.append(rows))
    small = ["--tiny", "--device", "cpu", "--rows", "2", "--rounds", "1", "--decisions", "2"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *small, "--json", str(tmp_path / "speed.json")])
    benchmark.main()
    last = capsys.readouterr().out.rpartition("\n\n")[2]
    assert compiled == [2, 2], "each world once"
    for line in (
        r"opensora: STDiT3, a step, compiled +\d+\.\d\d % +>= 55 +.*TFLOP/slot",
        r"opensora: frame decoder, eager +\d+\.\d\d %",
        r"opensora: prefix cache over whole window, compiled +\d+\.\d\d times +>= 1\.3",
        r"opensora: state of a slot +0\.\d\d MiB +<= 1",
        r"evac: UNet, a step, compiled +\d+\.\d\d % +>= 45",
        r"evac: compiled over eager +\d+\.\d\d times +>= 1\.4 +.*, 3 steps",
        r"evac: state of a slot +0\.\d\d MiB +<= 8 +room for 2 decisions",
        r"evac: peak memory, compiled +0\.00 GiB .*by the doctor: weights",
    ):
        assert re.search(line, last), line
    written = json.loads((tmp_path / "speed.json").read_text())
    assert written["settings"]["rows"] == 2
    kinds = {(reading["world"], reading["part"]) for reading in written["readings"]}
    both = {
        (world, part) for world in ("opensora", "evac") for part in ("networks", "compile", "state", "memory")
    }
    assert kinds == both | {("opensora", "prefix")}
    state = next(r for r in written["readings"] if (r["world"], r["part"]) == ("opensora", "state"))
    assert state["value"] * 2**20 == 4 * 4 * 8 * 8 * 4 + 1, "four latents of 4 channels, and whether finite"


def test_a_benchmark_of_the_published_worlds_measures_what_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module("published_worlds_speed")
    only = ["--worlds", "evac", "--parts", "state", "--tiny", "--device", "cpu", "--rows", "2"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *only, "--decisions", "2"])
    benchmark.main()
    readings = capsys.readouterr().out.rpartition("---\n")[2].splitlines()
    assert len(readings) == 1
    assert readings[0].startswith("evac: state of a slot")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_cost_of_feeding_ranks_is_read_from_whole_batches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module("replay_feed")
    small = ["--groups", "3", "--decisions", "2", "--image", "8", "--rounds", "1", "--update-seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *small, "--ranks", "1", "2"])
    benchmark.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 2"]
    for row in rows:
        ingest, choose, hand_over = (float(cell.removesuffix(" s")) for cell in row.split(" | ")[2:5])
        assert ingest >= 0
        assert 0 < choose + hand_over < 60


def test_a_benchmark_of_reading_measures_threads_and_a_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module("replay_reading")
    small = ["--groups", "3", "--decisions", "2", "--image", "8", "--threads", "1", "2"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *small])
    benchmark.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 2"]
    assert all(row.count(" s |") == 2 for row in rows)


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


def test_the_cost_of_evaluating_is_the_ratio_of_readings_of_one_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module("evaluate_every")
    seconds = {"off": (10.0, 20.0, 40.0), "on": (11.0, 21.0, 50.0), "other checkout": (10.0, 16.0, 50.0)}
    readings = {
        kind: [benchmark.Reading(updates=value, whole=0.0) for value in values]
        for kind, values in seconds.items()
    }
    assert benchmark.ratios(readings, "on", "off") == pytest.approx([1.1, 1.05, 1.25])
    on, off = benchmark.report(readings).splitlines()[2:]
    assert re.fullmatch(r"on / off +1\.100 +1\.050-1\.250", on)
    assert re.fullmatch(r"off / other checkout +1\.000 +0\.800-1\.250", off)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_cost_of_evaluating_is_read_from_whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module("evaluate_every")
    small = "--algorithm.groups-per-update 2 --algorithm.group-size 2 --actor.slots 4"
    readings = benchmark.measure(benchmark.Settings(updates=2, every=0, rounds=1, flags=small))
    assert list(readings) == ["off", "on"]
    for (reading,) in readings.values():
        assert 0 < reading.updates < reading.whole
    with pytest.raises(RuntimeError, match="two are needed"):
        benchmark.measure(benchmark.Settings(updates=1, every=0, rounds=1, flags=small))


def test_arms_of_the_comparison_of_refits_share_out_the_same_true_episodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module("coevolution")
    run = benchmark.Run(out=tmp_path, true_episodes=256, base=("old",), groups=8)
    for name, arm in benchmark.ARMS.items():
        given = tyro.cli(TrainConfig, args=benchmark.flags_of(run, name))
        pace, algorithm = given.pace, given.algorithm
        assert (algorithm.groups_per_update, algorithm.group_size) == (8, 8)
        if arm.rounds:
            spent = arm.true_episodes or 256
            assert pace.episodes * arm.rounds <= pace.budget == spent < (pace.episodes + 1) * arm.rounds
        if arm.true_only:
            assert given.world == "tabletop_true"
            assert given.updates * 8 * 8 == (arm.true_episodes or 256)
        else:
            assert given.updates == 40
            assert (given.keyframe_share == 0.5) == arm.keyframes


def test_the_comparison_of_refits_reads_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    report = import_module("coevolution_report")

    def rate(successes: int) -> dict[str, Any]:
        return {"rate": successes / 256, "successes": successes, "episodes": 256}

    def episode(imagined: bool, true: bool, last: float) -> dict[str, Any]:
        names = {"last frame": last, "best frame": 0.25, "second draw: verdict": float(last > 0.5)}
        return {"imagined": imagined, "true": true, "signals": names if imagined else {}}

    audited = [episode(True, True, 0.1)] * 3 + [episode(True, False, 0.9)] + [episode(False, False, 0.0)] * 2
    audits = []
    for version, (true, imagined, same, wrong) in {12: (128, 160, 96, 64), 24: (192, 200, 136, 32)}.items():
        name = f"frozen.seed0.update{version:02d}"
        (tmp_path / f"{name}.evaluate.json").write_text(json.dumps({"overall": rate(true)}))
        (tmp_path / f"{name}.choose.json").write_text(json.dumps({"overall": rate(200 - version)}))
        audit = {"imagined_success": rate(imagined), "true_success": rate(same), "wrong": rate(wrong)}
        audits.append({"name": f"update {version}", "episodes": audited, **audit})
    (tmp_path / "frozen.seed0.audit.json").write_text(json.dumps({"audits": audits}))
    rows = report.read(tmp_path, {"frozen": "frozen"})
    assert [(row.update, row.rate, row.gap, row.praise, row.wrong) for row in rows] == [
        (12, 50, 25, 12.5, 25),
        (24, 75, 25, 3.125, 12.5),
    ]
    assert [row.update for row in report.chosen_of(rows)] == [12]
    # Rewards 1 1 1 1 0 0 of truths 1 1 1 0 0 0; without the fourth where it is none or has no weight.
    guards = rows[0].guards
    assert guards == pytest.approx({"none": 0.707, "lasting": 1, "probability": 0.707, "second": 1}, abs=1e-3)
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(report.write(rows)))
    assert report.read(file, {}) == rows
    assert "| frozen | 1 | 12: 50; 24: 75 | 75.0 [69.4, 79.9] of 1 | 1 | 25 25 | 12 3 |" in report.table(
        rows, ["frozen"]
    )
    assert "| frozen, stopped early | 1 | updates 12 | 50.0 [43.9, 56.1] of 1 |" in report.table(
        rows, ["frozen"]
    )


def test_key_frames_are_compared_on_the_actions_that_follow_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module("keyframes")
    write_recorded(tmp_path, recorded_spec(16), (25, 30))
    recordings = load_recordings([tmp_path])
    assert [benchmark.decisions_of(recordings, one) for one in (0, 1)] == [3, 4]
    taken = recordings.actions[recordings.span(1)]
    behind = benchmark.actions_of(recordings, 1, 2, 3)
    assert behind.shape == (3, 8, 7)
    np.testing.assert_array_equal(behind.reshape(24, 7)[:13], taken[17:30])
    assert (behind.reshape(24, 7)[13:] == taken[-1]).all()
    drawn = [
        benchmark.Drawn(judged=judged, psnr=psnr) for judged, psnr in ((True, (20.0,)), (False, (30.0, 40.0)))
    ]
    whole = [
        benchmark.Drawn(judged=True, psnr=(1.0, 2.0, 10.0)),
        benchmark.Drawn(judged=True, psnr=(1.0, 2.0, 20.0, 30.0)),
    ]
    again = [(50.0, 50.0, 31.0), (50.0, 50.0, 33.0, 60.0)]
    row = benchmark.row_of(2, np.array([True, False]), drawn, whole, again)
    assert (row.wrong.successes, row.wrong_from_start.successes) == (0, 1)
    assert (row.psnr, row.psnr_from_start, row.psnr_redrawn) == ((25.0, 40.0), (15.0, 30.0), 32.0)


@pytest.mark.slow
def test_an_autoencoder_draws_every_decision_of_the_true_episodes_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module("keyframes")
    write_recorded(tmp_path, recorded_spec(64), (25, 30))
    recordings = load_recordings([tmp_path])
    settings = benchmark.Settings(data=(tmp_path,))
    found = benchmark.redrawn(settings, recordings, torch.device("cpu"))
    assert [len(one) for one in found] == [3, 4]
    drawn = load_fitted(world_folder("tabletop"), torch.device("cpu")).redraw(recordings)
    second = recordings.span(1)
    true, again = recordings.frames[second][17:25].astype(float), drawn[second][17:25].astype(float)
    expected = np.mean(
        [10 * np.log10(255**2 / np.square(a - b).mean()) for a, b in zip(true, again, strict=True)]
    )
    assert found[1][2] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        ("cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...>>", "matrix products"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolutions"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("triton_red_fused__to_copy_add_mul_native_layer_norm_3", "fused by the compiler"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "element by element, sums"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "between devices"),
        ("kernel_that_nobody_knows", "other"),
    ],
)
def test_a_kernel_is_told_by_its_name(name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    assert import_module("kernel_times").class_of(name) == expected


def test_the_time_of_kernels_is_shared_out_and_the_rest_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    times = import_module("kernel_times")
    spans = [("a_gemm", 0, 40), ("triton_x", 30, 50), ("a_gemm", 60, 90), ("triton_y", 65, 70)]
    found = [times.Kernel(name=name, start=start, end=end) for name, start, end in spans]
    assert times.busy(found) == 80  # 0 to 50 and 60 to 90, whatever ran at the same time.
    assert times.shares(found) == {"matrix products": 70, "fused by the compiler": 25, "idle": 10}
    assert list(times.shares(found)) == ["matrix products", "fused by the compiler", "idle"]


def test_a_recipe_is_made_smaller_and_stands_beside_what_is_expected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    recipes, asynchrony = import_module("recipes"), import_module("asynchrony")
    file = ROOT / "configs" / "opensora_libero_spatial_grpo_openvlaoft.toml"
    shipped = recipes.load_file(file)
    settings = recipes.Settings(recipes=(file,), full=tmp_path, groups=2)
    assert recipes.kind_of(shipped) == "opensora"
    config = recipes.scaled(shipped, settings, 2)
    assert (config.algorithm.groups_per_update, config.algorithm.minibatches, config.lora.rank) == (2, 2, 32)
    assert recipes.scaled(shipped, settings, 8).lora.rank == 0  # Four learners train all weights.
    alone = recipes.scaled(shipped, settings, 1)
    assert (alone.placement, alone.lora.rank, config.placement) == ("collocated", 32, shipped.placement)
    whole = recipes.scaled(shipped, replace(settings, groups=0), 2)
    assert whole.algorithm == shipped.algorithm
    prediction = recipes.expected(config, 2, measured=False)
    assert prediction.decisions == 2 * 8 * 32
    found = asynchrony.Outcome(
        mode="asynchronous", steps_per_hour=prediction.steps_per_hour / 2, update_seconds=1.0,
        learned_per_hour=math.nan, imagined_per_hour=math.nan,
        learner_waiting=0.5, actors_waiting=0.25, mfu=0.0, publish_seconds=0.0, published_bytes=0.0,
        memory={"learner/peak_memory": 2.0**31}, rows=2, loaded=1.0, first_update=3.0, seconds=9.0,
    )  # fmt: skip
    # Random worlds of our own layout compute as published ones, unless something else was chosen.
    assert config.imagination == replace(shipped.imagination, precision="bf16")
    monkeypatch.setattr(recipes, "written", lambda *_: (tmp_path / "policy", tmp_path / "world"))
    flags = recipes.flags_of(file, shipped, config, settings)
    assert flags[flags.index("--imagination.precision") + 1] == "bf16"
    short = recipes.scaled(shipped, replace(settings, decisions=8), 2)
    assert recipes.expected(short, 2, measured=False).decisions == config.algorithm.groups_per_update * 8 * 8
    assert "--actor.max-decisions 8" in " ".join(recipes.flags_of(file, shipped, short, settings))
    rounded = replace(shipped, imagination=replace(shipped.imagination, precision="float8"))
    assert recipes.scaled(rounded, settings, 2).imagination.precision == "float8"
    wan = recipes.load_file(ROOT / "configs" / "wan_libero_spatial_grpo_openvlaoft.toml")
    assert recipes.scaled(wan, settings, 2).imagination == wan.imagination
    assert "--imagination.precision" not in recipes.flags_of(
        file, wan, recipes.scaled(wan, settings, 2), settings
    )
    name, decisions, taken, wanted, ratio, learner, *_ = recipes.line_of(file, found, prediction)
    assert (name, decisions, ratio, learner) == (file.stem, 512, "2.00", "2.0")
    assert float(taken) == pytest.approx(2 * float(wanted), rel=0.01)
    with pytest.raises(SystemExit, match="this measures recipes in published worlds"):
        recipes.kind_of(replace(shipped, world="tabletop_true"))


def test_a_recipe_that_does_not_get_far_enough_is_named_and_the_next_one_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    recipes, asynchrony = import_module("recipes"), import_module("asynchrony")
    outcome = asynchrony.Outcome(
        mode="asynchronous", steps_per_hour=3600.0, update_seconds=1.0, learned_per_hour=3600.0,
        imagined_per_hour=3600.0, learner_waiting=0.5, actors_waiting=0.25, mfu=0.0, publish_seconds=0.0,
        published_bytes=0.0, memory={}, rows=1, loaded=1.0, first_update=3.0, seconds=9.0,
    )  # fmt: skip
    skipped = list[int]()

    def train(settings: Any, mode: str, out: Path, *, name: str) -> Any:
        skipped.append(settings.skip)
        if "evac" in name:
            raise RunError("The run ended after 1 updates; nothing to compare.")
        return outcome

    monkeypatch.setattr(asynchrony, "train", train)
    monkeypatch.setattr(recipes, "written", lambda *_: (tmp_path, tmp_path))
    files = [
        str(ROOT / "configs" / f"{kind}_libero_spatial_grpo_openvlaoft.toml") for kind in ("evac", "wan")
    ]
    monkeypatch.setattr(
        sys, "argv", ["recipes", *files, "--full", str(tmp_path), "--groups", "1", "--skip", "0"]
    )
    with pytest.raises(SystemExit, match="not measured: evac_libero_spatial"):
        recipes.main()
    assert skipped == [0, 0]
    assert re.search(r"^wan_libero_spatial\S+ +256 +2048\.0 ", capsys.readouterr().out, re.MULTILINE)


def test_the_models_of_full_runs_are_written_by_a_plain_command(tmp_path: Path) -> None:
    """As a user calls it: nothing of the tests is on the path of modules, and LIBERO's words are known."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "benchmarks" / "full_size.py"), str(tmp_path), "--scale", "tiny"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    policy, world = done.stdout.split()[-2:]
    tokenizer = load_policy(policy).tokenizer
    assert all(tokenizer.ids(task) for task in SUITES["libero_spatial"])
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
    unsaid = [{key: row[key] for key in row if key != "actor/decisions"} for row in rows]
    came_back = [*rows[:2], rows[2] | {"actor/decisions": 210.0}]
    for some in (unsaid, came_back):
        assert benchmark.outcome("asynchronous", some, 4, {}, 12.0).steps_per_hour == found.learned_per_hour


@pytest.mark.parametrize("change", [0, 1])
def test_a_run_whose_frames_never_change_imagined_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: int
) -> None:
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

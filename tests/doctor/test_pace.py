"""What the doctor says of a run's pace, and what the recipes' headers say of it."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from asyncrl.commands import doctor as command
from asyncrl.config.algorithm import LoraSettings
from asyncrl.config.imagination import Precision
from asyncrl.config.loading import load_file
from asyncrl.config.run import TrainConfig
from asyncrl.doctor import pace, work
from asyncrl.doctor.cost import predict
from asyncrl.doctor.findings import Examination
from asyncrl.doctor.pace import burst_rate, check_pace, expected_table, minutes
from asyncrl.doctor.published import published_run
from asyncrl.doctor.rates import H200, SHARES
from asyncrl.doctor.work import RunWork, work_of
from asyncrl.errors import ConfigError
from asyncrl.launch.placement import parse_placement
from asyncrl.policies.interface import Policy
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.policy import new_policy
from asyncrl.worlds.work import Stage
from support import ROOT
from support.tiny_models import WORLDS

RECIPES = sorted((ROOT / "configs").glob("*_openvla*.toml"))
WAN = ROOT / "configs" / "wan_libero_spatial_grpo_openvlaoft.toml"
_tables: dict[object, list[str]] = {}


def table_of(file: Path) -> list[str]:
    """The table of a recipe, made once for those that differ in the names of their models only."""
    config = load_file(file)
    policy = "maniskill" in config.policy, config.policy.endswith("openvla")
    like = (file.stem.split("_")[0], policy, config.algorithm, config.lora, config.learner, config.actor)
    key = repr((like, config.imagination, config.simulator.horizon, config.critic))
    if key not in _tables:
        _tables[key] = expected_table(config)
    return _tables[key]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", RECIPES, ids=lambda path: path.stem)
def test_headers_say_what_the_cost_model_expects(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    headers = import_module("recipe_headers")
    assert file in headers.full_size_recipes()
    text = file.read_text()
    assert headers.with_expectation(text, table_of(file)) == text, "run python benchmarks/recipe_headers.py"
    for devices in ("1 x 80", "2 x 80", "8 x 80", "141 GB"):
        assert devices in text


def test_a_header_is_written_once_and_then_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    put = import_module("recipe_headers").with_expectation
    text = "# A recipe.\n#\n# Sizes.\n\nupdates = 1\n\n[actor]\nslots = 8\n"
    first = put(text, ["Expected by the cost model: 1.", "more"])
    assert first.startswith(
        "# A recipe.\n#\n# Sizes.\n#\n# Expected by the cost model: 1.\n# more\n\nupdates"
    )
    assert first.endswith("\n\nupdates = 1\n\n[actor]\nslots = 8\n")
    assert put(first, ["Expected by the cost model: 2."]) == first.replace(": 1.\n# more", ": 2.")


def test_the_table_is_printed_without_the_models_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--costs", str(WAN)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == table_of(WAN)
    config = load_file(WAN)
    sizes, computed = published_run(config)
    found = predict(config, computed, sizes, H200, parse_placement(config.placement, 8, 0))
    row = next(line for line in printed if line.startswith("8 x"))
    assert row.split()[-2:] == [minutes(found.seconds), found.bottleneck]
    # All weights of 7.5 B do not fit one device, nor two with one learner, nor two learners of 80 GB.
    assert [", adapters" in line for line in printed[2:]] == [True, True, True, False, False]


def test_what_fits_nowhere_says_what_it_would_need() -> None:
    config = load_file(WAN)
    wide = replace(config, actor=replace(config.actor, slots=64))
    lines = expected_table(replace(wide, lora=LoraSettings(rank=32)))
    assert any(line.startswith("1 x 80") and "does not fit: " in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--costs"], "--policy is tabletop"), (["--costs", "--json", str(WAN)], "Leave --json out")],
)
def test_a_table_that_cannot_be_made_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        command.main(arguments)


def test_small_models_have_no_line() -> None:
    policy = new_policy(OpenVLAOFTConfig.tiny())
    assert work_of(TrainConfig(), policy) is None
    assert check_pace(Examination(config=TrainConfig())) is None


@pytest.fixture
def small_models_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "LEAST_FLOPS", 0.0)


@pytest.mark.parametrize("kind", ["wan", "opensora", "evac"])
def test_the_work_of_a_world_is_read_from_its_folder(
    kind: str, tmp_path: Path, small_models_count: None
) -> None:
    WORLDS[kind](tmp_path)
    policy = new_policy(OpenVLAOFTConfig.tiny())
    config = replace(TrainConfig(), world=str(tmp_path), actor=replace(TrainConfig().actor, max_decisions=3))

    def found(steps: int) -> RunWork:
        chosen = replace(config, imagination=replace(config.imagination, steps=steps))
        seen = work_of(chosen, policy)
        assert seen is not None
        return seen

    two, four = found(2), found(4)
    assert (two.decisions, two.chunk, two.policy) == (3, 8, policy.decision_flops())
    denoising = [stage for stage in four.world.decision if stage.calls == 4]
    assert [stage.name for stage in denoising] == [f"{kind} denoise"]
    total = [sum(stage.flops * stage.calls for stage in seen.world.decision) for seen in (two, four)]
    assert total[1] - total[0] == pytest.approx(2 * denoising[0].flops)
    assert all(stage.name in SHARES for stage in (*four.world.decision, *four.world.opening))


@pytest.mark.parametrize(("name", "kind"), [("tabletop", "wan"), ("tabletop_opensora", "opensora")])
def test_8_bit_layers_of_a_world_are_read_from_its_folder(
    name: str, kind: str, small_models_count: None
) -> None:
    config, policy = replace(TrainConfig(), world=name), new_policy(OpenVLAOFTConfig.tiny())
    found = {stage.name: stage for stage in stages_of(in_float8(config), policy)}
    denoise = found.pop(f"{kind} denoise")
    assert 0.5 * denoise.flops < denoise.float8 < denoise.flops
    assert all(stage.float8 == 0 for stage in found.values())
    assert [replace(s, float8=0.0) for s in stages_of(in_float8(config), policy)] == stages_of(config, policy)


@pytest.mark.parametrize("kind", ["wan", "opensora", "evac"])
def test_a_world_of_ours_is_reckoned_in_float32_unless_it_is_rounded(
    kind: str, tmp_path: Path, small_models_count: None
) -> None:
    WORLDS[kind](tmp_path)
    policy, config = new_policy(OpenVLAOFTConfig.tiny()), replace(TrainConfig(), world=str(tmp_path))
    stored, rounded = work_of(config, policy), work_of(in_precision(config, "bf16"), policy)
    assert stored is not None
    assert rounded is not None
    assert (stored.world.float32, rounded.world.float32) == (True, False)
    assert replace(stored.world, float32=False) == rounded.world


def test_the_line_says_that_a_world_in_float32_takes_longer() -> None:
    config = replace(load_file(WAN), device="cpu")
    sizes, computed = published_run(config)
    lines = []
    for float32 in (False, True):
        seen = replace(computed, world=replace(computed.world, float32=float32))
        finding = check_pace(Examination(config=config, sizes=sizes, work=seen))
        assert finding is not None
        lines.append(finding.seen)
    assert "float32" not in lines[0]
    said = "(the world's in float32: 4.7 times the time of --imagination.precision bf16)"
    assert f"a decision is 31.7 TFLOP {said} and takes" in lines[1]


def stages_of(config: TrainConfig, policy: Policy) -> list[Stage]:
    seen = work_of(config, policy)
    assert seen is not None
    return [*seen.world.decision, *seen.world.opening]


def in_float8(config: TrainConfig) -> TrainConfig:
    return in_precision(config, "float8")


def in_precision(config: TrainConfig, precision: Precision) -> TrainConfig:
    return replace(config, imagination=replace(config.imagination, precision=precision))


def test_the_line_and_the_table_say_how_fast_8_bit_products_are() -> None:
    config = replace(load_file(WAN), device="cpu")
    said = "8-bit products, 1.38 times as fast as those of bfloat16"
    lines = []
    for chosen in (config, in_float8(config)):
        sizes, computed = published_run(chosen)
        finding = check_pace(Examination(config=chosen, sizes=sizes, work=computed))
        assert finding is not None
        lines.append(finding.seen)
    assert "8-bit" not in lines[0]
    assert f"a decision is 31.7 TFLOP (11.2 of {said}) and takes" in lines[1]
    stored, rounded = table_of(WAN), expected_table(in_float8(config))
    assert rounded[1] == f"Actors: {said}."
    assert (len(rounded), rounded[2]) == (len(stored) + 1, stored[1])


def test_the_line_says_it_of_the_learner_too() -> None:
    config = replace(load_file(WAN), device="cpu", lora=LoraSettings(rank=32))
    learner = replace(config.learner, precision="bf16", frozen_precision="float8")
    config = replace(config, learner=learner)
    sizes, computed = published_run(config)
    finding = check_pace(Examination(config=config, sizes=sizes, work=computed))
    assert finding is not None
    said = "8-bit products, 1.38 times as fast as those of bfloat16"
    assert f"; 4.8 TFLOP of a pass are {said})" in finding.seen
    assert f"Learners: {said}." in expected_table(config)
    eager = replace(config, learner=replace(learner, compile=False))
    assert f"Learners: {said.replace('1.38', '0.71')}." in expected_table(eager)


def test_the_line_reckons_with_eight_devices_or_with_the_ranks_that_are_named() -> None:
    config = replace(load_file(WAN), device="cpu")
    sizes, computed = published_run(config)

    def line(chosen: TrainConfig) -> str:
        finding = check_pace(Examination(config=chosen, sizes=sizes, work=computed))
        assert finding is not None
        return finding.seen

    assert "8 x H200, none of which is here" in line(config)
    assert "3 x H200" in line(replace(config, placement="learner=0,actor=1-2"))
    found = predict(config, computed, sizes, H200, parse_placement(config.placement, 8, 0))
    assert f"{minutes(found.seconds)} minutes from one update to the next" in line(config)


def test_a_rate_is_products_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 12.0])
    monkeypatch.setattr(pace.time, "perf_counter", lambda: next(ticks))
    assert burst_rate(torch.device("cpu"), side=16, rounds=3) == 3 * 2 * 16**3 / 2.0

"""Which placement the doctor names: by the cost model, of those that fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncrl.config.algorithm import LoraSettings
from asyncrl.config.loading import load_file
from asyncrl.config.run import TrainConfig
from asyncrl.doctor.cost import Prediction, predict
from asyncrl.doctor.findings import Examination
from asyncrl.doctor.pace import check_pace
from asyncrl.doctor.placements import advice, quickest
from asyncrl.doctor.published import published_run
from asyncrl.doctor.rates import H100, H200, DeviceRate
from asyncrl.launch.placement import parse_placement
from support import ROOT

BESIDE = "--placement learner=0,policy=0,world=1 --actor.pipeline-stages 2"


def recipe(name: str = "wan_libero_spatial_grpo_openvlaoft", **actor: Any) -> TrainConfig:
    """A recipe with adapters and 16 slots."""
    config = load_file(ROOT / "configs" / f"{name}.toml")
    return replace(config, lora=LoraSettings(rank=32), actor=replace(config.actor, **{"slots": 16} | actor))


def best(config: TrainConfig, device: DeviceRate, ranks: int) -> tuple[str, Prediction] | None:
    sizes, work = published_run(config)
    return quickest(config, work, sizes, device, ranks)


def of(config: TrainConfig, device: DeviceRate, placement: str, ranks: int, stages: int = 1) -> Prediction:
    sizes, work = published_run(config)
    staged = replace(config, actor=replace(config.actor, pipeline_stages=stages))
    return predict(staged, work, sizes, device, parse_placement(placement, ranks, 0))


def test_on_two_gpus_of_80_gb_the_policy_goes_beside_the_learner() -> None:
    config = recipe()
    assert best(config, H100, 2) == (BESIDE, of(config, H100, BESIDE.split()[1], 2, stages=2))
    assert not of(config, H100, "collocated", 2).fits(H100)


def test_with_more_memory_both_sides_are_on_every_gpu() -> None:
    config = recipe()
    found = best(config, H200, 2)
    assert found == ("--placement collocated", of(config, H200, "collocated", 2))


def test_no_placement_of_those_that_fit_is_quicker() -> None:
    config = recipe()
    found = best(config, H100, 4)
    assert found is not None
    for placement in ("auto", "disaggregated", "learner=0-2,actor=3"):
        assert of(config, H100, placement, 4).steps_per_hour <= found[1].steps_per_hour


def test_each_learner_has_a_group() -> None:
    config = recipe()
    config = replace(config, algorithm=replace(config.algorithm, groups_per_update=1, minibatches=1))
    found = best(config, H100, 8)
    assert found is not None
    assert found[0].startswith("--placement learner=0,actor=")
    # With room for both sides on every GPU, too: a run would refuse eight learners.
    assert best(config, H200, 8) == ("--placement learner=0,actor=1-7", of(config, H200, "auto", 8))


def test_nothing_is_said_where_nothing_fits_or_nothing_is_gained() -> None:
    config = recipe()
    sizes, work = published_run(config)
    assert best(config, H100, 1) is None
    alone = of(config, H100, "auto", 1)
    assert not advice(config, work, sizes, H100, 1, alone)
    found = best(config, H100, 2)
    assert found is not None
    assert not advice(config, work, sizes, H100, 2, found[1])


def test_in_a_simulator_no_world_has_a_gpu_of_its_own() -> None:
    found = best(recipe("libero_spatial_grpo_openvlaoft"), H100, 2)
    assert found is not None
    assert "policy=" not in found[0]


@pytest.mark.parametrize(
    ("placement", "said"), [("learner=0,actor=1", True), ("learner=0@0,actor=0@1", False)]
)
def test_the_line_about_the_pace_names_it_on_one_host(placement: str, said: bool) -> None:
    config = replace(recipe(), device="cpu", placement=placement)
    sizes, work = published_run(config)
    finding = check_pace(Examination(config=config, sizes=sizes, work=work))
    assert finding is not None
    assert ("; --placement collocated is expected to be 1." in finding.seen) == said

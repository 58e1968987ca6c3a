"""What the doctor says of layers that compute their activations again where there is room to keep them."""

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
from asyncrl.doctor.published import published_run
from asyncrl.doctor.rates import H100, H200, DeviceRate
from asyncrl.doctor.recomputation import advice, with_fewer
from asyncrl.launch.placement import parse_placement
from support import ROOT

TWO = ("learner=0,actor=1", 2)


def recipe(**learner: Any) -> TrainConfig:
    """The Wan recipe with adapters."""
    config = load_file(ROOT / "configs" / "wan_libero_spatial_grpo_openvlaoft.toml")
    return replace(config, lora=LoraSettings(rank=32), learner=replace(config.learner, **learner))


def found(
    config: TrainConfig, device: DeviceRate = H100, placement: tuple[str, int] = TWO
) -> tuple[int, Prediction] | None:
    sizes, work = published_run(config)
    return with_fewer(config, work, sizes, device, parse_placement(*placement, 0))


def test_a_learner_alone_on_80_gb_keeps_what_three_layers_of_four_need() -> None:
    best = found(recipe())
    assert best is not None
    assert best[0] == 4
    same = recipe(gradient_checkpointing_every=4)
    sizes, work = published_run(same)
    assert best[1] == predict(same, work, sizes, H100, parse_placement(*TWO, 0))
    # Measured: 63.5 GiB.
    assert best[1].learner_bytes / 2**30 == pytest.approx(63.5, rel=0.1)


def test_more_memory_keeps_more() -> None:
    best = found(recipe(), H200)
    assert best is not None
    assert best[0] == 0
    none = recipe(gradient_checkpointing=False)
    sizes, work = published_run(none)
    assert best[1] == predict(none, work, sizes, H200, parse_placement(*TWO, 0))
    larger = recipe()
    larger = replace(larger, algorithm=replace(larger.algorithm, micro_batch=64))
    best = found(larger, H200)
    assert best is not None
    assert best[0] == 4


@pytest.mark.parametrize(
    ("config", "placement"),
    [
        pytest.param(recipe(gradient_checkpointing_every=4), TWO, id="in use"),
        pytest.param(recipe(gradient_checkpointing=False), TWO, id="nothing is computed again"),
        pytest.param(recipe(), ("collocated", 1), id="the actor needs the room"),
    ],
)
def test_nothing_is_said_where_nothing_is_to_gain(config: TrainConfig, placement: tuple[str, int]) -> None:
    assert found(config, H100, placement) is None


def test_a_policy_that_does_not_say_what_layers_keep_is_left_alone() -> None:
    config = recipe()
    sizes, work = published_run(config)
    assert not advice(config, work, replace(sizes, kept=0), H100, parse_placement(*TWO, 0))


def test_the_line_about_the_pace_names_the_flag_and_what_it_takes() -> None:
    config = replace(recipe(), device="cpu", placement=TWO[0])
    sizes, work = published_run(config)
    finding = check_pace(Examination(config=config, sizes=sizes, work=work))
    assert finding is not None
    said = "; a learner has room for --learner.no-gradient-checkpointing: 75 of 131 GiB, and "
    assert said in finding.seen


def test_what_was_set_before_is_taken_back_too() -> None:
    config = recipe(gradient_checkpointing_every=4)
    sizes, work = published_run(config)
    said = advice(config, work, sizes, H200, parse_placement(*TWO, 0))
    wanted = "--learner.no-gradient-checkpointing --learner.gradient-checkpointing-every 1"
    assert said.startswith(f"; a learner has room for {wanted}: 75 of 131 GiB")

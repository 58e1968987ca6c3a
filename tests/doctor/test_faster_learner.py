"""What the doctor says of a learner that has more memory than its settings use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncrl.config.algorithm import LearnerSettings, LoraSettings
from asyncrl.config.loading import load_file
from asyncrl.config.run import TrainConfig
from asyncrl.doctor.cost import Prediction, predict
from asyncrl.doctor.faster_learner import advice, faster_learner
from asyncrl.doctor.findings import Examination
from asyncrl.doctor.pace import check_pace
from asyncrl.doctor.published import published_run
from asyncrl.doctor.rates import H100, H200, DeviceRate
from asyncrl.launch.placement import parse_placement
from support import ROOT

TWO = ("learner=0,actor=1", 2)


def recipe(**learner: Any) -> TrainConfig:
    """The Wan recipe with adapters."""
    config = load_file(ROOT / "configs" / "wan_libero_spatial_grpo_openvlaoft.toml")
    return replace(config, lora=LoraSettings(rank=32), learner=replace(config.learner, **learner))


def found(
    config: TrainConfig, device: DeviceRate = H100, placement: tuple[str, int] = TWO
) -> tuple[LearnerSettings, Prediction] | None:
    sizes, work = published_run(config)
    return faster_learner(config, work, sizes, device, parse_placement(*placement, 0))


def test_a_learner_alone_on_80_gb_keeps_what_three_layers_of_four_need() -> None:
    best = found(recipe())
    assert best is not None
    same = recipe(gradient_checkpointing_every=4)
    assert best[0] == same.learner
    sizes, work = published_run(same)
    assert best[1] == predict(same, work, sizes, H100, parse_placement(*TWO, 0))
    # Measured: 63.5 GiB.
    assert best[1].learner_bytes / 2**30 == pytest.approx(63.5, rel=0.1)


def test_more_memory_keeps_more() -> None:
    best = found(recipe(), H200)
    assert best is not None
    none = recipe(gradient_checkpointing=False)
    assert best[0] == none.learner
    sizes, work = published_run(none)
    assert best[1] == predict(none, work, sizes, H200, parse_placement(*TWO, 0))
    larger = recipe()
    larger = replace(larger, algorithm=replace(larger.algorithm, micro_batch=64))
    best = found(larger, H200)
    assert best is not None
    assert best[0] == replace(larger.learner, gradient_checkpointing_every=4)


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


EIGHT = ("learner=0-3,actor=4-7", 8)


def all_weights(config: TrainConfig) -> TrainConfig:
    return replace(config, lora=LoraSettings())


def test_learners_that_share_all_weights_keep_them_gathered_where_there_is_room() -> None:
    config = all_weights(recipe())
    best = found(config, H200, EIGHT)
    assert best is not None
    assert best[0] == replace(config.learner, gradient_checkpointing=False), "which gains more"
    smaller = replace(config, algorithm=replace(config.algorithm, micro_batch=24))
    both = found(smaller, H200, EIGHT)
    assert both is not None
    assert both[0] == replace(config.learner, gradient_checkpointing=False, reshard_after="step")
    sizes, work = published_run(smaller)
    said = advice(smaller, work, sizes, H200, parse_placement(*EIGHT, 0))
    assert said.startswith(
        "; a learner has room for --learner.no-gradient-checkpointing --learner.reshard-after step: "
    )
    used = replace(smaller, learner=both[0])
    assert found(used, H200, EIGHT) is None
    sizes, work = published_run(used)
    assert both[1] == predict(used, work, sizes, H200, parse_placement(*EIGHT, 0))
    # 14 GiB of weights instead of two blocks of 0.4.
    each = predict(
        replace(used, learner=best[0]), work, sizes, H200, parse_placement(*EIGHT, 0)
    ).learner_bytes
    assert (both[1].learner_bytes - each) / 2**30 == pytest.approx(14.0 - 0.8, abs=0.1)


def test_weights_that_nobody_divides_are_not_gathered() -> None:
    alone = found(recipe(), H200, TWO)
    assert alone is not None
    assert alone[0].reshard_after == "pass"
    with_adapters = found(recipe(), H200, EIGHT)
    assert with_adapters is not None
    assert with_adapters[0].reshard_after == "pass"
    # Nothing is computed again, and 80 GB have no room for a second copy.
    assert found(all_weights(recipe(gradient_checkpointing=False, reshard_after="step")), H200, EIGHT) is None


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

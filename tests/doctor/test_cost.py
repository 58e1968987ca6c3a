"""The cost model against what docs/measurements/*_speed.md measured, on an H200 and on several."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from asyncrl.config.algorithm import LoraSettings
from asyncrl.config.loading import load_file
from asyncrl.config.run import TrainConfig
from asyncrl.doctor import cost
from asyncrl.doctor.cost import ActorCost, Prediction, actor_cost, learner_cost, predict
from asyncrl.doctor.findings import Sizes
from asyncrl.doctor.gpus import learner_needs
from asyncrl.doctor.published import published_run
from asyncrl.doctor.rates import H100, H200, SHARES, DeviceRate
from asyncrl.doctor.work import RunWork
from asyncrl.errors import ConfigError
from asyncrl.launch.placement import parse_placement
from asyncrl.policies.interface import PolicyInputs, SamplingParams
from asyncrl.policies.openvla.config import OpenVLAOFTConfig
from asyncrl.policies.openvla.memory import PROMPT
from asyncrl.policies.openvla.policy import new_policy
from asyncrl.policies.openvla.work import forward_flops
from support import ROOT

TOLERANCE = 0.2
PEAK = 989e12
TFLOP = 1e12
TWO = ("learner=0,actor=1", 2)
FOUR = ("learner=0-1,actor=2-3", 4)


def recipe(name: str) -> TrainConfig:
    return load_file(ROOT / "configs" / f"{name}.toml")


@pytest.fixture(scope="module")
def measured_run() -> TrainConfig:
    """The whole runs of the page: 4 groups of 8 episodes of 2 decisions, adapters, passes not compiled."""
    config = recipe("wan_libero_spatial_grpo_openvlaoft")
    return replace(
        config,
        actor=replace(config.actor, slots=16, max_decisions=2),
        lora=LoraSettings(rank=32),
        algorithm=replace(config.algorithm, groups_per_update=4, minibatches=1),
        learner=replace(config.learner, compile=False),
    )


@pytest.fixture(scope="module")
def models(measured_run: TrainConfig) -> tuple[Sizes, RunWork]:
    return published_run(measured_run)


def predicted(
    config: TrainConfig, models: tuple[Sizes, RunWork], placement: tuple[str, int] = TWO
) -> Prediction:
    sizes, work = models
    return predict(config, work, sizes, H200, parse_placement(*placement, 0))


@pytest.fixture
def slower_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step and the reading of how far the policy moved take what they took when this was measured."""
    monkeypatch.setattr(cost, "STEP_SECONDS", 0.44)
    monkeypatch.setattr(cost, "_read_again", lambda recipe, rows: min(recipe.algorithm.micro_batch, rows))


# Steps per hour, asynchronous and synchronous; the learner alone and the actors alone.
WHOLE_RUNS = [
    (("auto", 1), 248_994, 221_561, 442_038, 470_272),
    (TWO, 457_650, 222_942, 446_021, 473_715),
    (FOUR, 668_414, 378_705, 670_580, 1_025_215),
]


@pytest.mark.usefixtures("slower_steps")
@pytest.mark.parametrize(("placement", "asynchronous", "synchronous", "learner", "actors"), WHOLE_RUNS)
def test_whole_runs_take_what_is_predicted(
    measured_run: TrainConfig,
    models: tuple[Sizes, RunWork],
    placement: tuple[str, int],
    asynchronous: float,
    synchronous: float,
    learner: float,
    actors: float,
) -> None:
    found = predicted(measured_run, models, placement)
    in_turns = predicted(replace(measured_run, synchronous=True), models, placement)
    steps = found.decisions * found.chunk * 3600
    assert found.decisions == 64
    assert found.steps_per_hour == pytest.approx(asynchronous, rel=TOLERANCE)
    assert in_turns.steps_per_hour == pytest.approx(synchronous, rel=TOLERANCE)
    assert steps / found.learner.update == pytest.approx(learner, rel=TOLERANCE)
    assert steps / found.batch == pytest.approx(actors, rel=TOLERANCE)


@pytest.mark.usefixtures("slower_steps")
@pytest.mark.parametrize(
    ("placement", "seconds", "utilisation", "bottleneck"),
    [(TWO, 3.9, 0.166, "actors"), (FOUR, 2.6, 0.122, "learner")],
)
def test_updates_take_what_is_predicted(
    measured_run: TrainConfig,
    models: tuple[Sizes, RunWork],
    placement: tuple[str, int],
    seconds: float,
    utilisation: float,
    bottleneck: str,
) -> None:
    found = predicted(measured_run, models, placement)
    learners = placement[1] // 2
    assert found.learner.update == pytest.approx(seconds, rel=TOLERANCE)
    assert found.learner.flops / found.learner.update / learners / PEAK == pytest.approx(
        utilisation, rel=TOLERANCE
    )
    assert found.bottleneck == bottleneck  # 25.5 % of the actors' time was waiting on four GPUs.


@pytest.mark.usefixtures("slower_steps")
def test_a_shared_device_stretches_an_update(
    measured_run: TrainConfig, models: tuple[Sizes, RunWork]
) -> None:
    found = predicted(measured_run, models, ("auto", 1))
    assert found.bottleneck == "both, on one device"
    assert found.seconds == pytest.approx(7.4, rel=TOLERANCE)


@pytest.mark.usefixtures("slower_steps")
def test_a_compiled_learner_takes_what_is_predicted(
    measured_run: TrainConfig, models: tuple[Sizes, RunWork]
) -> None:
    compiled = replace(measured_run, learner=replace(measured_run.learner, compile=True))
    found = predicted(compiled, models)
    in_turns = predicted(replace(compiled, synchronous=True), models)
    assert found.learner.update == pytest.approx(2.57, rel=TOLERANCE)
    assert found.learner.flops / found.learner.update / PEAK == pytest.approx(0.249, rel=TOLERANCE)
    assert found.steps_per_hour == pytest.approx(507_641, rel=TOLERANCE)
    assert in_turns.steps_per_hour == pytest.approx(268_896, rel=TOLERANCE)
    # It waited 25 % of the time.
    assert found.bottleneck == "actors"
    # On two H100, where what was learned of a backlog does not count.
    assert found.steps_per_hour == pytest.approx(431_147, rel=TOLERANCE)
    assert in_turns.steps_per_hour == pytest.approx(270_079, rel=TOLERANCE)


def test_a_learner_that_computes_less_again_takes_what_is_predicted(
    measured_run: TrainConfig,
) -> None:
    fewer = replace(measured_run.learner, compile=True, gradient_checkpointing_every=4)
    compiled = replace(measured_run, learner=fewer)
    found = predicted(compiled, published_run(compiled))
    in_turns = predicted(replace(compiled, synchronous=True), published_run(compiled))
    assert found.learner.update == pytest.approx(1.99, rel=TOLERANCE)
    assert found.learner.flops / found.learner.update / PEAK == pytest.approx(0.325, rel=TOLERANCE)
    assert found.steps_per_hour == pytest.approx(474_642, rel=TOLERANCE)
    assert in_turns.steps_per_hour == pytest.approx(309_262, rel=TOLERANCE)
    assert found.bottleneck == "actors"  # The learner waited 47 % of the time.
    assert found.learner_bytes / 2**30 == pytest.approx(63.5, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("device", "groups", "micro_batch", "every", "seconds", "gib"),
    [(H200, 18, 48, 0, 6.348, 105.0), (H200, 4, 32, 4, 1.643, 63.1), (H100, 16, 32, 4, 6.839, 63.9)],
)
def test_updates_alone_take_what_is_predicted(
    measured_run: TrainConfig,
    device: DeviceRate,
    groups: int,
    micro_batch: int,
    every: int,
    seconds: float,
    gib: float,
) -> None:
    config = replace(
        measured_run,
        algorithm=replace(measured_run.algorithm, groups_per_update=groups, micro_batch=micro_batch),
        learner=replace(
            measured_run.learner,
            compile=True,
            gradient_checkpointing=every > 0,
            gradient_checkpointing_every=every or 1,
        ),
    )
    sizes, work = published_run(config)
    found = predict(config, work, sizes, device, parse_placement(*TWO, 0))
    assert found.decisions == 16 * groups
    assert found.learner.update == pytest.approx(seconds, rel=TOLERANCE)
    assert found.learner_bytes / 2**30 == pytest.approx(gib, rel=0.05)


@pytest.mark.parametrize(
    ("device", "ranks", "groups", "micro_batch", "every", "reshard_after", "seconds", "gib"),
    [
        (H200, 2, 8, 32, 4, "pass", 4.364, 104.0),
        (H200, 2, 8, 32, 4, "step", 3.980, 116.5),
        (H200, 2, 18, 36, 4, "pass", 8.962, None),
        (H200, 2, 18, 36, 4, "step", 8.400, 122.3),
        (H200, 2, 8, 32, 1, "pass", 5.684, 64.3),  # Before small blocks shared units.
        (H100, 4, 8, 32, 2, "pass", 5.248, None),
        (H100, 4, 8, 32, 2, "step", 4.401, 75.2),
    ],
)
def test_updates_of_all_weights_on_several_ranks_take_what_is_predicted(
    measured_run: TrainConfig,
    device: DeviceRate,
    ranks: int,
    groups: int,
    micro_batch: int,
    every: int,
    reshard_after: Literal["pass", "step"],
    seconds: float,
    gib: float | None,
) -> None:
    algorithm = replace(measured_run.algorithm, groups_per_update=ranks * groups, micro_batch=micro_batch)
    learner = replace(
        measured_run.learner,
        compile=True,
        gradient_checkpointing_every=every,
        reshard_after=reshard_after,
    )
    config = replace(measured_run, lora=LoraSettings(), algorithm=algorithm, learner=learner)
    sizes, work = published_run(config)
    found = learner_cost(config, work, sizes, device, ranks)
    assert found.update == pytest.approx(seconds, rel=TOLERANCE)
    if gib is not None:  # Nothing was published.
        assert learner_needs(config, sizes, ranks, first=False) / 2**30 == pytest.approx(gib, rel=0.05)


def test_a_shared_device_with_compiled_passes_takes_what_is_predicted(measured_run: TrainConfig) -> None:
    config = replace(
        measured_run,
        actor=replace(measured_run.actor, slots=8),
        learner=replace(measured_run.learner, compile=True),
    )
    sizes, work = published_run(config)
    one = parse_placement("auto", 1, 0)
    found = predict(config, work, sizes, H100, one)
    in_turns = predict(replace(config, synchronous=True), work, sizes, H100, one)
    assert found.steps_per_hour == pytest.approx(295_227, rel=TOLERANCE)
    assert in_turns.steps_per_hour == pytest.approx(296_184, rel=TOLERANCE)
    assert found.learner_bytes / 2**30 == pytest.approx((25_576_537_088 + 40_430_043_136) / 2**30, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "groups", "decisions", "counted", "seconds", "gib"),
    [
        ("wan", 2, 32, 512, 46.4, 61.2),
        ("opensora", 1, 32, 256, (40.6 + 43.3) / 2, 41.6),
        ("evac", 4, 8, 64, 64 * 35.0 / 48, 41.1),
    ],
)
def test_a_recipe_on_one_device_takes_what_is_predicted(
    kind: str, groups: int, decisions: int, counted: int, seconds: float, gib: float
) -> None:
    shipped = recipe(f"{kind}_libero_spatial_grpo_openvlaoft")
    config = replace(
        shipped,
        placement="collocated",
        algorithm=replace(shipped.algorithm, groups_per_update=groups, minibatches=groups),
        actor=replace(shipped.actor, max_decisions=decisions),
        lora=LoraSettings(rank=32),
    )
    sizes, work = published_run(config)
    found = predict(config, work, sizes, H200, parse_placement(config.placement, 1, 0))
    assert found.decisions == counted
    assert found.seconds == pytest.approx(seconds, rel=TOLERANCE)
    assert found.learner_bytes == pytest.approx(gib * 2**30, rel=TOLERANCE)


def test_a_recipe_that_trains_all_weights_on_four_devices_takes_what_is_predicted() -> None:
    shipped = recipe("wan_libero_spatial_grpo_openvlaoft")
    config = replace(
        shipped,
        algorithm=replace(shipped.algorithm, groups_per_update=9),
        actor=replace(shipped.actor, max_decisions=4),
    )
    sizes, work = published_run(config)
    found = predict(config, work, sizes, H100, parse_placement("learner=0-2,actor=3", 4, 0))
    assert (found.decisions, found.bottleneck) == (288, "actors")
    assert found.seconds == pytest.approx(17.7, rel=TOLERANCE)
    # Random scores were all the same, so no pass came before the first step.
    assert found.learner.update - found.learner.before == pytest.approx(4.13, rel=TOLERANCE)
    assert found.learner_bytes == pytest.approx(73_717_562_368, rel=0.06)
    assert found.actor_bytes == pytest.approx(69_754_956_800, rel=0.05)


def test_two_stages_on_two_devices_take_what_is_predicted(
    measured_run: TrainConfig, models: tuple[Sizes, RunWork]
) -> None:
    staged = replace(measured_run, actor=replace(measured_run.actor, pipeline_stages=2))
    found = predicted(staged, models, ("hybrid", 2))
    assert found.steps_per_hour == pytest.approx(395_577, rel=TOLERANCE)


def test_a_policy_on_the_learners_device_takes_what_is_predicted(measured_run: TrainConfig) -> None:
    learner = replace(measured_run.learner, compile=True)
    apart = replace(measured_run, learner=replace(learner, gradient_checkpointing_every=4))
    actor = replace(measured_run.actor, pipeline_stages=2)
    config = replace(measured_run, learner=learner, actor=actor)
    beside = predicted(config, published_run(config), ("learner=0,policy=0,world=1", 2))
    alone = predicted(apart, published_run(apart))
    assert alone.steps_per_hour == pytest.approx(468_801, rel=TOLERANCE)
    assert beside.steps_per_hour == pytest.approx(483_627, rel=TOLERANCE)
    assert beside.steps_per_hour / alone.steps_per_hour == pytest.approx(1.03, rel=0.06)
    assert beside.actor_bytes / 2**30 == pytest.approx(25.4, rel=TOLERANCE)  # On the world's device.


def stage_flops(work: RunWork) -> dict[str, float]:
    return {s.name: s.flops * s.calls / TFLOP for s in work.world.decision}


def test_flops_are_those_that_were_counted(models: tuple[Sizes, RunWork]) -> None:
    _, work = models
    assert work.policy / TFLOP == pytest.approx(4.96, abs=0.005)
    assert stage_flops(work) == pytest.approx(
        {"wan encode": 0.92, "wan denoise": 11.32, "wan decode": 14.47}, abs=0.006
    )


FRAMES = [  # recipe, frames per second of 16 slots, compiled
    ("wan_libero_spatial_grpo_openvlaoft", 170, True),
    ("wan_libero_spatial_grpo_openvlaoft", 99, False),
    ("opensora_libero_spatial_grpo_openvlaoft", 70.2, True),
    ("opensora_libero_spatial_grpo_openvlaoft", 34.2, False),
    ("evac_libero_spatial_grpo_openvlaoft", 13.3, True),
    ("evac_libero_spatial_grpo_openvlaoft", 9.5, False),
]


@pytest.mark.parametrize(("name", "frames", "compiled"), FRAMES)
def test_worlds_draw_as_fast_as_predicted(name: str, frames: float, compiled: bool) -> None:
    config = recipe(name)
    config = replace(
        config,
        actor=replace(config.actor, slots=16),
        imagination=replace(config.imagination, compile=compiled),
    )
    _, work = published_run(config)
    cost = actor_cost(config, work, H200)
    assert work.chunk / cost.world == pytest.approx(frames, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("slots", "adapters", "compiled", "each_second"),
    [
        (1, False, False, 26),
        (8, False, False, 92),
        (32, False, False, 96),
        (1, False, True, 87),
        (8, False, True, 122),
        (32, False, True, 123),
        (32, True, True, 83),
    ],
)
def test_policies_decide_as_fast_as_predicted(
    measured_run: TrainConfig,
    models: tuple[Sizes, RunWork],
    slots: int,
    adapters: bool,
    compiled: bool,
    each_second: float,
) -> None:
    config = replace(
        measured_run,
        actor=replace(measured_run.actor, slots=slots),
        lora=LoraSettings(rank=32 if adapters else 0),
        imagination=replace(measured_run.imagination, compile=compiled),
    )
    assert 1 / actor_cost(config, models[1], H200).policy == pytest.approx(each_second, rel=TOLERANCE)


def test_memory_in_latents_saves_what_is_predicted(measured_run: TrainConfig) -> None:
    latents = replace(measured_run, imagination=replace(measured_run.imagination, context="latents"))
    _, work = published_run(latents)
    assert work.chunk / actor_cost(latents, work, H200).world == pytest.approx(216, rel=TOLERANCE)
    tiny = replace(latents, imagination=replace(latents.imagination, decoder="tiny"))
    _, work = published_run(tiny)
    assert work.chunk / actor_cost(tiny, work, H200).world == pytest.approx(381, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "frames"),
    [({}, 190), ({"context": "latents"}, 253), ({"context": "latents", "decoder": "tiny"}, 489)],
)
def test_a_world_with_8_bit_products_draws_as_fast_as_predicted(
    measured_run: TrainConfig, changes: dict[str, str], frames: float
) -> None:
    config = in_float8(measured_run)
    config = replace(config, imagination=replace(config.imagination, **changes))
    _, work = published_run(config)
    assert work.chunk / actor_cost(config, work, H100).world == pytest.approx(frames, rel=TOLERANCE)


@pytest.mark.parametrize(("compiled", "stored", "rounded"), [(False, 1.5863, 2.1810), (True, 0.9859, 0.7605)])
def test_passes_of_a_learner_take_what_is_predicted(
    measured_run: TrainConfig, compiled: bool, stored: float, rounded: float
) -> None:
    """Forward and backward of 32 decisions, on an H100 (docs/measurements/policy_speed.md)."""
    for precision, seconds in (("stored", stored), ("float8", rounded)):
        learner = replace(
            measured_run.learner, compile=compiled, precision="bf16", frozen_precision=precision
        )
        config = replace(measured_run, learner=learner)
        sizes, work = published_run(config)
        passes = learner_cost(config, work, sizes, H100, 1).passes
        assert passes / 2 == pytest.approx(seconds, rel=TOLERANCE)  # The update has 64.


@pytest.mark.parametrize("changes", [{}, {"images": 2, "proprio_dim": 8}, {"image_size": 32}])
def test_a_policys_flops_are_those_of_a_real_pass(changes: dict[str, int]) -> None:
    size = OpenVLAOFTConfig.tiny(**changes)
    policy = new_policy(size).eval()
    shape = (1, *([size.images] if size.images > 1 else []), size.image_size, size.image_size, 3)
    seen = PolicyInputs(
        pixels=torch.zeros(shape, dtype=torch.uint8),
        input_ids=torch.ones(1, 35, dtype=torch.int64),
        attention_mask=torch.ones(1, 35, dtype=torch.int64),
        padded=False,
        proprio=torch.zeros(1, size.proprio_dim) if size.proprio_dim else None,
    )
    # What a CPU fuses the counter does not know.
    plain = sdpa_kernel(SDPBackend.MATH)
    with torch.no_grad(), plain, FlopCounterMode(display=False) as counter:
        policy.choose(seen, SamplingParams(temperature=1.0), None)
    assert forward_flops(size) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_what_is_asked_of_the_learner_is_what_it_costs(
    measured_run: TrainConfig, models: tuple[Sizes, RunWork]
) -> None:
    sizes, work = models

    def seconds(config: TrainConfig, learners: int = 1) -> float:
        return learner_cost(config, work, sizes, H200, learners).update

    plain = seconds(measured_run)
    kept = replace(measured_run, learner=replace(measured_run.learner, gradient_checkpointing=False))
    assert 0.6 * plain < seconds(kept) < 0.8 * plain  # Two passes of three, and the same besides.
    twice = replace(measured_run, algorithm=replace(measured_run.algorithm, epochs=2))
    assert 1.7 * plain < seconds(twice) < 2 * plain
    several = replace(measured_run, algorithm=replace(measured_run.algorithm, minibatches=4))
    found = learner_cost(several, work, sizes, H200, 1)
    assert found.before == pytest.approx(found.passes / 3)  # One more pass, without a gradient.
    assert plain / 2 < seconds(measured_run, 2) < plain  # Steps and the reading are not shared out.


def test_layers_that_compute_again_are_their_share_of_a_forward_pass(
    measured_run: TrainConfig, models: tuple[Sizes, RunWork]
) -> None:
    def run(**changes: int | bool) -> TrainConfig:
        return replace(measured_run, learner=replace(measured_run.learner, **changes))

    def found(config: TrainConfig) -> Prediction:
        return predicted(config, published_run(config))

    none, every = found(run(gradient_checkpointing=False)), found(run())
    forward = 64 * models[1].policy / (H200.products * SHARES["learning"].eager)
    assert none.learner.passes == pytest.approx(2 * forward)
    assert every.learner.passes == pytest.approx(3 * forward)
    for k in (2, 4):
        some = found(run(gradient_checkpointing_every=k))
        assert some.learner.passes == pytest.approx((2 + 1 / k) * forward)
        assert some.learner.flops == every.learner.flops  # What is computed again is not progress.
        kept = (every.learner_bytes - none.learner_bytes) / k
        assert some.learner_bytes - none.learner_bytes == pytest.approx(kept, rel=1e-6)


def in_float8(config: TrainConfig) -> TrainConfig:
    return replace(config, imagination=replace(config.imagination, precision="float8"))


def wan_float8_flops() -> float:
    """FLOPs of a step: 30 blocks attend to 256 tokens and to 13 actions, and have an MLP."""
    width, inner, tokens, actions = 3072, 14336, 256, 13
    return 30 * 2 * (tokens * (6 * width**2 + 2 * width * inner) + actions * 2 * width**2)


def opensora_float8_flops(frames: int = 8) -> float:
    """FLOPs of a step: of 28 pairs of blocks, 4 and 8 squares of the width over 256 tokens of each frame."""
    return 28 * 2 * 2 * frames * 256 * 12 * 1152**2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("kind", "flops"),
    [
        ("wan", 5 * wan_float8_flops()),
        ("opensora", 10 * opensora_float8_flops() + opensora_float8_flops(frames=4)),
    ],
)
def test_products_of_8_bits_are_as_fast_as_measured(kind: str, flops: float, compiled: bool) -> None:
    """OpenSora's blocks see the four condition frames once and the new ones in every step."""
    config = recipe(f"{kind}_libero_spatial_grpo_openvlaoft")
    config = replace(config, imagination=replace(config.imagination, compile=compiled))
    stored, rounded = (
        actor_cost(chosen, published_run(chosen)[1], H200) for chosen in (config, in_float8(config))
    )
    faster = {False: 0.71, True: 1.38}[compiled]
    saved = flops / (H200.products * SHARES[f"{kind} denoise"].of(compiled)) * (1 - 1 / faster)
    assert stored.world - rounded.world == pytest.approx(saved)
    assert (rounded.policy, rounded.opening) == (stored.policy, stored.opening)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_world_in_float32_takes_its_multiple_of_the_time_but_for_its_8_bit_products(compiled: bool) -> None:
    config = recipe("opensora_libero_spatial_grpo_openvlaoft")
    config = replace(config, imagination=replace(config.imagination, compile=compiled))
    rounded = in_float8(config)

    def costs(chosen: TrainConfig, *, float32: bool) -> ActorCost:
        _, work = published_run(chosen)
        return actor_cost(chosen, replace(work, world=replace(work.world, float32=float32)), H200)

    fast, slow = costs(config, float32=False), costs(config, float32=True)
    assert slow.world == pytest.approx(4.7 * fast.world)
    assert slow.opening == pytest.approx(4.7 * fast.opening)
    assert slow.policy == fast.policy
    flops = 10 * opensora_float8_flops() + opensora_float8_flops(frames=4)
    narrow = flops / (H200.products * SHARES["opensora denoise"].of(compiled))
    left = costs(rounded, float32=False).world - narrow / {False: 0.71, True: 1.38}[compiled]
    mixed = costs(rounded, float32=True).world - narrow / {False: 0.71, True: 1.38}[compiled]
    assert mixed == pytest.approx(4.7 * left)


def test_the_rate_of_8_bit_products_follows_the_measured_one(measured_run: TrainConfig) -> None:
    config = in_float8(measured_run)
    _, work = published_run(config)
    slow = replace(H200, products=H200.products / 4)
    assert actor_cost(config, work, slow).world == pytest.approx(4 * actor_cost(config, work, H200).world)


@pytest.mark.parametrize("targets", ["all", "language"])
def test_8_bit_products_of_frozen_layers_are_as_fast_as_measured(
    measured_run: TrainConfig, models: tuple[Sizes, RunWork], targets: Literal["all", "language"]
) -> None:
    learner = replace(measured_run.learner, precision="bf16", frozen_precision="float8")
    config = replace(measured_run, learner=learner, lora=LoraSettings(rank=32, targets=targets))
    sizes, work = published_run(config)
    # 56 slots, 256 patches and the prompt; the towers see their patches and a few tokens more.
    tokens = 56 + 256 + PROMPT
    llama = 2 * tokens * 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    vision = 2 * 261 * 23 * (4 * 1024**2 + 2 * 1024 * 4096) + 2 * 256 * 26 * (4 * 1152**2 + 2 * 1152 * 4304)
    assert work.frozen == pytest.approx(llama + vision * (targets == "all"), rel=0.01)
    assert replace(work, frozen=0.0) == models[1]
    stored, rounded = (
        learner_cost(measured_run, models[1], models[0], H200, 1),
        learner_cost(config, work, sizes, H200, 1),
    )
    saved = work.frozen / (H200.products * SHARES["learning"].eager) * (1 - 1 / 0.71)
    assert stored.passes - rounded.passes == pytest.approx(3 * 64 * saved, rel=1e-6)
    assert rounded.flops == stored.flops
    assert rounded.steps == pytest.approx(stored.steps, rel=1e-2)  # Fewer layers have fewer adapters.
    assert actor_cost(config, work, H200) == actor_cost(measured_run, models[1], H200)


def test_a_published_world_that_refuses_float8_is_not_reckoned_with() -> None:
    with pytest.raises(ConfigError, match=r"--imagination.precision is float8, but of an EVAC world"):
        published_run(in_float8(recipe("evac_libero_spatial_grpo_openvlaoft")))


def test_cards_of_the_same_chip_differ_by_what_fits(
    measured_run: TrainConfig, models: tuple[Sizes, RunWork]
) -> None:
    sizes, work = models
    wide = replace(measured_run, actor=replace(measured_run.actor, slots=32))
    small, large = (predict(wide, work, sizes, card, parse_placement(*TWO, 0)) for card in (H100, H200))
    assert (small.fits(H100), large.fits(H200)) == (False, True)
    assert small.seconds == pytest.approx(large.seconds, rel=0.02)


@pytest.mark.parametrize("flag", ["policy", "world"])
def test_models_that_nobody_published_are_refused(measured_run: TrainConfig, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag} is models/mine"):
        published_run(replace(measured_run, **{flag: "models/mine"}))

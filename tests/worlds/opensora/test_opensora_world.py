"""The OpenSora world: decisions by hand, slots, starts, compiled worlds, rectified flow, action ranges."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.records import Bounds
from asyncrl.worlds.opensora.files import STEPS, ends_on, read_action_range
from asyncrl.worlds.opensora.world import OpenSoraWorld, normalise, sample, sampling_times
from support import tiny_models
from support.opensora import RANGE, by_diffusers, nano_world


@pytest.fixture(scope="module")
def world() -> OpenSoraWorld:
    return nano_world()


start_state = partial(tiny_models.start_state, size=32)


def some_actions(batch: int, seed: int = 0) -> Tensor:
    return 0.5 * torch.randn(batch, 8, 7, generator=torch.Generator().manual_seed(seed))


def grey_levels_apart(one: Tensor, other: Tensor) -> int:
    return int((one.int() - other.int()).abs().max())


def test_imagined_frames_follow_the_written_recipe(world: OpenSoraWorld) -> None:
    """Three decisions by hand: whole windows, plain Euler steps, diffusers' autoencoder frame by frame."""
    start, library = start_state(5), by_diffusers(world.vae)
    pixels = torch.tensor(start.frame).permute(2, 0, 1)[None] / 127.5 - 1
    memory = 0.13025 * library.encode(pixels).latent_dist.mean[:, :, None].repeat(1, 1, 4, 1, 1)
    state = world.start([start])
    torch.testing.assert_close(state.latents, memory, atol=1e-5, rtol=1e-5)
    low, high = torch.tensor(RANGE.q01), torch.tensor(RANGE.q99)
    for decision in range(3):
        actions = some_actions(1, decision)
        scaled = 2 * (actions - low) / (high - low) - 1
        x = torch.randn(4, 8, 4, 4, generator=torch.Generator().manual_seed(70 + decision))[None]
        for time in (1000.0, 500.0):
            window = torch.cat([memory, x], dim=2)
            x = x + world.transformer(window, torch.tensor([time]), scaled) * 0.5
        memory = x[:, :, -4:]
        drawn = torch.cat([library.decode(x[:, :, i] / 0.13025).sample for i in range(8)]).clamp(-1, 1)
        expected = ((drawn + 1) * 127.5).round().permute(0, 2, 3, 1)
        frames, state = world.imagine(state, actions, [70 + decision])
        difference = (frames[0].float() - expected).abs()
        assert difference.max() <= 1  # a level may flip where rounding is close to a half
        assert difference.mean() < 1e-2
        torch.testing.assert_close(state.latents, memory, atol=1e-5, rtol=1e-5)
    assert expected.std() > 1


def test_an_episode_goes_on_from_its_context_and_not_from_the_first_frame(world: OpenSoraWorld) -> None:
    start = start_state(6, context=4)
    state = world.start([start])
    for i in range(4):
        only = world.start(
            [replace(start, frame=start.context_frames[i], context_frames=start.context_frames[:0])]
        )
        torch.testing.assert_close(state.latents[:, :, i], only.latents[:, :, 0], atol=1e-5, rtol=1e-5)
    still = replace(start, context_frames=np.stack([start.frame] * 4))
    plain = replace(start, context_frames=start.context_frames[:0])
    # Four frames are encoded beside each other, one alone: the last digits may differ.
    torch.testing.assert_close(
        world.start([still]).latents, world.start([plain]).latents, atol=1e-5, rtol=1e-5
    )


def test_a_compiled_world_fills_its_batch_up_and_imagines_the_same(world: OpenSoraWorld, monkeypatch) -> None:
    """Whole graphs are captured for real, and run as they are: building kernels would take a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    starts, actions = [start_state(1), start_state(2)], some_actions(2)
    plain, plain_after = world.imagine(world.start(starts), actions, [11, 12])
    alone, _ = world.imagine(plain_after.select([1]), actions[:1], [13])
    # A kind of block comes in two shapes (condition frames, new frames), the decoder in one or two.
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        fixed = nano_world().compile(rows=3)
        frames, after = fixed.imagine(fixed.start(starts), actions, [11, 12])
        later, _ = fixed.imagine(after.select([1]), actions[:1], [13])
    assert frames.shape == plain.shape
    assert grey_levels_apart(frames, plain) <= 1
    torch.testing.assert_close(after.latents, plain_after.latents, atol=1e-5, rtol=1e-5)
    assert grey_levels_apart(later, alone) <= 1


@pytest.mark.gpu
def test_on_a_gpu_a_decision_waits_for_nothing_and_is_that_of_the_cpu(world: OpenSoraWorld) -> None:
    device = torch.device("cuda")
    there = nano_world().to(device)
    starts, actions = [start_state(1), start_state(2)], some_actions(2)
    state, on_device = there.start(starts), actions.to(device)
    there.imagine(state, on_device, [1, 2])  # libraries choose their kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        fresh = there.start(starts)
        frames, after = there.imagine(fresh, on_device, [1, 2])
        after.write_rows([0], after.select([1]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected, _ = world.imagine(world.start(starts), actions, [1, 2])
    assert grey_levels_apart(frames.cpu(), expected) <= 2


@pytest.mark.gpu
def test_on_a_gpu_the_graph_of_all_steps_gives_the_same_frames_after_weights_moved() -> None:
    device = torch.device("cuda")
    plain, graphed = nano_world().to(device), nano_world().to(device).compile(rows=2)
    starts, actions = [start_state(1), start_state(2)], some_actions(2).to(device)
    before, expected_before = graphed.start(starts), plain.start(starts)
    for decision in range(3):
        frames, after = graphed.imagine(before, actions, [decision, 9])
        expected, expected_after = plain.imagine(expected_before, actions, [decision, 9])
        assert grey_levels_apart(frames, expected) <= 2
        torch.testing.assert_close(after.latents, expected_after.latents, atol=1e-3, rtol=1e-3)
        before, expected_before = after, expected_after
        if decision == 1:
            graphed.to("cpu").to(device)
            graphed.weights_moved()


def test_the_sampler_visits_the_published_times() -> None:
    assert sampling_times(STEPS) == (1000, 900, 800, 700, 600, 500, 400, 300, 200, 100, 0)
    assert sampling_times(1) == (1000, 0)
    assert sampling_times(3) == pytest.approx((1000, 666.6667, 333.3333, 0), abs=1e-3)


def test_numbers_stay_float32_when_the_network_is_not() -> None:
    drawn = sample(lambda x, times: x.bfloat16(), torch.ones(1, 2), steps=10)
    assert drawn.dtype == torch.float32


LOW = [-0.7, -0.6, -0.9, -0.1, -0.2, -0.3, 0.0]
HIGH = [0.9, 0.8, 0.7, 0.2, 0.1, 0.4, 1.0]
ENDS = Bounds(q01=tuple(LOW), q99=tuple(HIGH), mask=(True,) * 7)


def write(folder: Path, content: Any) -> Path:
    (folder / "dataset_statistics.json").write_text(json.dumps(content))
    return folder


def entry(**changes: Any) -> dict[str, Any]:
    return {"action": {"q01": LOW, "q99": HIGH, "mask": [True] * 6 + [False], "mean": [0] * 7, **changes}}


def test_percentiles_become_one_and_nothing_is_clipped_not_even_the_gripper() -> None:
    actions = torch.randn(3, 8, 7, generator=torch.Generator().manual_seed(0))
    low, high = ends_on(ENDS, torch.device("cpu"))
    scaled = normalise(actions, low, high)
    for i in range(3):
        for j in range(8):
            for k in range(7):
                expected = 2 * (actions[i, j, k].item() - LOW[k]) / (HIGH[k] - LOW[k]) - 1
                assert scaled[i, j, k].item() == pytest.approx(expected, abs=1e-5)
    assert scaled.abs().max() > 2
    torch.testing.assert_close(
        normalise(torch.tensor([LOW, HIGH]), low, high)[:, 6], torch.tensor([-1.0, 1.0])
    )


@pytest.mark.parametrize("nested", [False, True])
def test_both_published_forms_are_read(tmp_path: Path, nested: bool) -> None:
    content = {"libero_spatial_train": {**entry(), "num_trajectories": 3}} if nested else entry()
    assert read_action_range(write(tmp_path, content)) == ENDS


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"b_spatial": entry(), "a_object": entry()}, "one data set with q01 and q99.*too many values"),
        ({"libero": {"proprio": {}}}, "one data set.*not enough values"),
        ({}, "one data set.*not enough values"),
        (entry(q01=LOW[:6]), "7 finite numbers each.*have 6, 7 and 7 numbers"),
        ([1], r"is not JSON \(it holds a list, expected a dict\)"),
    ],
)
def test_wrong_statistics_are_refused_by_file_and_reason(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"dataset_statistics\.json.*{words}"):
        read_action_range(write(tmp_path, content))


def test_missing_statistics_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"dataset_statistics\.json is missing\. Copy the one"):
        read_action_range(tmp_path)

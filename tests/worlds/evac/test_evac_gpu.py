"""The EVAC world on a GPU: it waits for nothing, and draws what the CPU draws."""

import pytest
import torch

from asyncrl.worlds.evac.ddim import normal_noise, normal_words, seed_words
from asyncrl.worlds.evac.world import EvacWorld
from support.evac import some_actions, start_state, tiny_config, tiny_networks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = tiny_config()


def cuda_world() -> EvacWorld:
    return EvacWorld(tiny_networks(CONFIG), CONFIG, device="cuda")


@pytest.mark.parametrize("compiled", [False, True])
def test_imagining_makes_no_call_that_waits(compiled: bool) -> None:
    world = cuda_world()
    if compiled:
        world.compile(4)
    state = world.start([start_state(1), start_state(2, context=4)], decisions=3)
    actions = some_actions(2).cuda()
    world.imagine(state, actions, [1, 2])  # compiles, captures, and lets libraries choose their kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        _, state = world.imagine(state, actions, [1, 2])
        _, state = world.imagine(state, actions, [3, 4])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.finite.all()


def test_compiled_noise_is_the_noise() -> None:
    seeds = torch.from_numpy(seed_words([1, 2**62 + 3])).cuda()
    draw, shape = torch.tensor(5, device="cuda"), (4, 100_000)
    compiled = torch.compile(normal_words, fullgraph=True, dynamic=False)
    got = normal_noise(seeds, draw, shape, words=compiled)
    torch.testing.assert_close(got.cpu(), normal_noise(seeds.cpu(), 5, shape), atol=1e-6, rtol=1e-5)


def test_the_gpu_draws_what_the_cpu_draws() -> None:
    worlds = [EvacWorld(tiny_networks(CONFIG), CONFIG), cuda_world()]
    starts = [start_state(1), start_state(2, context=4)]
    frames, states = [], []
    for world in worlds:
        state = world.start(starts, decisions=1)
        drawn, after = world.imagine(state, some_actions(2), [1, 2**62 + 3])
        frames.append(drawn.cpu().int())
        states.append(after.to("cpu"))
    assert (frames[0] - frames[1]).abs().max() <= 2  # grey levels
    assert (frames[0] - frames[1]).abs().float().mean() < 0.1
    torch.testing.assert_close(states[0].history, states[1].history, atol=2e-2, rtol=2e-2)


def test_compiled_and_eager_draw_the_same_and_weights_may_move() -> None:
    eager, compiled = cuda_world(), cuda_world().compile(3)
    state = eager.start([start_state(1), start_state(2)], decisions=1)
    expected, _ = eager.imagine(state, some_actions(2).cuda(), [1, 2])
    for _ in range(2):
        got, _ = compiled.imagine(state, some_actions(2).cuda(), [1, 2])
        assert (got.int() - expected.int()).abs().max() <= 2
        compiled.to("cpu").to("cuda")
        compiled.weights_moved()

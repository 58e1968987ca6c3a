"""The tiny decoder: streams against wholes, rows against neighbours, its fit, its files, its command."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.commands import fit
from asyncrl.devices.tensors import to_uint8
from asyncrl.errors import CheckpointError
from asyncrl.fitting.fit_decoder import OPENING, ImaginedVideos, compare, fit_decoder, imagine_episodes, psnr
from asyncrl.fitting.loop import Schedule
from asyncrl.fitting.world import reconstruction_loss
from asyncrl.policies.interface import SamplingParams
from asyncrl.rewards.resnet import ResNetReward, RewardConfig, RewardNetwork
from asyncrl.storage.assets import start_states_path, world_folder
from asyncrl.worlds.start_states import load_start_states
from asyncrl.worlds.wan.tiny_decoder import TinyDecoder, TinyDecoderConfig, load_decoder, save_decoder
from asyncrl.worlds.wan.vae import decode_stream
from asyncrl.worlds.wan.world import WanWorld
from support.tiny_models import nano_wan, small_policy, start_state
from support.worlds import load_world

NANO = TinyDecoderConfig(z_dim=32, widths=(8, 6, 8, 10), blocks=(1, 2, 1, 1))
TASK = "put the red cube on the white plate"
SAMPLING = SamplingParams(temperature=1.0, top_k=0)


def nano(dtype: torch.dtype = torch.float64) -> TinyDecoder:
    torch.manual_seed(0)
    return TinyDecoder(NANO).to(dtype).eval().requires_grad_(False)


def some_latents(batch: int, frames: int, seed: int = 1, size: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 32, frames, size, size, generator=generator, dtype=torch.float64)


# ---- the contract --------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_stream_equals_the_whole_video(at_once: int) -> None:
    decoder, latents = nano(), some_latents(2, 5)
    frames, cache = decoder.decode(latents[:, :, :1], None)
    streamed = [frames]
    for place in range(1, 5, at_once):
        before = [memory.clone() for memory in cache]
        frames, following = decoder.decode(latents[:, :, place : place + at_once], cache)
        assert all(torch.equal(*pair) for pair in zip(cache, before, strict=True)), (
            "decode changed its memory"
        )
        streamed.append(frames)
        cache = following
    whole = decoder(latents).clamp(-1, 1)
    assert whole.shape == (2, 3, 17, 32, 32)
    torch.testing.assert_close(torch.cat(streamed, dim=2), whole, atol=1e-13, rtol=0)


def test_a_row_of_the_memory_can_be_put_into_another_batch() -> None:
    decoder, latents = nano(), some_latents(3, 3)
    _, cache = decoder.decode(latents[:, :, :1], None)
    frames, _ = decoder.decode(latents[:, :, 1:], cache)
    _, others = decoder.decode(some_latents(2, 1, seed=9), None)
    for mine, theirs in zip(others, cache, strict=True):
        mine.index_copy_(0, torch.tensor([0]), theirs[2:3])
    again, _ = decoder.decode(latents[[2, 0]][:, :, 1:], others)
    torch.testing.assert_close(again[0], frames[2], atol=1e-13, rtol=0)
    assert (again[1] - frames[0]).abs().max() > 1e-5, "row 1 kept another video's memory"


def test_a_video_that_starts_with_two_latents_is_refused() -> None:
    with pytest.raises(ValueError, match="single latent frame, got 2"):
        nano().decode(some_latents(1, 2), None)


def test_the_last_layers_channels_are_frames_colours_and_pixels() -> None:
    """Channel ((frame * 3 + colour) * 2 + row) * 2 + column is one pixel of a 2x2 patch."""
    decoder = nano()
    torch.nn.init.zeros_(decoder.draw.weight)
    assert decoder.draw.bias is not None
    decoder.draw.bias.copy_(torch.arange(48))
    _, cache = decoder.decode(some_latents(1, 1), None)
    frames, _ = decoder.decode(some_latents(1, 2), cache, clamp=False)
    for frame in range(8):
        for colour in range(3):
            patch = torch.tensor([[0, 1], [2, 3]]) + ((frame % 4) * 3 + colour) * 4
            assert torch.equal(frames[0, colour, frame], patch.double().tile(16, 16))


def test_a_compiler_sees_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps its numbers; `backend` stands for the steps before code is generated, which take minutes."""
    eager, compiled, latents = nano(torch.float32), nano(torch.float32), some_latents(2, 5).float()
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    compiled.compile()
    _, cache = compiled.decode(latents[:, :, :1], None)
    for batch in (1, 2, 3):  # as many slots as happen to begin
        _, opened = compiled.decode(some_latents(batch, 1).float(), None)
        compiled.decode(some_latents(batch, 1).float(), opened)
    assert not graphs
    for place in (1, 3):
        new = latents[:, :, place : place + 2]
        expected, _ = eager.decode(new, cache)
        frames, cache = compiled.decode(new, cache)
        torch.testing.assert_close(frames, expected)
    assert len(graphs) == 1


@pytest.mark.gpu
def test_a_cuda_graph_draws_the_same_frames() -> None:
    torch.manual_seed(0)
    decoder = TinyDecoder(TinyDecoderConfig.full()).to("cuda", torch.bfloat16).eval().requires_grad_(False)
    latents = torch.randn(2, 48, 3, 16, 16, device="cuda")
    _, cache = decoder.decode(latents[:, :, :1], None)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decoder.decode(latents[:, :, 1:], cache)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        frames, after = decoder.decode(latents[:, :, 1:], cache)
    latents.copy_(torch.randn_like(latents))
    graph.replay()
    expected, memory = decoder.decode(latents[:, :, 1:], cache)
    assert frames.shape == (2, 3, 8, 256, 256)
    torch.testing.assert_close(frames, expected, atol=2e-2, rtol=0)
    for mine, theirs in zip(after, memory, strict=True):
        torch.testing.assert_close(mine, theirs, atol=5e-2, rtol=5e-2)


# ---- files ---------------------------------------------------------------------------------------


def save(folder: Path, mean: float = 0.25) -> TinyDecoder:
    decoder = nano(torch.float32)
    save_decoder(folder, decoder, latents_mean=[mean] * 32, latents_std=[1.5] * 32, fit={"psnr": 30.0})
    return decoder


def load(folder: Path) -> TinyDecoder:
    return load_decoder(folder, latents_mean=[0.25] * 32, latents_std=[1.5] * 32)


def test_a_decoder_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    saved, loaded = save(tmp_path), load(tmp_path)
    assert loaded.config == NANO
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    latents = some_latents(1, 3).float()
    assert torch.equal(saved(latents), loaded(latents))


def test_a_folder_without_a_tiny_decoder_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"asyncrl fit decoder --world {tmp_path}"):
        load(tmp_path)


def test_a_decoder_of_another_autoencoder_is_refused(tmp_path: Path) -> None:
    save(tmp_path, mean=0.26)
    with pytest.raises(CheckpointError, match="belongs to another autoencoder"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format 'other'"),
        ({"config": {"widths": [8, 8, 8, 8]}}, "is incomplete .*blocks"),
        ({"config": {"z_dim": 32, "widths": [8, 6, 8, 12], "blocks": [1, 2, 1, 1]}}, "another size"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    save(tmp_path)
    file = tmp_path / "decoder.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def nano_world() -> WanWorld:
    torch.manual_seed(2)
    return nano_wan(1)


def imagine(world: WanWorld, count: int, batch: int) -> ImaginedVideos:
    policy = small_policy(llm_layers=1)
    starts = [start_state(seed, task=TASK) for seed in range(count)]
    return imagine_episodes(world, policy, SAMPLING, starts, decisions=2, batch=batch, seed=5, name="imagine")


@pytest.fixture(scope="module")
def world() -> WanWorld:
    return nano_world()


@pytest.fixture(scope="module")
def imagined(world: WanWorld) -> ImaginedVideos:
    return imagine(world, 3, batch=2)


def test_latents_and_frames_of_an_episode_belong_together(world: WanWorld, imagined: ImaginedVideos) -> None:
    assert imagined.latents.shape == (3, 32, 6, 4, 4)
    assert imagined.frames.shape == (3, 21, 64, 64, 3)
    drawn = to_uint8(decode_stream(world.vae, imagined.latents)).permute(0, 2, 3, 4, 1)
    assert (drawn.int() - imagined.frames.int()).abs().max() <= 1  # a number may round to either side
    assert not hasattr(world.decoder, "frames"), "the recorder stayed in the world"


# ---- the fit -------------------------------------------------------------------------------------


def test_the_loss_and_its_gradient_follow_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn, wanted = (torch.rand(2, 3, 2, 2, 2, generator=generator, dtype=torch.float64) for _ in "ab")
    background = torch.rand(3, 2, 2, generator=generator, dtype=torch.float64)
    total, gradient = 0.0, torch.zeros_like(drawn)
    for b, t, y, x in np.ndindex(2, 2, 2, 2):
        away = sum(abs(float(wanted[b, c, t, y, x] - background[c, y, x])) for c in range(3)) / 3
        for c in range(3):
            error = float(drawn[b, c, t, y, x] - wanted[b, c, t, y, x])
            total += (1 + 20 * away) * (abs(error) + 2 * error**2) / drawn.numel()
            sign = 1 if error > 0 else -1
            gradient[b, c, t, y, x] = (1 + 20 * away) * (sign + 4 * error) / drawn.numel()
    drawn.requires_grad_(True)
    loss = reconstruction_loss(drawn, wanted, background)
    loss.backward()
    assert loss.item() == pytest.approx(total, abs=1e-12)
    assert drawn.grad is not None
    torch.testing.assert_close(drawn.grad, gradient, atol=1e-12, rtol=0)


def random_reward() -> ResNetReward:
    torch.manual_seed(4)
    size = RewardConfig(widths=(4, 4, 4, 4), tasks=(TASK,), embed_dim=4, hidden_dim=4, image_size=64)
    return ResNetReward(RewardNetwork(size), size)


def test_a_fit_brings_the_frames_nearer_and_repeats_itself(imagined: ImaginedVideos) -> None:
    def fitted(steps: int) -> TinyDecoder:
        torch.manual_seed(0)
        decoder = TinyDecoder(NANO)
        schedule = Schedule(steps=steps, batch=2, learning_rate=1e-1)  # warms up over 200 steps
        fit_decoder(decoder, imagined, schedule)
        return decoder

    fresh, short, longer, again = (fitted(steps) for steps in (1, 4, 40, 4))
    decibels = [compare(decoder, imagined, None, threshold=0.5).psnr for decoder in (fresh, longer)]
    assert decibels[1] > decibels[0] + 2
    assert all(torch.equal(a, b) for a, b in zip(short.parameters(), again.parameters(), strict=True))


def test_a_decoder_is_like_itself_and_unlike_another(imagined: ImaginedVideos) -> None:
    decoder, reward = nano(torch.float32), random_reward()
    own = replace(imagined, frames=to_uint8(decoder(imagined.latents)).permute(0, 2, 3, 4, 1))
    scores = reward.score(own.frames[:, OPENING:], own.tasks)
    threshold = float(scores.median())
    same = compare(decoder, own, reward, threshold=threshold)
    assert (same.psnr, same.same_verdict, same.same_outcome) == (pytest.approx(78.13, abs=0.01), 1.0, 1.0)
    assert same.success == float((scores >= threshold).any(1).float().mean())
    other = replace(own, frames=255 - own.frames)
    verdicts = [reward.score(e.frames[:, OPENING:], e.tasks) >= threshold for e in (own, other)]
    unlike = compare(decoder, other, reward, threshold=threshold)
    assert unlike.psnr < 30
    assert unlike.same_verdict == pytest.approx(float((verdicts[0] == verdicts[1]).float().mean()))
    assert np.isnan(compare(decoder, own, None, threshold=threshold).same_verdict)


def test_the_shipped_decoder_draws_what_the_full_one_draws() -> None:
    folder = world_folder("tabletop")
    world, reward = load_world(folder), ResNetReward.load(folder, torch.device("cpu"), ())
    size = world.vae.size
    tiny = load_decoder(folder, latents_mean=size.latents_mean, latents_std=size.latents_std)
    starts = load_start_states(start_states_path("tabletop", "tabletop"))[:4]
    torch.manual_seed(0)
    actions = [torch.rand(4, 8, 7) * 2 - 1 for _ in range(2)]
    drawn = []
    for decoder in (world.decoder, tiny):
        world.decoder, state = decoder, None
        state = world.start(starts)
        for number, chunk in enumerate(actions):
            frames, state = world.imagine(state, chunk, [10 * number + row for row in range(4)])
            drawn.append(frames)
    full, ours = (torch.cat(part, dim=1) for part in (drawn[:2], drawn[2:]))
    assert psnr(full, ours).mean() > 26
    scores = [reward.score(frames, [start.task for start in starts]) for frames in (full, ours)]
    assert (scores[0] - scores[1]).abs().mean() < 0.1


def test_the_command_fits_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--episodes", "2", "--held-out", "1", "--decisions", "1", "--steps", "2", "--batch", "1"]
    fit.main(["decoder", *small, "--device", "cpu", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "on 1 held-out episodes" in printed
    assert "same verdict" in printed
    content = json.loads((tmp_path / "decoder.json").read_text())
    assert content["fit"]["steps"] == 2
    assert content["config"]["widths"] == [48, 64, 48, 32]
    decoder = load_decoder(tmp_path, latents_mean=content["latents_mean"], latents_std=content["latents_std"])
    assert decoder.decode(torch.zeros(1, 32, 1, 4, 4), None)[0].shape == (1, 3, 1, 64, 64)

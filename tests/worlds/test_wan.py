"""World models: numbers against slow formulas, streams against wholes, slots against their neighbours."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.errors import AssetError, CheckpointError
from asyncrl.worlds.start_states import StartStateStream, load_start_states, save_start_states, start_state_at
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig
from asyncrl.worlds.wan.vae import VaeConfig, WanVae, decode_step, decode_stream, encode_step, encode_stream
from asyncrl.worlds.wan.world import (
    CONTEXT_SIGMA,
    WanWorld,
    sampling_sigmas,
    save_world,
    training_tables,
    window_loss,
)
from support.formulas import gelu, gelu_tanh, rms_norm, silu, standardised
from support.published_exports import TRANSFORMER_NAMES
from support.tiny_models import start_state
from support.worlds import load_world

NANO = TransformerConfig(heads=2, head_dim=24, layers=2, ffn_dim=40, channels=32, patch=2, freq_dim=32)


def nano_vae() -> WanVae:
    torch.manual_seed(1)
    mean, std = tuple(0.1 * i for i in range(32)), tuple(0.5 + 0.1 * i for i in range(32))
    size = replace(VaeConfig.tiny(), base_dim=4, decoder_base_dim=4, latents_mean=mean, latents_std=std)
    return WanVae(size).eval().requires_grad_(False)


def nano_transformer(size: TransformerConfig = NANO) -> ActionWanTransformer:
    torch.manual_seed(2)
    return ActionWanTransformer(size).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def world() -> WanWorld:
    return WanWorld(nano_transformer(), nano_vae(), image_size=64, schedule_steps=2, version=3)


def some_actions(batch: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, 8, 7, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("steps", "times"),
    [
        (1, [1000, 0]),
        (3, [1000, 909.0909, 714.2857, 0]),
        (5, [1000, 952.381, 882.3529, 769.2308, 555.5556, 0]),
    ],
)
def test_the_sampler_visits_the_published_noise_levels(steps: int, times: list[float]) -> None:
    assert [1000 * s for s in sampling_sigmas(steps)] == pytest.approx(times, abs=1e-3)


def test_training_levels_and_weights_follow_the_formula() -> None:
    times = [1000 * 5 * (1 - i / 1000) / (1 + 4 * (1 - i / 1000)) for i in range(1000)]
    bell = [math.exp(-2 * ((t - 500) / 1000) ** 2) for t in times]
    raised = [b - min(bell) for b in bell]
    expected = [r * 1000 / sum(raised) for r in raised]
    torch.testing.assert_close(1000 * training_tables()[0], torch.tensor(times), atol=1e-3, rtol=0)
    torch.testing.assert_close(training_tables()[1], torch.tensor(expected), atol=1e-5, rtol=0)
    assert (
        training_tables()[0][950].item() == pytest.approx(CONTEXT_SIGMA) == pytest.approx(0.208333, abs=1e-6)
    )


def rotate(head: Tensor, places: list[tuple[int, int, int]], width: int) -> Tensor:
    """Rotate pairs of channels of one head by angles of the token's (frame, row, column)."""
    third = width // 3 // 2 * 2
    split = [width - 2 * third, third, third]
    turned = []
    for token, place in zip(head, places, strict=True):
        angles = [
            place[axis] / 10000 ** (2 * i / split[axis]) for axis in range(3) for i in range(split[axis] // 2)
        ]
        numbers = torch.view_as_complex(token.double().reshape(-1, 2))
        turned.append(
            torch.view_as_real(
                numbers * torch.polar(torch.ones(len(angles)).double(), torch.tensor(angles).double())
            ).reshape(-1)
        )
    return torch.stack(turned).float()


def attention(
    w: dict[str, Tensor],
    name: str,
    x: Tensor,
    context: Tensor,
    heads: int,
    places: list[tuple[int, int, int]] | None,
) -> Tensor:
    def linear(part: str, value: Tensor) -> Tensor:
        return value @ w[f"{name}.{part}.weight"].T + w[f"{name}.{part}.bias"]

    q = rms_norm(linear("q", x), w[f"{name}.norm_q.weight"])
    k = rms_norm(linear("k", context), w[f"{name}.norm_k.weight"])
    v = linear("v", context)
    width = q.shape[1] // heads
    outs = []
    for i in range(heads):
        part = slice(i * width, (i + 1) * width)
        qi, ki = q[:, part], k[:, part]
        if places is not None:
            qi, ki = rotate(qi, places, width), rotate(ki, places, width)
        outs.append((qi @ ki.T / math.sqrt(width)).softmax(-1) @ v[:, part])
    return linear("o", torch.cat(outs, dim=1))


def slow_transformer(
    w: dict[str, Tensor], size: TransformerConfig, x: Tensor, times: list[float], actions: Tensor
) -> Tensor:
    """One sample ``[Z, F, h, w]`` by the description of the published model, with its tensor names."""
    channels, frames, height, width = x.shape
    p, d = size.patch, size.heads * size.head_dim
    places = [(f, i, j) for f in range(frames) for i in range(height // p) for j in range(width // p)]
    patches = torch.stack([x[:, f, i * p : i * p + p, j * p : j * p + p].reshape(-1) for f, i, j in places])
    tokens = patches @ w["patch_embedding.weight"].reshape(d, -1).T + w["patch_embedding.bias"]

    def mlp(name: str, value: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        value = value @ w[f"{name}.0.weight"].T + w[f"{name}.0.bias"]
        value = act(value)
        return value @ w[f"{name}.2.weight"].T + w[f"{name}.2.bias"]

    repeated = torch.stack([actions[0]] * 3 + list(actions))
    embeddings = []
    for f in range(frames):
        half = size.freq_dim // 2
        angles = [times[f] * 10000 ** (-i / half) for i in range(half)]
        wave = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles])
        four_actions = repeated[4 * f : 4 * f + 4].reshape(-1)
        embeddings.append(mlp("time_embedding", wave, silu) + mlp("action_mlp2", four_actions, silu))
    per_token = torch.stack([embeddings[f] for f, _, _ in places])
    active = per_token * per_token.sigmoid()
    six = (active @ w["time_projection.1.weight"].T + w["time_projection.1.bias"]).reshape(-1, 6, d)
    context = mlp("action_mlp1", actions, gelu)
    for n in range(size.layers):
        b = {
            name.removeprefix(f"blocks.{n}."): value
            for name, value in w.items()
            if name.startswith(f"blocks.{n}.")
        }
        shift1, scale1, gate1, shift2, scale2, gate2 = (six + b["modulation"]).unbind(1)
        seen = standardised(tokens) * (1 + scale1) + shift1
        tokens = tokens + gate1 * attention(b, "self_attn", seen, seen, size.heads, places)
        seen = standardised(tokens) * b["norm3.weight"] + b["norm3.bias"]
        tokens = tokens + attention(b, "cross_attn", seen, context, size.heads, None)
        seen = standardised(tokens) * (1 + scale2) + shift2
        inner = gelu_tanh(seen @ b["ffn.0.weight"].T + b["ffn.0.bias"])
        tokens = tokens + gate2 * (inner @ b["ffn.2.weight"].T + b["ffn.2.bias"])
    shift, scale = (w["head.modulation"] + per_token[:, None]).unbind(1)
    out = (standardised(tokens) * (1 + scale) + shift) @ w["head.head.weight"].T + w["head.head.bias"]
    result = torch.zeros_like(x)
    for token, (f, i, j) in zip(out, places, strict=True):
        result[:, f, i * p : i * p + p, j * p : j * p + p] = token.reshape(p, p, channels).permute(2, 0, 1)
    return result


@pytest.mark.parametrize("patch", [1, 2])
def test_the_transformer_computes_what_the_published_one_is_said_to(patch: int) -> None:
    size = replace(NANO, patch=patch)
    model = nano_transformer(size)
    for parameter in model.parameters():  # so that norms and biases count
        parameter.add_(0.05 * torch.randn(parameter.shape))
    latents, actions = torch.randn(2, 32, 4, 4, 4), torch.randn(2, 13, 7)
    times = torch.tensor([[0, 0, 952.381, 952.381], [0, 0, 555.5556, 555.5556]])
    weights = {TRANSFORMER_NAMES[name]: value for name, value in model.state_dict().items()}
    expected = [slow_transformer(weights, size, latents[i], times[i].tolist(), actions[i]) for i in range(2)]
    torch.testing.assert_close(model(latents, times, actions), torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_published_checkpoints_see_bfloat16_times() -> None:
    rounding = nano_transformer(replace(NANO, round_timestep=True))
    exact = nano_transformer(NANO)
    latents, actions = torch.randn(1, 32, 4, 4, 4), torch.randn(1, 13, 7)
    times = 1000 * torch.tensor(sampling_sigmas(5)[:5])
    seen = torch.tensor([1000.0, 952.0, 884.0, 768.0, 556.0])
    for time, rounded in zip(times, seen, strict=True):
        window = torch.tensor([0.0, 0.0, 1.0, 1.0])[None]
        torch.testing.assert_close(
            rounding(latents, time * window, actions), exact(latents, rounded * window, actions)
        )


def test_streams_equal_the_autoencoder_on_whole_videos() -> None:
    vae = nano_vae()
    video = torch.rand(2, 3, 17, 32, 32) * 2 - 1
    raw = vae.encode(video).latent_dist.mode()
    mean, std = torch.tensor(vae.size.latents_mean), torch.tensor(vae.size.latents_std)
    normalised = (raw - mean[:, None, None, None]) / std[:, None, None, None]
    torch.testing.assert_close(encode_stream(vae, video), normalised, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(encode_stream(vae, video, frames_per_step=4), normalised, atol=1e-5, rtol=1e-5)
    decoded = vae.decode(raw).sample
    assert decoded.shape == (2, 3, 17, 32, 32)
    for at_once in (1, 2, 4):
        streamed = decode_stream(vae, normalised, latents_per_step=at_once)
        torch.testing.assert_close(streamed, decoded, atol=1e-5, rtol=1e-5)


def test_frames_that_do_not_fit_the_rhythm_of_the_autoencoder_are_refused() -> None:
    vae = nano_vae()
    with pytest.raises(ValueError, match=r"1 \+ 4 k frames, got 6"):
        encode_stream(vae, torch.zeros(1, 3, 6, 32, 32))
    with pytest.raises(ValueError, match="got 2 frames"):
        encode_step(vae, torch.zeros(1, 3, 2, 32, 32), None)
    with pytest.raises(ValueError, match="single latent frame, got 2"):
        decode_step(vae, torch.zeros(1, 32, 2, 2, 2), None)


def denoised(world: WanWorld, given: Tensor, history: Tensor, actions: Tensor, seed: int) -> Tensor:
    """The two new latents behind `given` anchor and memory, by plain Euler steps."""
    x = torch.randn(32, 4, 4, 4, generator=torch.Generator().manual_seed(seed))[None, :, 2:]
    all_actions = torch.cat([torch.tensor([[0, 0, 0, 0, 0, 0, -1.0]]), history, actions])[None]
    for time, following in ((1000.0, 5 / 6 * 1000), (5 / 6 * 1000, 0.0)):
        window = torch.cat([given, x], dim=2)
        velocity = world.transformer(window, torch.tensor([[0, 0, time, time]]), all_actions)[:, :, 2:]
        x = x + velocity * (following - time) / 1000
    return x


@pytest.mark.parametrize("memory", ["latents", "frames"])
def test_imagined_frames_follow_the_written_recipe(world: WanWorld, memory: Any) -> None:
    """Two decisions by hand, with whole-video encode and decode.

    The latents go on as one video; or [first, last four] frames are encoded anew, as published.
    """
    asked = WanWorld(world.transformer, world.vae, image_size=64, schedule_steps=2, memory=memory)
    start = start_state(5, context=4)
    actions = [some_actions(1, 1)[0], some_actions(1, 2)[0]]
    seen = torch.tensor(np.concatenate([start.frame[None], start.context_frames]))
    history, drawn = torch.tensor(start.context_actions), []
    latents = encode_stream(world.vae, (seen / 127.5 - 1).permute(3, 0, 1, 2)[None])
    for decision in range(2):
        x = denoised(world, latents[:, :, [0, -1]], history, actions[decision], 70 + decision)
        latents, history = torch.cat([latents, x], dim=2), actions[decision][4:]
        video = decode_stream(world.vae, latents, latents_per_step=1)
        drawn.append(((video[0, :, -8:] + 1) * 127.5).round().permute(1, 2, 3, 0))
        if memory == "frames":
            seen = torch.cat([seen[:1], drawn[-1][-4:].to(torch.uint8)])
            latents = encode_stream(world.vae, (seen / 127.5 - 1).permute(3, 0, 1, 2)[None])

    state = asked.start([start])
    first, state = asked.imagine(state, actions[0][None], [70])
    second, state = asked.imagine(state, actions[1][None].numpy(), [71])
    frames = torch.cat([first, second], dim=1)[0].float()
    assert (frames - torch.cat(drawn)).abs().max() <= 1  # a level may flip where rounding is close to a half
    assert (frames - torch.cat(drawn)).abs().mean() < {"latents": 1e-3, "frames": 1e-2}[memory]
    torch.testing.assert_close(state.anchor, latents[:, :, :1], atol=1e-5, rtol=1e-5)
    if memory == "latents":
        torch.testing.assert_close(state.memory, latents[:, :, -1:], atol=1e-5, rtol=1e-5)


def test_a_compiled_world_fills_its_batch_up_and_imagines_the_same(world: WanWorld, monkeypatch) -> None:
    """Whole graphs are captured for real, and run as they are: building kernels would take a minute."""
    compiler, module_compiler = torch.compile, torch.nn.Module.compile
    monkeypatch.setattr(torch, "compile", partial(compiler, backend="eager"))
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(module_compiler, backend="eager"))
    fixed = WanWorld(world.transformer, world.vae, image_size=64, schedule_steps=2).compile(rows=3)
    starts, actions = [start_state(1), start_state(2)], some_actions(2)
    frames, after = fixed.imagine(fixed.start(starts), actions, [11, 12])
    plain, plain_after = world.imagine(world.start(starts), actions, [11, 12])
    assert frames.shape == plain.shape
    assert (frames.int() - plain.int()).abs().max() <= 1
    torch.testing.assert_close(after.memory, plain_after.memory, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("noisy", [True, False])
def test_the_window_loss_is_the_weighted_error_of_the_new_latents(noisy: bool) -> None:
    model = nano_transformer()
    latents, actions = torch.randn(3, 32, 4, 4, 4), torch.randn(3, 13, 7)
    result = window_loss(model, latents, actions, torch.Generator().manual_seed(8), context_noise=noisy)
    g = torch.Generator().manual_seed(8)
    ids = torch.randint(0, 1000, (3,), generator=g)
    noise, memory_noise = torch.randn(3, 32, 2, 4, 4, generator=g), torch.randn(3, 32, 1, 4, 4, generator=g)
    expected = []
    for i, n in enumerate(ids.tolist()):
        sigma = 5 * (1 - n / 1000) / (1 + 4 * (1 - n / 1000))
        window = latents[i].clone()
        if noisy:
            window[:, 1:2] = (1 - 0.2083333) * window[:, 1:2] + 0.2083333 * memory_noise[i]
        window[:, 2:] = (1 - sigma) * window[:, 2:] + sigma * noise[i]
        times = torch.tensor([[0, 0, 1000 * sigma, 1000 * sigma]])
        velocity = model(window[None], times, actions[i : i + 1])[0, :, 2:]
        error = (velocity - (noise[i] - latents[i, :, 2:])).pow(2).mean()
        expected.append(error * training_tables()[1][n])
    assert result.item() == pytest.approx(sum(e.item() for e in expected) / 3, rel=1e-4)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for enabled in (False, True):
        model = nano_transformer().train().requires_grad_(True)
        if enabled:
            model.enable_gradient_checkpointing()
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn(1, 32, 4, 4, 4, generator=generator)
        window_loss(model, latents, torch.ones(1, 13, 7), generator).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(list(model.parameters()))
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_a_broken_world_names_file_tensor_and_shapes(world: WanWorld, tmp_path: Path) -> None:
    save_world(tmp_path, world)
    file = tmp_path / "transformer.safetensors"
    save_file(load_file(file) | {"proj_out.bias": torch.zeros(3)}, file)
    said = r"transformer.safetensors: tensor proj_out.bias has shape \[3\], the model needs \[128\]"
    with pytest.raises(CheckpointError, match=said):
        load_world(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load_world(tmp_path)
    (tmp_path / "world.json").write_text(json.dumps({"format": "asyncrl-world-2", "kind": "wan"}))
    with pytest.raises(CheckpointError, match="incomplete"):
        load_world(tmp_path)


@pytest.mark.parametrize("contexts", [(0, 0), (0, 4), (4, 4)])
def test_start_states_survive_the_file(tmp_path: Path, contexts: tuple[int, int]) -> None:
    states = [start_state(i, context=k, size=8) for i, k in enumerate(contexts)]
    states[0] = replace(states[0], task="open the tür")
    save_start_states(tmp_path / "starts.h5", states)
    for loaded, original in zip(load_start_states(tmp_path / "starts.h5"), states, strict=True):
        assert (loaded.name, loaded.task) == (original.name, original.task)
        for field in ("frame", "context_frames", "context_actions"):
            np.testing.assert_array_equal(getattr(loaded, field), getattr(original, field))
            assert getattr(loaded, field).dtype == getattr(original, field).dtype
    assert len(load_start_states(tmp_path)) == 2


def test_what_is_not_a_file_of_start_states_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match="holds no start states"):
        load_start_states(tmp_path)
    with pytest.raises(AssetError, match="do not exist"):
        load_start_states(tmp_path / "absent.h5")
    np.save(tmp_path / "traj0.npy", np.zeros(3))
    for path in (tmp_path, tmp_path / "traj0.npy"):
        with pytest.raises(AssetError, match="one-dimensional array of objects"):
            load_start_states(path)
    (tmp_path / "noise.h5").write_bytes(b"noise")
    with pytest.raises(AssetError, match="cannot be read"):
        load_start_states(tmp_path / "noise.h5")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file.attrs["format"] = "something else"
    with pytest.raises(AssetError, match="something else"):
        load_start_states(tmp_path / "other.h5")


def test_start_states_that_do_not_belong_together_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match="no start states"):
        save_start_states(tmp_path / "a.h5", [])
    with pytest.raises(AssetError, match="share a name"):
        save_start_states(tmp_path / "a.h5", [start_state(1, size=8), start_state(1, size=8)])
    with pytest.raises(AssetError, match="differ in image shape"):
        save_start_states(tmp_path / "a.h5", [start_state(1, size=8), start_state(2, size=16)])


def test_a_stream_visits_every_start_state_once_per_turn_wherever_it_is_continued() -> None:
    states = [start_state(i, size=8) for i in range(5)]
    stream = StartStateStream(states, seed=3)
    names = [stream[n].name for n in range(15)]
    for turn in range(3):
        assert sorted(names[5 * turn : 5 * turn + 5]) == [f"start-{i}" for i in range(5)]
    assert len({tuple(names[5 * turn : 5 * turn + 5]) for turn in range(3)}) > 1
    later = StartStateStream(states, seed=3)
    assert [later[n].name for n in range(7, 15)] == names[7:]
    assert [start_state_at(states, 3, n).name for n in range(15)] == names
    assert [start_state_at(states, 4, n).name for n in range(15)] != names


def test_a_vae_that_imagined_before_can_be_fitted_in_the_same_process() -> None:
    vae = WanVae(replace(VaeConfig.tiny(), base_dim=4, decoder_base_dim=4))
    video = torch.rand(1, 3, 1, 16, 16)
    with torch.inference_mode():
        encode_stream(vae, video)
    encode_stream(vae, video).sum().backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in vae.parameters())

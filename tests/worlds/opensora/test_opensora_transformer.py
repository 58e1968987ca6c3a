"""STDiT3 against slow formulas, the prefix against the whole window, and the training objective."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from asyncrl.worlds.opensora.stdit3 import UNUSED, STDiT3, STDiT3Config
from asyncrl.worlds.opensora.world import window_loss
from support.formulas import gelu_tanh, rms_norm, silu, standardised
from support.opensora import NANO, nano_transformer
from support.published_worlds import listed_shapes


def some_inputs(batch: int = 2, *, new: int = 8, height: int = 6, width: int = 4) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    latents = torch.randn(batch, 4, 4 + new, height, width, generator=generator)
    actions = torch.randn(batch, new, 7, generator=generator)
    return latents, torch.tensor([700.0, 312.5])[:batch], actions


def linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def adaptive_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return standardised(x) * (1 + scale) + shift


def turn(x: Tensor, frame: int, rates: Tensor) -> Tensor:
    """RoPE of one head of one token: each pair of channels as a complex number."""
    turned = []
    for pair in range(len(x) // 2):
        number = complex(x[2 * pair].item(), x[2 * pair + 1].item())
        angle = frame * rates[pair].item()
        number *= complex(math.cos(angle), math.sin(angle))
        turned += [number.real, number.imag]
    return torch.tensor(turned)


def slow_attention(
    w: dict[str, Tensor], name: str, tokens: list[Tensor], heads: int, rates: Tensor | None
) -> list[Tensor]:
    """Attention over the tokens of a list; with `rates` they are frames: turned, and blind to the future."""
    width = len(tokens[0])
    size = width // heads
    heads_of = [linear(w, f"{name}.qkv", x).reshape(3, heads, size) for x in tokens]
    outs = [torch.zeros(width) for _ in tokens]
    for head in range(heads):
        queries = [rms_norm(qkv[0, head], w[f"{name}.q_norm.weight"]) for qkv in heads_of]
        keys = [rms_norm(qkv[1, head], w[f"{name}.k_norm.weight"]) for qkv in heads_of]
        if rates is not None:
            queries = [turn(q, frame, rates) for frame, q in enumerate(queries)]
            keys = [turn(k, frame, rates) for frame, k in enumerate(keys)]
        for i, query in enumerate(queries):
            seen = range(i + 1) if rates is not None else range(len(tokens))
            weights = [math.exp((query @ keys[j]).item() / math.sqrt(size)) for j in seen]
            mixed = sum(weight * heads_of[j][2, head] for weight, j in zip(weights, seen, strict=True))
            outs[i][head * size : (head + 1) * size] = mixed / sum(weights)
    return [linear(w, f"{name}.proj", out) for out in outs]


def slow_times(w: dict[str, Tensor], time: float, channels: int) -> Tensor:
    half = channels // 2
    angles = [time * 10000 ** (-i / half) for i in range(half)]
    waves = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles])
    return linear(w, "t_embedder.mlp.2", silu(linear(w, "t_embedder.mlp.0", waves)))


def slow_position(row: int, column: int, rows: int, columns: int, width: int) -> Tensor:
    """Sine and cosine of the stretched column, then of the row: half of the channels each."""
    half, out = width // 2, []
    stretch = math.sqrt(16 * rows * 16 * columns) / 512
    base = round(math.sqrt(rows * columns))
    for place, length in ((column, columns), (row, rows)):
        at = place / stretch * base / length
        angles = [at / 10000 ** (2 * i / half) for i in range(half // 2)]
        out += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return torch.tensor(out)


def slow_block(
    w: dict[str, Tensor], name: str, x: list[list[Tensor]], shared: list[Tensor], heads: int, *, causal: bool
) -> list[list[Tensor]]:
    """One block on ``x[frame][token]``; `shared` is the ``[6 D]`` modulation of each frame."""
    frames, tokens = len(x), len(x[0])
    six = [(part.reshape(6, -1) + w[f"{name}.scale_shift_table"]).unbind(0) for part in shared]
    normed = [[adaptive_norm(token, six[f][0], six[f][1]) for token in x[f]] for f in range(frames)]
    if causal:
        by_token = [
            slow_attention(w, f"{name}.attn", [normed[f][s] for f in range(frames)], heads, w["rope.freqs"])
            for s in range(tokens)
        ]
        mixed = [[by_token[s][f] for s in range(tokens)] for f in range(frames)]
    else:
        mixed = [slow_attention(w, f"{name}.attn", normed[f], heads, None) for f in range(frames)]
    out = []
    for f in range(frames):
        row = [x[f][s] + six[f][2] * mixed[f][s] for s in range(tokens)]
        inner = [gelu_tanh(linear(w, f"{name}.mlp.fc1", adaptive_norm(t, six[f][3], six[f][4]))) for t in row]
        out.append([t + six[f][5] * linear(w, f"{name}.mlp.fc2", i) for t, i in zip(row, inner, strict=True)])
    return out


def slow_transformer(
    w: dict[str, Tensor], size: STDiT3Config, latents: Tensor, time: float, actions: Tensor
) -> Tensor:
    """Velocity of all frames of one window ``[Z, F, h, w]`` by the description of the published model.

    Of the condition frames, whose velocity nobody reads, it is that of the time of the new frames.
    """
    channels, frames, height, width = latents.shape
    p, rows, columns = size.patch, height // size.patch, width // size.patch
    x: list[list[Tensor]] = []
    for f in range(frames):
        x.append([])
        for i in range(rows):
            for j in range(columns):
                patch = latents[:, f, i * p : i * p + p, j * p : j * p + p]
                token = w["x_embedder.proj.weight"][:, :, 0].flatten(1) @ patch.flatten()
                place = slow_position(i, j, rows, columns, size.width)
                x[f].append(token + w["x_embedder.proj.bias"] + place)
    embedded = slow_times(w, time, size.freq_dim)
    given = slow_times(w, 15.0, size.freq_dim)
    made_by = [w["action_embedder.none_action.weight"][0]] * 4 + [
        linear(w, "action_embedder.fc.2", silu(linear(w, "action_embedder.fc.0", action)))
        for action in actions
    ]

    def share(embedding: Tensor) -> Tensor:
        return linear(w, "t_block.1", silu(embedding))

    spatial = [share(given if f < 4 else embedded + made_by[f]) for f in range(frames)]
    temporal = [share(given if f < 4 else embedded) for f in range(frames)]
    for n in range(size.depth):
        x = slow_block(w, f"spatial_blocks.{n}", x, spatial, size.heads, causal=False)
        x = slow_block(w, f"temporal_blocks.{n}", x, temporal, size.heads, causal=True)
    shift, scale = w["final_layer.scale_shift_table"] + embedded
    out = torch.zeros(channels, frames, height, width)
    for f in range(frames):
        for s, token in enumerate(x[f]):
            i, j = divmod(s, columns)
            numbers = linear(w, "final_layer.linear", adaptive_norm(token, shift, scale))
            patch = numbers.reshape(p, p, 2 * channels).permute(2, 0, 1)[:channels]
            out[:, f, i * p : i * p + p, j * p : j * p + p] = patch
    return out


@pytest.mark.parametrize("patch", [1, 2])
def test_the_whole_window_is_what_the_published_model_is_said_to_compute(patch: int) -> None:
    size = replace(NANO, patch=patch)
    model = nano_transformer(size)
    latents, times, actions = some_inputs(new=3, height=3 * patch, width=2 * patch)
    expected = [
        slow_transformer(model.state_dict(), size, latents[i], times[i].item(), actions[i])[:, 4:]
        for i in range(2)
    ]
    torch.testing.assert_close(model(latents, times, actions), torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_the_prefix_gives_the_velocities_of_the_whole_window_at_every_time() -> None:
    model = nano_transformer()
    latents, times, actions = some_inputs()
    prefix = model.prefix(latents[:, :, :4])
    for factor in (1.0, 0.5, 0.1):
        whole = model(latents, factor * times, actions)
        stepped = model.step(latents[:, :, 4:], factor * times, actions, prefix)
        assert whole.abs().max() > 0.1
        torch.testing.assert_close(stepped, whole, atol=1e-5, rtol=1e-5)


def test_gradients_of_prefix_and_step_are_those_of_the_whole_window() -> None:
    latents, times, actions = some_inputs()
    found = []
    for whole in (True, False):
        model = nano_transformer().requires_grad_(True)
        if whole:
            velocity = model(latents, times, actions)
        else:
            velocity = model.step(latents[:, :, 4:], times, actions, model.prefix(latents[:, :, :4]))
        velocity.square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    none = found[0].pop("action_embedder.none_action.weight")
    assert (none == 0).all()  # Condition frames have a time of their own, and with it no action.
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-4, rtol=1e-4, msg=name)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for enabled in (False, True):
        model = nano_transformer().requires_grad_(True)
        model.gradient_checkpointing = enabled
        model(*some_inputs()).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_times_are_rounded_to_the_type_of_the_weights() -> None:
    model = nano_transformer().bfloat16()
    exact, rounded = model.embed_times(torch.tensor([952.38])), model.embed_times(torch.tensor([952.0]))
    assert torch.equal(exact, rounded)
    assert not torch.equal(exact, model.embed_times(torch.tensor([956.0])))


def test_the_published_size_has_the_published_tensors_that_are_used() -> None:
    with torch.device("meta"):
        model = STDiT3(STDiT3Config.xl2())
    used = {
        n: shape for n, shape in listed_shapes("stdit3_xl2").items() if not any(part in n for part in UNUSED)
    }
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == used
    assert sum(p.numel() for p in model.parameters()) == 907_789_892


@pytest.mark.parametrize("change", [{"heads": 5}, {"width": 26, "heads": 1}, {"depth": 0}, {"freq_dim": 3}])
def test_sizes_that_cannot_be_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"size that is no size|even number of channels"):
        replace(NANO, **change)


def some_window(batch: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(batch, 4, 12, 4, 4, generator=generator), torch.randn(batch, 8, 7, generator=generator)


def test_the_loss_and_its_gradients_are_those_of_the_written_objective() -> None:
    latents, actions = some_window()
    model = nano_transformer().requires_grad_(True)
    result = window_loss(model, latents, actions, torch.Generator().manual_seed(8))
    result.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(3, generator=generator).tolist()
    noise = torch.randn(3, 4, 12, 4, 4, generator=generator)
    errors = []
    for i, logit in enumerate(logits):
        share = 1 / (1 + math.exp(-logit))
        window = torch.empty(4, 12, 4, 4)
        for frame in range(12):
            part = 0.015 if frame < 4 else share
            window[:, frame] = (1 - part) * latents[i, :, frame] + part * noise[i, :, frame]
        velocity = model(window[None], torch.tensor([1000 * share]), actions[i : i + 1])[0]
        squares = [
            (velocity[:, k] - (latents[i, :, 4 + k] - noise[i, :, 4 + k])).pow(2).sum() for k in range(8)
        ]
        errors.append(sum(squares) / (4 * 8 * 4 * 4))
    expected = torch.stack(errors)
    torch.testing.assert_close(result, expected.mean(), atol=1e-5, rtol=1e-5)
    expected.mean().backward()
    grown = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == grown.keys()
    assert {
        "t_block.1.weight",
        "spatial_blocks.0.attn.qkv.weight",
        "action_embedder.fc.0.bias",
    } < found.keys()
    for name, gradient in grown.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=name)

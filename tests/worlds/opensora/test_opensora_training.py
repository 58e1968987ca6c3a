"""The published training objective against a loop over samples, with its gradients."""

import math

import torch
from torch import Tensor

from asyncrl.worlds.opensora.world import window_loss
from support.opensora import nano_transformer


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

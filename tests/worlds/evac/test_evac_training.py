"""EVAC's training loss against the formulas, frame by frame."""

import math

import pytest
import torch
from torch import Tensor

from asyncrl.worlds.evac.ddim import Draws, chunk_loss, draw, signal_scales, signal_shares
from asyncrl.worlds.evac.unet import EvacUNet
from support.evac import TINY_UNET, randomised

SIZE = TINY_UNET
B, P, C = 3, 2, 3


def inputs(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "history_BPZhw": torch.randn(B, P, 4, 4, 4, generator=g),
        "new_BCZhw": torch.randn(B, C, 4, 4, 4, generator=g),
        "maps_BCZhw": torch.randn(B, C, 4, 4, 4, generator=g),
        "rays_6hw": torch.randn(6, 4, 4, generator=g),
        "image_BIK": torch.randn(B, 5, 24, generator=g),
        "actions_BFTK": torch.randn(B, P + C, 2, 24, generator=g),
        "fps": torch.full((B,), 2),
        "domain": torch.full((B,), 11),
    }


def some_draws(seed: int = 1) -> Draws:
    found = draw(torch.Generator().manual_seed(seed), torch.Size((B, C, 4, 4, 4)), P)
    # The levels at both ends, and a sample without tokens.
    return found._replace(levels=torch.tensor([0, 500, 999]), conditioned=torch.tensor([1.0, 0.0, 1.0]))


def slow_loss(unet: EvacUNet, given: dict[str, Tensor], draws: Draws) -> Tensor:
    shares, scales = signal_shares(), signal_scales()

    def mixed(clean: Tensor, t: int, noise: Tensor) -> Tensor:
        return math.sqrt(shares[t]) * scales[t] * clean + math.sqrt(1 - shares[t]) * noise

    losses = []
    for b in range(B):
        t = int(draws.levels[b])
        seen = []
        for p in range(P):
            clean = given["history_BPZhw"][b, p]
            level = int(draws.history_levels[b, p])
            seen.append(mixed(clean, level, draws.history_noise[b, p]))
        frames = []
        for frame in seen:
            frames.append(
                torch.cat([frame, frame, torch.ones(1, 4, 4), torch.zeros(4, 4, 4), given["rays_6hw"]])
            )
        for c in range(C):
            noisy = mixed(given["new_BCZhw"][b, c], t, draws.noise[b, c])
            told = [seen[-1], torch.zeros(1, 4, 4), given["maps_BCZhw"][b, c], given["rays_6hw"]]
            frames.append(torch.cat([noisy, *told]))
        share = float(draws.conditioned[b])
        predicted = unet(
            torch.stack(frames, 1)[None],
            torch.tensor([[0] * P + [t] * C]),
            share * given["image_BIK"][b : b + 1],
            share * given["actions_BFTK"][b : b + 1],
            torch.tensor([2]),
            torch.tensor([11]),
        )[0]
        errors = []
        for c in range(C):
            noise, clean = draws.noise[b, c], given["new_BCZhw"][b, c]
            wanted = math.sqrt(shares[t]) * noise - math.sqrt(1 - shares[t]) * scales[t] * clean
            errors.append((predicted[:, P + c] - wanted).square().mean())
        losses.append(sum(errors, torch.zeros(())) / C)
    return torch.stack(losses)


def test_loss_and_gradients_follow_the_formulas() -> None:
    unet = randomised(EvacUNet(SIZE), 1)
    assert isinstance(unet, EvacUNet)
    given, draws = inputs(), some_draws()
    leaves = [given["image_BIK"].requires_grad_(), given["actions_BFTK"].requires_grad_()]
    leaves += [p for n, p in unet.named_parameters() if not n.endswith(("attn2.to_k.weight", "_tp.weight"))]
    got = chunk_loss(unet, **given, draws=draws)
    expected = slow_loss(unet, given, draws)
    torch.testing.assert_close(got, expected.mean(), atol=1e-5, rtol=1e-5)
    mine = torch.autograd.grad(got, leaves, allow_unused=True)
    theirs = torch.autograd.grad(expected.mean(), leaves, allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert mine[0] is not None
    assert mine[0][1].abs().max() == 0  # a sample without tokens teaches them nothing
    assert mine[0][0].abs().max() > 0


def test_noise_levels_of_the_history_follow_the_rule() -> None:
    draws = draw(torch.Generator().manual_seed(0), torch.Size((4000, 1, 1, 1, 1)), 4)
    levels = draws.history_levels.double()
    assert (levels[:, :-1] >= levels[:, 1:]).all()  # the older the noisier
    assert levels.min() >= 0
    assert levels.max() <= 1000 / 3
    # 1 - cos of a uniform angle has the mean 1 - 2 / pi; the divisors are 3 to 20 alike.
    expected = (1 - 2 / math.pi) * 1000 * sum(1 / d for d in range(3, 21)) / 18 - 0.5
    assert levels.mean().item() == pytest.approx(expected, rel=0.04)
    assert draws.conditioned.mean().item() == pytest.approx(0.9, abs=0.02)
    assert set(draws.conditioned.tolist()) == {0.0, 1.0}
    share = (draws.levels < 500).double().mean().item()
    assert share == pytest.approx(0.5, abs=0.03)
    assert (draws.levels.min(), draws.levels.max()) == (0, 999)

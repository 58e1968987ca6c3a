"""What a fit computes with: rounded weights, CUDA graphs of both passes."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from asyncrl.fitting.loop import Rounded, prepared_network
from asyncrl.worlds.evac.unet import EvacUNet
from support.evac import TINY_UNET

CPU = torch.device("cpu")
BATCH, FRAMES, SIDE = 2, 12, 8


def network() -> EvacUNet:
    torch.manual_seed(0)
    unet = EvacUNet(TINY_UNET)
    for parameter in unet.parameters():
        if parameter.ndim > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.05)
    return unet


def inputs(seed: int, device: torch.device) -> list[Tensor]:
    size, generator = TINY_UNET, torch.Generator().manual_seed(seed)
    noise = [
        torch.randn(shape, generator=generator)
        for shape in (
            (BATCH, size.in_channels, FRAMES, SIDE, SIDE),
            (BATCH, 16, size.context_dim),
            (BATCH, FRAMES, 4, size.context_dim),
        )
    ]
    times = torch.randint(0, 1000, (BATCH, FRAMES), generator=generator)
    speed, robot = torch.full((BATCH,), 5.0), torch.zeros(BATCH, dtype=torch.int64)
    window, image, actions = (tensor.to(device) for tensor in noise)
    rest = [tensor.to(device) for tensor in (speed, robot)]
    return [window, times.to(device), image.requires_grad_(), actions.requires_grad_(), *rest]


def answer_and_gradients(
    run: Callable[..., Tensor], given: Sequence[Tensor], unet: EvacUNet
) -> tuple[Tensor, list[Tensor]]:
    answer = run(*given)
    sources = [*unet.parameters(), given[2], given[3]]
    loss = (answer.float() * torch.linspace(-1, 1, SIDE, device=answer.device)).square().mean()
    found = torch.autograd.grad(loss, sources, allow_unused=True)
    return answer.detach().float().clone(), [g.float().clone() for g in found if g is not None]


def apart(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Root mean square of the difference, in that of the others."""
    assert len(some) == len(others) > 0
    difference = sum(float((x - y).square().sum()) for x, y in zip(some, others, strict=True))
    return math.sqrt(difference / sum(float(y.square().sum()) for y in others))


def test_rounded_weights_give_nearly_the_same_gradients_to_the_exact_ones() -> None:
    unet, given = network(), inputs(1, CPU)
    exact, wanted = answer_and_gradients(unet, given, unet)
    answer, gradients = answer_and_gradients(Rounded(unet), given, unet)
    assert Rounded(unet)(*given).dtype == torch.bfloat16
    assert 0 < apart([answer], [exact]) < 0.03
    assert 0 < apart(gradients, wanted) < 0.05
    assert all(parameter.dtype == torch.float32 for parameter in unet.parameters())


def test_on_a_cpu_nothing_is_rounded() -> None:
    unet, given = network(), inputs(1, CPU)
    assert torch.equal(prepared_network(unet, CPU, compiled=False)(*given), unet(*given))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_of_both_passes_follows_inputs_and_weights() -> None:
    device = torch.device("cuda")
    unet = network().to(device)
    run = prepared_network(unet, device, compiled=False)
    answer_and_gradients(run, inputs(0, device), unet)  # captures
    for seed in (1, 2):
        given = inputs(seed, device)
        wanted = answer_and_gradients(Rounded(unet), given, unet)
        answer, gradients = answer_and_gradients(run, given, unet)
        assert apart([answer], [wanted[0]]) < 1e-3
        assert apart(gradients, wanted[1]) < 1e-2
        with torch.no_grad():
            for parameter in unet.parameters():
                parameter.mul_(1.1)

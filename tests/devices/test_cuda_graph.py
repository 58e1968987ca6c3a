"""A function as a CUDA graph: the same numbers, new inputs each time, weights that change in place."""

import pytest
import torch
from torch import Tensor, nn

from asyncrl.devices.tensors import CudaGraphed

pytestmark = pytest.mark.gpu


@torch.no_grad()
def test_a_captured_function_follows_its_inputs_and_weights() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 16).cuda()

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x).relu(), x * y

    captured = CudaGraphed(both)
    for scale in (1.0, 2.0):
        layer.weight.mul_(scale)
        for _ in range(2):
            x, y = torch.randn(4, 16, device="cuda"), torch.randn(4, 16, device="cuda")
            for found, expected in zip(captured(x, y), both(x, y), strict=True):
                torch.testing.assert_close(found, expected)
    layer.weight.data = torch.ones(16, 16, device="cuda")
    captured.forget()
    torch.testing.assert_close(captured(x, y)[0], both(x, y)[0])  # Weights that moved are found again.


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@torch.no_grad()
def test_the_device_need_not_be_the_current_one() -> None:
    with torch.cuda.device(0):
        layer, x = nn.Linear(16, 16).to("cuda:1"), torch.randn(4, 16, device="cuda:1")
        captured = CudaGraphed(layer)
        for scale in (1.0, 2.0):
            torch.testing.assert_close(captured(scale * x), layer(scale * x))

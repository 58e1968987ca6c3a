"""Attention by products is scaled dot-product attention, gradients included."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from asyncrl.worlds.layers import attend_by_products, attend_few

PLACES, HEADS, FRAMES, SEEN, CHANNELS = 5, 3, 8, 12, 6


def some(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(PLACES, HEADS, frames, CHANNELS) for frames in (FRAMES, SEEN, SEEN)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def causal() -> Tensor:
    return torch.ones(FRAMES, SEEN, dtype=torch.bool).tril(SEEN - FRAMES)


@pytest.mark.parametrize("visible", [None, causal()], ids=["all", "causal"])
def test_products_are_the_attention_and_have_its_gradients(visible: Tensor | None) -> None:
    by_products, fused = some(torch.float64), some(torch.float64)
    got = attend_by_products(*by_products, visible)
    wanted = functional.scaled_dot_product_attention(*fused, attn_mask=visible)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)
    weights = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(got)
    (got * weights).sum().backward()
    (wanted * weights).sum().backward()
    for own, other in zip(by_products, fused, strict=True):
        torch.testing.assert_close(own.grad, other.grad, atol=1e-12, rtol=0)


def test_half_precision_comes_out_as_it_goes_in_with_shares_that_were_not_rounded_on_the_way() -> None:
    query, key, value = (tensor.detach() for tensor in some(torch.bfloat16))
    got = attend_by_products(query, key, value, causal())
    exact = attend_by_products(query.double(), key.double(), value.double(), causal())
    assert got.dtype == torch.bfloat16
    assert (got.double() - exact).abs().max() < 0.03


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_and_a_cpu_agree() -> None:
    query, key, value = (tensor.detach() for tensor in some(torch.float32))
    on_gpu = attend_few(query.cuda(), key.cuda(), value.cuda(), causal().cuda())
    torch.testing.assert_close(on_gpu.cpu(), attend_few(query, key, value, causal()), atol=1e-5, rtol=0)

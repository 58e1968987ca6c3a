"""Frozen layers with 8-bit products: values and gradients against slow arithmetic, compiled, on a GPU."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from asyncrl.devices.float8 import FrozenFloat8Linear
from asyncrl.policies.lora import adapt

K, N = 96, 64
HALF = torch.bfloat16


def rounded(x: Tensor, dim: int) -> Tensor:
    """Round to 8 bits what is summed over along `dim`, each scaled by its largest magnitude: float64."""
    scale = x.double().abs().amax(dim, keepdim=True) / 448
    return (x.double() / scale).to(torch.float8_e4m3fn).double() * scale


class SlowProduct(torch.autograd.Function):
    """The definition: both products in float64, of matrices that were rounded and scaled back."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)  # type: ignore[attr-defined]
        return (rounded(x, -1) @ rounded(weight, 1).T).to(x.dtype)

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return (rounded(dy, -1) @ rounded(weight, 0)).to(dy.dtype), None


def frozen(into: int = K, out: int = N, *, seed: int = 0, bias: bool = True) -> nn.Linear:
    """A layer whose channels are of very different sizes, on either side."""
    torch.manual_seed(seed)
    layer = nn.Linear(into, out, bias=bias, dtype=HALF).requires_grad_(False)
    layer.weight.mul_(torch.logspace(-1, 1, out)[:, None]).mul_(torch.logspace(1, -1, into))
    return layer


def some_rows(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape, generator=generator)
    return (rows * torch.logspace(-3, 3, shape[-2])[:, None]).to(HALF)


def apart(found: Tensor, expected: Tensor) -> float:
    """Size of the difference over that of what is expected."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def by_row(found: Tensor, expected: Tensor) -> float:
    """The same of the row that is worst."""
    pairs = zip(found.flatten(0, -2), expected.flatten(0, -2), strict=True)
    return max(apart(*pair) for pair in pairs)


def passes(layer: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer computes, and the gradient of what went in."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


def test_both_products_are_those_of_rounded_matrices() -> None:
    exact = frozen()
    layer, x, dy = FrozenFloat8Linear(exact), some_rows(3, 5, K), some_rows(3, 5, N, seed=2)
    y, dx = passes(layer, x, dy)
    assert (y.dtype, dx.dtype, y.shape, dx.shape) == (HALF, HALF, (3, 5, N), (3, 5, K))
    assert exact.bias is not None
    expected = rounded(x, -1) @ rounded(exact.weight, 1).T + exact.bias.double()
    assert by_row(y, expected) < 1e-2  # bfloat16 has 2^-9.
    assert by_row(dx, rounded(dy, -1) @ rounded(exact.weight, 0)) < 1e-2
    of_exact = passes(exact, x, dy)
    assert 0 < apart(y, of_exact[0]) < 0.04
    assert 0 < apart(dx, of_exact[1]) < 0.04
    assert by_row(dx, of_exact[1]) < 0.06
    assert layer.weight.grad is None


@pytest.mark.parametrize("power", [-60, -40, 40])
def test_a_gradient_of_another_size_gives_the_same_bits_of_another_size(power: int) -> None:
    """A loss is divided by all tokens of a batch; a scale of its own for each row makes that harmless."""
    layer, x, dy = FrozenFloat8Linear(frozen()), some_rows(7, K), some_rows(7, N, seed=2) / 1024
    _, usual = passes(layer, x, dy)
    _, scaled = passes(layer, x, dy * 2.0**power)
    assert torch.equal(scaled.double() * 2.0**-power, usual.double())


class Stack(nn.Module):
    """Two adapted layers with something between that bends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = frozen(K, N, seed=3), frozen(N, 32, seed=4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.nn.functional.silu(self.first(x)))


def adapted() -> Stack:
    stack = Stack()
    torch.manual_seed(5)
    adapt(stack, {"first", "second"}, 4, 6.0, dtype=HALF)
    for name, parameter in stack.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.05)
    return stack


def round_stack(stack: Stack, kind: type[nn.Module] = FrozenFloat8Linear) -> Stack:
    for layer in (stack.first, stack.second):
        layer.base_layer = kind(layer.base_layer)  # type: ignore[arg-type, assignment]
    return stack


class SlowLayer(nn.Module):
    """`SlowProduct` in place of a layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = SlowProduct.apply(x, self.weight)
        return y if self.bias is None else y + self.bias  # type: ignore[return-value]


def adapter_gradients(stack: nn.Module, x: Tensor, *, recomputed: bool = False) -> dict[str, Tensor]:
    stack.zero_grad()
    y = checkpoint(stack, x, use_reentrant=False) if recomputed else stack(x)
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y).to(y.device)).sum().backward()
    return {name: p.grad.clone() for name, p in stack.named_parameters() if p.grad is not None}


def test_gradients_of_adapters_below_and_above_are_those_of_rounded_matrices() -> None:
    x = some_rows(6, K)
    x = x / x.norm(dim=1, keepdim=True)
    exact = adapter_gradients(adapted(), x)
    found = adapter_gradients(round_stack(adapted()), x)
    expected = adapter_gradients(round_stack(adapted(), SlowLayer), x)
    assert found.keys() == expected.keys() == exact.keys()
    assert len(found) == 4
    for name, gradient in expected.items():
        assert apart(found[name], gradient) < 2e-2, name  # Both round to bfloat16 on the way.
        assert 0 < apart(found[name], exact[name]) < 0.1, name


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # The compiler's own.
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole_it_computes_the_same_for_any_number_of_rows(backend: str) -> None:
    torch.compiler.reset()
    stack = round_stack(adapted())
    compiled = torch.compile(stack, fullgraph=True, backend=backend)
    for rows in (6, 9, 2):
        x = some_rows(rows, K)
        x = x / x.norm(dim=1, keepdim=True)
        for run in (adapter_gradients, partial(adapter_gradients, recomputed=True)):
            expected, found = run(stack, x), run(compiled, x)
            for name, gradient in expected.items():
                other = found[f"_orig_mod.{name}"]
                # A compiler rounds to bfloat16 in fewer places.
                assert apart(other, gradient) < (1e-6 if backend == "aot_eager" else 0.03), name


def test_products_are_counted_as_those_of_the_layer() -> None:
    x = some_rows(3, 5, K)
    with FlopCounterMode(display=False) as counter:
        passes(FrozenFloat8Linear(frozen()), x, torch.ones(3, 5, N, dtype=HALF))
    assert counter.get_total_flops() == 2 * (2 * 15 * K * N)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_computes_what_a_cpu_computes(compiled: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs 8-bit products")
    torch.compiler.reset()
    layer, x, dy = FrozenFloat8Linear(frozen()), some_rows(3, 5, K), some_rows(3, 5, N, seed=2)
    expected = passes(layer, x, dy)
    there = layer.cuda()
    run = torch.compile(there, fullgraph=True) if compiled else there
    for found, wanted in zip(passes(run, x.cuda(), dy.cuda()), expected, strict=True):
        assert by_row(found.cpu(), wanted) < 1e-2
    stack = round_stack(adapted())
    x = some_rows(6, K)
    x = x / x.norm(dim=1, keepdim=True)
    gradients = adapter_gradients(stack, x)
    stack = stack.cuda()
    run = torch.compile(stack, fullgraph=True) if compiled else stack
    for recomputed in (False, True):
        found = adapter_gradients(run, x.cuda(), recomputed=recomputed)
        for name, gradient in gradients.items():
            other = found[f"_orig_mod.{name}" if compiled else name]
            assert apart(other.cpu(), gradient) < 0.05, name

"""Linear layers whose weights are frozen, with 8-bit products in both directions.

    forward     y  = x W^T     x is rounded per row, W per output channel
    backward    dx = dy W      dy is rounded per row, W per input channel

Weights get no gradient. The two products sum over different sides of W, a scale must be the same for all that
is summed over, and GPUs want W in memory the other way round for the second: so there are two rounded copies.

The weight itself stays the layer's parameter, with its name, dtype and numbers. What is published, saved or
merged with adapters is read from there and is never rounded. The copies are buffers that no state dict has;
they take two bytes per weight beside those of the parameter, and are moved and offloaded like other buffers.

The gradient is rounded to ``e4m3`` too, not to ``e5m2``, which has more range and a bit of precision less.
Scaled row by row it needs no range: a number becomes 0 only below 2^-18 of its row's largest one. And it was
not tried whether every torch that is supported multiplies the two types, scaled by rows, on a GPU.

Dimension letters:
    K, N  features into and out of the layer
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from asyncrl.devices.float8 import DTYPE, product, quantise


class _Product(torch.autograd.Function):
    """``x W^T``, and ``dy W`` in the backward pass, which needs nothing of the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, transposed: Tensor, of_transposed: Tensor
    ) -> Tensor:
        ctx.save_for_backward(transposed, of_transposed)
        return product(x, weight, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return product(gradients[0], *ctx.saved_tensors), None, None, None, None


class FrozenFloat8Linear(nn.Linear):
    """A frozen linear layer that multiplies rounded copies of its weight."""

    forward_weight: Tensor
    """``[N, K]`` e4m3."""
    forward_scale: Tensor
    """``[1, N]`` float32."""
    backward_weight: Tensor
    """``[K, N]`` e4m3."""
    backward_scale: Tensor
    """``[1, K]`` float32."""

    def __init__(self, linear: nn.Linear) -> None:
        """Take over the parameters of a layer, and round copies of its weight on its device.

        Args:
            linear: Frozen. Its numbers must not change afterwards: the copies would not follow.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        weight = linear.weight.detach()
        for name, copied in (("forward", weight), ("backward", weight.T.contiguous())):
            rounded, scale = quantise(copied)
            self.register_buffer(f"{name}_weight", rounded, persistent=False)
            self.register_buffer(f"{name}_scale", scale.T.contiguous(), persistent=False)
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:  # what `nn.Linear` calls it
        """Map ``[..., K]`` to ``[..., N]``, in the dtype of `input`; both products are bfloat16."""
        copies = self.forward_weight, self.forward_scale, self.backward_weight, self.backward_scale
        y = cast("Tensor", _Product.apply(input, *copies))
        return y if self.bias is None else y + self.bias


def copied_bytes(linear: nn.Linear) -> int:
    """Return the bytes of the two copies of a layer's weight, with their scales."""
    return 2 * linear.weight.numel() * DTYPE.itemsize + 4 * (linear.in_features + linear.out_features)

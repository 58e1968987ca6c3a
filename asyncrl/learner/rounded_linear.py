"""Linear layers that keep float32 weights and compute in the type of what they are given.

FSDP can round what is trained for its passes too, but then it turns the gradient of every weight back into
float32 itself, one by one and in each pass: of a thousand adapters the host is not done with one pass when
the device is. Here that is part of the passes: the compiler sees it, and gradients are added up where they
arise. Numbers are the same.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class RoundedLinear(nn.Linear):
    """Rounds weight and bias to the type of its input, in every pass; their gradients keep their own type."""

    def forward(self, input: Tensor) -> Tensor:
        """Turn ``[..., I]`` of any float dtype into ``[..., O]`` of the same one."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return nn.functional.linear(input, self.weight.to(input.dtype), bias)


def round_trained_layers(network: nn.Module) -> bool:
    """Let what is trained of a network be rounded in its layers, in place.

    Returns:
        Whether it could be done: all that is trained belongs to plain linear layers, as adapters do. If not,
        nothing was changed.
    """
    trained = [
        module
        for module in network.modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]
    if not all(type(module) is nn.Linear for module in trained):
        return False
    for module in trained:
        module.__class__ = RoundedLinear  # Its parameters stay the same objects, under the same names.
    for module in network.modules():
        layer: Any = module
        if hasattr(layer, "cast_input_dtype_enabled"):  # peft: the input would become float32 instead.
            layer.cast_input_dtype_enabled = False
    return True

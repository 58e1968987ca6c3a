"""The critic: the hidden state of the last prompt token in, one number per decision or per step out.

Dimension letters:
    B  rows      D  width of the language model      V  values per decision
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """Three linear layers with exact GELU between them; the last has no bias and starts near zero.

    Names and shapes follow RLinf's `value_head.mlp.{0,2,4}`, so that its critics can be read. The arithmetic
    is float32, whatever the type of the weights and of autocast.
    """

    def __init__(self, width: int, hidden: tuple[int, int], outputs: int) -> None:
        """Build with fresh random weights, drawn from torch's generator.

        Args:
            width: ``D``.
            hidden: Features of the two hidden layers.
            outputs: ``V``.
        """
        super().__init__()
        first, second = hidden
        layers = nn.Linear(width, first), nn.Linear(first, second), nn.Linear(second, outputs, bias=False)
        for layer in layers[:2]:
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        nn.init.normal_(layers[2].weight, std=0.02)
        self.mlp = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])

    def forward(self, hidden_BD: Tensor) -> Tensor:
        """``[B, D]`` hidden states of any type to ``[B, V]`` float32 values."""
        values = hidden_BD.float()
        with torch.autocast(hidden_BD.device.type, enabled=False):
            for layer in self.mlp:
                if isinstance(layer, nn.Linear):
                    bias = None if layer.bias is None else layer.bias.float()
                    values = nn.functional.linear(values, layer.weight.float(), bias)
                else:
                    values = layer(values)
        return values

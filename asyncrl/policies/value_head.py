"""The critic: the hidden state of the last prompt token in, one number per decision out."""

from __future__ import annotations

from torch import Tensor, nn


class ValueHead(nn.Module):
    """Three linear layers with exact GELU between them; the last has no bias and starts near zero.

    Names and shapes follow RLinf's `value_head.mlp.{0,2,4}`, so that its critics can be read.
    """

    def __init__(self, width: int, hidden: tuple[int, int]) -> None:
        super().__init__()
        first, second = hidden
        layers = nn.Linear(width, first), nn.Linear(first, second), nn.Linear(second, 1, bias=False)
        for layer in layers[:2]:
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        nn.init.normal_(layers[2].weight, std=0.02)
        self.mlp = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])

    def forward(self, hidden_BD: Tensor) -> Tensor:
        """``[B, D]`` hidden states to ``[B]`` float32 values."""
        return self.mlp(hidden_BD).squeeze(-1).float()

"""Count what a pass keeps for its backward pass, also of networks without weights (device meta)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

FLOAT32: Final = 4
"""Bytes of a number in which models are fitted."""


def kept_bytes(loss: Callable[[], Tensor], modules: Iterable[nn.Module]) -> int:
    """Add up the memory that is kept from a loss until its gradients are known, each piece of it once.

    On the meta device nothing is computed, and the number is the same in every precision's own types.

    Args:
        loss: Makes the pass; ``[]``, with gradient.
        modules: Whose weights and buffers do not count.
    """
    weights = {
        tensor.untyped_storage()._cdata
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    }
    found: dict[int, Tensor] = {}  # The tensors live until all are counted: addresses are not given twice.

    def note(tensor: Tensor) -> Tensor:
        if (address := tensor.untyped_storage()._cdata) not in weights:
            found[address] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss()
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())

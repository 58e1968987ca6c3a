"""Give the frozen layers below a learner's adapters 8-bit products: --learner.frozen-precision float8.

Actors, checkpoints and exports have the weights as they are stored (`devices.float8`), so a
learner's log-probs differ from the actors' by the rounding, and adapters are trained on top of it. With its
adapters disabled, as reference of the KL penalty, a policy goes through the same layers: where adapters do
not change anything the penalty is 0. The adapters' own products stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from asyncrl.devices.float8 import ALIGNMENT, FrozenFloat8Linear, copied_bytes, fits
from asyncrl.errors import ConfigError
from asyncrl.policies.acceleration import HasBlocks

FLAG: Final = "--learner.frozen-precision"


def use_float8_where_frozen(policy: HasBlocks) -> None:
    """Replace the frozen linear layers below adapters, in place; one that does not fit stays.

    Args:
        policy: With adapters, its weights loaded, on its device, not sharded and not compiled. Only what is
            trained may be loaded into it afterwards, as a resumed run does.

    Raises:
        ConfigError: No layer fits.
    """
    for layer in _required(policy):
        layer.base_layer = FrozenFloat8Linear(layer.base_layer)


def frozen_float8_bytes(policy: HasBlocks) -> int:
    """Return by how many bytes `use_float8_where_frozen` makes a policy larger; it may be on device meta.

    Raises:
        ConfigError: No layer fits.
    """
    return sum(copied_bytes(layer.base_layer) for layer in _required(policy))


def _required(policy: HasBlocks) -> list[Any]:
    found = list(_adapted(policy))
    if not found:
        raise ConfigError(
            f"{FLAG} is float8, but no layer of {type(policy).__name__} can be rounded: it takes linear "
            f"layers with adapters, inside `blocks`, whose widths are multiples of {ALIGNMENT}. Use {FLAG} "
            "stored."
        )
    return found


def _adapted(policy: HasBlocks) -> Iterator[Any]:
    """Yield the layers of blocks that have adapters, over a frozen layer that fits. Needs no peft."""
    for block in policy.blocks():
        for module in block.modules():
            base: Any = getattr(module, "base_layer", None)
            if hasattr(module, "lora_A") and fits(base) and not base.weight.requires_grad:
                yield module

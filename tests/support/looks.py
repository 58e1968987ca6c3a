"""Counts what makes the host wait for a device, on a CPU too."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READ = frozenset(["_local_scalar_dense", "is_nonzero", "item", "equal"])
SHAPES = frozenset(["nonzero", "masked_select", "unique", "unique_dim", "_unique2"])


class Looks(TorchDispatchMode):
    """Notes the operations that read numbers of a tensor on the host, or whose shapes depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name in READ | SHAPES or masks:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))

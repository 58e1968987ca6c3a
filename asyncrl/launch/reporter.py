"""Says in one sentence what a part did that its protocol does not allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.learner.interface import describe_tensor
from asyncrl.registry import FLAGS


class Reporter:
    """Says in one sentence what a part of one kind did wrong."""

    def __init__(self, kind: str, part: object) -> None:
        found = type(part)
        self.name = f"{FLAGS[kind]} names {found.__module__}:{found.__qualname__}"

    def refused(self, method: str, came: str, expected: str) -> ConfigError:
        """Return the error that says so."""
        return ConfigError(f"{self.name}, whose {method} is {came}, expected {expected}.")

    def require(self, fits: bool, method: str, came: object, expected: str) -> None:
        """Refuse what does not fit."""
        if not fits:
            raise self.refused(method, f"{came!s:.200}", expected)

    def tensor(self, method: str, found: Any, dtype: str, shape: Sequence[int | str]) -> Tensor:
        """Refuse anything but a tensor of this dtype and shape such as ``[2, L]``: letters are any size."""
        fits = (
            isinstance(found, Tensor)
            and found.dtype == getattr(torch, dtype)
            and len(found.shape) == len(shape)
            and all(isinstance(a, str) or a == b for a, b in zip(shape, found.shape, strict=True))
        )
        if not fits:
            sizes = ", ".join(map(str, shape))
            raise self.refused(method, describe_tensor(found), f"{dtype}[{sizes}]")
        return found

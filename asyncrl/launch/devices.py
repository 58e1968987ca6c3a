"""The text of `--device` in, a device out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    import torch


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Choose the device of a process.

    Args:
        name: cpu, cuda, or auto: cuda where there is a GPU.
        local_rank: The process's number on its host; ranks beyond the number of GPUs share them.

    Raises:
        ConfigError: cuda was asked for and there is none, or `name` is something else.
    """
    import torch

    if name not in ("cpu", "cuda", "auto"):
        raise ConfigError(f"--device is {name!r}. Use cpu, cuda or auto.")
    count = torch.cuda.device_count() if name != "cpu" else 0
    if name == "cuda" and not count:
        raise ConfigError(
            "--device is cuda, but PyTorch sees no CUDA device. Use --device cpu, or run `asyncrl doctor`."
        )
    return torch.device("cuda", local_rank % count) if count else torch.device("cpu")

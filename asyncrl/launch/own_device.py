"""The device of a process, and the folder of the code that torch compiles for it.

    <cache folder>/compiled/<asyncrl version>-<torch version>-<device name>

All processes of a run share the folder; deleting it only makes the next start compile again. It is loaded as
code, so it is the user's alone.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import asyncrl
from asyncrl.errors import ConfigError
from asyncrl.storage.assets import user_cache_folder

if TYPE_CHECKING:
    import torch

INDUCTOR: Final = "TORCHINDUCTOR_CACHE_DIR"
TRITON: Final = "TRITON_CACHE_DIR"
_log = logging.getLogger(__name__)


def compiler_cache_folder(device: torch.device) -> Path:
    """Return the folder of compiled code for a device; it may not exist."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts = (asyncrl.__version__, torch.__version__, name)
    folder = "-".join(re.sub(r"[^A-Za-z0-9.+]+", "_", part) for part in parts)
    return user_cache_folder() / "compiled" / folder


def use_compiler_cache(device: torch.device) -> None:
    """Keep compiled code of this process and its children in the folder, unless the user chose another."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Imports of torch's compiler write torch's own folder into the variable, which does not count.
    if os.environ.get(INDUCTOR, "") not in ("", default_cache_dir()):  # Triton's is within it.
        return
    folder = compiler_cache_folder(device)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:  # Torch's own folder stays.
        _log.warning("%s cannot be made (%s); set %s to choose another", folder, error.strerror, INDUCTOR)
        return
    os.environ[INDUCTOR] = str(folder)
    os.environ.setdefault(TRITON, str(folder / "triton"))


def count_gpus(name: str) -> int:
    """Return the number of GPUs that PyTorch sees; 0 for --device cpu."""
    import torch

    return torch.cuda.device_count() if name != "cpu" else 0


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Choose the device of a process by --device; raises ConfigError if there is none."""
    import torch

    if name not in ("cpu", "cuda", "auto"):
        raise ConfigError(f"--device is {name!r}. Use cpu, cuda or auto.")
    count = count_gpus(name)
    if name == "cuda" and not count:
        raise ConfigError(
            "--device is cuda, but PyTorch sees no CUDA device. Use --device cpu, or run `asyncrl doctor`."
        )
    return torch.device("cuda", local_rank % count) if count else torch.device("cpu")


def take_device(name: str, local_rank: int = 0) -> torch.device:
    """Choose the device of this process, check that it multiplies right, and make it the current one."""
    import torch

    from asyncrl.devices.tensors import check_matrix_products

    device = pick_device(name, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        check_matrix_products(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return device

"""The device of a process, and the folder of what torch compiles for it.

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
from asyncrl.config.run import TrainConfig
from asyncrl.launch.job import Job
from asyncrl.launch.placement import Placement, pick_device
from asyncrl.storage.assets import user_cache_folder

if TYPE_CHECKING:
    import torch

INDUCTOR: Final = "TORCHINDUCTOR_CACHE_DIR"
TRITON: Final = "TRITON_CACHE_DIR"
PRIORITY: Final = "CUDA_MPS_CLIENT_PRIORITY"
"""Environment variable of a client of MPS, read when it first uses a GPU. 0: normal, 1: below that."""
_log = logging.getLogger(__name__)


def compiler_cache_folder(device: torch.device) -> Path:
    """Return the folder of what is compiled for a device; it may not exist."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts = (asyncrl.__version__, torch.__version__, name)
    folder = "-".join(re.sub(r"[^A-Za-z0-9.+]+", "_", part) for part in parts)
    return user_cache_folder() / "compiled" / folder


def compiles(config: TrainConfig) -> bool:
    """Return True if any process of a run compiles something."""
    return config.learner.compile or config.imagination.compile


def chosen_folder() -> str:
    """Return the folder that the user set in `INDUCTOR`; empty if none.

    Imports of torch's compiler write torch's own folder into the variable, which does not count.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    found = os.environ.get(INDUCTOR, "")
    return "" if found and Path(found).absolute() == Path(default_cache_dir()) else found


def use_compiler_cache(config: TrainConfig, device: torch.device) -> None:
    """Keep compiled code of this process and its children in the folder, unless the user chose another.

    Where the folder cannot be made, torch's own is used, with a line in the log.
    """
    if not compiles(config) or chosen_folder():  # Triton's is within it, unless it was set too.
        return
    folder = compiler_cache_folder(device)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    if not usable:
        _log.warning(
            "%s cannot be written, so what is compiled is kept in torch's own folder; set %s to choose one",
            folder,
            INDUCTOR,
        )
        return
    os.environ[INDUCTOR] = str(folder)
    os.environ.setdefault(TRITON, str(folder / "triton"))


def take_device(name: str, local_rank: int = 0) -> torch.device:
    """Choose the device of this process, check that it multiplies right, and make it the current one.

    Raises:
        ConfigError: As `pick_device`, or the GPU gives wrong products.
    """
    device = pick_device(name, local_rank)
    make_current(device)
    return device


def make_current(device: torch.device) -> None:
    """Check that a device multiplies right, and make it the current one."""
    import torch

    from asyncrl.devices.tensors import check_matrix_products

    if device.type == "cuda":
        torch.cuda.set_device(device)
        check_matrix_products(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def give_way(config: TrainConfig, placement: Placement, job: Job, devices: set[torch.device]) -> None:
    """Let a learner's kernels go before those of this actor, where both share a GPU by MPS.

    Without a server of MPS the variable means nothing. No GPU has been used by this process yet.
    """
    here = job.here
    learners = {pick_device(config.device, rank - here.start) for rank in placement.learners if rank in here}
    if any(device.type == "cuda" for device in learners & devices):
        os.environ.setdefault(PRIORITY, "1")

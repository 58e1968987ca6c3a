"""Takes the device that a process computes on.

Where the compiler of torch keeps what it compiled, so that the next start of a run finds it.

    <cache folder>/compiled/<asyncrl version>-<torch version>-<device name>

One folder per version, so that old ones can be told and deleted; deleting any of them only makes the next
start compile again. All processes of a run share it. That is safe: torch writes an entry beside its place
and renames it there, and what several would build at once is built under a file lock. Entries are found by a
hash of code, shapes, settings and device, so one of another version is never taken for ours.

What lies there is loaded as code, so the folder is the user's alone, as is that of torch by itself.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import asyncrl
from asyncrl.config.run import TrainConfig
from asyncrl.launch import rendezvous
from asyncrl.launch.placement import Placement, pick_device
from asyncrl.storage.user_cache import user_cache_folder

if TYPE_CHECKING:
    import torch


INDUCTOR: Final = "TORCHINDUCTOR_CACHE_DIR"
TRITON: Final = "TRITON_CACHE_DIR"
"""Environment variables that torch and Triton read when they first compile."""

_log = logging.getLogger(__name__)


def compiler_cache_folder(device: torch.device) -> Path:
    """Return the folder of what is compiled for a device; it may not exist.

    Args:
        device: Of one name there may be several: they share the folder.
    """
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts = (asyncrl.__version__, torch.__version__, name)
    folder = "-".join(re.sub(r"[^A-Za-z0-9.+]+", "_", part) for part in parts)
    return user_cache_folder() / "compiled" / folder


def compiles(config: TrainConfig) -> bool:
    """Tell whether any process of a run compiles something."""
    return config.learner.compile or config.imagination.compile


def chosen_folder() -> str:
    """Return the folder that the user set; empty where none was.

    Imports of torch's compiler write torch's own folder into the variable: that is nobody's choice.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    found = os.environ.get(INDUCTOR, "")
    return "" if found and Path(found).absolute() == Path(default_cache_dir()) else found


def use_compiler_cache(config: TrainConfig, device: torch.device) -> None:
    """Let this process, and those that it will start, keep there what they compile.

    Nothing changes where nothing is compiled, or where the user has set `INDUCTOR`. Where the folder
    cannot be made, as without a home, torch's own in the system's temporary folder is used, with a line in
    the log.
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


PRIORITY: Final = "CUDA_MPS_CLIENT_PRIORITY"
"""Environment variable of a client of MPS, read when it first uses a GPU. 0: normal, 1: below that."""


def take_device(name: str, local_rank: int = 0) -> torch.device:
    """Choose the device of this process, see that it multiplies right, and make it the current one.

    Args:
        name: See `pick_device`, which only plans and leaves the device alone.

    Raises:
        ConfigError: As `pick_device`, or the GPU gives wrong products.
    """
    device = pick_device(name, local_rank)
    make_current(device)
    return device


def make_current(device: torch.device) -> None:
    """See that a device multiplies right, and let what asks for "the" device get this one."""
    import torch

    from asyncrl.devices.tensors import check_matrix_products

    if device.type == "cuda":
        torch.cuda.set_device(device)
        check_matrix_products(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def give_way(config: TrainConfig, placement: Placement, devices: set[torch.device]) -> None:
    """Let kernels of a learner go before those of this process, an actor, where both share a GPU by MPS.

    Without a server of MPS the variable means nothing, and one that the user set stays. No GPU has been used
    by this process yet.
    """
    here = rendezvous.ranks_here()
    learners = {pick_device(config.device, rank - here.start) for rank in placement.learners if rank in here}
    if any(device.type == "cuda" for device in learners & devices):
        os.environ.setdefault(PRIORITY, "1")
